"""``SwiftPlugin``: the handler through which recovery comes into an ``Accelerator``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, KwargsHandler
from torch import nn

from accelerate_swift import compat
from accelerate_swift.data import gate, unwrapped
from accelerate_swift.launch import hand_over_if_needed
from accelerate_swift.state import AccelerateRunState, Steps
from accelerate_swift.watch import Watch
from shared_core import SharedStep, SwiftConfig, TrainingLoop, install, pipeline
from shared_core.adapters import launched_by_swiftrun, under_plain_torchrun
from shared_core.checkpoint import absolute
from shared_core.config import full_names
from shared_core.errors import ConfigError, Unsupported
from shared_core.trackers import prepare
from shared_core.versions import check_version

_ENABLE = "SWIFT_RECOVERY"


class SwiftPlugin(KwargsHandler):  # type: ignore[misc]  # Accelerate has no type annotations
    """Keeps a run of Accelerate going through the failure of workers, bit for bit.

    ``Accelerator(kwargs_handlers=[plugin])`` is enough for failures in the first epoch; to recover from any point,
    write the loop as ``for epoch in plugin.epochs(n)`` and register what the script itself counts
    (:meth:`register`). Without ``swiftrun`` (see :mod:`accelerate_swift.launch`), or with ``SWIFT_RECOVERY=0`` in the
    environment, it does nothing.

    Args:
        config_file: YAML or JSON file of options; see :class:`shared_core.SwiftConfig`.
        num_processes: workers to start where the script is run as ``python train.py``.
        standbys: processes kept ready to replace a failed worker, where this plugin starts ``swiftrun`` itself.
        init_process_group: Accelerate's own handler for ``init_process_group``; only one of the two can be passed to
            it.
        options: options of :class:`shared_core.SwiftConfig`, by name: ``checkpoint={"dir": "checkpoints",
            "resume": "always"}`` makes checkpoints of the job, from which the same command continues by itself;
            ``checkpoint={..., "resume_from": PATH}`` begins with a checkpoint of another command.

    Raises:
        ConfigError: for an unknown option or a bad value.
        Unsupported: this version of Accelerate cannot be used.

    Example::

        plugin = accelerate_swift.SwiftPlugin()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for epoch in plugin.epochs(2):
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        config_file: str | None = None,
        num_processes: int = 1,
        standbys: int = 1,
        init_process_group: InitProcessGroupKwargs | None = None,
        **options: Any,
    ) -> None:
        given = (SwiftConfig.from_file(config_file).changed if config_file else {}) | full_names(options)
        for name in ("checkpoint.dir", "checkpoint.resume_from"):
            if given.get(name) is not None:
                given[name] = absolute(given[name])
        self.config = SwiftConfig.from_env(base=SwiftConfig.from_dict(given))
        if launched_by_swiftrun() and enabled():
            check_version(compat.TESTED, compat.NAMES)
            prepare()
        # Here, because transformers makes the process group before there is an Accelerator.
        job = install() if given and launched_by_swiftrun() and enabled() else None
        if job is not None:
            job.options.check_told(given)
            job.options.use_checkpoints(given)
        self._num_processes = num_processes
        self._standbys = standbys
        self._init = init_process_group
        self._accelerator: Accelerator | None = None
        self._built: Accelerator | None = None
        self._steps = Steps()
        #: What is trained; shared with the ``Accelerator`` and its loaders.
        self.watch = Watch()
        if self.config.checkpoint.dir is not None and under_plain_torchrun() and enabled():
            self.hand_over()  # here for the same reason

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return compat.ASKED_FIRST

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """In the worker that it serves a copy is the plugin itself.

        Elsewhere it says of the process group what it would say here, and does nothing.
        """
        return _plugin_here, (os.getpid(), _known(self), self._init)

    @property
    def loop(self) -> TrainingLoop:
        """The loop of the core."""
        return self.watch.loop

    def to_kwargs(self) -> dict[str, Any]:
        """``Accelerator`` calls it while it is built, before any process group exists.

        Raises:
            ConfigError: ``SWIFT_RECOVERY`` is neither on nor off.
            SwiftError: where the script cannot be started again under ``swiftrun``.
        """
        accelerator = self._built = compat.accelerator_under_construction()
        if accelerator is not None and enabled():
            self.hand_over()
            if launched_by_swiftrun():
                self.adopt(accelerator)
        return self.group_options()

    def group_options(self) -> dict[str, Any]:
        """What the user's own handler says of the process group, with gloo for DeepSpeed on a CPU."""
        given = {} if self._init is None else dict(self._init.to_kwargs())
        if compat.uses_deepspeed() and not torch.cuda.is_available():
            # On a CPU, Accelerate chooses neither a backend for DeepSpeed nor the device.
            pipeline.import_deepspeed()
            os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
            return {"backend": "gloo"} | given
        return given

    # -- what the user calls ------------------------------------------------------------------------------------------

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """As :meth:`shared_core.TrainingLoop.epochs`."""
        if self._accelerator is not None:
            job = self.loop.job
            if job is not None and not self._accelerator.trackers:  # an open one has rows that only its process knows
                job.make_own_standby()
            self.state.early()
        for epoch in self.loop.epochs(count, start):
            self.watch.begin_epoch()
            yield epoch

    def steps(self, loader: Any) -> Iterator[tuple[int, Any]]:
        """``(index, batch)`` for each batch of ``loader``, as ``enumerate(loader)``.

        A replacement continues with the failed worker's number, where ``enumerate`` would begin with 0.

        Args:
            loader: as ``accelerator.prepare`` has returned it, or a progress bar around it.
        """
        return self._steps.over(loader)

    def shared_steps(
        self, model: nn.Module | Sequence[nn.Module], loader: Any, epochs: int, *, accumulate: int | None = None
    ) -> Iterator[SharedStep]:
        """As :meth:`shared_core.TrainingLoop.shared_steps`: the only loop for ``on_failure="reroute"``.

        ``step.backward(loss)`` stands for ``accelerator.backward``, for ``accelerator.accumulate`` and for
        ``optimizer.zero_grad``; clipping, ``optimizer.step`` and ``scheduler.step`` stay the script's.

        Args:
            model: as ``accelerator.prepare`` has returned it; several as a list.
            loader: as ``accelerator.prepare`` has returned it.
            epochs: passes over the data.
            accumulate: batches of a step at each rank; ``gradient_accumulation_steps`` of the ``Accelerator`` unless
                given.

        Raises:
            ConfigError: no ``Accelerator`` has taken this plugin.
            Unsupported: for fp16, ``dispatch_batches``, DeepSpeed, and whatever the core refuses.
        """
        accelerator = self._built
        if accelerator is None:
            raise ConfigError(
                "no Accelerator has taken this plugin: build Accelerator(kwargs_handlers=[plugin]) before "
                "plugin.shared_steps()"
            )
        if self.watch.engine is not None:
            raise Unsupported("shared_steps() is for data parallelism: a pipeline engine makes its steps itself")
        if accelerator.scaler is not None:
            raise Unsupported("shared_steps() cannot be used with fp16, whose scaler counts steps: use bf16 or no")
        if self.loop.job is not None:
            self.watch.attach()
        if accumulate is None:
            accumulate = int(accelerator.gradient_accumulation_steps)
        modules = [model] if isinstance(model, nn.Module) else list(model)
        return self.loop.shared_steps(unwrapped(loader), epochs, accumulate=accumulate, modules=modules)

    def wait_for_all(self) -> None:
        """As :meth:`shared_core.TrainingLoop.wait_for_all`."""
        if self.watch.engine is not None:
            self.watch.engine.wait_for_all()
        else:
            self.loop.wait_for_all()

    def register(self, *objects: Any, **values: Any) -> SimpleNamespace:
        """As :meth:`shared_core.TrainingLoop.register`.

        Not needed for what is registered for checkpointing with Accelerate.
        """
        return self.loop.register(*objects, **values)

    def ignore(self, *names: str) -> None:
        """As :meth:`shared_core.TrainingLoop.ignore`; call it once there is an ``Accelerator``."""
        self.loop.ignore(*names)

    # -- inside -------------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Become ``swiftrun``, unless this is one of its workers; see :mod:`accelerate_swift.launch`."""
        if not launched_by_swiftrun():
            hand_over_if_needed(self._num_processes, self._standbys, self.config)

    def adopt(self, accelerator: Accelerator) -> None:
        """Let an ``Accelerator`` that is being built survive the failure of workers."""
        self._accelerator = accelerator
        job = install()
        assert job is not None
        self.watch.begin(accelerator, job, self.config)
        self.state = AccelerateRunState(accelerator, self.watch.progress, self._steps, replays=self.watch.replays)
        accelerator._swift_plugin = self
        compat.become(accelerator, _Watched)

    def gate(self, prepared: Any) -> Any:
        """Have a loader that Accelerate has prepared mark the step boundaries, unless others mark them."""
        if self.watch.replays:
            return prepared
        if self.watch.fetching is None:
            return gate(self.watch, prepared)
        # A Trainer makes a new loader for each evaluation, but keeps one whose workers persist: those of a replacement
        # are not to draw a seed again.
        return gate(self.watch, prepared, self.watch.kept_key()) if compat.persists(prepared) else prepared


class _Watched(Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` whose loaders mark the step boundaries; an existing object is turned into one."""

    _swift_plugin: SwiftPlugin

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """In the same worker a copy has the plugin, too; elsewhere it is one of Accelerate's own."""
        values = {name: value for name, value in vars(self).items() if name != "_swift_plugin"}
        return _accelerator_here, (compat.without_mixin(self), self._swift_plugin, values)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_data_loader(*args, **kwargs)
        watched = self._swift_plugin.gate(prepared)
        compat.exchange_loader(self, prepared, watched)
        return watched

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        job = self._swift_plugin.loop.job
        # As for evaluation: without DistributedDataParallel, which sums what each worker has computed itself.
        bare = evaluation_mode or (job is not None and job.reroutes)
        if not bare:
            self._swift_plugin.watch.refuse_wrapping(model)
        return self._swift_plugin.watch.note_model(super().prepare_model(model, device_placement, bare))

    def _prepare_deepspeed(self, *args: Any) -> Any:
        if self._swift_plugin.watch.replays:  # a pipeline
            return super()._prepare_deepspeed(*args)
        with pipeline.engines(pipeline.SwiftZeroEngine):
            result = super()._prepare_deepspeed(*args)
        for each in result:
            if isinstance(each, pipeline.SwiftZeroEngine):
                self._swift_plugin.watch.note_model(each)
        return result

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As in ``Accelerator``; a policy of checkpoints hears the loss, which is not read here."""
        super().backward(loss, **kwargs)
        job = self._swift_plugin.loop.job
        if job is not None and isinstance(loss, torch.Tensor):
            job.note_loss(loss)

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        self._swift_plugin.state.trackers.start(
            config, lambda kept: super(_Watched, self).init_trackers(project_name, kept, init_kwargs)
        )

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._swift_plugin.state.trackers.watch()  # those that came without init_trackers
        super().log(*args, **kwargs)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return self._swift_plugin.state.save_again(
            output_dir, lambda path: super(_Watched, self).save_state(path, *args, **kwargs)
        )

    def skip_first_batches(self, *args: Any, **kwargs: Any) -> Any:
        return self._swift_plugin.gate(super().skip_first_batches(*args, **kwargs))


#: The plugins of this process, by ``id``.
_PLUGINS: weakref.WeakValueDictionary[int, SwiftPlugin] = weakref.WeakValueDictionary()


def _known(plugin: SwiftPlugin) -> int:
    _PLUGINS[id(plugin)] = plugin
    return id(plugin)


def _plugin_here(process: int, number: int, init: InitProcessGroupKwargs | None) -> Any:
    plugin = _PLUGINS.get(number) if process == os.getpid() else None
    return plugin if plugin is not None else init or InitProcessGroupKwargs()


def _accelerator_here(kind: type, plugin: Any, values: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(values)
    if type(plugin) is SwiftPlugin:
        made._swift_plugin = plugin
        compat.become(made, _Watched)
    return made


def enabled() -> bool:
    """Whether ``SWIFT_RECOVERY`` leaves the plugin on. Raises ConfigError where it is neither on nor off."""
    value = os.environ.get(_ENABLE, "1").strip().lower()
    if value not in ("0", "1", "true", "false", "yes", "no", "on", "off"):
        raise ConfigError(f"{_ENABLE}={value!r} is neither on nor off: use 1 or 0")
    return value in ("1", "true", "yes", "on")


__all__ = ["SwiftPlugin"]
