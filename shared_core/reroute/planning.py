"""The plans of one worker of a job: from measured times, and made before they are needed.

All workers measure, tell each other what they found, and go by the same times from the same step on. Each can then make
any plan by itself and comes to the same one. So plans need not be handed round, and it does not matter which worker of
a machine has made those that lie ready: one process in the background, for all workers of the machine. At a loss the
survivors agree on whether all of them have the plan; if not, each makes one with less effort.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from shared_core.errors import ConfigError
from shared_core.reroute.plan_cache import Filling, PlanStore, Settings
from shared_core.reroute.room import MemoryUse, room_of
from shared_core.schedule.check import Memory
from shared_core.schedule.planner import IterationPlan
from shared_core.schedule.problem import Variant
from shared_core.schedule.profile import COMMUNICATION
from shared_core.schedule.remainder import EFFORT
from shared_core.schedule.schedule import Action, Kind, Schedule, Topology, Worker
from shared_core.schedule.timing import StageTimes, Times, simulate

#: Parts into which the longest of the measured F, I and W is divided; plans go by whole parts. Noise of some percent
#: would make orders that look better and are not, and no plan would reach its bound, at which planning stops.
PARTS = 8
#: What an engine plans for until it has measured: equal slots.
EQUAL = Times(data_apart=True)

#: Medians of one worker, by kind of action or ``communication``, in seconds.
Medians = Mapping[str, float]


def agree(found: Iterable[tuple[int, Medians]], stages: int) -> Times | None:
    """Times of the stages from what all workers have measured, given as (stage, medians).

    A worker that comes early to the sum of gradients waits there for its peers, so the least of a stage's optimizer
    times is its own. Of all else it is the median of the workers.

    Returns:
        None if a stage has not been measured.
    """
    rows = list(found)
    made = []
    for stage in range(stages):
        there: dict[str, list[float]] = {}
        for at, medians in rows:
            if at == stage:
                for name, seconds in medians.items():
                    there.setdefault(name, []).append(seconds)
        middle = {name: median(values) for name, values in there.items()}
        try:
            whole, optimizer = middle.get(Kind.B), min(there[Kind.OPT])
            made.append(StageTimes(middle[Kind.F], middle[Kind.I], middle[Kind.W], optimizer, whole))
        except KeyError:
            return None
    transfers = [medians[COMMUNICATION] for _, medians in rows if COMMUNICATION in medians]
    return Times(tuple(made), median(transfers) if transfers else 0.0, data_apart=True)


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
    made = tuple(of(one) for one in times.stages)
    return replace(times, stages=made, communication=max(1.0, whole(times.communication)))


class Plans:
    """Plans of one worker.

    Args:
        topology: shape of the job.
        variant: of all plans.
        ordered: see :func:`~shared_core.schedule.planner.plan`.
        folder: shared by the workers of a machine and removed with the job.
        losses: plans are made for so many more losses than there are.
        held: micro-batches that a worker may hold, or those of 1F1B if they are more; 0: as many as fit into the
            memory, once that is measured.

    Attributes:
        variant: of all plans.
        ordered: all micro-batches of a lost worker go to one peer.
        times: durations that all workers go by; None until they are known: then plans are made for equal slots.
        room: micro-batches that a worker of each stage may hold.
    """

    def __init__(
        self, topology: Topology, variant: Variant, ordered: bool, folder: Path, losses: int, held: int = 0
    ) -> None:
        self._topology, self.variant, self.ordered = topology, variant, ordered
        self._folder, self._losses, self._held = folder, losses, held
        self.times: Times | None = None
        self.room = room_of(topology, held)
        self._known: dict[frozenset[Worker], IterationPlan] = {}
        self._looked_up: dict[frozenset[Worker], tuple[bool, float]] = {}
        self._store: PlanStore | None = None
        self._filling: Filling | None = None

    def room_for(self, found: Iterable[tuple[int, MemoryUse]]) -> tuple[int, ...]:
        """What workers may hold, from what all have measured, given as (stage, use)."""
        return room_of(self._topology, self._held, found)

    def adopt(self, times: Times, room: tuple[int, ...]) -> None:
        """Go by these times, and hold so much, from now on."""
        self.times, self.room = times, room
        self._known.clear()
        self._looked_up.clear()
        self._store = PlanStore(self._folder, self._settings)

    @property
    def _settings(self) -> Settings:
        times = EQUAL if self.times is None else rounded(self.times)
        return Settings(self._topology, times, self.variant, self.ordered, self.room)

    @property
    def planned_times(self) -> Times:
        """Durations that plans are made for: rounded, in no unit."""
        return self._settings.times

    @property
    def memory(self) -> Memory:
        """What every worker may hold."""
        return self._settings.memory

    def lies_ready(self, lost: frozenset[Worker]) -> bool:
        """Whether this worker has the plan for these losses; reads one file, the first time."""
        if self._store is None or not self._losses:
            return False
        try:
            return self._store.look_up(lost) is not None
        except ConfigError:  # half a file, say, on a full disk
            return False

    def choose(self, lost: frozenset[Worker], ready: bool) -> None:
        """Go by the plan that lies ready, if it does so everywhere, else by one that is quickly made.

        Args:
            lost: what to plan for.
            ready: what all workers have agreed upon.
        """
        began, found = time.perf_counter(), None
        if ready and self._store is not None:
            found = self._store.look_up(lost) or self._settings.plan(lost)
        if found is None:
            found = self._settings.plan_within(lost, EFFORT)
        self._known[lost] = found
        self._looked_up[lost] = ready, time.perf_counter() - began

    def plan(self, lost: frozenset[Worker]) -> IterationPlan:
        """The plan of a step that begins while some are lost."""
        if lost not in self._known:
            self.choose(lost, False)
        return self._known[lost]

    def seconds(self, schedule: Schedule, staggered: bool) -> float:
        """What an iteration takes, by the measured times."""
        return simulate(schedule, self.times or EQUAL, staggered=staggered).period

    def rest(self, schedule: Schedule, staggered: bool, done: Collection[Action]) -> float:
        """What the rest of an iteration takes, to the end of its updates, by the measured times."""
        timeline = simulate(schedule, self.times or EQUAL, staggered=staggered, done=done, rounds=0)
        return max((slot.end for row in timeline.rows.values() for slot in row), default=0.0)

    def prepare(self, lost: frozenset[Worker]) -> dict[str, Any]:
        """Begin to make plans for further losses, and say what is planned for now. Not on the way of a loss.

        Returns:
            Plain data: the ``times``, the ``room``, the ``period_s`` that is expected, whether the plan was ``ready``,
            and after how many seconds it was there (``planned_s``).
        """
        now = self.plan(lost)
        ready, seconds = self._looked_up[lost]
        staggered = self.variant is Variant.STAGGERED
        facts = {
            "lost": [list(worker) for worker in sorted(lost)],
            "period_s": self.seconds(now.schedule, staggered),
            "times": to_dict(self.times) if self.times is not None else None,
            "room": list(self.room),
            "ready": ready,
            "planned_s": seconds,
        }
        if self._store is None or not self._losses:
            return facts
        number = len(lost) + self._losses
        try:
            (self._store.folder / f"for-{number}-losses").touch(exist_ok=False)
        except FileExistsError:
            return facts  # another worker of this machine makes them
        self.stop()
        self._filling = self._store.fill_in_background(number)
        return facts

    def stop(self) -> None:
        """End what runs in the background."""
        if self._filling is not None:
            self._filling.stop()
            self._filling = None


def to_dict(times: Times) -> dict[str, Any]:
    """Plain data of times by stage."""
    rows = [[s.forward, s.backward_input, s.backward_weight, s.optimizer, s.backward] for s in times.stages]
    return {"stages": rows, "communication": times.communication}


def from_dict(data: Mapping[str, Any]) -> Times:
    """Reverse of :func:`to_dict`."""
    return Times(tuple(StageTimes(*row) for row in data["stages"]), data["communication"], data_apart=True)
