"""Worker of the pipeline overhead benchmark: builds an engine, then runs blocks of steps when told to."""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

from benchmarks import pipeline_model as model
from benchmarks.common import Line
from benchmarks.overhead_worker import memory
from shared_core.worker.messages import segments


def slow_disk(bytes_per_s: float) -> None:
    """Let a log on disk take its time for every byte, in the thread that writes it."""
    write = segments.write_all

    def slowly(fd: int, parts: Any) -> None:
        begin = time.monotonic()
        write(fd, parts)
        size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
        time.sleep(max(0.0, size / bytes_per_s - (time.monotonic() - begin)))

    segments.write_all = slowly


def logged(job: Any) -> dict[str, float]:
    """What this rank has logged to disk so far: bytes put, of which some may still wait, and seconds waited for it."""
    archive = job.runtime.disk.archive if job is not None else None
    if archive is None:
        return {"bytes": 0, "blocked_s": 0.0}
    stats = archive.stats
    return {"bytes": stats.bytes_written + stats.bytes_waiting, "blocked_s": stats.blocked_s}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--compute", choices=list(model.COMPUTE), required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--disk-bytes-per-s", type=float, default=0.0)
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    model.start(options.ours)
    if options.disk_bytes_per_s:
        slow_disk(options.disk_bytes_per_s)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    engine, net, data = model.engine(options.compute, options.stages, swift=options.ours)
    job: Any = None
    if options.ours:
        import shared_core

        job = shared_core.current_job()
    line = Line.of_worker(options.socket, options.system)
    while True:
        message = line.receive()
        if "run" in message:
            begin, times, earlier, cpu_s = time.perf_counter(), [], logged(job), time.process_time()
            for _ in range(message["run"]):
                engine.train_batch(data)
                times.append(time.perf_counter())
            steps = [b - a for a, b in zip([begin, *times], times, strict=False)]
            done = {"seconds": times[-1] - begin, "steps": steps, "cpu_s": time.process_time() - cpu_s}
            line.send(done | {"logged": logged(job)["bytes"] - earlier["bytes"]})
        elif "memory" in message:
            parameters = sum(p.numel() for p in net.parameters())
            line.send({"before": before, "after": memory(), "parameters": parameters, **logged(job)})
        else:
            break
    line.close()
    import torch.distributed as dist

    dist.barrier()
    if job is None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
