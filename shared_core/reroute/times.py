"""What plans are made for: times, from what workers have measured, and how many micro-batches fit into their memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Any, NamedTuple

from torch import Tensor

from shared_core.kinds import whole_of_environment
from shared_core.reroute.split import kept_tensors
from shared_core.schedule.normalise import Move
from shared_core.schedule.schedule import Kind, PlannedWorker, Topology, held_without_failure
from shared_core.schedule.timing import StageTimes, Times
from shared_core.system.process import machine_bytes

#: Name of transfers among the samples; other samples have the names of the kinds of actions.
COMMUNICATION = "communication"
#: Samples of each sort that are kept.
_SAMPLES = 64


class Profile:
    """Samples of durations of one worker, in seconds, and the steps in which they were taken."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[int, float]]] = {}

    def add(self, kind: Kind | str, seconds: float, step: int = 0) -> None:
        """Note one duration of an action, or of a transfer (``COMMUNICATION``)."""
        self._samples.setdefault(str(kind), deque(maxlen=_SAMPLES)).append((step, seconds))

    def medians(self, since: int = 0) -> dict[str, float]:
        """Seconds by name, from the steps from ``since`` on.

        Transfers are measured once in a job: theirs has no age. Of the optimizer it is the least: others
        contain waiting.
        """
        found: dict[str, float] = {}
        for name, samples in self._samples.items():
            recent = [seconds for step, seconds in samples if step >= since or name == COMMUNICATION]
            if recent:
                found[name] = min(recent) if name == Kind.OPT else median(recent)
        return found


#: Parts of the longest F, I or W of the stages; plans use whole parts. Noise of some percent would make orders that
#: look better and are not, and no plan would reach its bound, at which planning stops.
PARTS = 8
#: A worker has times of its own where one of them is off its stage's by this share of the stage's longest F, I or W.
OWN = 0.25
#: Times have drifted where one is off by this share. More than :data:`OWN`, so that a worker at that limit is no drift.
DRIFT = 0.4
_TOLD = 4
#: What an engine plans for until it has measured: equal slots.
EQUAL = Times(data_apart=True)

#: Medians of one worker, by kind of action or ``communication``, in seconds.
Medians = Mapping[str, float]


class Drift(NamedTuple):
    """A duration that has changed, in seconds. ``kind`` is F, I, W or OPT."""

    worker: PlannedWorker
    kind: Kind
    before: float
    now: float


def agree(found: Iterable[tuple[PlannedWorker, Medians]], stages: int, used: Times | None = None) -> Times | None:
    """Times of a job from the medians of its workers; None if a stage has not been measured.

    A worker that comes early to the sum of gradients waits there for its peers, so the least of a stage's optimizer
    times is its own. Of all else it is the median of the workers, of two the lower one. Who is far from that is a
    straggler, or the opposite, and gets times of its own. ``used`` are the times until now, for transfers that nobody
    has measured.
    """
    rows = sorted(found)
    made: list[StageTimes] = []
    own: list[tuple[PlannedWorker, StageTimes]] = []
    for stage in range(stages):
        here = [(worker, medians) for worker, medians in rows if worker.stage == stage]
        there: dict[str, list[float]] = {}
        for _, medians in here:
            for name, seconds in medians.items():
                there.setdefault(name, []).append(seconds)
        try:
            optimizer = min(there[Kind.OPT])
            common = _times_of({name: median_low(values) for name, values in there.items()}, optimizer)
        except KeyError:
            return None
        made.append(common)
        for worker, medians in here:
            if {Kind.F, Kind.I, Kind.W} <= medians.keys():
                times = _times_of(medians, optimizer)
                if _furthest(times, common) > OWN:
                    own.append((worker, times))
    transfers = [medians[COMMUNICATION] for _, medians in rows if COMMUNICATION in medians]
    otherwise = 0.0 if used is None else used.communication
    return Times(tuple(made), median(transfers) if transfers else otherwise, data_apart=True, own=tuple(own))


def _times_of(medians: Medians, optimizer: float) -> StageTimes:
    return StageTimes(medians[Kind.F], medians[Kind.I], medians[Kind.W], optimizer, medians.get(Kind.B))


def _furthest(one: StageTimes, other: StageTimes) -> float:
    """The largest difference of F, I, W and B, in parts of the longest F, I or W of ``other``."""
    longest = max(other.forward, other.backward_input, other.backward_weight)
    kinds = (Kind.F, Kind.I, Kind.W, Kind.B)
    return max(abs(one.of(kind) - other.of(kind)) for kind in kinds) / longest if longest else 0.0


def completed(medians: Medians, used: StageTimes) -> dict[str, float]:
    """Medians of one worker with those that it has not measured lately, in proportion to those that it sees.

    A worker that runs whole backwards sees no I and W, one that splits all of them sees no B.
    """
    halves = used.backward_input + used.backward_weight
    full = {Kind.F.value: used.forward, Kind.OPT.value: used.optimizer} | dict(medians)
    if Kind.I in full and Kind.W in full:
        grown = (full[Kind.I] + full[Kind.W]) / halves if halves else 1.0
        full.setdefault(Kind.B.value, used.of(Kind.B) * grown)
    else:
        grown = full[Kind.B] / used.of(Kind.B) if Kind.B in full and used.of(Kind.B) else 1.0
        full.setdefault(Kind.B.value, used.of(Kind.B))
        full |= {Kind.I.value: used.backward_input * grown, Kind.W.value: used.backward_weight * grown}
    return full


def drifts(now: Times, before: Times, workers: Iterable[PlannedWorker]) -> list[Drift]:
    """Durations off by more than :data:`DRIFT`, as a share of the longest F, I, W (OPT: of its own if longer)."""
    found = []
    for worker in workers:
        old, new = before.at(worker), now.at(worker)
        longest = max(old.forward, old.backward_input, old.backward_weight)
        for kind in (Kind.F, Kind.I, Kind.W, Kind.OPT):
            unit = max(longest, old.optimizer) if kind is Kind.OPT else longest
            if abs(new.of(kind) - old.of(kind)) > DRIFT * unit:
                found.append(Drift(worker, kind, old.of(kind), new.of(kind)))
    return found


def drift_line(facts: Mapping[str, Any]) -> str:
    """A line for people about what has drifted, from what ``Plans.facts`` gives; names at most four durations."""
    names = {"F": "forward", "I": "gradient of inputs", "W": "gradient of weights", "OPT": "optimizer"}
    parts = [
        f"{names[kind]} of worker {d}:{s} took {1000 * before:.1f} ms, takes {1000 * now:.1f} ms"
        for d, s, kind, before, now in facts["drifted"][:_TOLD]
    ]
    more = len(facts["drifted"]) - _TOLD
    parts += [f"{more} more"] if more > 0 else []
    return (
        f"durations have drifted ({'; '.join(parts)}): planned again, a step is expected to take "
        f"{facts['period_s']:.3f} s, {facts['period_before_s']:.3f} s with the plan until now"
    )


def rounded(times: Times) -> Times:
    """Times in whole parts, for the planner; see :data:`PARTS`. A whole backward is its two halves if it nearly is."""
    part = max(max(one.forward, one.backward_input, one.backward_weight) for one in times.stages) / PARTS
    if not part:
        return times

    def whole(seconds: float) -> float:
        return float(round(seconds / part))

    def of(one: StageTimes) -> StageTimes:
        halves = one.backward_input + one.backward_weight
        splits_well = one.backward is None or abs(one.backward - halves) <= halves / PARTS
        return StageTimes(
            whole(one.forward),
            whole(one.backward_input),
            whole(one.backward_weight),
            whole(one.optimizer),
            None if splits_well or one.backward is None else whole(one.backward),
        )

    # Never nothing: a plan that leaves messages some time is as short, and a late one then delays nobody.
    made, own = tuple(of(one) for one in times.stages), tuple((worker, of(one)) for worker, one in times.own)
    return replace(times, stages=made, own=own, communication=max(1.0, whole(times.communication)))


def second_updates(times: Times, moves: Iterable[Move]) -> dict[PlannedWorker, float]:
    """Seconds of the update that a worker which has moved makes for its own stage, by the place where it computes."""
    return {move.target: times.of_stage(move.source.stage).optimizer for move in moves}


def to_dict(times: Times) -> dict[str, Any]:
    """Times as plain data: those of each stage, and those of workers that differ from their stage."""
    own = [[*worker, *_row(one)] for worker, one in times.own]
    return {"stages": [_row(one) for one in times.stages], "communication": times.communication, "own": own}


def from_dict(data: Mapping[str, Any]) -> Times:
    own = tuple((PlannedWorker(d, s), StageTimes(*row)) for d, s, *row in data["own"])
    stages = tuple(StageTimes(*row) for row in data["stages"])
    return Times(stages, data["communication"], data_apart=True, own=own)


def _row(one: StageTimes) -> list[float | None]:
    return [one.forward, one.backward_input, one.backward_weight, one.optimizer, one.backward]


# -- memory -----------------------------------------------------------------------------------------------------------


#: Share of the free memory that plans may use: messages are kept until a step is over, and others need memory, too.
_SHARE = 0.5


class MemoryUse(NamedTuple):
    """Bytes that a micro-batch holds on the host until its backward, None if unknown; bytes that are to spare."""

    held: int | None
    spare: int


def room_of(topology: Topology, held: int, found: Iterable[tuple[int, MemoryUse]] = ()) -> tuple[int, ...]:
    """Micro-batches that a worker of each stage may hold; never fewer than 1F1B does.

    What is spare is measured between two steps, so what 1F1B holds may have been given back and count as free: it is
    not added. A stage of which somebody knows nothing holds what it does under 1F1B. ``held``: chosen for all stages; 0
    for what fits.
    """
    most = topology.pipelines * topology.micro_batches
    fits: dict[int, int] = {}
    for stage, use in found:
        here = use.spare // max(1, use.held) if use.held is not None else 0
        fits[stage] = min(fits.get(stage, most), here)
    return tuple(
        min(most, max(held_without_failure(topology, stage), held or fits.get(stage, 0)))
        for stage in range(topology.stages)
    )


def bytes_held(inputs: Iterable[Tensor], outputs: Sequence[Tensor], parameters: Iterable[Tensor]) -> int | None:
    """Bytes that a forward holds until its backward: inputs, outputs and what the graph has saved, without parameters.

    What a user's ``autograd.Function`` keeps in places of its own is not seen. None for tensors that are not in the
    host's memory.
    """
    own = {one.untyped_storage().data_ptr() for one in parameters}
    tensors = [*inputs, *outputs, *kept_tensors(outputs)]
    if any(one.device.type != "cpu" for one in tensors):
        return None
    sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size for place, size in sizes.items() if place not in own)


def spare_bytes() -> int:
    """Bytes of the machine's free memory that this worker may use; its workers share them."""
    return int(_SHARE * machine_bytes()[0]) // max(1, whole_of_environment("LOCAL_WORLD_SIZE", 1))
