"""The rank-local state of a Lightning run: what is published at each step boundary, and put back in a replacement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import Metric

from lightning_swift import compat
from lightning_swift.averages import Averages
from lightning_swift.compat import BatchProgress, Counter, Loop, Metadata, Progress, ResultMetric
from lightning_swift.data import Data
from lightning_swift.loggers import Loggers, Missed, is_own
from shared_core import Job
from shared_core.encoding import Holder, Holders, decode, dumps, encode, encode_state, holds_more, loads
from shared_core.worker.comm import group_name, group_named

# -- what self.log has gathered: Lightning's result collections as plain data -----------------------------------------


_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


class LightningResults:
    """Captures and restores the collections of the training and evaluation loops.

    Entries that a replacement has not logged yet are made again from their metadata, bound to its own strategy, groups
    and metrics.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._metas: dict[int, tuple[ResultMetric, Any]] = {}

    def capture(self) -> dict[str, Any]:
        """Plain data, about 4 us for each logged name."""
        return {
            name: [(key, self._meta(metric), _values(metric)) for key, metric in collection.items()]
            for name, collection in compat.results_of(self._trainer).items()
            if collection
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Put back what :meth:`capture` took; names that were not logged by then are removed."""
        for name, collection in compat.results_of(self._trainer).items():
            entries = data.get(name, [])
            known = dict(collection)
            collection.clear()
            for key, meta, values in entries:
                metric = known.get(key) or self._make(meta)
                collection[key] = metric
                if metric.is_tensor:
                    for attribute in ("value", "cumulated_batch_size"):
                        if attribute in values:
                            setattr(metric, attribute, decode(values[attribute]))
                forward, computed = decode(values["forward"]), decode(values["computed"])
                compat.set_metric_state(metric, forward, computed, values["updates"])
                metric.has_reset = values["reset"]
                metric.meta.sync.should = meta["should"]

    def reset(self) -> None:
        """Forget the values of what is logged, not that it is."""
        for collection in compat.results_of(self._trainer).values():
            for metric in collection.values():
                if metric.is_tensor:
                    metric.reset()

    def _meta(self, metric: ResultMetric) -> dict[str, Any]:
        cached = self._metas.get(id(metric))
        if cached is not None and cached[0] is metric and cached[1]["should"] == metric.meta.sync.should:
            found: dict[str, Any] = cached[1]
            return found
        meta = metric.meta
        sync = meta.sync
        plain = {name: getattr(meta, name) for name in _META}
        plain |= {
            "reduce_fx": meta.reduce_fx.__name__,
            "is_tensor": metric.is_tensor,
            "should": sync.should,
            "op": sync.op,
            "rank_zero_only": sync.rank_zero_only,
            "group": None if sync.group is None else group_name(sync.group),
        }
        self._metas[id(metric)] = (metric, plain)
        return plain

    def _make(self, plain: dict[str, Any]) -> ResultMetric:
        meta = Metadata(**{name: plain[name] for name in _META}, reduce_fx=getattr(torch, plain["reduce_fx"]))
        group: Any = None
        if plain["group"] is not None:
            group = group_named(plain["group"])
        reduce = self._trainer.strategy.reduce
        meta.sync = compat.make_sync(reduce, plain["should"], plain["rank_zero_only"], plain["op"], group)
        metric = ResultMetric(meta, plain["is_tensor"])
        if not metric.is_tensor:
            # Its state belongs to the module, which is captured with it.
            object.__setattr__(metric, "value", self._trainer.lightning_module.get_submodule(plain["metric_attribute"]))
        return metric


def _values(metric: ResultMetric) -> dict[str, Any]:
    forward, computed, updates = compat.metric_state(metric)
    values: dict[str, Any] = {
        "forward": encode(forward),
        "computed": encode(computed),
        "updates": updates,
        "reset": metric.has_reset,
    }
    if metric.is_tensor:
        values["value"] = encode(metric.value)
        if metric.meta.is_mean_reduction:
            values["cumulated_batch_size"] = encode(metric.cumulated_batch_size)
    return values


# -- everything -------------------------------------------------------------------------------------------------------


_OPTIMIZER_INTERNALS = frozenset({"state", "param_groups", "defaults"})


class RunState:
    """Everything of a trainer, its module and callbacks that only this rank has. One for each entry call.

    What there is to visit is looked up once, when it is first needed, because hooks of the start-up still add to it.
    With ``held``, models that the user's callbacks hold belong to it.
    """

    def __init__(self, trainer: pl.Trainer, *, held: bool = False) -> None:
        self.trainer = trainer
        self.data = Data(trainer)
        self.loggers = Loggers(trainer)
        self.averages = Averages(trainer, held=held)
        self._results = LightningResults(trainer)
        self._built: dict[str, Any] = {}

    def register(self, job: Job) -> None:
        """Register every part; the order is the order in which a replacement restores them."""
        self._job = job
        self._told: list[str] = []
        for cls, leaves in _OF_FRAMEWORKS.items():
            job.variables.leave(cls, leaves)
        job.variables.data_sets.watch(self.data.loaders)
        self.data.watch(job)
        self.tell()
        for name, capture, restore, forward in (
            ("progress", self._capture_progress, self._restore_progress, False),
            ("averages", self.averages.capture, self.averages.restore, False),
            ("metrics", lambda: None, self._restore_metrics, False),
            ("flags", self._capture_flags, self._restore_flags, False),
            ("callbacks", self._capture_callbacks, self._restore_callbacks, False),
            ("results", self._results.capture, self._restore_results, True),
            ("schedulers", self._capture_schedulers, self._restore_schedulers, False),
            ("data", self.data.capture, self._restore_data, False),
        ):
            job.register(f"lightning.{name}", capture, restore, forward_mutated=forward)
        job.register("lightning.loggers", self.loggers.capture, self.loggers.restore, main=True)
        if job.reroutes:
            Missed(job, self.trainer, self.loggers)

    def forget(self) -> None:
        """Look up again what there is to visit: the entry has added modules or callbacks."""
        self._built.clear()
        self.tell()

    def tell(self) -> None:
        """Attributes of the user's callbacks and data module, and those given to the trainer, count as variables."""
        for name in self._told:
            self._job.variables.forget(name)
        found = {f"callback {name}": each for name, each in _callback_objects(self.trainer, user=True)[0].items()}
        found |= {f"scheduler {name}": each for name, each in self._own_schedulers()}
        found |= {f"logger {number}": each for number, each in enumerate(self.trainer.loggers) if is_own(each)}
        if (data := getattr(self.trainer, "datamodule", None)) is not None:
            found["data module"] = data
        found["trainer"] = SimpleNamespace(itself=self.trainer)
        for name, each in found.items():
            self._job.variables.tell(name, each)
        self._told = list(found)

    def _own_schedulers(self) -> Iterator[tuple[int, object]]:
        """Those that hold what their ``state_dict()`` does not give, such as another scheduler or a closure."""
        for number, config in enumerate(self.trainer.strategy.lr_scheduler_configs):
            if holds_more(config.scheduler):
                yield number, config.scheduler

    # -- holders ------------------------------------------------------------------------------------------------------

    def _holders(self, name: str) -> Holders:
        if name not in self._built:
            self._built[name] = Holders(*_BUILDERS[name](self.trainer))
        found: Holders = self._built[name]
        return found

    def _capture_callbacks(self) -> Any:
        return self._holders("callbacks").capture()

    def _restore_callbacks(self, data: Any) -> None:
        self._holders("callbacks").restore(data)

    def _model(self) -> tuple[list[nn.Module], list[nn.Parameter]]:
        if "model" not in self._built:
            module = self.trainer.lightning_module
            self._built["model"] = (list(module.modules()), list(module.parameters()))
        found: tuple[list[nn.Module], list[nn.Parameter]] = self._built["model"]
        return found

    # -- progress and flags -------------------------------------------------------------------------------------------

    def _loops(self) -> tuple[list[Holder], list[Counter], list[BatchProgress]]:
        if "loops" not in self._built:
            fitting = self.trainer.state.fn == TrainerFn.FITTING
            loops = list(_loops_of(self.trainer, fitting))
            leaves: list[Counter] = []
            batches: list[BatchProgress] = []
            for loop in loops:
                for value in vars(loop).values():
                    if isinstance(value, Progress):
                        _leaves(value, leaves, batches)
            items: list[object] = [self.trainer, compat.logger_connector(self.trainer), *loops]
            self._built["loops"] = ([Holder(item, compat.LOOP_OBJECTS) for item in items], leaves, batches)
        found: tuple[list[Holder], list[Counter], list[BatchProgress]] = self._built["loops"]
        return found

    def _capture_progress(self) -> Any:
        holders, leaves, batches = self._loops()
        return {
            "clock": (time.time(), time.monotonic()),
            "attributes": [holder.capture() for holder in holders],
            "counters": [tuple(vars(leaf).values()) for leaf in leaves],
            "last": [progress.is_last_batch for progress in batches],
        }

    def _restore_progress(self, data: Mapping[str, Any]) -> None:
        holders, leaves, batches = self._loops()
        wall, monotonic = data["clock"]
        self._shift = (time.monotonic() - time.time()) - (monotonic - wall)
        lengths = self.data.lengths() if self._job.position.resized else None
        for holder, values in zip(holders, data["attributes"], strict=True):
            holder.restore(values)
        if lengths is not None:
            self.data.set_lengths(lengths)
        for leaf, counts in zip(leaves, data["counters"], strict=True):
            leaf.__dict__.update(zip(vars(leaf), counts, strict=True))
        for progress, last in zip(batches, data["last"], strict=True):
            progress.is_last_batch = last
        if abs(self._shift) > 1.0:
            for item in (self.trainer, *getattr(self.trainer, "callbacks", ())):
                _shift_clocks(item, self._shift)

    def _capture_flags(self) -> Any:
        modules, parameters = self._model()
        precision = self.trainer.precision_plugin.state_dict()
        return {
            "training": bytes([m.training for m in modules]),
            "requires_grad": bytes([p.requires_grad for p in parameters]),
            "precision": encode(dict(precision)) if precision else None,
            "optimizers": self._holders("optimizers").capture(),
        }

    def _restore_flags(self, data: Mapping[str, Any]) -> None:
        modules, parameters = self._model()
        for child, flag in zip(modules, data["training"], strict=False):
            child.training = bool(flag)
        for parameter, flag in zip(parameters, data["requires_grad"], strict=False):
            if parameter.requires_grad != bool(flag):
                parameter.requires_grad_(bool(flag))
        precision = decode(data["precision"])
        if precision:
            self.trainer.precision_plugin.load_state_dict(precision)
        self._holders("optimizers").restore(data["optimizers"])

    # -- module and schedulers ----------------------------------------------------------------------------------------

    def _restore_metrics(self, data: None) -> None:
        strategy: Any = self.trainer.strategy
        if self._job.added and not strategy.metrics_alike:
            for child in self._model()[0]:
                if isinstance(child, Metric):
                    child.reset()  # what another rank has seen

    def _restore_results(self, data: Any) -> None:
        self._results.restore(data)
        if self._job.added and not self._job.reroutes:  # then all ranks have the same
            self._results.reset()

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Afterwards, the module's own attributes, metrics among them, are as before, unless an error comes out."""
        before = dumps(self._holders("module").capture())
        yield
        self._holders("module").restore(loads(before))

    def _restore_data(self, data: Mapping[str, Any]) -> None:
        self.data.restore(data, resized=self._job.position.resized, copied=self._job.added and self._job.reroutes)

    def _capture_schedulers(self) -> Any:
        return [encode_state(config.scheduler.state_dict()) for config in self.trainer.strategy.lr_scheduler_configs]

    def _restore_schedulers(self, data: list[Any]) -> None:
        for config, state in zip(self.trainer.strategy.lr_scheduler_configs, data, strict=False):
            config.scheduler.load_state_dict(decode(state))


_OF_MODULES = frozenset(vars(pl.LightningModule())) | compat.METRIC_INTERNALS | frozenset(vars(nn.Module()))
#: Attributes that objects of these classes have by themselves.
_OF_FRAMEWORKS: dict[type, frozenset[str]] = {
    pl.LightningModule: frozenset(vars(pl.LightningModule())),
    pl.LightningDataModule: frozenset(vars(pl.LightningDataModule())),
    Metric: compat.METRIC_INTERNALS,
}


def _module_objects(trainer: pl.Trainer) -> tuple[dict[str, object], frozenset[str]]:
    module: nn.Module | None = trainer.lightning_module
    return {} if module is None else _layers({"": module}), _OF_MODULES


def _layers(modules: Mapping[str, nn.Module]) -> dict[str, object]:
    """Modules with attributes to visit. Those of torch's own layers are configuration; parameters and buffers aside."""
    return {
        f"{name}.{path}" if name else path: child
        for name, module in modules.items()
        for path, child in module.named_modules()
        if not type(child).__module__.startswith("torch.nn.")
    }


def _callback_objects(trainer: pl.Trainer, user: bool) -> tuple[dict[str, object], frozenset[str]]:
    found: dict[str, object] = {}
    for number, callback in enumerate(getattr(trainer, "callbacks", ())):
        kind = type(callback)
        library = kind.__module__.startswith(("lightning.", "pytorch_lightning.", "lightning_swift."))
        library = library and kind is not LambdaCallback  # what it holds are functions of the user's
        # A progress bar's state is what is on this process' screen.
        if library != user and not isinstance(callback, ProgressBar):
            found[f"{number} {kind.__qualname__}"] = callback
    return found, frozenset()


_BUILDERS: dict[str, Callable[[pl.Trainer], tuple[dict[str, object], frozenset[str]]]] = {
    "module": _module_objects,
    "callbacks": lambda trainer: _callback_objects(trainer, user=False),
    "optimizers": lambda trainer: (
        {str(number): optimizer for number, optimizer in enumerate(trainer.strategy.optimizers)},
        _OPTIMIZER_INTERNALS,
    ),
}


def _loops_of(trainer: pl.Trainer, fitting: bool) -> Iterator[Loop]:
    roots: list[Loop] = [trainer.fit_loop]
    if not fitting:
        roots += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    while roots:
        loop = roots.pop(0)
        yield loop
        roots += [child for child in vars(loop).values() if isinstance(child, Loop)]


def _leaves(progress: Any, leaves: list[Counter], batches: list[BatchProgress]) -> None:
    if isinstance(progress, Counter):
        leaves.append(progress)
        return
    if isinstance(progress, BatchProgress):
        batches.append(progress)
    for child in vars(progress).values():
        if isinstance(child, Progress):
            _leaves(child, leaves, batches)


def _shift_clocks(item: object, shift: float) -> None:
    values = vars(item)
    for name in compat.CLOCKS:
        value = values.get(name)
        if isinstance(value, float):
            values[name] = value + shift
        elif isinstance(value, dict):
            values[name] = {k: v + shift if isinstance(v, float) else v for k, v in value.items()}


__all__ = ["RunState"]
