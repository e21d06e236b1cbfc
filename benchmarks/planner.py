"""Plans around failed workers: slots against closed forms and proven optima, the greedy against both, and planning
time.

The closed forms hold for equal times (F = I = W = 1 slot, the optimizer 3, no transfers, no memory limit); see
docs/design/planner.md. The optimum is CP-SAT's, or the bound where it is reached; where neither proves it, the best
known. Times are those of the processor: the greedy and the look-up use one thread, and other programs do not disturb
them.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.common import QUICK, Row, arguments, at_most, begin, finish, say
from benchmarks.lab.check import check
from shared_core.reroute.plan_cache import PlanStore, Settings
from shared_core.schedule.planner import IterationPlan, plan, replan
from shared_core.schedule.problem import Memory, Route, Variant, deal
from shared_core.schedule.schedule import Kind, PlannedWorker, Topology, held_without_failure
from shared_core.schedule.timing import StageTimes, Times, simulate

Failures = tuple[tuple[int, int], ...]

#: Pipelines, stages, micro-batches and failures; each in three variants: 30 instances.
INSTANCES: tuple[tuple[int, int, int, Failures], ...] = (
    (3, 4, 6, ((1, 0),)),
    (3, 4, 6, ((1, 1),)),
    (3, 4, 6, ((1, 2),)),
    (3, 4, 6, ((1, 3),)),
    (3, 4, 6, ((1, 2), (0, 1))),
    (3, 4, 6, ((1, 2), (0, 2))),
    (4, 4, 8, ((1, 2),)),
    (3, 3, 4, ((0, 1),)),
    (2, 4, 4, ((1, 3),)),
    (4, 4, 6, ((1, 1), (2, 3))),
)
#: Where the proven optimum is above the closed form: at stage 0 nothing comes before the first forward.
ABOVE = {((3, 4, 6, ((1, 0),)), Variant.COUPLED): 29}
#: Times as they may be measured, and room for five micro-batches.
MEASURED = Times((StageTimes(1.0, 1.1, 0.8, 2.5),), 0.1)
#: Micro-batches that peers may hold: slots coupled and decoupled, from an exact model written apart from this planner.
LIMITS = {4: (34, 29), 3: (34, 30), 2: (36, 32)}
HELD_SIZES = ((3, 4, 6), (4, 8, 32))
SIZES = ((4, 8, 32), (8, 16, 64), (16, 32, 128), (32, 64, 256))
GREEDY_OVER_BEST, LARGEST_S, LOOK_UP_MS, REPLAN_MS = 1.05, 60.0, 10.0, 300.0


def loads(topology: Topology, failed: Collection[PlannedWorker], route: Route) -> dict[PlannedWorker, int]:
    """Micro-batches that each surviving worker computes in an iteration."""
    gone = set(failed)
    count = {worker: topology.micro_batches for worker in topology.workers() if worker not in gone}
    for worker in route.values():
        count[worker] += 1
    return count


def closed_form(topology: Topology, failed: Sequence[PlannedWorker], variant: Variant) -> int:
    """Slots (staggered: the period) of the best plan: 1F1B's, or those of the stage that failed most."""
    load = loads(topology, failed, deal(topology, failed))
    optimizer = 3 if variant is Variant.STAGGERED else 0
    best = 3 * (topology.micro_batches + topology.stages - 1) + optimizer
    for worker, count in load.items():
        if any(one.stage == worker.stage for one in failed):
            ways = {Variant.COUPLED: 3 * worker.stage, Variant.DECOUPLED: worker.stage, Variant.STAGGERED: 3}[variant]
            best = max(best, 3 * count + ways)
    return best


def name(topology: Topology, failed: Sequence[PlannedWorker], variant: Variant) -> str:
    """The instance in a few letters."""
    shape = f"{topology.pipelines}x{topology.stages}x{topology.micro_batches}"
    return f"{shape} failed {' '.join(f'{d}:{s}' for d, s in failed)} {variant.value}"


def cost(found: IterationPlan) -> float:
    """What the plan minimises."""
    return found.period if found.variant is Variant.STAGGERED else found.slots


def quality(limit: float) -> list[Row]:
    """Closed forms and optima."""
    rows, worst = [], 0.0
    for shape in INSTANCES:
        for variant in Variant:
            topology, failed = Topology(*shape[:3]), [PlannedWorker(*one) for one in shape[3]]
            case = name(topology, failed, variant)
            first, best = (
                plan(topology, failed, variant=variant),
                plan(topology, failed, variant=variant, time_limit=limit),
            )
            check(first.schedule, topology)
            check(best.schedule, topology)
            wanted = ABOVE.get((shape, variant), closed_form(topology, failed, variant))
            rows.append(at_most(case, "best plan (target: closed form)", cost(best), "slots", wanted))
            ratio = cost(first) / cost(best)
            rows.append(at_most(case, "greedy / best", ratio, "", GREEDY_OVER_BEST))
            worst = max(worst, ratio)
            proof = "proven" if best.optimal else "best known"
            say(f"{case}: greedy {cost(first):g}, best {cost(best):g} ({proof}), closed form {wanted}")
    rows.append(at_most(f"all {3 * len(INSTANCES)} instances", "greedy / best, worst", worst, "", GREEDY_OVER_BEST))
    for variant in Variant:
        topology, failed = Topology(3, 4, 6), [PlannedWorker(1, 2)]
        case = name(topology, failed, variant) + ", measured times, room for 5"
        first = plan(topology, failed, times=MEASURED, memory=Memory(5), variant=variant)
        best = plan(topology, failed, times=MEASURED, memory=Memory(5), variant=variant, time_limit=limit)
        rows.append(at_most(case, "greedy / best known", cost(first) / cost(best), "", GREEDY_OVER_BEST))
    return rows


def memory_rows(shapes: Sequence[tuple[int, int, int]]) -> list[Row]:
    """Micro-batches held at once (F to W), by stage, and what a limit costs. 1F1B holds fewer the later the stage:
    ReCycle's re-routed and split work goes into that room. Its own figure of memory is not published as numbers.
    """
    rows = []
    for shape in shapes:
        topology, failed = Topology(*shape), [PlannedWorker(1, shape[1] // 2)]
        normal = [held_without_failure(topology, s) for s in range(topology.stages)]
        first = [normal[0]] * topology.stages
        limits = (("no limit", []), ("all may hold what 1F1B's first stage does", first), ("what 1F1B holds", normal))
        for limit, room in limits:
            case = f"{name(topology, failed, Variant.STAGGERED)}, {limit}"
            found = plan(topology, failed, memory=Memory.of_stages(topology, room))
            held = most_held(found)
            say(f"{case}: held by stage {held}, without a failure {normal}; period {found.period:g}")
            rows.append(Row(case, "micro-batches held, most", max(held), ""))
            rows.append(Row(case, "period / period without a failure", found.period / plan(topology).period, ""))
    return rows


def most_held(found: IterationPlan) -> list[int]:
    """The most micro-batches that a worker of each stage holds at once."""
    most = [0] * found.topology.stages
    for worker, row in found.schedule.rows.items():
        held = 0
        for action in row:
            held += (action.kind is Kind.F) - (action.kind in (Kind.W, Kind.B))
            most[worker.stage] = max(most[worker.stage], held)
    return most


def limit_rows(seconds: float) -> list[Row]:
    """What a limit at the peers of one failure in 3 x 4 x 6 costs, where others hold what 1F1B does."""
    rows, topology, failed = [], Topology(3, 4, 6), [PlannedWorker(1, 2)]
    for peers, targets in LIMITS.items():
        room = [held_without_failure(topology, s) for s in range(4)]
        room[2] = peers
        for variant, target in zip((Variant.COUPLED, Variant.DECOUPLED), targets, strict=True):
            best = plan(topology, failed, variant=variant, memory=Memory.of_stages(topology, room), time_limit=seconds)
            case = f"{name(topology, failed, variant)}, peers hold {peers}, others what 1F1B does"
            rows.append(at_most(case, "best plan (target: another exact model)", cost(best), "slots", target))
    return rows


def speed(sizes: Sequence[tuple[int, int, int]]) -> list[Row]:
    """Planning time of the greedy, and how far its plan is from the bound."""
    rows = []
    for shape in sizes:
        topology, failed = Topology(*shape), [PlannedWorker(1, shape[1] // 2)]
        for variant in (Variant.COUPLED, Variant.STAGGERED):
            case = name(topology, failed, variant)
            start = time.process_time()
            found = plan(topology, failed, variant=variant)
            seconds = time.process_time() - start
            say(f"{case}: {seconds:.2f} s of the processor, {cost(found):g} (bound {found.bound:g})")
            rows.append(at_most(case, "planning, greedy, processor time", seconds, "s", LARGEST_S))
            rows.append(Row(case, "greedy / bound", cost(found) / found.bound, ""))
    return rows


def at_a_failure() -> list[Row]:
    """What happens while training waits: looking a plan up, and planning the rest of an iteration."""
    topology = Topology(4, 8, 32)
    with tempfile.TemporaryDirectory() as folder:
        store = PlanStore(Path(folder), Settings(topology))
        store.fill(1)
        cold, warm = [], []
        for worker in topology.workers():
            fresh = PlanStore(Path(folder), store.settings)
            for times in (cold, warm):
                start = time.process_time()
                assert fresh.look_up([worker]) is not None
                times.append(1000 * (time.process_time() - start))
    case = "4x8x32, any one failure, staggered"
    rows = [
        at_most(case, "look-up of a plan in memory, median", sorted(warm)[len(warm) // 2], "ms", LOOK_UP_MS),
        Row(case, "look-up of a plan on disk, median", sorted(cold)[len(cold) // 2], "ms"),
    ]
    for shape in ((3, 4, 6), (4, 8, 32)):
        topology = Topology(*shape)
        healthy = plan(topology)
        timeline = simulate(healthy.schedule, Times())
        longest = 0.0
        for part in (0.1, 0.3, 0.5, 0.7, 0.9):
            until = part * timeline.slots
            progress = {worker: sum(slot.end <= until for slot in row[:-1]) for worker, row in timeline.rows.items()}
            start = time.process_time()
            replan(healthy, progress, [PlannedWorker(1, shape[1] // 2)])
            longest = max(longest, 1000 * (time.process_time() - start))
        case = f"{shape[0]}x{shape[1]}x{shape[2]}, a failure within an iteration"
        rows.append(at_most(case, "planning the rest, longest", longest, "ms", REPLAN_MS))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = begin(arguments("planner", __doc__ or ""), argv)
    limit_s = (1.0, 4.0, 30.0)[options.size]  # to look for a better plan
    rows = quality(limit_s)
    rows += limit_rows(limit_s)
    rows += memory_rows(HELD_SIZES)
    rows += at_a_failure()
    rows += speed(SIZES[: 2 if options.size == QUICK else None])
    assert all(row.value is None or math.isfinite(row.value) for row in rows)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
