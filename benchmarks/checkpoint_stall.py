"""What a checkpoint costs the training that takes it: how long it stands still, and how much slower it then goes.

A multilayer perceptron with AdamW in one process, whose parameters and moments are saved while it trains. Each system
runs in a process of its own, on one thread, so that what it does in the background has the other core. Of each save are
measured: the **stall**, which is all the time in which the training waits (the call, and the wait before the update
for those that copy in the background); the **cost**, which is by how much the steps from the save until it is complete
take longer than others, the stall included; and when it is **complete**. Ours and that of torch.distributed.checkpoint
are then on the device; Lightning and Accelerate do not flush theirs, so the system may still hold them in memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common import ROOT, Row, arguments, at_most, begin, finish, say, scratch
from shared_core.checkpoint.spool import FOLDER, Spool, Target, available_memory

#: parameters in millions: (width, matrices, rows of a batch)
SIZES = {10: (1024, 10, 64), 50: (2048, 12, 64), 100: (2048, 24, 64), 200: (4096, 12, 64), 500: (4096, 30, 64)}
#: By size of the run: which are measured; saves, and steps without one between two.
DEFAULT = ("10", "10,50", "10,100,500")
SAVES = ((2, 4), (3, 4), (4, 6))
#: Bytes of memory a parameter takes at most: itself, gradient, two moments; the copies of those and of the parameter.
BYTES = 28
SYNCHRONOUS = ("ModelCheckpoint", "Accelerate save_state", "DCP")
DCP_ASYNC = ("DCP async", "DCP async, staged")
OURS = "ours"
SYSTEMS = (SYNCHRONOUS[0], "AsyncCheckpointIO", *SYNCHRONOUS[1:], *DCP_ASYNC, OURS)
#: A save under our writer is waited for at most so long, in seconds.
TIMEOUT_S = 300.0


class Recorder:
    """Times of the steps of one training, and what its saves did to them.

    Args:
        saves: how many.
        plain: steps before the first and after each, which are as if there were no saves.
    """

    def __init__(self, saves: int, plain: int) -> None:
        self._saves, self._every = saves, plain
        self._left = plain + 2  # the first steps are slow
        self._plain: list[float] = []
        self._window: list[float] = []
        self._stall = 0.0
        self._at = self._began = time.perf_counter()
        self._saving = False
        self.found: list[dict[str, float]] = []

    @property
    def due(self) -> bool:
        """Whether a save begins with this step."""
        return not self._saving and not self._left and not self.over

    @property
    def over(self) -> bool:
        """Whether all has been measured."""
        return len(self.found) == self._saves and not self._left

    def begin(self) -> None:
        """A save begins."""
        self._saving, self._stall, self._window, self._began = True, 0.0, [], time.perf_counter()

    def stalled(self, seconds: float) -> None:
        """The training waited."""
        self._stall += seconds

    def step(self, complete: bool) -> None:
        """A step is over; whether the save is complete."""
        now = time.perf_counter()
        spent, self._at = now - self._at, now
        if not self._saving:
            self._plain.append(spent)
            self._left -= 1
            return
        self._window.append(spent)
        if complete:
            usual = statistics.median(self._plain[2:])
            cost = sum(self._window) - usual * len(self._window)
            self.found.append(
                {"stall": self._stall, "cost": cost, "complete": now - self._began, "steps": len(self._window)}
            )
            self._saving, self._left = False, self._every

    def to_dict(self) -> dict[str, Any]:
        """What was measured."""
        return {"saves": self.found, "step": statistics.median(self._plain[2:])}


class Saver(Protocol):
    """How one system saves in a loop that the user has written."""

    def save(self, number: int) -> None:
        """Begin a save; what it does before it returns is stall."""

    def fence(self) -> None:
        """Called before the update."""

    def complete(self) -> bool:
        """Whether the save is complete."""

    def close(self) -> None:
        """The end."""


class Accelerated:
    """``Accelerator.save_state``."""

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        from accelerate import Accelerator

        self._accelerator, self._folder = Accelerator(cpu=True), folder
        self._accelerator.prepare(model, optimizer)

    def save(self, number: int) -> None:
        """See :class:`Saver`."""
        self._accelerator.save_state(str(self._folder / str(number)))

    def fence(self) -> None:
        """See :class:`Saver`."""

    def complete(self) -> bool:
        """See :class:`Saver`."""
        return True

    def close(self) -> None:
        """See :class:`Saver`."""


class Distributed:
    """``torch.distributed.checkpoint``: ``save``, ``async_save`` in a thread, and the same with staging in a thread."""

    def __init__(self, model: Any, optimizer: Any, folder: Path, kind: str) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._model, self._optimizer, self._folder, self._kind = model, optimizer, folder, kind
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1)
        self._future: Any = None
        self._staging: Any = None
        self._stager: Any = None
        if kind == DCP_ASYNC[1]:
            self._stager = DefaultStager(StagingOptions(False, False, True, False))  # the others need an accelerator

    def save(self, number: int) -> None:
        """See :class:`Saver`."""
        import torch.distributed.checkpoint as dcp

        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        path = str(self._folder / str(number))
        if self._kind == "DCP":
            dcp.save(state, checkpoint_id=path)
        elif self._stager is None:
            self._future = dcp.async_save(state, checkpoint_id=path)
        else:
            response: Any = dcp.async_save(state, checkpoint_id=path, async_stager=self._stager)
            self._future, self._staging = response.upload_completion, response.staging_completion

    def fence(self) -> None:
        """See :class:`Saver`."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def complete(self) -> bool:
        """See :class:`Saver`."""
        if self._future is not None and self._future.done():
            self._future.result()
            self._future = None
        return self._future is None

    def close(self) -> None:
        """See :class:`Saver`."""
        import torch.distributed as dist

        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group()


class Ours:
    """A snapshot in memory, the fence, and the writer."""

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        from shared_core.checkpoint.snapshots import Snapshots
        from shared_core.launcher.persisting import Persisting

        self._model, self._optimizer = model, optimizer
        self._job_dir = Path(tempfile.mkdtemp(prefix="swift-bench-", dir="/dev/shm"))
        self._spool, self._number = Spool(self._job_dir / FOLDER), 0
        self._spool.folder.mkdir()
        self._snapshots = Snapshots(self._spool, 0, 1, [0], Target(str(folder)), say)
        self._persisting = Persisting(self._job_dir, None, 5.0, say)
        self._persisting.look()

    def save(self, number: int) -> None:
        """See :class:`Saver`."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        tensors = dict(self._model.state_dict())
        for parameter, state in self._optimizer.state.items():
            tensors |= {f"optimizer.0.{key}.{names[parameter]}": value for key, value in state.items()}
        groups = {"groups": json.dumps([{"lr": group["lr"]} for group in self._optimizer.param_groups])}
        self._number = number
        images = {"replicated0.safetensors": (tensors, groups)}
        if not self._snapshots.take(number, {"rank0": b"generators"}, images, {"run": "bench"}):
            raise RuntimeError("no snapshot was taken")

    def fence(self) -> None:
        """See :class:`Saver`."""
        self._snapshots.fence()

    def complete(self) -> bool:
        """See :class:`Saver`."""
        status = self._spool.status()
        if status.failed >= 0:
            raise RuntimeError(status.message)
        return bool(status.committed.get("step") == self._number)

    def close(self) -> None:
        """See :class:`Saver`."""
        self._persisting.finish(time.monotonic() + TIMEOUT_S, time.sleep, lambda: False)
        shutil.rmtree(self._job_dir)


def perceptron(million: int) -> Any:
    """A model of so many million parameters."""
    import torch
    from torch import nn

    width, count, _ = SIZES[million]
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


def batch(million: int) -> Any:
    """Its input."""
    import torch

    width, _, rows = SIZES[million]
    return torch.randn(rows, width)


def in_a_loop(system: str, million: int, recorder: Recorder, folder: Path) -> None:
    """Train and save where the user has written the loop."""
    import torch

    model = perceptron(million)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = batch(million)
    saver: Saver
    if system.startswith("DCP"):
        saver = Distributed(model, optimizer, folder, system)
    else:
        saver = Accelerated(model, optimizer, folder) if system != OURS else Ours(model, optimizer, folder)
    number = 0
    while not recorder.over:
        if recorder.due:
            number += 1
            recorder.begin()
            began = time.perf_counter()
            saver.save(number)
            recorder.stalled(time.perf_counter() - began)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        began = time.perf_counter()
        saver.fence()
        recorder.stalled(time.perf_counter() - began)
        optimizer.step()
        recorder.step(saver.complete())
    saver.close()


def in_a_trainer(system: str, million: int, recorder: Recorder, folder: Path) -> None:
    """Train and save under Lightning's Trainer."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    data = batch(million)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron(million)

        def training_step(self, rows: Any, index: int) -> Any:
            return self.net(data).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    plugin = AsyncCheckpointIO() if system == "AsyncCheckpointIO" else None
    last: list[concurrent.futures.Future[None]] = []

    class Timed(ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            recorder.step(all(future.done() for future in last))
            if recorder.over:
                trainer.should_stop = True
            elif recorder.due:
                recorder.begin()
                began = time.perf_counter()
                super().on_train_batch_end(trainer, *args)
                recorder.stalled(time.perf_counter() - began)
                if plugin is not None and plugin._executor is not None:
                    last[:] = [plugin._executor.submit(lambda: None)]  # done when the save before it is

    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Timed(folder, every_n_train_steps=1, save_top_k=-1)],
        plugins=[plugin] if plugin is not None else [],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(1_000_000, 1), batch_size=1))


def worker(options: argparse.Namespace) -> int:
    """One system at one size; prints what it measured as JSON."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    recorder = Recorder(options.saves, options.plain)
    run = in_a_trainer if options.system in SYSTEMS[:2] else in_a_loop
    run(options.system, options.million, recorder, options.folder)
    print(json.dumps(recorder.to_dict()), flush=True)
    return 0


def measure(system: str, million: int, saves: int, plain: int, parent: Path) -> dict[str, Any]:
    """Run a system in a process of its own.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    folder = parent / f"{system.replace(' ', '-').replace(',', '')}-{million}"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.checkpoint_stall", "--worker", system, str(million), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [*command, "--saves", str(saves), "--plain", str(plain)], capture_output=True, text=True, env=env, cwd=ROOT
        )
        if done.returncode:
            raise RuntimeError(f"{system} at {million} M failed\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return measured
    finally:
        shutil.rmtree(folder)
        os.sync()  # what it left in memory must not slow the next one


def rows_of(million: int, saves: int, plain: int, parent: Path) -> list[Row]:
    """Rows of all systems at one size."""
    rows, stalls = [], {}
    for system in SYSTEMS:
        found = measure(system, million, saves, plain, parent)
        # The first save makes memory and connections that later ones use again.
        first, later = found["saves"][0], found["saves"][1:]
        middle = {key: statistics.median(save[key] for save in later) for key in first}
        case = f"{million} M, {system}"
        stalls[system] = middle["stall"]
        rows += [
            Row(case, "stall", 1e3 * middle["stall"], "ms"),
            Row(case, "stall of the first save", 1e3 * first["stall"], "ms"),
            Row(case, "cost: steps longer, stall included", 1e3 * middle["cost"], "ms"),
            Row(case, "complete after", middle["complete"], "s"),
        ]
        say(
            f"{case}: step {found['step']:.3f} s, stall {middle['stall']:.4f} s (first {first['stall']:.4f} s), cost "
            f"{middle['cost']:.3f} s in {middle['steps']:.0f} steps, complete after {middle['complete']:.2f} s"
        )
    fastest = min(stalls[system] for system in SYNCHRONOUS)
    staged = min(stalls[system] for system in DCP_ASYNC)
    case = f"{million} M, ours"
    return [
        *rows,
        at_most(case, "stall / that of the fastest synchronous save", stalls[OURS] / fastest, "ratio", 0.05),
        at_most(case, "stall / that of DCP async, the better of two", stalls[OURS] / staged, "ratio", 1.0),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = arguments("checkpoint_stall", __doc__ or "")
    parser.add_argument("--sizes", help="millions of parameters, with commas; default, by size: " + "; ".join(DEFAULT))
    parser.add_argument("--folder", type=Path, help="where to save; default: the folder of temporary files")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--saves", type=int, help="saves of each system; the first is reported apart")
    parser.add_argument("--plain", type=int, help="steps without a save between two")
    options = begin(parser, argv)
    if options.worker:
        system, million, folder = options.worker
        options.system, options.million, options.folder = system, int(million), Path(folder)
        return worker(options)
    rows: list[Row] = []
    sizes = [int(size) for size in (options.sizes or DEFAULT[options.size]).split(",")]
    with scratch() as folder:
        for million in sizes:
            if million * 1e6 * BYTES > available_memory():
                say(f"{million} M parameters do not fit into {available_memory() / 1e9:.0f} GB of memory: left out")
                continue
            saves, plain = SAVES[options.size]
            rows += rows_of(million, options.saves or saves, options.plain or plain, options.folder or folder)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
