"""The loop of a script under Fabric: that of plain PyTorch, over what Fabric has set up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import shared_core
from lightning_swift import compat
from shared_core import Job, TrainingLoop
from shared_core.errors import Unsupported

_PASSES = "fabric.passes"


class FabricLoop:
    """A training loop under Fabric that survives the failure of workers. Without ``swiftrun`` it is a plain loop.

    Made by :func:`attach`. ``loop`` is that of the core.

    Example::

        job = lightning_swift.attach(model, optimizer)
        counts = job.register(seen=0)
        for step, batch in job.steps(loader):
            counts.seen += len(batch)
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        #: Loaders that the script has set up before its loop; others are made again in each epoch. None before the
        #: first use.
        self._loaders: list[compat.FabricLoader] | None = None
        self._call = 0
        self._at_epoch: list[int] = []
        if loop.job is not None:
            _check(loop.job)
            loop.job.register(_PASSES, self._capture, self._restore)

    @property
    def total_steps(self) -> int:
        """Batches used so far, of all epochs and loops."""
        return self.loop.total_steps

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """As :meth:`shared_core.TrainingLoop.epochs`."""
        self._call += 1
        if (job := self.loop.job) is not None:
            job.make_own_standby()
            if job.joining:
                self._early(job)
        for epoch in self.loop.epochs(count, start):
            self._at_epoch = [compat.passes_of(loader) for loader in self._known()]
            yield epoch

    def steps(self, loader: Any) -> Iterator[tuple[int, Any]]:
        """``(index, batch)`` for each batch, as ``enumerate(loader)``; see :meth:`shared_core.TrainingLoop.steps`.

        Args:
            loader: what ``fabric.setup_dataloaders`` has returned, a progress bar around it, or any iterable that
                reads from no such loader.

        Raises:
            Unsupported: at the first batch, if a loader of Fabric is read through something else.
        """
        given, job = loader, self.loop.job
        if job is None:
            yield from self.loop.steps(given)
            return
        job.make_own_standby()
        inside = getattr(given, "iterable", given)  # of a progress bar
        if isinstance(inside, compat.FabricLoader):
            self._known()
            read = compat.begin_pass(inside)
            if inside is given:
                given = read
            else:
                given.iterable = read
            yield from self.loop.steps(given)
        else:
            yield from self._other_steps(given, checked=job.joining)

    def _other_steps(self, given: Any, *, checked: bool) -> Iterator[tuple[int, Any]]:
        before = [compat.passes_of(each) for each in compat.fabric_loaders()]
        with contextlib.closing(self.loop.steps(given)) as steps:  # type: ignore[type-var]  # a generator
            for step in steps:
                if not checked and before != [compat.passes_of(each) for each in compat.fabric_loaders()]:
                    raise Unsupported(
                        f"this {type(given).__name__} reads from a loader that Fabric has set up, whose passes a "
                        "replacement cannot count then: give job.steps() the loader itself, and leave the pass with "
                        "break"
                    )
                checked = True  # what the script reads inside the pass is its own
                yield step

    def register(self, *objects: Any, **values: Any) -> SimpleNamespace:
        """As :meth:`shared_core.TrainingLoop.register`."""
        return self.loop.register(*objects, **values)

    def ignore(self, *names: str) -> None:
        """As :meth:`shared_core.TrainingLoop.ignore`."""
        self.loop.ignore(*names)

    # -- passes over the data -----------------------------------------------------------------------------------------
    # Fabric shuffles by the number of passes that each loader has begun, which it counts in the loader.

    def _known(self) -> list[compat.FabricLoader]:
        if self._loaders is None:
            self._loaders = compat.fabric_loaders()
        return self._loaders

    def _early(self, job: Job) -> None:
        """In a replacement, before the epoch of the failed worker begins: it runs the epoch from its start."""
        published: Mapping[str, Any] | None = job.peek(_PASSES)
        if published is not None and published["call"] == self._call:
            self._set(published["epoch"])

    def _set(self, counts: list[int]) -> None:
        for loader, count in zip(self._known(), counts, strict=False):
            compat.set_passes(loader, count)

    def _capture(self) -> dict[str, Any]:
        now = [compat.passes_of(loader) for loader in self._known()]
        return {"call": self._call, "epoch": self._at_epoch, "now": now}

    def _restore(self, found: Mapping[str, Any]) -> None:
        self._at_epoch = list(found["epoch"])
        self._set(found["now"])


def attach(*objects: Any) -> FabricLoop:
    """Say what a script under Fabric trains, and get the loop that survives the failure of workers.

    Example::

        fabric = Fabric(accelerator="cpu", devices=1, strategy="swift_ddp")
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        job = lightning_swift.attach(model, optimizer)
        for epoch in job.epochs(3):  # instead of range(3)
            for step, batch in job.steps(loader):  # instead of enumerate(loader)
                ...

    Args:
        objects: models and optimizers as ``fabric.setup`` has returned them, and whatever else has ``state_dict``
            (schedulers, averages of the weights).

    Raises:
        ConfigError: under ``swiftrun``, if the strategy of Fabric is none of this package; if an object has no state.
        Unsupported: where the number of workers may change, or others compute a failed worker's share.
    """
    return FabricLoop(shared_core.attach(*(compat.without_fabric(each) for each in objects)))


def _check(job: Job) -> None:
    if job.reroutes or job.config.resizes:
        raise Unsupported(
            "under Fabric a failed worker is replaced: choose on_failure='replace' and leave "
            "resize.replace_timeout_s=0. With fewer workers, or with a share that others compute, use "
            "lightning.pytorch.Trainer or plain PyTorch"
        )
    job.checkpoints.keep_number("Fabric deals out the data to a fixed number of workers")
