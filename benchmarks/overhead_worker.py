"""Worker of the overhead benchmark: builds a model when told to, and runs blocks of steps when told to."""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import Line
from benchmarks.overhead_parts import Parts

Loss = Callable[[nn.Module], torch.Tensor]


def perceptron(layers: int, width: int, batch: int) -> tuple[nn.Module, Loss]:
    """Linear layers of one width with ReLU between, and the loss of a new random batch of ``batch`` rows."""
    net = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.randn(batch, width)
        result: torch.Tensor = (model(x) - x.sin()).pow(2).mean()
        return result

    return net, loss


def gpt2(rows: int = 6, **shape: int) -> tuple[nn.Module, Loss]:
    """The demo's model, in the demo's shape or another one, on ``rows`` windows of random bytes."""
    from examples.demo.model import CONTEXT, byte_gpt2

    def loss(model: nn.Module) -> torch.Tensor:
        tokens = torch.randint(256, (rows, CONTEXT))
        result: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return result

    return byte_gpt2(**shape), loss


CASES: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "gpt2": gpt2,
    "mlp": lambda: perceptron(6, 512, 32),
    "1M": lambda: perceptron(4, 512, 32),
    "10M": lambda: perceptron(10, 1024, 32),
    "50M": lambda: perceptron(12, 2048, 32),
    "fsdp2-10M": lambda: gpt2(rows=2, width=320, layers=8, heads=5),
    "fsdp2-50M": lambda: gpt2(rows=2, width=640, layers=10, heads=10),
}
CASES |= {"zero3-10M": CASES["fsdp2-10M"], "zero3-50M": CASES["fsdp2-50M"]}
#: Cases in which ``fully_shard``, or DeepSpeed's ZeRO-3, takes the place of DDP.
ZERO = ("zero3-10M", "zero3-50M")
SHARDED = ("fsdp2-10M", "fsdp2-50M", *ZERO)


def imported(case: str) -> list[str]:
    """Modules that a case needs besides this one's."""
    side = "benchmarks.zero_side" if case in ZERO else "benchmarks.fsdp2_side"
    sharded = [side] if case in SHARDED else []
    return [*sharded, "examples.demo.model"] if sharded or case == "gpt2" else []


class Trainer:
    """One model in training under one system."""

    def __init__(self, system: str, case: str) -> None:
        self.system = system
        self.job: Any = None
        self.manager: Any = None
        self.model: Any = None
        torch.manual_seed(1)
        net, self.loss = CASES[case]()
        self.parameters = sum(p.numel() for p in net.parameters())
        if case in ZERO:
            from benchmarks import zero_side

            self.model = zero_side.engine(net, 1e-4, 2, survives=system == "swift")
            self.optimizer = zero_side.Stepper(self.model)
            torch.manual_seed(100 + int(os.environ["RANK"]))
            self._attach([])
            return
        if case in SHARDED:
            from benchmarks import fsdp2_side

            fsdp2_side.shard(net, net.get_submodule("transformer.h").children())
        torch.manual_seed(100 + int(os.environ["RANK"]))
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-4)
        if system == "torchft":
            from benchmarks import torchft_side

            self.manager, self.model, self.optimizer = torchft_side.wrap(net, optimizer, case, min_replicas=4)
            return
        self.model = net if case in SHARDED else nn.parallel.DistributedDataParallel(net)
        self.optimizer = optimizer
        self._attach([optimizer])

    def _attach(self, optimizers: list[Any]) -> None:
        if self.system.startswith("swift"):
            import shared_core

            self.job = shared_core.current_job()
            assert self.job is not None, "not started by swiftrun"
            self.job.attach([self.model], optimizers)
            self.job.keep_images()  # as shared_core.attach() does

    def run(self, steps: int) -> dict[str, float]:
        """Seconds for ``steps`` steps: by the clock, and of the processor on all threads."""
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            if self.job is not None:
                self.job.step_boundary()
            self.optimizer.zero_grad()
            loss = self.loss(self.model)
            if hasattr(self.optimizer, "backward"):
                self.optimizer.backward(loss)
            else:
                loss.backward()
            self.optimizer.step()
        return {"seconds": time.perf_counter() - begin, "processor": time.process_time() - busy}

    def close(self) -> None:
        """Stop what torchft has started."""
        if self.manager is not None:
            self.manager.shutdown(wait=False)


def memory() -> dict[str, int]:
    """Fields of /proc/self/status in bytes: peak and present size, and what of the latter is not mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    value = {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")}
    job_dir = os.environ.get("SWIFT_RECOVERY_JOB_DIR")
    own = Path(job_dir) / f"rank{os.environ['RANK']}" if job_dir else None
    value["published"] = sum(p.stat().st_size for p in own.rglob("*") if p.is_file()) if own and own.is_dir() else 0
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.system.startswith("swift"):
        import shared_core

        job = shared_core.install()
        assert job is not None, "not started by swiftrun"
        job.entries.begin()
    if options.system != "torchft":
        dist.init_process_group("gloo")
    line = Line.of_worker(options.socket, options.system)
    trainer: Trainer | None = None
    parts: Parts | None = None
    before: dict[str, int] = {}
    while True:
        message = line.receive()
        if "build" in message:
            if trainer is not None:
                trainer.close()
            trainer = None
            for name in imported(message["build"]):
                importlib.import_module(name)  # modules are not the model's memory
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            before = memory()
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            trainer = Trainer(options.system, message["build"])
            line.send({"parameters": trainer.parameters})
        elif "run" in message:
            assert trainer is not None
            line.send(trainer.run(message["run"]))
        elif "parts" in message:
            assert trainer is not None
            parts = parts or Parts()
            trainer.run(3)
            parts.take(1)
            trainer.run(message["parts"])
            line.send(parts.take(message["parts"]))
        elif "memory" in message:
            line.send({"before": before, "after": memory()})
        else:
            break
    line.close()
    if trainer is not None:
        trainer.close()
    if options.system == "torchft":
        os._exit(0)  # its threads do not end by themselves
    if options.system.startswith("swift"):
        job.entries.done(None)
    dist.barrier()  # gloo may hang when its last operation was DDP's own, and the group goes with the model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
