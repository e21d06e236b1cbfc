"""Checkpoint policies: overhead (stall and rework) and utility at the end, over many simulated lives of a job.

Cases of research (a power law, kills at a constant rate), and COCI's setting: the stall times of its models, its mean
times between faults, one worker or a number that falls from 8 to 1, and several laws of early ends. Every policy is
told the truth; then ``value`` has to estimate it from a history of runs and from noisy losses, made up and recorded.
Needs NumPy.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.common import QUICK, Row, arguments, at_most, begin, finish, say
from benchmarks.equal_progress import EqualProgress, best_fall
from benchmarks.simulate.checkpointed_runs import RunOutcomes, SimulatedRuns, mean_and_error, simulate_runs
from benchmarks.simulate.placing import Array, Clock, Knowledge, Recorded, SimulatedJob, exponential_of, places
from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.curve import Curve, CurveFitter
from shared_core.checkpoint.history import Hazard, Run, RunEnding, from_history
from shared_core.checkpoint.policy import (
    CheckFreq,
    Coci,
    CociLiteral,
    Daly,
    Exact,
    Fixed,
    LossCurve,
    Policy,
    Value,
    Young,
)
from shared_core.report.text import columns

CURVES = Path(__file__).parent / "curves"
MTBFS_H = (4.0, 8.0, 16.0, 70.0)
#: A worker is let go each time; from which share of the useful time on there are how many.
SHRINKING = ((0.0, 8), (0.05, 4), (0.2, 2), (0.5, 1))
#: COCI's published change of the overhead against Young's interval, in per cent.
PUBLISHED = {"serial": -40.18, "data parallel": -60.64}
#: A target is missed where the difference is beyond so many standard errors of it.
ERRORS = 3.0
BASELINE = "young, one rate"
THEOREM_42 = "coci_literal, theorem 4.2"


@dataclass(frozen=True)
class Model:
    """One of COCI's models.

    Attributes:
        name: of the model.
        stall_s: published (A30 and A800).
        size_gb: published; the rest is assumed: written at 0.5 GB/s, and
        hours: useful hours of the job,
        epochs: in that time,
        power: of the loss's shifted power law,
        shift: in steps of a second.
    """

    name: str
    stall_s: float
    size_gb: float
    hours: float = 12.0
    epochs: int = 90
    power: float = 0.7
    shift: float = 1000.0


MODELS = (
    Model("DenseNet201", 0.13, 0.235),
    Model("ResNet152", 0.27, 0.694),
    Model("VGG16_bn", 0.59, 1.6),
    Model("VGG19_bn", 0.60, 1.7),
    Model("BERT-large", 1.60, 3.8, hours=24.0, epochs=40, power=0.4, shift=500.0),
)

#: Laws of early ends for a job of a second: hazards from given times on, and the share of abrupt ends.
ENDS: dict[str, RunEnding] = {
    "none": RunEnding.constant(0.0, 0.0),
    "stopped at a quarter": RunEnding((0.0, 0.2), (0.0, 20.0), 0.0),
    "55 % killed at 40-60 %": RunEnding((0.0, 0.4, 0.6), (0.0, 4.0, 0.0), 1.0),
    "any time, half killed": RunEnding.constant(3.0, 0.5),
    "any time, all killed": RunEnding.constant(3.0, 1.0),
    "any time, half killed, priced": RunEnding.constant(3.0, 0.5),
}
#: Price of a checkpoint in that case, as a share of what the whole job gains.
PRICE = 1e-4


@dataclass(frozen=True)
class Cell:
    """A job under all policies.

    Attributes:
        mode: ``serial`` or ``data parallel``; ``research`` for its cases.
        ends: key of :data:`ENDS`, or how it is called.
        name: the rest of the case.
        job: the job.
    """

    mode: str
    ends: str
    name: str
    job: SimulatedJob

    @property
    def case(self) -> str:
        """As in the table."""
        return f"{self.mode}, {self.name}, ends: {self.ends}"

    @property
    def judged(self) -> str:
        """Utility is lost by delays where a run ends early; else they only take time."""
        return "overhead" if self.ends == "none" else "utility lost"


def stretched(ending: RunEnding, seconds: float) -> RunEnding:
    """The law of a job that is so many seconds long."""
    return RunEnding(
        tuple(since * seconds for since in ending.since_s),
        tuple(rate / seconds for rate in ending.rates),
        ending.abrupt,
    )


def coci_cells(models: Sequence[Model], mtbfs_h: Sequence[float]) -> Iterator[Cell]:
    """COCI's setting."""
    for mode in ("serial", "data parallel"):
        for model in models:
            seconds = model.hours * 3600
            workers = SHRINKING if mode == "data parallel" else ((0.0, 1),)
            curve = Curve(0.0, model.shift**model.power, model.power, model.shift - 1)
            for mtbf_h in mtbfs_h:
                for ends, ending in ENDS.items():
                    job = SimulatedJob(
                        curve,
                        model.hours,
                        Cost(model.stall_s, persist_s=model.size_gb / 0.5),
                        mtbf_h,
                        stretched(ending, seconds),
                        epoch_s=seconds / model.epochs,
                        workers=tuple((share * seconds, count) for share, count in workers),
                        price=PRICE * (curve.loss(0) - curve.loss(seconds)) if "priced" in ends else 0.0,
                    )
                    yield Cell(mode, ends, f"{model.name}, MTBF {mtbf_h:g} h", job)


def research_cells() -> Iterator[Cell]:
    """Section 3.5 of research: ``1 - (1 + t / t0)^-p``, six hours, kills at a constant rate."""
    for power, shift_min, mtbf_min, end_min, cost_min in ((0.7, 10, 240, 120, 0.3), (1.5, 5, 480, 90, 0.1)):
        shift = shift_min * 60.0
        curve = Curve(0.0, shift**power, power, shift - 1)
        for ends, abrupt in (("graceful", 0.0), ("half abrupt", 0.5), ("abrupt", 1.0)):
            ending = RunEnding.constant(1 / (60 * end_min), abrupt)
            job = SimulatedJob(curve, 6.0, Cost(60 * cost_min), mtbf_min / 60, ending)
            yield Cell("research", ends, f"power {power:g}", job)


def policies(job: SimulatedJob) -> dict[str, tuple[Policy, bool]]:
    """By name: the policy, and whether it is told the average hazard only. ``fixed`` is Lightning's, once an epoch.
    ``coci_literal`` is its theorem 4.1; in data parallel jobs 4.2 has a row too, told the present workers.
    """
    found: dict[str, tuple[Policy, bool]] = {
        "fixed": (Fixed(max(1, round(job.epoch_s / job.step_s))), False),
        BASELINE: (Young(), True),
        "young": (Young(), False),
        "daly": (Daly(), False),
        "exact": (Exact(), False),
        "checkfreq": (CheckFreq(), False),
        "coci": (Coci(), True),
        "best equal progress": (EqualProgress(_best_fall(job)), True),
        "coci_literal": (CociLiteral(), True),
        THEOREM_42: (CociLiteral(), True),
        "value": (Value(job.price), False),
    }
    if len(job.workers) == 1:
        del found["young"], found[THEOREM_42]
        found = {name.removesuffix(", one rate"): each for name, each in found.items()}
    return found


def _best_fall(job: SimulatedJob) -> float:
    clock = Clock(job)
    edges = np.linspace(0, job.horizon_s, 20001)
    slopes = np.diff([job.curve.loss(clock.step(edge)) for edge in edges]) / np.diff(edges)
    return best_fall(float((slopes**2).mean()), job.cost.seconds, clock.mean_hazard())


@dataclass
class Remembered:
    """What cells share that differ in the law of ends, or only in who is killed and what a checkpoint costs."""

    places: dict[object, list[float]] = field(default_factory=dict)
    lives: dict[object, RunOutcomes] = field(default_factory=dict)


def outcomes(job: SimulatedJob, lives: SimulatedRuns, memory: Remembered) -> dict[str, RunOutcomes]:
    """Every policy, told the truth."""
    known = Knowledge(job.ending, exponential=exponential_of(job))
    by_worker = replace(known, exponential=exponential_of(job, by_worker=True), by_worker=True)
    same_job = replace(job, price=0.0, ending=RunEnding.constant(0.0, 0.0))
    same_ends = replace(job, price=0.0, ending=replace(job.ending, abrupt=0.0))
    found = {}
    for name, (policy, one_hazard) in policies(job).items():
        asked = (job if name == "value" else same_job, name)
        if asked not in memory.places:
            told = by_worker if name == THEOREM_42 else known
            memory.places[asked] = places(job, policy, replace(told, one_hazard=one_hazard))
        made = memory.places[asked]
        played = (same_ends, len(lives.ends_s), tuple(made))
        if played not in memory.lives:
            memory.lives[played] = simulate_runs(job, made, lives)
        found[name] = memory.lives[played].of(job)
    return found


def judge(cell: Cell, found: dict[str, RunOutcomes], every: bool) -> list[Row]:
    """``value`` against the best other; ``every`` adds all policies."""

    def of(name: str) -> Array:
        return found[name].overhead_s if cell.judged == "overhead" else found[name].lost

    best = min((name for name in found if name != "value"), key=lambda name: of(name).mean())
    least = float(of(best).mean())
    mean, error = mean_and_error(of("value") - of(best))
    metric = f"value / best other ({best}), {cell.judged}, s.e. {error / least:.3f}"
    rows = [at_most(cell.case, metric, 1 + mean / least, "", 1 + ERRORS * error / least)]
    for name, outcome in found.items() if every else ():
        for metric, values, scale, unit in (
            ("stall and rework", outcome.overhead_s, 1 / 36 / cell.job.hours, "%"),
            ("utility lost", outcome.lost, 1e4, "1e-4"),
        ):
            mean, error = mean_and_error(values)
            rows.append(Row(cell.case, f"{name}: {metric}, s.e. {error * scale:.2g}", mean * scale, unit))
    return rows


def against_young(mode: str, ends: str, cells: Sequence[dict[str, RunOutcomes]]) -> list[Row]:
    """Mean change over cells against Young's interval at the average hazard, which is COCI's baseline."""
    rows = []
    for name in ("value", "young", "coci", "best equal progress", "coci_literal", THEOREM_42):
        if name == THEOREM_42 and mode != "data parallel":
            continue
        for metric in ("overhead_s", "lost"):
            if ends == "none" and metric == "lost":
                continue
            ratios = []
            for found in cells:
                base = found.get(BASELINE, found["young"])
                ratios.append(getattr(found[name], metric).mean() / getattr(base, metric).mean())
            if name != "young" or mode == "data parallel":
                text = "stall and rework" if metric == "overhead_s" else "utility lost"
                change = 100 * (sum(ratios) / len(ratios) - 1)
                rows.append(Row(f"{mode}, ends: {ends}", f"{name} against {BASELINE}, {text}", change, "%"))
    return rows


def summary(cells: Sequence[tuple[Cell, dict[str, RunOutcomes]]]) -> str:
    """What each policy loses over the best one's, on average over the cells with the same ends."""
    names = list(dict.fromkeys(name for _, found in cells for name in found))
    rows = [["mode", "ends", "judged by", *names]]
    for mode, ends in dict.fromkeys((cell.mode, cell.ends) for cell, _ in cells):
        group = [(cell, found) for cell, found in cells if (cell.mode, cell.ends) == (mode, ends)]
        row = [mode, ends, group[0][0].judged]
        for name in names:
            ratios = []
            for cell, found in group:
                means = {
                    key: (each.overhead_s if cell.judged == "overhead" else each.lost).mean()
                    for key, each in found.items()
                }
                if name in means:
                    ratios.append(means[name] / min(means.values()))
            row.append(f"{sum(ratios) / len(ratios):.3f}" if ratios else "")
        rows.append(row)
    return columns(rows)


def told_by(
    job: SimulatedJob, seed: int, losses: Callable[[np.random.Generator], tuple[Array, Array]], runs: int
) -> Knowledge:
    """What is estimated from so many earlier runs, and from losses: steps and values, which are fitted ever again."""
    random = np.random.default_rng(seed)
    ends = SimulatedRuns.draw(job, runs, seed + 1000).ends_s
    history, hazard = [], Hazard()
    for number, end in enumerate(np.minimum(ends, job.horizon_s)):
        how = "completed" if end == job.horizon_s else "killed" if random.random() < job.ending.abrupt else "stopped"
        history.append(Run(str(number), how, float(end), float(end)))
        faults = int(random.poisson(end * Clock(job).mean_hazard()))
        hazard = hazard.seen(faults, float(end))
    steps, values = losses(random)
    fitter, done = CurveFitter(), 0
    fits: list[tuple[float, LossCurve | None]] = [(0.0, fitter.fit().curve)]
    while done < len(steps):
        more = max(done + 20, int(1.15 * done))
        fitter.feed(steps[done:more].tolist(), values[done:more].tolist())
        done = min(more, len(steps))
        fits.append((float(steps[done - 1]), fitter.fit().curve))
    since = [step for step, _ in fits]
    return Knowledge(
        from_history(history),
        lambda step: fits[int(np.searchsorted(since, step, "right")) - 1][1],
        exponential_of(job),
        hazard_factor=hazard.mean(1) / Clock(job).mean_hazard(),
    )


def noisy(job: SimulatedJob) -> Callable[[np.random.Generator], tuple[Array, Array]]:
    """Losses of the true curve with noise and spikes, one in ten steps."""

    def draw(random: np.random.Generator) -> tuple[Array, Array]:
        steps = np.arange(1, int(Clock(job).step(job.horizon_s)), 10)
        true = np.array([job.curve.loss(step) for step in steps]) * 5 + 1
        spikes = (random.random(len(steps)) < 0.003) * random.uniform(1, 8, len(steps))
        return steps, true + random.normal(0, 0.15, len(steps)) + spikes

    return draw


def recorded() -> dict[str, Array]:
    """Losses of every step of the examples, by the name of the file."""
    return {path.stem: np.loadtxt(path, delimiter=",", skiprows=1)[:, 1] for path in sorted(CURVES.glob("*.csv"))}


def estimated_rows(
    name: str, job: SimulatedJob, told: Callable[[int], Knowledge], lives: SimulatedRuns, trials: int
) -> list[Row]:
    """``value`` with estimates, against ``value`` with the truth and Young with the same estimates."""
    truth = simulate_runs(job, places(job, Value(job.price), Knowledge(job.ending)), lives)
    sums: dict[str, list[Array]] = {"value": [], "young": []}
    for seed in range(trials):
        known = told(seed)
        sums["value"].append(simulate_runs(job, places(job, Value(job.price), known), lives).lost)
        sums["young"].append(simulate_runs(job, places(job, Young(), known), lives).lost)
    rows = []
    for other, values in (("value, told the truth", [truth.lost]), ("young, same estimates", sums["young"])):
        mean, least = np.mean(sums["value"]), float(np.mean(values))
        error = mean_and_error(np.mean(sums["value"], axis=0) - np.mean(values, axis=0))[1]
        metric = f"value, estimated / {other}, utility lost, s.e. {error / least:.3f}"
        rows.append(Row(name, metric, float(mean) / least, ""))
    return rows


def estimated(models: Sequence[Model], count: int, trials: int) -> Iterator[Row]:
    """Synthetic curves, then recorded ones."""
    for cell in coci_cells(models, MTBFS_H[:1]):
        if cell.mode == "serial" and cell.ends.startswith("any time") and "priced" not in cell.ends:
            lives = SimulatedRuns.draw(cell.job, count, 11)
            for runs in (3, 10, 40):
                name = f"estimated, {cell.name}, ends: {cell.ends}, {runs} runs in the history"
                told = functools.partial(told_by, cell.job, losses=noisy(cell.job), runs=runs)
                yield from estimated_rows(name, cell.job, told, lives, trials)
    for stem, losses in recorded().items():
        hours, steps = 3.0, np.arange(1.0, len(losses) + 1)
        for ends in ("any time, half killed", "any time, all killed"):
            job = SimulatedJob(
                Recorded.smooth(losses),
                hours,
                Cost(2.0, persist_s=10.0),
                1.0,
                stretched(ENDS[ends], hours * 3600),
                step_s=hours * 3600 / len(losses),
                epoch_s=hours * 360,
            )
            lives = SimulatedRuns.draw(job, count, 11)
            found = outcomes(job, lives, Remembered())
            cell = Cell("recorded", ends, stem, job)
            yield from judge(cell, found, False)
            yield from estimated_rows(
                cell.case + ", 40 runs in the history",
                job,
                functools.partial(told_by, job, losses=lambda random, told=(steps, losses): told, runs=40),
                lives,
                trials,
            )


#: Simulated lives of a cell, by size of the run.
LIVES = (1000, 1000, 4000)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if ``value`` is above the best other policy by more than chance."""
    parser = arguments("checkpoint_policy", __doc__ or "")
    parser.add_argument("--all", action="store_true", help="rows of every policy in every cell")
    parser.add_argument("--lives", metavar="N", type=int, help="simulated lives of a cell")
    parser.add_argument("--only", choices=("cells", "estimated"), help="known parameters, or estimated ones")
    options = begin(parser, argv)
    quick = options.size == QUICK
    count = options.lives or LIVES[options.size]
    models, mtbfs_h = (MODELS[-1:], MTBFS_H[1:2]) if quick else (MODELS, MTBFS_H)
    cells = [*research_cells(), *coci_cells(models, mtbfs_h)] if options.only != "estimated" else []
    rows: list[Row] = []
    done: list[tuple[Cell, dict[str, RunOutcomes]]] = []
    memory, of = Remembered(), ""
    for number, cell in enumerate(cells):
        if of != cell.mode + cell.name:
            memory, of = Remembered(), cell.mode + cell.name
        found = outcomes(cell.job, SimulatedRuns.draw(cell.job, count, 5), memory)
        rows += judge(cell, found, options.all)
        # Only means are needed again.
        done.append((cell, {name: each.mean() for name, each in found.items()}))
        if number % 10 == 9:
            say(f"{number + 1} of {len(cells)} cells")
    for mode, published in PUBLISHED.items() if cells else ():
        for ends in ENDS:
            group = [found for cell, found in done if (cell.mode, cell.ends) == (mode, ends)]
            rows += against_young(mode, ends, group)
        rows.append(Row(mode, "published: coci against Young, overhead", published, "%"))
    if options.only != "cells":
        rows += estimated(models[-1:] if quick else (models[0], models[-1]), count, (1, 2, 8)[options.size])
    assert all(row.value is None or math.isfinite(row.value) for row in rows)
    status = finish(rows, options)
    if done:
        print("\nWhat each policy loses, over the best of them, mean over models and MTBFs:\n")
        print(summary(done))
    return status


if __name__ == "__main__":
    sys.exit(main())
