"""``swiftrun --metrics-port PORT``: the view of the job as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shared_core.errors import MissingExtra
from shared_core.watch.server import Page
from shared_core.watch.view import JobView, RankPhase

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

_STATES = ("starting", "running", "recovering", "succeeded", "failed", "gone")


def need_prometheus() -> None:
    """Raises MissingExtra where the client library is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise MissingExtra("metrics need prometheus_client: pip install 'swift-recovery[all]'") from error


def pages_of(view: Callable[[], JobView]) -> dict[str, Page]:
    """The page that Prometheus scrapes. ``view``: gives what there is to see now."""
    from prometheus_client import generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    registry = registry_of(view)
    return {"/metrics": Page(CONTENT_TYPE_LATEST, lambda: generate_latest(registry))}


def registry_of(view: Callable[[], JobView]) -> CollectorRegistry:
    """A registry whose metrics are made of the view whenever they are asked for."""
    from prometheus_client.registry import Collector, CollectorRegistry

    class OfTheJob(Collector):
        def collect(self) -> Iterator[Metric]:
            return metrics_of(view())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(OfTheJob())
    return registry


def metrics_of(view: JobView) -> Iterator[Metric]:
    """All metrics. What is unknown has no sample."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    def gauge(name: str, text: str, value: float | None) -> Metric:
        family = GaugeMetricFamily(name, text)
        if value is not None:
            family.add_metric([], value)
        return family

    def by(kind: type, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        family: Metric = kind(name, text, labels=[label])
        for each, value in values.items():
            family.add_metric([each], value)  # type: ignore[attr-defined]
        return family

    mine = [one for one in view.workers if one.here]
    phases = {phase.value: float(sum(one.phase == phase for one in view.workers)) for phase in RankPhase}
    steps = {str(one.rank): float(one.step) for one in mine if one.step is not None}
    newest = view.checkpoint
    said = {"run": view.run, "name": view.name, "script": view.script, "host": view.host}
    yield InfoMetricFamily("swift_job", "The job.", value=said)
    yield by(
        GaugeMetricFamily,
        "swift_job_state",
        "1 for the state that the job is in.",
        "state",
        {state: float(state == view.state) for state in _STATES},
    )
    yield gauge("swift_workers", "Ranks that a worker holds.", view.present)
    yield gauge("swift_workers_wanted", "Workers that there are to be.", view.world_size)
    yield by(GaugeMetricFamily, "swift_workers_in_phase", "Workers by what they do.", "phase", phases)
    yield gauge("swift_generation", "Number of the newest generation.", view.generation)
    yield gauge("swift_step", "Batches begun by the worker of this machine that is furthest.", view.step)
    yield gauge("swift_steps_per_second", "Median of the workers of this machine.", view.steps_per_s)
    yield by(GaugeMetricFamily, "swift_worker_step", "Batches begun, by rank of this machine.", "rank", steps)
    slow = {str(one.rank): 1.0 for one in view.workers if one.slow}
    yield by(GaugeMetricFamily, "swift_worker_slow", "1 for each rank that is slow.", "rank", slow)
    failures = {kind: float(count) for kind, count in view.failures_by_kind.items()}
    yield by(CounterMetricFamily, "swift_failures", "Workers that failed, by cause.", "cause", failures)
    answers = {answer: float(count) for answer, count in view.recoveries.items()}
    yield by(CounterMetricFamily, "swift_recoveries", "Recoveries that are over.", "answer", answers)
    yield CounterMetricFamily(
        "swift_stall_seconds", "All stalls that are over: the worker that waited longest in each.", value=view.stall_s
    )
    yield gauge("swift_stalled_seconds", "How long the stall under way has lasted; 0 without one.", view.stalled_s)
    yield CounterMetricFamily("swift_restarts", "How often all workers have started again.", value=view.restarts)
    yield CounterMetricFamily("swift_resizes", "How often the number of workers has changed.", value=view.resizes)
    yield CounterMetricFamily("swift_checkpoints", "Checkpoints that were committed.", value=view.checkpoints)
    yield gauge("swift_checkpoint_age_seconds", "Since the newest checkpoint.", newest.age_s if newest else None)
    yield gauge(
        "swift_checkpoint_step", "Batch step boundary of the newest checkpoint.", newest.step if newest else None
    )
    yield gauge("swift_checkpoint_bytes", "Size of the newest checkpoint.", newest.nbytes if newest else None)
    logs = {"memory": float(view.log_bytes), "disk": float(view.disk_bytes)}
    yield by(GaugeMetricFamily, "swift_log_bytes", "Message logs of this machine.", "where", logs)
