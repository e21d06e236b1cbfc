"""Fabric: strategies whose workers may fail (``Fabric(strategy="swift_ddp")``, and FSDP2), and the loop over them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import nn
from torch.distributed.constants import default_pg_timeout

import shared_core
from lightning_swift import compat
from lightning_swift.launching import workers_here
from lightning_swift.recovering import leave_out_banner
from lightning_swift.support import check_ddp_options
from shared_core import Job, SwiftConfig, TrainingLoop, install
from shared_core.adapters import (
    hand_over,
    launched_by_swiftrun,
    under_plain_torchrun,
    warn_plain_torchrun_once,
    warn_srun_once,
)
from shared_core.checkpoint import absolute
from shared_core.config import full_names
from shared_core.devices import check as check_device
from shared_core.errors import ConfigError, Unsupported
from shared_core.trackers import prepare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_OF_THE_STRATEGY = frozenset(inspect.signature(DDPStrategy.__init__).parameters)


class _Surviving(ParallelStrategy):
    """What these strategies add to a strategy of Fabric, which comes after this class in theirs."""

    job: Job | None = None

    def _take_over(self, standbys: int, options: dict[str, Any] | None) -> None:
        self._standbys, self._options = standbys, full_names(options or {})
        for name in ("checkpoint.dir", "checkpoint.resume_from"):
            if self._options.get(name) is not None:
                self._options[name] = absolute(self._options[name])
        self._config = SwiftConfig.from_env(base=SwiftConfig.from_dict(self._options))
        self.job = install() if launched_by_swiftrun() else None
        leave_out_banner(self.job)
        if self.job is not None:
            prepare()
            compat.note_fabric_loaders()
            self.job.options.check_told(self._options)
            self.job.options.use_checkpoints(self._options)

    def _configure_launcher(self) -> None:
        # Called once the number of devices is known, and before there is a process group.
        super()._configure_launcher()
        assert self.cluster_environment is not None
        if self.job is not None:
            return
        if self.num_processes > 1 and not self.cluster_environment.creates_processes_externally:
            self._check_device()
            hand_over(self.num_processes, self._standbys, self._options)
        if under_plain_torchrun():
            warn_plain_torchrun_once()
        warn_srun_once()

    def setup_environment(self) -> None:
        if self.job is not None:
            self._check_device()
        super().setup_environment()

    def _check_device(self) -> None:
        check_device(self.root_device, "the model", allowed=self._config.uses_devices)

    @property
    def num_processes(self) -> int:
        return workers_here(self.job, super().num_processes)  # type: ignore[misc]

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """As in the stock strategy; a policy of checkpoints hears the loss, which is not read here."""
        super().backward(tensor, module, *args, **kwargs)
        if self.job is not None:
            self.job.note_loss(tensor)


class SwiftFabricStrategy(_Surviving, DDPStrategy):
    """Fabric's ``DDPStrategy`` in which a run continues through the failure of workers, bit for bit.

    The script's loop must say where epochs and batches begin, see :func:`lightning_swift.attach`. With ``python
    train.py`` and several devices the script is started again under ``swiftrun``.

    Args:
        standbys: processes kept ready to replace a failed worker, where this strategy starts ``swiftrun`` itself.
        options: options of :class:`shared_core.SwiftConfig`, by name.
        kwargs: as ``DDPStrategy``, and options of ``DistributedDataParallel``.

    Raises:
        Unsupported: for start methods that spawn or fork.
        ConfigError: for an unknown option or a bad value.

    Example::

        fabric = Fabric(accelerator="cpu", devices=1, strategy=lightning_swift.SwiftFabricStrategy())
    """

    def __init__(self, standbys: int = 1, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if kwargs.get("start_method", "popen") != "popen":
            raise Unsupported(
                f"swift recovery starts workers with swiftrun, not with start_method={kwargs['start_method']!r}: "
                "leave it out"
            )
        check_ddp_options(None, None, None, None, {k: v for k, v in kwargs.items() if k not in _OF_THE_STRATEGY})
        super().__init__(**kwargs)
        self._take_over(standbys, options)


class SwiftFabricFSDPStrategy(_Surviving, ModelParallelStrategy):
    """Fabric's ``ModelParallelStrategy`` in which a run with FSDP2 or HSDP survives the failure of workers, bit
    for bit.

    Data, and the model with them, are divided over all workers.

    Args:
        parallelize_fn: given a module and the device mesh, calls ``fully_shard`` with ``mesh["data_parallel"]``, or
            with a mesh of two dimensions (HSDP), and returns the module.
        standbys: as in :class:`SwiftFabricStrategy`, and so are ``options``.

    All others are as in ``ModelParallelStrategy``.

    Raises:
        ConfigError: for an unknown option or a bad value.

    Example::

        def shard(module, mesh):
            return fully_shard(module, mesh=mesh["data_parallel"])

        strategy = lightning_swift.SwiftFabricFSDPStrategy(shard)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        save_distributed_checkpoint: bool = True,
        standbys: int = 1,
        options: dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            parallelize_fn,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._take_over(standbys, options)

    def setup_environment(self) -> None:
        compat.set_data_parallel_size(self, self.num_nodes * self.num_processes)
        super().setup_environment()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """As in ``ModelParallelStrategy``.

        Raises:
            ConfigError: nothing is sharded, so that each worker would train a model of its own.
        """
        from torch.distributed.fsdp import FSDPModule  # imported by whoever shards

        made = super().setup_module(module)
        if self.job is not None and not any(isinstance(each, FSDPModule) for each in made.modules()):
            raise ConfigError(
                "parallelize_fn has sharded nothing: call in it fully_shard(layer, mesh=mesh['data_parallel']) of "
                "torch.distributed.fsdp, or choose strategy='swift_ddp'"
            )
        return made

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self.job is None else self.job.runtime.unchecked():  # each save has a random number
            super().save_checkpoint(*args, **kwargs)


def register_fabric() -> None:
    """Register the strategy under the names that the Trainer's has, but for what Fabric has no name for."""
    for name, options in (
        ("swift_ddp", {}),
        ("swift_ddp_find_unused_parameters_true", {"find_unused_parameters": True}),
    ):
        if name not in STRATEGY_REGISTRY:
            STRATEGY_REGISTRY.register(
                name, SwiftFabricStrategy, description="DDP that survives the failure of workers", **options
            )


# -- the loop of a script: that of plain PyTorch, over what Fabric has set up -----------------------------------------


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
        inside = given if isinstance(given, Iterator) else getattr(given, "iterable", given)  # of a progress bar
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
            if (job := self.loop.job) is not None:
                read = [compat.read_by(each) for each in self._loaders]
                job.variables.tell("loaders of Fabric", SimpleNamespace(loaders=read))
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
