"""What pipelines lose while nobody takes a failed worker's place: ``on_failure="reroute"``, with 0, 1 and 2 failed
workers.

Workers are killed (SIGKILL) in the middle of a step; replacements are withheld, except where they are the matter. With
emulated compute a stage sleeps one slot for each of F, I and W, and three in the optimizer, so that a few cores are as
good as one for each worker. Rows:

- period: from a step to the next, mean of several steps, of all survivors; beside that of the plan in whole slots;
- throughput: of samples, as ratio to no failure; beside it what dropping each pipeline that has lost a worker leaves
  (computed: as many pipelines less), as torchft does. Who waits has none, until somebody takes the place;
- first re-routed: from the kill until the first forward of a failed worker's micro-batch begins at a peer;
- extra: how much longer the step took in which the worker was killed; beside it what was predicted when the rest of the
  step was planned, which was after everybody had finished what he was at and was connected again;
- admitted: how much later the others are, when a replacement was admitted, than they would be without;
- two of a stage: with and without a survivor of the other stage that moves there;
- straggler: a peer of the failed worker takes twice as long in forward and backward from some step on. The period until
  the plan for its new times holds, and from then on.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import FULL, QUICK, Row, Workers, arguments, at_most, begin, finish, say, scratch
from benchmarks.pipeline_model import COMPUTE, ENV, OPTIMIZER
from benchmarks.recovery_traces import Job, end
from shared_core.reroute.times import second_updates
from shared_core.schedule.normalise import Move
from shared_core.schedule.planner import plan
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.schedule.timing import StageTimes, Times, simulate

SCRIPT = Path(__file__).with_name("reroute_worker.py")
#: Steps that are not looked at in the beginning: in them all is measured, and plans are made.
WARM = 4
#: Steps of which a period is taken, by size of the run.
STEPS = (5, 5, 8)
PERIOD_TARGET, COST_TARGET, FIRST_TARGET_S, EXTRA_TARGET = 0.05, 0.03, 0.3, 0.1
#: Four micro-batches that take twice as long, instead of six of them, where others have eight of the usual ones.
STRAGGLER_TARGET = 0.8
NEVER_S = 1e6


@dataclass(frozen=True)
class Case:
    """A pipeline and a variant of plans.

    Attributes:
        topology: its shape.
        variant: of plans.
        failures: workers that are killed, one after the other.
        compute: see ``pipeline_model.COMPUTE``.
        rejoins: replacements come at once.
        spreads: whether survivors may move to the stage that has lost most; None where no stage has lost two.
        straggler: gets slow after the failures.
    """

    topology: Topology
    variant: Variant
    failures: tuple[PlannedWorker, ...]
    compute: str = "halves"
    rejoins: bool = False
    spreads: bool | None = None
    straggler: PlannedWorker | None = None

    @property
    def name(self) -> str:
        """In the table: pipe x data, as the number of micro-batches of each pipeline."""
        t, slot = self.topology, COMPUTE[self.compute].slot_s
        compute = f"slots of {1000 * slot:.0f} ms" if slot else "real"
        rejoins = ", replacement" if self.rejoins else ", straggler" if self.straggler else ""
        if self.spreads is not None:
            rejoins = ", two of a stage, " + ("normalised" if self.spreads else "not normalised")
        return f"pipe {t.stages} x data {t.pipelines} x {t.micro_batches}, {compute}, {self.variant.value}{rejoins}"

    def rank(self, worker: PlannedWorker) -> int:
        """Rank of a place."""
        return worker.stage * self.topology.pipelines + worker.pipeline

    def slots(self, failed: Sequence[PlannedWorker], moves: Sequence[Move] = ()) -> float:
        """Planned seconds from one step to the next, by slots alone; a worker that has moved makes two updates."""
        times = Times((StageTimes(optimizer=OPTIMIZER),), data_apart=True)
        found = plan(self.topology, failed, times=times, variant=self.variant)
        staggered, late = self.variant is Variant.STAGGERED, second_updates(times, moves)
        return simulate(found.schedule, times, staggered=staggered, late=late).period * COMPUTE[self.compute].slot_s


@dataclass
class Phase:
    """Some steps with the same failures; seconds.

    Attributes:
        failed: who is not there.
        period_s: measured.
        expected_s: by the plan and the times that the job has measured.
        first_s: until the first re-routed instruction.
        extra_s, predicted_s: of the step with the kill.
        moved_s: what the move took before these steps, if there was one.
        moves: who had moved.
        load: of the machine, at the end.
    """

    failed: tuple[PlannedWorker, ...]
    period_s: float
    expected_s: float | None
    load: float
    first_s: float | None = None
    extra_s: float | None = None
    predicted_s: float | None = None
    moved_s: float | None = None
    moves: tuple[Move, ...] = ()


class Straggling(NamedTuple):
    """Periods with a straggler, in seconds: measured, and as the job expects them.

    Attributes:
        old_s, new_s: with the plan until then, and with the one for its times.
        old_expected_s, new_expected_s: of these.
        steps: from the first slow step until the new plan holds.
    """

    old_s: float
    new_s: float
    old_expected_s: float
    new_expected_s: float
    steps: int


@dataclass
class Outcome:
    """All phases of a case, what admitting a replacement took, and periods with a straggler."""

    case: Case
    phases: list[Phase] = field(default_factory=list)
    admitted_s: float | None = None
    straggling: Straggling | None = None


class Run(Job):
    """A job under way."""

    def __init__(self, case: Case, folder: Path, steps: int) -> None:
        self.case, self.steps, out = case, steps, folder / "job"
        out.mkdir()
        topology = case.topology
        args = ["--out", str(out), "--compute", case.compute, "--stages", str(topology.stages)]
        args += ["--micro-batches", str(topology.micro_batches)]
        args += ["--straggler", str(case.rank(case.straggler))] if case.straggler is not None else []
        env = ENV | {
            "SWIFT_RECOVERY_ON_FAILURE": "reroute",
            "SWIFT_RECOVERY_REROUTE_PLAN": case.variant.value,
            "SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "0" if case.rejoins else str(NEVER_S),
            "SWIFT_RECOVERY_REROUTE_NORMALISE": str(case.spreads is not False).lower(),
        }
        number = topology.pipelines * topology.stages
        standbys = int(case.rejoins)
        super().__init__(Workers("swift", SCRIPT, args, out, standbys=standbys, env=env, nproc=number))

    def period(self, first: int, ranks: Sequence[int]) -> float:
        """Mean seconds of the steps after ``first``."""
        self.until(first + self.steps, ranks)
        found = [self.ends(rank) for rank in ranks]
        return statistics.mean((ends[first + self.steps] - ends[first]) / self.steps for ends in found)

    def measure(self) -> Outcome:
        """Do everything."""
        case, outcome = self.case, Outcome(self.case)
        ranks = list(self.traces.ranks)
        normal = self.period(WARM, ranks)
        outcome.phases.append(Phase((), normal, self.expected(()), os.getloadavg()[0]))
        failed: tuple[PlannedWorker, ...] = ()
        for worker in case.failures:
            failed, rank = (*failed, worker), case.rank(worker)
            ranks.remove(rank)
            outcome.phases.append(self.strike(failed, rank, ranks, outcome.phases[-1].period_s))
            last = outcome.phases[-1]
            say(f"{case.name}: failed {worker}: period {last.period_s:.3f} s (slots {case.slots(failed):.3f} s)")
            if case.rejoins:
                outcome.admitted_s = self.await_replacement(ranks, normal, outcome.phases[-1].period_s)
        if case.spreads:
            outcome.phases[-1] = self.spread(failed, ranks)  # the move came while that phase was measured
        if case.straggler is not None:
            outcome.straggling = self.straggle(ranks)
        end(self.workers, max(max(self.ends(rank)) for rank in ranks) + 3)
        return outcome

    def expected(self, failed: Sequence[PlannedWorker]) -> float | None:
        """What the job itself expects of its plan."""
        wanted = [list(worker) for worker in sorted(failed)]
        found = [e for e in self.events("planned") if e.fields["failed"] == wanted and e.fields["times"] is not None]
        return float(found[-1].fields["period_s"]) if found else None

    def strike(self, failed: tuple[PlannedWorker, ...], rank: int, others: list[int], before_s: float) -> Phase:
        """Kill a worker in the middle of a step, and measure that step and those that follow."""
        self.traces.refresh()
        now = max(self.ends(rank))
        self.until(now + 1, [rank])
        time.sleep(0.4 * before_s)
        self.traces.refresh()
        pid, at = self.traces.lines[rank][-1]["pid"], time.time()
        os.kill(pid, signal.SIGKILL)
        self.traces.refresh()
        before = min(max(self.ends(each)) for each in others)
        self.when(lambda: len(self.events("took_over", at)) > 0)
        self.until(before + 1, others)
        due = max(self.ends(r)[before] for r in others) + before_s
        extra = max(self.ends(r)[before + 1] for r in others) - due
        if self.case.rejoins:
            return Phase(failed, before_s, None, os.getloadavg()[0])
        period = self.period(before + 2, others)
        first = min(e.time for e in self.events("took_over", at)) - at
        told = self.events("rerouted", at)
        planned, rest = max(e.time for e in told), told[0].fields["rest_s"]
        predicted = planned + rest[max(rest)] - due if rest else None
        return Phase(failed, period, self.expected(failed), os.getloadavg()[0], first, extra, predicted)

    def spread(self, failed: tuple[PlannedWorker, ...], others: list[int]) -> Phase:
        """Wait until somebody has moved, and measure the steps after that."""
        self.when(lambda: len(self.events("moved")) > 0)
        moved = self.events("moved")[0]
        if "why_not" in moved.fields:
            raise RuntimeError(f"{self.case.name}: nobody moved: {moved.fields['why_not']}")
        self.traces.refresh()
        moves = tuple(Move(PlannedWorker(*source), PlannedWorker(*target)) for source, target in moved.fields["moves"])
        places = set(failed) - {move.target for move in moves} | {move.source for move in moves}
        vacant, took_s = tuple(sorted(places)), float(moved.fields["took_s"])
        period = self.period(int(moved.fields["step"]) + 2, others)
        say(f"{self.case.name}: vacant {vacant}: period {period:.3f} s (slots {self.case.slots(vacant, moves):.3f} s)")
        return Phase(vacant, period, self.expected(vacant), os.getloadavg()[0], moved_s=took_s, moves=moves)

    def await_replacement(self, others: Sequence[int], normal_s: float, re_routed_s: float) -> float:
        """How much later the others are for having admitted a replacement."""
        self.when(lambda: len(self.events("admitted")) > 0)
        at = self.events("admitted")[0].time
        self.traces.refresh()
        before = min(max(step for step, end in self.ends(rank).items() if end <= at) for rank in others)
        self.until(before + 3, others)
        # The step after the admitting, as compared with one with all workers; it fills the pipeline again.
        took = max(self.ends(rank)[before + 1] - self.ends(rank)[before] for rank in others)
        return took - normal_s

    def straggle(self, ranks: Sequence[int]) -> Straggling:
        """Let a worker get slow, and wait until its times are planned with."""
        at = time.time()
        (self.out / "slow").touch()
        self.when(lambda: any(event.fields.get("drifted") for event in self.events("planned", at)))
        event = next(event for event in self.events("planned", at) if event.fields.get("drifted"))
        self.traces.refresh()
        slow = min(step for step, end in self.ends(ranks[0]).items() if end > at) + 1
        last = max(step for step, end in self.ends(ranks[0]).items() if end <= event.time + 0.01)
        ends = self.ends(ranks[0])
        old = (ends[last] - ends[slow]) / (last - slow)
        new = self.period(last + 2, ranks)
        return Straggling(old, new, event.fields["period_before_s"], event.fields["period_s"], last - slow + 1)


def rows_of(outcome: Outcome) -> list[Row]:
    """Rows of a case, by failures."""
    case, rows = outcome.case, []
    emulated = COMPUTE[case.compute].slot_s > 0
    normal = outcome.phases[0].period_s
    pipelines = case.topology.pipelines
    if outcome.admitted_s is not None:
        return [at_most(case.name, "admitted: later than without, in steps", outcome.admitted_s / normal, "steps", 1.0)]
    if outcome.straggling is not None:
        found = outcome.straggling
        return [
            Row(case.name, "period with a straggler, plan until then", found.old_s, "s"),
            Row(case.name, "the same, expected", found.old_expected_s, "s"),
            Row(case.name, "period with a straggler, plan for its times", found.new_s, "s"),
            Row(case.name, "the same, expected", found.new_expected_s, "s"),
            at_most(case.name, "new plan / old plan", found.new_s / found.old_s, "times", STRAGGLER_TARGET),
            Row(case.name, "steps until the new plan holds", float(found.steps), "steps"),
        ]
    for phase in outcome.phases:
        name = f"{case.name}, {len(phase.failed)} failed{'' if phase.moved_s is None else ', one moved'}"
        rows.append(Row(name, "period", phase.period_s, "s"))
        if emulated:
            slots = case.slots(phase.failed, phase.moves)
            rows.append(Row(name, "period, plan in slots", slots, "s"))
            rows.append(
                at_most(name, "period / plan in slots - 1", phase.period_s / slots - 1, "of the plan", PERIOD_TARGET)
            )
        if phase.expected_s is not None:
            rows.append(Row(name, "period, plan with measured times", phase.expected_s, "s"))
        rows.append(Row(name, "load of the machine", phase.load, ""))
        if not phase.failed:
            continue
        ratio = normal / phase.period_s
        rows.append(Row(name, "throughput / without a failure", ratio, "times"))
        if emulated:
            rows.append(Row(name, "the same, planned", case.slots(()) / case.slots(phase.failed, phase.moves), "times"))
            if (
                case.variant is Variant.STAGGERED
                and len(phase.failed) == 1
                and pipelines == 3
                and case.topology.stages == 4
            ):
                rows.append(at_most(name, "cost of the failure", phase.period_s / normal - 1, "of a step", COST_TARGET))
        hit = len({worker.pipeline for worker in phase.failed})
        rows.append(Row(name, "the same, dropping pipelines (computed)", (pipelines - hit) / pipelines, "times"))
        rows.append(Row(name, "the same, waiting, until a replacement is there", 0.0, "times"))
        if phase.moved_s is not None:
            rows.append(Row(name, "the move, from one step boundary to the other", phase.moved_s, "s"))
            continue
        metric = "first re-routed after the kill"
        # An action under way is finished first; in long slots that alone takes up to 0.2 s.
        judged = COMPUTE[case.compute].slot_s == COMPUTE["halves"].slot_s
        rows.append(at_most(name, metric, phase.first_s, "s", FIRST_TARGET_S if judged else None))
        rows.append(Row(name, "extra of that step", phase.extra_s, "s"))
        rows.append(Row(name, "extra of that step, predicted", phase.predicted_s, "s"))
        if phase.extra_s is not None and phase.predicted_s:
            off = abs(phase.extra_s / phase.predicted_s - 1)
            rows.append(at_most(name, "extra, deviation", off, "of the prediction", EXTRA_TARGET if emulated else None))
    return rows


def cases(size: int) -> list[Case]:
    """What a run of this size runs."""
    two, big = (PlannedWorker(1, 1), PlannedWorker(0, 0)), (PlannedWorker(1, 2), PlannedWorker(0, 1))
    small, large = Topology(2, 2, 4), Topology(3, 4, 6)
    shapes = [(small, two), (Topology(3, 2, 4), two), (Topology(2, 4, 6), big), (large, big)]
    if size < FULL:
        few = shapes[:1] if size == QUICK else shapes
        found = [Case(topology, Variant.STAGGERED, failed[:1], _slots(topology)) for topology, failed in few]
        return [*found, Case(small, Variant.STAGGERED, two[:1], rejoins=True)]
    found = [Case(topology, variant, failed, _slots(topology)) for topology, failed in shapes for variant in Variant]
    found += [Case(small, Variant.STAGGERED, two, "real")]
    one_stage = (PlannedWorker(0, 1), PlannedWorker(1, 1))
    found += [Case(Topology(3, 2, 4), Variant.STAGGERED, one_stage, spreads=spreads) for spreads in (False, True)]
    found += [Case(Topology(3, 2, 4), Variant.STAGGERED, two[:1], straggler=PlannedWorker(0, 1))]
    found += [Case(small, variant, two[:1], rejoins=True) for variant in (Variant.STAGGERED, Variant.DECOUPLED)]
    return found


def _slots(topology: Topology) -> str:
    """Twelve processes share two cores: what they do besides sleeping takes longer."""
    return "long halves" if topology.pipelines * topology.stages > 8 else "halves"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target is missed."""
    parser = arguments("reroute", "Pipelines that continue without failed workers.")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose name contains this")
    options = begin(parser, argv)
    rows: list[Row] = []
    for case in cases(options.size):
        if options.only and options.only not in case.name:
            continue
        with scratch() as folder:
            say(f"{case.name}: starting {case.topology.pipelines * case.topology.stages} workers")
            run = Run(case, folder, STEPS[options.size])
            with run.workers:
                rows += rows_of(run.measure())
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
