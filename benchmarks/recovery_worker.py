"""Worker of the recovery benchmark: a plain loop, of DDP, FSDP2 or ZeRO-3, that notes when each optimizer step has
returned.

The systems differ only where a user of each would write something else.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

BEGIN = time.time()  # before the imports, which are not the user's own start-up code

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

WIDTH, LAYERS, BATCH = 512, 6, 32
SYSTEMS = ("swift", "accelerate", "shared", "torchrun", "checkfreq", "commit", "torchft")
#: Batches to evaluate on. No rank trains on them: it would have this number.
EVALUATED, EVALUATION_RANK = 16, 99


class Trace:
    """One line of JSON for each thing that happened to a rank; read by the benchmark while the job runs."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.fd = os.open(folder / f"trace{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, kind: str, **fields: Any) -> None:
        """Append one line."""
        line = {"kind": kind, "time": time.time(), "pid": os.getpid()} | fields
        os.write(self.fd, (json.dumps(line) + "\n").encode())


def batch(step: int, rank: int, width: int = WIDTH) -> torch.Tensor:
    """The batch of a rank in a step, (BATCH, width) float32."""
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step * 100 + rank))


def result(net: nn.Module, width: int = WIDTH) -> dict[str, Any]:
    """Loss on the evaluation set, and a digest of the parameters' bits."""
    from tests.support.digest import digest

    batches = [batch(i, EVALUATION_RANK, width) for i in range(EVALUATED)]
    with torch.no_grad():
        losses = [(net(x) - x.sin()).pow(2).mean().item() for x in batches]
    return {"loss": sum(losses) / EVALUATED, "digest": digest([each.detach() for each in net.parameters()])}


class Stream(torch.utils.data.Dataset[torch.Tensor]):
    """The batches of all ranks in turn, one an item."""

    def __init__(self, ranks: int, steps: int = 1 << 18) -> None:
        self.ranks, self.steps = ranks, steps

    def __len__(self) -> int:
        return self.ranks * self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        return batch(*divmod(index, self.ranks))


def _accelerate(net: nn.Module, optimizer: Any, out: Path, trace: Trace, begin: float) -> None:
    """The same training under Accelerate."""
    from accelerate import Accelerator

    from accelerate_swift import SwiftPlugin

    plugin = SwiftPlugin(data="seeded")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
    loader = torch.utils.data.DataLoader(Stream(accelerator.num_processes), batch_size=1)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    counter = plugin.register(step=0)
    trace.note("loop", user_s=time.time() - begin, import_s=begin - BEGIN)
    stop = out / "stop"
    for _ in plugin.epochs(1):
        for x in loader:
            optimizer.zero_grad()
            accelerator.backward((model(x[0]) - x[0].sin()).pow(2).mean())
            optimizer.step()
            counter.step += 1
            trace.note("step", step=counter.step)
            if stop.exists() and counter.step >= int(stop.read_text() or 1 << 60):
                break
    trace.note("end", step=counter.step)
    accelerator.end_training()


def _shared(net: nn.Module, optimizer: Any, out: Path, trace: Trace, begin: float) -> None:
    """The same training in a loop whose workers continue at once without a failed one."""
    import shared_core

    shared_core.install()
    dist.init_process_group("gloo")
    data = Stream(dist.get_world_size(), int((out / "stop").read_text()))
    sampler: Any = torch.utils.data.DistributedSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=1, sampler=sampler)
    job = shared_core.attach(net, optimizer)
    trace.note("loop", user_s=time.time() - begin, import_s=begin - BEGIN)
    for step in job.shared_steps(loader, 1):
        losses = step.backward(lambda x: (net(x[0]) - x[0].sin()).pow(2).mean())
        optimizer.step()
        trace.note("step", step=step.number + 1, shares=int((losses > 0).sum()))
    trace.note("end", step=job.total_steps, **result(net))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=0, help="steps between two checkpoints")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--sharded", choices=["fsdp2", "zero3"], help="under swift; FSDP2 under torchrun, too")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    trace = Trace(options.out, rank)
    main_begin = time.time()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options.width
    net = nn.Sequential(*[part for _ in range(options.layers) for part in (nn.Linear(width, width), nn.ReLU())])
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    counter = {"step": 0}
    job: Any = None
    manager: Any = None
    committed: Any = None
    background: Any = None
    checkpoint = options.out / "checkpoint.pt"
    if options.system == "torchft":
        from benchmarks import torchft_side

        extra = (lambda: dict(counter), counter.update)
        manager, model, optimizer = torchft_side.wrap(net, optimizer, "recovery", min_replicas=1, extra=extra)
    elif options.system == "commit":
        from benchmarks.commit_side import Committed

        committed = Committed(net, optimizer, counter, options.every)
        model = committed.model
    elif options.system in ("accelerate", "shared"):
        loop = _accelerate if options.system == "accelerate" else _shared
        loop(net, optimizer, options.out, trace, main_begin)
        return
    else:
        if options.system == "swift":
            import shared_core

            job = shared_core.install()
        dist.init_process_group("gloo")
        if options.sharded == "zero3":
            from benchmarks import zero_side

            model = zero_side.engine(net, 1e-3, BATCH, survives=options.system == "swift")
            optimizer = zero_side.Stepper(model)
        elif options.sharded:
            from benchmarks import fsdp2_side

            optimizer = torch.optim.AdamW(fsdp2_side.shard(net, net[::2]).parameters(), lr=1e-3)
            if options.system == "torchrun":
                background = fsdp2_side.AsyncCheckpoints(options.out / "saved", net, optimizer, options.every)
                counter["step"] = background.step
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            counter["step"] = saved["step"]
        if options.sharded != "zero3":
            model = net if options.sharded else nn.parallel.DistributedDataParallel(net)
        if options.system == "checkfreq" and rank == 0:
            from benchmarks.checkfreq_side import CheckFreq

            background = CheckFreq(checkpoint, net, optimizer)
            background.next = counter["step"] + 1
        if job is not None:
            job.entries.begin()
            job.attach([model], [] if options.sharded == "zero3" else [optimizer])
            job.register("counter", lambda: counter, counter.update)
    trace.note("loop", user_s=time.time() - main_begin, import_s=main_begin - BEGIN)

    stop = options.out / "stop"
    while not (stop.exists() and counter["step"] >= int(stop.read_text() or 1 << 60)):
        if job is not None:
            job.step_boundary()
        step = counter["step"]

        def one(model: Any, step: int = step) -> None:
            optimizer.zero_grad()
            x = batch(step, rank, width)
            loss = (model(x) - x.sin()).pow(2).mean()
            if options.sharded == "zero3":
                optimizer.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            if manager is None:
                counter["step"] = step + 1

        if committed is None:
            one(model)
        elif not committed.run(one):
            continue
        if manager is not None:
            if manager.current_step() == step:
                trace.note("discarded", step=step + 1)
                continue
            counter["step"] = manager.current_step()
        shares = {} if manager is None else {"shares": manager.num_participants()}
        trace.note("step", step=counter["step"], **shares)
        if background is not None:
            background.after_step(counter["step"])
        elif options.system == "torchrun" and rank == 0 and counter["step"] % options.every == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": counter["step"]}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
            trace.note("saved", step=counter["step"])
    if options.sharded and background is not None:
        background.wait()
    trace.note("end", step=counter["step"], **result(model if options.sharded else net, width))
    if manager is not None:
        manager.shutdown(wait=False)
        os._exit(0)  # its threads do not end by themselves
    if job is not None:
        job.entries.done(None)
    dist.barrier()  # gloo may hang when its last operation was DDP's own, and the group goes with the model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
