"""What ``self.log`` has gathered: Lightning's result collections as plain data."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_swift import compat
from lightning_swift.compat import Metadata, ResultMetric
from shared_core.encoding import decode, encode
from shared_core.worker.comm import group_name, group_named

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
