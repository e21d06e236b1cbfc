"""The plans of one worker of a job: from measured times, and made before they are needed.

All workers measure, exchange what they found, and use the same times from the same step on. Each then makes any plan by
itself and comes to the same one, so plans need not be sent. One process in the background makes plans for all workers
of a machine. After a failure the survivors agree on whether all of them have the plan; if not, each makes one with less
effort. Plans of the exact solver count if all have the same one.
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shared_core.errors import ConfigError
from shared_core.reroute.plan_cache import PlanStore, Settings
from shared_core.reroute.times import EQUAL, MemoryUse, drifts, from_dict, room_of, rounded, second_updates, to_dict
from shared_core.schedule.normalise import Move
from shared_core.schedule.planner import REPLAN_EFFORT, IterationPlan
from shared_core.schedule.problem import Memory, Variant
from shared_core.schedule.schedule import Action, PlannedWorker, Schedule, Topology
from shared_core.schedule.timing import Times, simulate

#: Times that are kept: the step under way may use those before the newest.
_KEPT = 2


@dataclass(frozen=True)
class TimesInUse:
    """Times that all use from step ``since`` on; ``ready``: failures whose plan all had by then, or None."""

    since: int
    times: Times
    ready: frozenset[PlannedWorker] | None = None

    def to_dict(self) -> dict[str, Any]:
        ready = None if self.ready is None else [list(worker) for worker in sorted(self.ready)]
        return {"since": self.since, "times": to_dict(self.times), "ready": ready}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TimesInUse:
        ready = None if data["ready"] is None else frozenset(PlannedWorker(*each) for each in data["ready"])
        return cls(data["since"], from_dict(data["times"]), ready)


class Proposal(NamedTuple):
    """Times that all may use later; its ``number`` is the step in which it was made."""

    number: int
    times: Times


class Plans:
    """Plans of one worker.

    Args:
        ordered: all micro-batches of a failed worker go to one peer.
        folder: shared by the workers of a machine and removed with the job.
        failures: plans are made for so many more failures than there are; 0 for none in advance.
        held: micro-batches that a worker may hold, or those of 1F1B if they are more; 0: as many as fit into the
            memory, once that is measured.

    Attributes:
        room: micro-batches that a worker of each stage may hold.
        proposal: times that plans are being made for, if any.
    """

    def __init__(
        self, topology: Topology, variant: Variant, ordered: bool, folder: Path, failures: int, held: int = 0
    ) -> None:
        self._topology, self.variant, self.ordered = topology, variant, ordered
        self._folder, self._failures, self._held = folder, failures, held
        self.room = room_of(topology, held)
        self.proposal: Proposal | None = None
        self._in_use: tuple[TimesInUse, ...] = ()
        self._known: dict[tuple[str, frozenset[PlannedWorker]], IterationPlan] = {}
        self._looked_up: tuple[bool, float] = False, 0.0
        self._by_times: dict[Times | None, Settings] = {}
        self._stores: dict[str, PlanStore] = {}
        self._filled: set[tuple[str, int]] = set()
        self._filling: subprocess.Popen[bytes] | None = None

    # -- times -------------------------------------------------------------------------------------

    @property
    def times(self) -> Times | None:
        """Durations in seconds that all workers use; None until they are known: then plans are made for equal slots."""
        return self._in_use[-1].times if self._in_use else None

    @property
    def since(self) -> int:
        """First step that is planned with the newest times; -1 before anything is measured."""
        return self._in_use[-1].since if self._in_use else -1

    def room_for(self, found: Iterable[tuple[int, MemoryUse]]) -> tuple[int, ...]:
        """Micro-batches that a worker of each stage may hold, from what all have measured as (stage, use)."""
        return room_of(self._topology, self._held, found)

    def adopt(self, used: TimesInUse, room: tuple[int, ...]) -> None:
        """Use these times and this room from their first step on."""
        self._use((*self._in_use, used)[-_KEPT:], room)

    def view(self) -> dict[str, Any]:
        return {"in_use": [used.to_dict() for used in self._in_use], "room": list(self.room)}

    def learn(self, views: Iterable[Mapping[str, Any]]) -> None:
        """Use the newest times that anybody knows: the times of a step are settled before anybody begins it."""
        newest = max(views, key=lambda view: max((each["since"] for each in view["in_use"]), default=-1))
        if newest["in_use"] and newest["in_use"][-1]["since"] > self.since:
            self._use(tuple(map(TimesInUse.from_dict, newest["in_use"])), tuple(newest["room"]))

    def _use(self, in_use: tuple[TimesInUse, ...], room: tuple[int, ...]) -> None:
        self._in_use, self.room, self.proposal = in_use, room, None
        self._by_times.clear()
        names = {self._settings(used.times).key for used in in_use}
        self._known = {key: plan for key, plan in self._known.items() if key[0] in names}
        self._stores = {name: store for name, store in self._stores.items() if name in names}

    def _of_step(self, step: int) -> TimesInUse | None:
        return next((used for used in reversed(self._in_use) if used.since <= step), None)

    def _settings(self, times: Times | None) -> Settings:
        if times not in self._by_times:
            planned = EQUAL if times is None else rounded(times)
            self._by_times[times] = Settings(self._topology, planned, self.variant, self.ordered, self.room)
        return self._by_times[times]

    def _settings_of(self, step: int) -> Settings:
        used = self._of_step(step)
        return self._settings(used.times if used is not None else None)

    def planned_times(self, step: int) -> Times:
        """Durations that the plan of a step is made for: rounded, in no unit."""
        return self._settings_of(step).times

    @property
    def memory(self) -> Memory:
        return self._settings(None).memory

    # -- plans -------------------------------------------------------------------------------------

    def _store(self, settings: Settings) -> PlanStore:
        name = settings.key
        if name not in self._stores:
            self._stores[name] = PlanStore(self._folder, settings)
        return self._stores[name]

    def _look_up(
        self, settings: Settings, failed: frozenset[PlannedWorker], *, exact: bool = False
    ) -> IterationPlan | None:
        """A plan that this worker has, None if it has none; reads one file, the first time."""
        try:
            return self._store(settings).look_up(failed, exact=exact)
        except ConfigError:  # half a file, say, on a full disk
            return None

    def lies_ready(self, failed: frozenset[PlannedWorker]) -> list[str]:
        """Names of the plans for these failures that this worker has, for the times in use and proposed."""
        if not self._failures:
            return []
        proposed = [] if self.proposal is None else [self.proposal.times]
        newest = [] if self.times is None else [self.times]
        ready = []
        for settings in map(self._settings, (*newest, *proposed)):
            ready += [settings.key] if self._look_up(settings, failed) is not None else []
            ready += _names(settings, self._look_up(settings, failed, exact=True))
        return ready

    def ready_for(self, failed: frozenset[PlannedWorker]) -> int:
        """Number of the proposal, if this worker has the plan for these failures that goes with it, else -1."""
        if self.proposal is None:
            return -1
        ready = not self._failures or self._look_up(self._settings(self.proposal.times), failed) is not None
        return self.proposal.number if ready else -1

    def choose(self, failed: frozenset[PlannedWorker], ready: Collection[str]) -> None:
        """Use the plan for ``failed`` that is ready, if all have it, else make one quickly; with the newest times.

        ``ready``: what :meth:`lies_ready` has told at all workers. Raises ConfigError if all others use a plan of the
        exact solver that this worker does not have.
        """
        settings = self._settings(self.times)
        exact = next((name for name in ready if name.startswith(f"{settings.key}:")), "")
        self._make(settings, failed, settings.key in ready, exact)

    def _make(
        self, settings: Settings, failed: frozenset[PlannedWorker], ready: bool, exact: str = ""
    ) -> IterationPlan:
        began, found = time.perf_counter(), None
        if exact:
            found = self._look_up(settings, failed, exact=True)
            if exact not in _names(settings, found):
                raise ConfigError(
                    f"the others have an exact plan for the failure of {', '.join(map(str, sorted(failed)))} that this "
                    "worker cannot read: its file was removed or changed while the job ran. Start the job again"
                )
        elif ready:
            found = self._store(settings).look_up(failed) or settings.plan(failed)
        if found is None:
            found = settings.plan(failed, REPLAN_EFFORT)
        self._known[settings.key, failed] = found
        self._looked_up = ready, time.perf_counter() - began
        return found

    def plan(self, failed: frozenset[PlannedWorker], step: int) -> IterationPlan:
        used, settings = self._of_step(step), self._settings_of(step)
        found = self._known.get((settings.key, failed))
        if found is None:
            ready = used is not None and used.ready == failed and self._failures > 0
            found = self._make(settings, failed, ready)
        return found

    def seconds(self, schedule: Schedule, staggered: bool, moves: Sequence[Move] = ()) -> float:
        """Seconds of an iteration, by the measured times; slots where there are none."""
        times = self.times or EQUAL
        return simulate(schedule, times, staggered=staggered, late=second_updates(times, moves)).period

    def rest(self, schedule: Schedule, staggered: bool, done: Collection[Action]) -> float:
        """Seconds of the rest of an iteration, to the end of its updates, by the measured times."""
        timeline = simulate(schedule, self.times or EQUAL, staggered=staggered, done=done, rounds=0)
        return max((slot.end for row in timeline.rows.values() for slot in row), default=0.0)

    def facts(self, failed: frozenset[PlannedWorker], moves: Sequence[Move] = (), *, switched: bool) -> dict[str, Any]:
        """What is planned for the present failures. Slow: not to be called while others wait after a failure.

        ``failed`` are places at which nobody computes; ``switched`` says that the newest times are new.

        Returns plain data: the ``times``, the ``room``, the ``period_s`` that is expected, whether the plan was
        ``ready``, its ``solver``, and after how many seconds it was there (``planned_s``). After new times also
        what ``drifted`` (pipeline, stage, kind, seconds before and now), and ``period_before_s``, with the old plan.
        """
        now, staggered = self.plan(failed, self.since), self.variant is Variant.STAGGERED
        ready, seconds = self._looked_up
        facts = {
            "failed": [list(worker) for worker in sorted(failed)],
            "period_s": self.seconds(now.schedule, staggered, moves),
            "times": to_dict(self.times) if self.times is not None else None,
            "room": list(self.room),
            "ready": ready,
            "solver": now.solver,
            "planned_s": seconds,
        }
        if switched and len(self._in_use) == _KEPT:
            old, new = self._in_use
            there = [worker for worker in self._topology.workers() if worker not in failed]
            before = self.plan(failed, new.since - 1)
            found = drifts(new.times, old.times, there)
            facts["drifted"] = [[*one.worker, one.kind.value, one.before, one.now] for one in found]
            facts["period_before_s"] = self.seconds(before.schedule, staggered, moves)
        return facts

    def fill(self, failed: frozenset[PlannedWorker]) -> None:
        """Begin to make plans for these and further failures, with the proposed times, or else those in use."""
        times = self.times if self.proposal is None else self.proposal.times
        if times is None or not self._failures:
            return
        settings, number = self._settings(times), len(failed) + self._failures
        if (settings.key, number) in self._filled:
            return
        self._filled.add((settings.key, number))
        store = self._store(settings)
        try:
            (store.folder / f"for-{number}-failures").touch(exist_ok=False)
        except FileExistsError:
            return  # another worker of this machine makes them
        self.stop()
        self._filling = store.fill_in_background(number)

    def stop(self) -> None:
        if self._filling is not None:
            self._filling.kill()  # plans that are there stay
            self._filling.wait()
            self._filling = None


def _names(settings: Settings, exact: IterationPlan | None) -> list[str]:
    """Name of a plan of the exact solver, if any, by its content: solvers of two machines may find two."""
    digests = [hashlib.sha256(plan.to_json().encode()).hexdigest()[:16] for plan in (exact,) if plan is not None]
    return [f"{settings.key}:{digest}" for digest in digests]
