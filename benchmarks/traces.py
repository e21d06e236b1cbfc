"""Failure traces: systems simulated from their models, beside what was published; then up to 100,000 workers.

On the trace of GCP spot instances (24 workers) the models are given the throughput without failures and nothing else
that was measured on it. What is not published is assumed, and varied to show what depends on it. Events are shifted
within the trace's resolution, 32 times.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common import Row, arguments, at_most, begin, finish, say
from benchmarks.recycle_published import LARGE, MEDIUM, PIPELINES, STAGES, Model
from benchmarks.simulate import (
    Bamboo,
    CheckpointInterval,
    CheckpointRestart,
    FaultScaled,
    Layout,
    MeasuredStalls,
    Oobleck,
    Pattern,
    ReCycle,
    SimulationResult,
    System,
    ThisSystem,
    Trace,
    gcp_trace,
    merge,
    simulate,
    young,
)
from benchmarks.simulate.generators import exponential, racks
from benchmarks.simulate.rerouting import ENDS

#: Micro-batches of a pipeline in a step: not published.
MICRO_BATCHES = 12
#: Bytes of state for a parameter (fp16 and fp32 copies, Adam), of the link between machines in a second, of a GPU.
STATE_BYTES, LINK_BYTES, GPU_BYTES = 16, 10e9, 40e9
DRAWS = 32
TARGET_PERCENT = 5.0
ENOUGH = 20

#: Hours between interruptions of one GPU: 419 unexpected ones of 16,384 in 54 days (Llama 3, arXiv 2407.21783).
GPU_MTBF_H = 54 * 24 * 16384 / 419
SCALE_STAGES, SCALE_DAYS, SCALE_REPAIR_H, SCALE_STEP_S = 8, 30, 4.0, 10.0
SCALE_WRITE_S, SCALE_RESTART_S, SCALE_COPY_S = 30.0, 300.0, 5.0

NO_OVERHEAD = MeasuredStalls(overhead=1.0)

#: ReCycle's table by frequency of failures, GPT-3 3.35B: hours between failures in the job. Its numbers, the layout,
#: the step, and when workers come back are in the paper's body, which was not at hand: what is here is assumed.
FREQUENCY_H, FREQUENCY_REPAIR_H, FREQUENCY_STEP_S = (6.0, 2.0, 0.5), 2.0, 90.0
#: Parameters, and pipelines, stages and micro-batches of one sequence: Megatron-LM's own runs (arXiv 2104.04473, table
#: 1), a worker being the 8 GPUs of a machine. ReCycle's layouts and numbers of these sizes were not at hand either.
LARGE_MODELS = {"18.4B": (32, 1, 32), "39.1B": (32, 2, 48), "76.1B": (32, 4, 56), "145.6B": (24, 8, 96)}
LOST_PERCENT = (1, 5, 10)

EXPLAINED = (
    "Bamboo is not judged. Its code keeps whole pipelines of 4 stages (5 of 6 with 20 to 23 workers: 0.833) or waits "
    "for a doubled stage (0.75); the published curve falls in proportion to the workers (0.954 with 23). So it would, "
    "were micro-batches shared by speed and doubled stages kept: the row 'batch shared by speed'. That was found with "
    "the curve in view. Bamboo keeps the state of two stages: for 6.7B parameters it does not fit, as on the poster.",
    "Micro-batches and batch are not published; the rows with m and batch show what they do. Oobleck holds with the "
    "batch of 1024 of GPT-3 6.7B (a change costs the step in flight), not with 512 or 2048.",
    "ReCycle's ideal has no communication, uneven stages or slow workers: with 20 to 23 workers it loses nothing, "
    "where 0.4 to 7.7 % were measured.",
    "This system: its overhead is of CPU workers that share cores; stalls of re-routing are the design's target. It "
    "waits when a pipeline has lost both ends, until one of them is back, except in rows with SharedData: data that "
    "any worker can read. A rack of 8 is a whole pipeline.",
    "ReCycle's tables by frequency of failures (3.35B) and of 18.4B to 145.6B: the published numbers are not at hand, "
    "nor the layout, micro-batches, steps and returns behind them; the rows are of assumed ones (see the source), and "
    "nothing is compared.",
)


def layout(model: Model, throughput: float, micro_batches: int = MICRO_BATCHES, batch: int | None = None) -> Layout:
    """The published layout; a step takes the batch over the throughput without failures."""
    return Layout(PIPELINES, STAGES, micro_batches, (batch or model.batch) / throughput)


def oobleck(model: Model, micro_batches: int = MICRO_BATCHES, batch: int | None = None) -> Oobleck:
    """Oobleck for a published model, from its artifact's inputs."""
    shape = layout(model, model.fault_free["Oobleck"], micro_batches, batch)
    copy_s = model.parameters * STATE_BYTES / STAGES / LINK_BYTES
    return Oobleck(shape, model.layers, reconfigure_s=model.oobleck_s, copy_s=copy_s)


def on_gcp(system: System) -> SimulationResult:
    """A system on the published trace."""
    trace = gcp_trace()
    return merge([simulate(trace.jittered(seed), system) for seed in range(DRAWS)])


def published_rows(model: Model) -> list[Row]:
    """One model: every system's simulated average and its deviation, for the whole trace and for N >= 20."""
    free = model.fault_free["ReCycle"]
    compared: list[tuple[str, System, float]] = [
        ("ReCycle", ReCycle(layout(model, free)), free),
        ("Oobleck", oobleck(model), free),
        ("fault-scaled", FaultScaled(layout(model, free)), free),
        ("this, reroute", ThisSystem(layout(model, free)), free),
        ("this, reroute, no overhead", ThisSystem(layout(model, free), measured=NO_OVERHEAD), free),
        (
            f"this, reroute{ENDS}, no overhead",
            ThisSystem(layout(model, free), measured=NO_OVERHEAD, ends=True),
            free,
        ),
    ]
    if "Bamboo" in model.fault_free:
        own = model.fault_free["Bamboo"]
        shape = layout(model, own)
        compared.append(("Bamboo", Bamboo(shape), own))
        compared.append(("Bamboo, batch shared by speed", Bamboo(shape, shared_batch=True), own))
    rows = []
    for name, system, throughput in compared:
        case, result = f"{model.name}: {name}", on_gcp(system)
        rows.append(Row(case, "average, whole trace", result.useful * throughput, "samples/s"))
        rows.append(Row(case, f"average, N >= {ENOUGH}", result.average(ENOUGH) * throughput, "samples/s"))
        of = name.partition(",")[0]
        judged = name in ("ReCycle", "Oobleck")
        for what, value, known in (
            ("whole trace", result.useful, model.average),
            (f"N >= {ENOUGH}", result.average(ENOUGH), model.average_20),
        ):
            if of in known:
                rows.append(Row(case, f"published average, {what}", known[of], "samples/s"))
                rows.append(deviation(case, what, value * throughput, known[of], judged))
        if name == "Oobleck":
            cost_min = (result.stalled_s + result.lost) / (DRAWS * len(gcp_trace().events)) / 60
            say(f"{case}: a change costs {cost_min:.2f} min, published {model.oobleck_change_min}")
        published = model.sustained.get(of, ())
        for missing, best in enumerate(published):
            share = system.throughput(Pattern(system.layout, frozenset(range(missing))))
            text = f"N={24 - missing}: {share:.3f} of no failure, published {best / published[0]:.3f}"
            say(f"{case}, {text}")
    if "Bamboo" not in model.fault_free:
        bytes_held = 2 * model.parameters * STATE_BYTES / STAGES
        say(
            f"{model.name}: Bamboo needs {bytes_held / 1e9:.0f} of {GPU_BYTES / 1e9:.0f} GB a GPU for two stages' state"
        )
    return rows


def deviation(case: str, what: str, value: float, published: float, judged: bool) -> Row:
    """How far a simulated average is from a published one; the sign is in the metric."""
    percent = 100 * (value / published - 1)
    metric = f"deviation, {what} ({'above' if percent > 0 else 'below'})"
    return at_most(case, metric, abs(percent), "%", TARGET_PERCENT if judged else None)


def sensitivity_rows(model: Model) -> list[Row]:
    """What the assumptions do to the deviation: micro-batches, and the batch for Oobleck."""
    free, rows = model.fault_free["ReCycle"], []
    what, known = ("whole trace", model.average)
    for micro_batches in (6, 8, 10, 15, 16, 20, 24):
        recycle = on_gcp(ReCycle(layout(model, free, micro_batches)))
        rows.append(
            deviation(f"{model.name}: ReCycle, m={micro_batches}", what, recycle.useful * free, known["ReCycle"], False)
        )
        other = on_gcp(oobleck(model, micro_batches))
        rows.append(
            deviation(f"{model.name}: Oobleck, m={micro_batches}", what, other.useful * free, known["Oobleck"], False)
        )
    for batch in (256, 512, 2048):
        other = on_gcp(oobleck(model, batch=batch))
        rows.append(
            deviation(f"{model.name}: Oobleck, batch {batch}", what, other.useful * free, known["Oobleck"], False)
        )
    return rows


def scale_rows(workers: int, seeds: int) -> list[Row]:
    """Large jobs, single failures and racks of 8: with nothing to spare, and with one spare worker in a hundred."""
    mtbf_h = GPU_MTBF_H / workers
    shape = Layout(workers // SCALE_STAGES, SCALE_STAGES, 3 * SCALE_STAGES, SCALE_STEP_S)
    rows = []
    for kind in ("single failures", "racks of 8"):
        gap_h = mtbf_h if kind == "single failures" else 8 * mtbf_h
        saved = CheckpointInterval(young(SCALE_WRITE_S, gap_h * 3600), SCALE_RESTART_S)
        measured = MeasuredStalls(copy_s=SCALE_COPY_S)
        systems: tuple[tuple[System, bool], ...] = (
            (ReCycle(shape, checkpoints=saved), False),
            (ThisSystem(shape, "reroute", measured, saved), False),
            (ThisSystem(shape, "reroute", replace(measured, overhead=1.0), saved), False),
            (ThisSystem(shape, "reroute", replace(measured, overhead=1.0), saved, ends=True), False),
            (Oobleck(shape, copy_s=SCALE_COPY_S, checkpoints=saved), False),
            (CheckpointRestart(shape, saved.every_s, SCALE_WRITE_S, SCALE_RESTART_S), False),
            (ThisSystem(shape, "replace", replace(measured, overhead=1.0), saved), True),
            (CheckpointRestart(shape, saved.every_s, SCALE_WRITE_S, SCALE_RESTART_S), True),
        )
        made = [_scale_trace(workers, kind, gap_h, seed) for seed in range(seeds)]
        spared = [trace.with_spares(workers // 100) for trace in made]
        for system, spare in systems:
            result = merge([simulate(trace, system) for trace in (spared if spare else made)])
            free = isinstance(system, ThisSystem) and system.measured.overhead == 1
            name = system.name + (", no overhead" if free else "")
            case = f"{workers} workers, {kind}: {name}{', 1 % spare' if spare else ''}"
            rows.append(Row(case, "throughput / no failure", result.useful, "ratio"))
    return rows


def frequency_rows(seeds: int) -> list[Row]:
    """Failures every 6 h, 2 h and 30 min on average, in a job of the published trace's shape."""
    shape, rows = Layout(PIPELINES, STAGES, MICRO_BATCHES, FREQUENCY_STEP_S), []
    systems: tuple[System, ...] = (
        ReCycle(shape),
        ThisSystem(shape, measured=NO_OVERHEAD),
        ThisSystem(shape, measured=NO_OVERHEAD, ends=True),
        Oobleck(shape),
        Bamboo(shape),
        FaultScaled(shape),
    )
    for hours in FREQUENCY_H:
        made = [exponential(shape.workers, 30 * 24, hours, FREQUENCY_REPAIR_H, seed) for seed in range(seeds)]
        for system in systems:
            result = merge([simulate(trace, system) for trace in made])
            case = f"3.35B, a failure every {hours:g} h, back after {FREQUENCY_REPAIR_H:g} h (assumed): {system.name}"
            rows.append(Row(case, "throughput / no failure", result.useful, "ratio"))
    return rows


def large_rows(draws: int) -> list[Row]:
    """Large models with 1, 5 and 10 % of their workers gone, drawn evenly; without the cost of changes."""
    rows = []
    for size, numbers in LARGE_MODELS.items():
        shape = Layout(*numbers)
        systems: tuple[System, ...] = (
            ReCycle(shape),
            ThisSystem(shape, measured=NO_OVERHEAD),
            ThisSystem(shape, measured=NO_OVERHEAD, ends=True),
            FaultScaled(shape),
        )
        for percent in LOST_PERCENT:
            gone = max(1, round(shape.workers * percent / 100))
            drawn = [random.Random(seed).sample(range(shape.workers), gone) for seed in range(draws)]
            for system in systems:
                shares = [system.throughput(Pattern(shape, frozenset(places))) for places in drawn]
                case = f"{size}, {gone} of {shape.workers} workers gone, layout assumed: {system.name}"
                rows.append(Row(case, "throughput / no failure", sum(shares) / draws, "ratio"))
    return rows


def _scale_trace(workers: int, kind: str, gap_h: float, seed: int) -> Trace:
    if kind == "single failures":
        return exponential(workers, SCALE_DAYS * 24, gap_h, SCALE_REPAIR_H, seed)
    return racks(workers, SCALE_DAYS * 24, gap_h, 8, SCALE_REPAIR_H, seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if ReCycle or Oobleck deviate by more than 5 %."""
    options = begin(arguments("traces", "Systems on failure traces, simulated."), argv)
    rows = []
    for model in (LARGE, MEDIUM):
        say(f"{model.name} on the GCP trace")
        rows += published_rows(model)
        rows += sensitivity_rows(model)
    for workers in (1_000, 10_000, 100_000):
        say(f"{workers} workers for {SCALE_DAYS} days")
        rows += scale_rows(workers, (1, 2, 4)[options.size])
    rows += frequency_rows((1, 4, 8)[options.size])
    rows += large_rows(100)
    status = finish(rows, options)
    print("\nExplanations:")
    for text in EXPLAINED:
        print(f"- {text}")
    return status


if __name__ == "__main__":
    sys.exit(main())
