"""Random faults until enough have struck: ``python -m shared_core.testing.soak --faults N --seed S``.

Each run trains a small model with one to three faults drawn from the seed and is compared, on every rank and bit for
bit, with the run of the same script under the stock strategy on plain gloo (three pipelines that go on without
lost workers: with the same run without faults).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared_core.faults.spec import ANY_STEP, KINDS, POINTS, Fault, random_faults
from shared_core.testing.plain import PlainLauncher
from shared_core.testing.runner import JobResult, Mismatch, check_clean, check_survivors, compare, run_job, unconfirmed
from shared_core.testing.warm import WarmLauncher

JOBS = Path(__file__).parent / "jobs"
MODELS = ("mlp", "gan", "bn", "plain", "accelerate", "averages", "by-hand")
#: Plain loops that change parameters outside updates.
_OUTSIDE = ("averages", "by-hand")
#: Pipelines by name, with their stages; stages without replicas are rebuilt from logs.
PIPELINES = {"pipeline-2x2": 2, "pipeline-1x4": 4, "rerouted-2x2": 2, "rerouted-3x2": 2}
#: Sharded models by name, with the replicas of each shard.
SHARDED = {"fsdp2": 1, "hsdp": 2}
#: Those that go on without lost workers, with their ranks.
REROUTED = {"rerouted-2x2": 4, "rerouted-3x2": 6}
STEPS = 14
#: Faults are drawn for these steps, so that the last ones end without.
LAST_STRUCK = STEPS - 2
#: A run of the job takes some seconds; one that takes so long hangs.
TIMEOUT_S = 90.0

_COMMON = (
    "batch_top",
    "forward",
    "collective.before",
    "collective.after",
    "bucket",
    "update.before",
    "update.during",
    "update.after",
    "validation",
    "join",
    "recovery.severed",
    "recovery.frontier",
    "recovery.connected",
    "recovery.giving",
    "recovery.exchanged",
    "recovery.installed",
)
#: Highest occurrence of a point in one batch of each model, kept low enough that most draws are met.
_NTH: dict[str, dict[str, int]] = {
    "mlp": {"collective.before": 4, "collective.after": 4, "bucket": 2, "update.during": 40},
    "plain": {"collective.before": 5, "collective.after": 5, "bucket": 2, "update.during": 40},
    "bn": {"collective.before": 5, "collective.after": 5, "bucket": 2, "update.during": 40},
    "accelerate": {"collective.before": 3, "collective.after": 3, "bucket": 2, "update.during": 40},
    "averages": {"forward": 2, "collective.before": 4, "collective.after": 4, "bucket": 2, "update.during": 40}
    | {"outside": 17},
    "by-hand": {"forward": 2, "collective.before": 4, "collective.after": 4, "bucket": 2, "update.during": 40}
    | {"outside": 10},
    # Four groups of parameters: gathered four times in forward, three times in backward, reduced, and a sum of norms.
    "fsdp2": {"collective.before": 12, "collective.after": 12, "update.during": 40},
    "hsdp": {"collective.before": 16, "collective.after": 16, "update.during": 40},
    "gan": {
        "collective.before": 6,
        "collective.after": 6,
        "bucket": 4,
        "update.before": 2,
        "update.during": 60,
        "update.after": 2,
    },
}
#: Points of a pipeline, with their highest occurrence in one batch at every stage.
_PIPE: dict[str, int] = {
    "batch_top": 1,
    "pipe.instruction": 15,
    "pipe.forward": 4,
    "pipe.backward": 4,
    "pipe.reduce_tied": 1,
    "pipe.reduce": 1,
    "pipe.step": 1,
    "collective.before": 2,
    "collective.after": 2,
    "update.before": 1,
    "update.during": 20,
    "update.after": 1,
}
_PIPE_RECOVERY = tuple(name for name in _COMMON if name.startswith("recovery.")) + ("recovery.streamed",)
#: Batch tops of the pipeline's job that train (each fourth evaluates), and those with a checkpoint.
_PIPE_TOPS, _PIPE_CHECKPOINTS = (1, 2, 3, 5, 6, 7, 9, 10, 11, 13), 3
_REROUTE = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}
#: Points of a re-routed pipeline, with their highest occurrence in one batch that trains, or evaluates.
_REROUTED_TRAINS: dict[str, int] = {
    "batch_top": 1,
    "reroute.action": 8,
    "lane.send": 8,
    "reroute.reduce": 1,
    "reroute.step": 1,
    "update.before": 1,
    "update.during": 20,
    "update.after": 1,
}
#: Share of runs with a loss while a newcomer copies the state.
COPIED = 0.25
_REROUTED_EVALUATES: dict[str, int] = {"batch_top": 1, "reroute.evaluate": 4, "reroute.evaluated": 1}
#: Batches after which the job of a model validates.
_VALIDATED = {"accelerate": (7,)}
_VALIDATED_BY_LIGHTNING = (3, 6, 10, 13)


@dataclass(frozen=True)
class Run:
    """One run of the soak: which model, and the faults in it.

    Attributes:
        copies: where workers wait until newcomers have begun to copy the state; see ``testing.copies``.
    """

    number: int
    model: str
    faults: tuple[Fault, ...]
    copies: str = ""


def plan(
    seed: int, number: int, models: Sequence[str], world_size: int, points: Sequence[str] | None, kinds: Sequence[str]
) -> Run:
    """Run ``number`` of a soak, a function of its arguments only."""
    model = models[number % len(models)]
    rng = random.Random(f"{seed}/{number}")
    if model in REROUTED:
        draw = _faults_in_a_copy if rng.random() < COPIED else _rerouted_faults
        return Run(number, model, *draw(rng, model, kinds))
    if model in PIPELINES:
        return Run(number, model, _pipeline_faults(rng, model, world_size, kinds))
    count = rng.choice([1, 1, 2, 2, 3])
    chosen = tuple(points or _points(model))
    count = count if world_size > 2 else 1
    faults = random_faults(
        f"{seed}/{number}/faults",
        count,
        world_size,
        LAST_STRUCK,
        chosen,
        kinds,
        max_nth=_NTH[model],
        only={"validation": _VALIDATED.get(model, _VALIDATED_BY_LIGHTNING)},
    )
    return Run(number, model, tuple(faults))


def _pipeline_faults(rng: random.Random, model: str, world_size: int, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """One to three faults: apart, of neighbours at once, or one and more in the recovery from it."""
    how = rng.choice(("one", "apart", "at once", "replay", "recovery"))

    def draw(rank: int, step: int, incarnation: int = 0) -> Fault:
        points = dict(_PIPE)
        if PIPELINES[model] == world_size and step % _PIPE_CHECKPOINTS == 0:
            points["checkpoint.write"] = 1
        point = rng.choice(sorted(points))
        # The same exception at the same place a second time ends a job.
        kind = rng.choice([each for each in kinds if not incarnation or each != "exception"])
        return Fault(rank, step, point, kind, rng.randint(1, points[point]), incarnation)

    rank, place = rng.randrange(world_size), rng.randrange(len(_PIPE_TOPS))
    step = _PIPE_TOPS[place]
    first = draw(rank, step)
    if how == "apart":
        # Ranks are a batch apart at most, so these are two recoveries.
        other, later = rng.randrange(world_size), _PIPE_TOPS[min(place + 3, len(_PIPE_TOPS) - 1)]
        return (first,) if later - step < 3 else (first, draw(other, later, int(other == rank)))
    if how == "at once":
        count = rng.choice((2, 2, 3))
        start = rng.randrange(world_size - count + 1)
        return tuple(draw(each, step) for each in range(start, start + count))
    if how == "replay":
        # A newcomer from a checkpoint passes earlier batches again, any other one only the batch of the loss.
        earliest = step // _PIPE_CHECKPOINTS * _PIPE_CHECKPOINTS if PIPELINES[model] == world_size else step
        again = [top for top in _PIPE_TOPS if max(1, earliest) <= top <= step]
        return first, draw(rank, rng.choice(again), 1)
    if how == "recovery":
        other = rng.choice([each for each in range(world_size) if each != rank])
        point = rng.choice(_PIPE_RECOVERY if PIPELINES[model] == world_size else _PIPE_RECOVERY[:-1])
        kind = rng.choice([each for each in kinds if each != "exception"])
        return first, Fault(other, ANY_STEP, point, kind)
    return (first,)


def _rerouted_faults(rng: random.Random, model: str, kinds: Sequence[str]) -> tuple[tuple[Fault, ...], str]:
    """Losses that leave each stage a replica, often of both ends of a pipeline: at once, or up to two batches apart."""
    world, stages = REROUTED[model], PIPELINES[model]
    pipelines = world // stages
    home = rng.randrange(pipelines)
    ranks = [home, (stages - 1) * pipelines + home]
    if rng.random() < 0.3:
        ranks = [rng.randrange(pipelines) + stage * pipelines for stage in rng.sample(range(stages), rng.randint(1, 2))]
    if pipelines > 2 and rng.random() < 0.5:
        ranks.append(rng.choice([rank for rank in range(pipelines) if rank not in ranks]))
    step, apart, found = rng.randint(2, LAST_STRUCK - 2), rng.choice((0, 0, 1, 2)), list[Fault]()
    for rank in ranks:
        found.append(_rerouted_fault(rng, rank, step + (rng.randint(0, apart) if found else 0), kinds))
    return tuple(found), ""


def _rerouted_fault(rng: random.Random, rank: int, step: int, kinds: Sequence[str]) -> Fault:
    points = _REROUTED_TRAINS if step in _PIPE_TOPS else _REROUTED_EVALUATES
    point = rng.choice(sorted(points))
    return Fault(rank, step, point, rng.choice(list(kinds)), rng.randint(1, points[point]))


def _faults_in_a_copy(rng: random.Random, model: str, kinds: Sequence[str]) -> tuple[tuple[Fault, ...], str]:
    """A loss, and another one while its newcomer copies the state and the others train: of the newcomer, of the worker
    that gives it the state, or of another one. Each stage keeps a replica. The others wait at a later step for the copy
    to begin.
    """
    world, pipelines = REROUTED[model], REROUTED[model] // PIPELINES[model]
    rank, place = rng.randrange(world), rng.randrange(4)
    peers = [each for each in range(world) if each // pipelines == rank // pipelines and each != rank]
    others = [each for each in range(world) if each != rank and (pipelines > 2 or each not in peers)]
    whose = rng.choice(("newcomer", "giver", "other") if pipelines > 2 else ("newcomer", "other"))
    first = _rerouted_fault(rng, rank, _PIPE_TOPS[place], kinds)
    kind = rng.choice([each for each in kinds if each != "exception"])  # no code of the user's runs there
    if whose == "other":
        second = _rerouted_fault(rng, rng.choice(others), _PIPE_TOPS[place + 2], kinds)
    elif whose == "giver":
        second = Fault(min(peers), ANY_STEP, "copy.give", kind)
    else:
        second = Fault(rank, ANY_STEP, "copy.take", kind, rng.randint(1, 2), incarnation=1)
    return (first, second), f"{place + 2}:{2 if whose == 'newcomer' else 1}"


def _points(model: str) -> tuple[str, ...]:
    """Points that the job of a model meets."""
    if model == "plain":  # plain loops have neither
        return tuple(name for name in _COMMON if name != "validation")
    if model in SHARDED:  # nobody gives a newcomer its shard
        return tuple(name for name in _COMMON if name not in ("validation", "bucket", "recovery.giving"))
    if model in _OUTSIDE:
        return (*(name for name in _COMMON if name != "validation"), "outside", "outside", "outside")
    return _COMMON if model == "gan" else (*_COMMON, "clip")


def _job(model: str, how: str) -> tuple[Path, list[str]]:
    """Script of a model and its arguments."""
    if model == "plain":
        return JOBS / "plain_job.py", []
    if model in _OUTSIDE:
        return JOBS / "outside_job.py", ["--what", model]
    if model == "accelerate":
        return JOBS / "accelerate_job.py", []
    if model in SHARDED:
        return JOBS / "sharded_job.py", ["--replicas", str(SHARDED[model])]
    if model in PIPELINES:
        rerouted = ["--rerouted"] if model in REROUTED else []
        return JOBS / "pipeline_job.py", ["--stages", str(PIPELINES[model]), *rerouted]
    return JOBS / "soak_job.py", ["--model", model, "--how", how]


def judge(result: JobResult, reference: JobResult) -> tuple[str, str]:
    """Verdict on a run: ``ok``, ``restarted`` (a pipeline went back to a checkpoint with all its ranks, and said so),
    ``not counted`` (a fault was not met) or ``FAILED``, and the reason."""
    restarts = len(result.kinds("restart"))
    rerouted = "--rerouted" in result.command
    if rerouted:  # the others may end before a newcomer comes
        away = {fault.rank for fault in result.faults} - result.reports.keys()
        kept = {rank: report for rank, report in reference.reports.items() if rank not in away}
        reference = replace(reference, reports=kept)
    try:
        compare(result, reference)
        check_clean(result)
        if result.stderr.count(" workers are back") != restarts:
            raise Mismatch(f"{restarts} restarts are not on the console\n{result.tail()}")
        if rerouted and restarts:
            raise Mismatch(f"all started again, and each stage had a replica left\n{result.tail()}")
        if not rerouted and (not restarts or "pipeline_job.py" not in " ".join(result.command)):
            check_survivors(result, reference)
    except Mismatch as error:
        return "FAILED", str(error)
    missed = unconfirmed(result)
    missed += [
        f"{Fault.from_dict(record['fault'])}: struck in the last step"
        for record in result.struck
        if record["tops"] >= STEPS
    ]
    if missed:
        return "not counted", "; ".join(missed)
    reasons = [str(event.fields["reason"]) for event in result.kinds("restart")]
    return ("restarted", "; ".join(reasons)) if restarts else ("ok", "")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``--help``.

    Returns:
        0 if enough faults struck and every run ended as it should, else 1.
    """
    args = _parser().parse_args(argv)
    models = {"all": MODELS, "pipelines": tuple(PIPELINES)}.get(args.model, (args.model,))
    if any(model in PIPELINES for model in models) and args.world != 4:
        raise SystemExit("soak: the number of ranks of a pipeline is given: leave --world at 4")
    if any(args.world % SHARDED.get(model, 1) for model in models):
        raise SystemExit("soak: each shard of hsdp has two replicas: give an even --world")
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"soak: seed {seed}, {args.faults} faults, {args.world} ranks, models {', '.join(models)}", flush=True)
    rows: list[dict[str, Any]] = []
    struck = failed = restarted = 0
    begin = time.monotonic()
    with (
        PlainLauncher() as plain,
        nullcontext() if args.cold else closing(WarmLauncher()) as warm,
        tempfile.TemporaryDirectory(prefix="swift-soak-") as folder,
    ):
        references: dict[str, JobResult] = {}
        number = args.only if args.only is not None else 0
        while True:
            run = plan(seed, number, models, args.world, args.points, args.kinds)
            if run.model not in references:
                references[run.model] = _reference(run.model, args.world, Path(folder), plain)
            verdict, reason, result = _execute(run, args, Path(folder), references[run.model], warm)
            if verdict in ("ok", "restarted"):
                struck += len(run.faults)
            restarted += verdict == "restarted"
            failed += verdict == "FAILED"
            rows.append(_row(run, verdict, reason, result))
            print(_line(run, verdict, result, struck, args.faults), flush=True)
            if verdict in ("not counted", "restarted"):
                print(f"    {reason}", flush=True)
            elif verdict == "FAILED":
                # The whole output of a job is long: it is shown when a run is repeated alone.
                shown = reason if args.only is not None else _brief(reason, result)
                print(f"    {shown}\n    repeat: {_repeat(seed, run.number, args)}", flush=True)
            number += 1
            if args.only is not None or struck >= args.faults or (failed and args.stop):
                break
            if len(rows) >= 20 + 3 * args.faults:
                print("soak: too few faults strike; giving up", flush=True)
                break
    enough = struck >= args.faults or (args.only is not None and not failed)
    seconds = time.monotonic() - begin
    told = f", {restarted} went back to a checkpoint" if restarted else ""
    print(f"soak: {struck} faults struck in {len(rows)} runs, {failed} runs failed{told}, {seconds:.0f} s, seed {seed}")
    if args.json:
        summary: dict[str, Any] = {
            "seed": seed,
            "struck": struck,
            "failed": failed,
            "restarted": restarted,
            "seconds": seconds,
        }
        summary["runs"] = rows
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary | {"runs": rows}, indent=1))
    return 0 if enough and not failed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shared_core.testing.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=60, help="stop when so many have struck")
    parser.add_argument("--seed", type=int, help="repeats a soak; drawn and printed when not given")
    parser.add_argument("--world", type=int, default=4, help="ranks")
    parser.add_argument("--model", choices=[*MODELS, *SHARDED, *PIPELINES, "all", "pipelines"], default="all")
    parser.add_argument("--how", choices=["strategy", "callback"], default="strategy", help="how the product gets in")
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="start each job in fresh interpreters, as from a shell")
    parser.add_argument("--points", nargs="+", choices=POINTS, help="points to strike at; all by default")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", type=int, metavar="RUN", help="only this run of the seed")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the folders of the runs here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the runs and verdicts")
    return parser


def _reference(model: str, world: int, folder: Path, plain: PlainLauncher) -> JobResult:
    script, words = _job(model, "strategy")
    two = REROUTED.get(model, 4) == 4  # gloo adds three addends in an order of its own
    result = run_job(
        script,
        nproc=REROUTED.get(model, world),
        out=folder / f"reference-{model}",
        launcher="plain" if two else "swiftrun",
        env={} if two else _REROUTE,
        args=words,
        plain=plain,
        timeout_s=TIMEOUT_S,
    )
    if result.status != 0:
        raise SystemExit(f"the reference run of {model} failed; is Lightning installed?\n{result.tail()}")
    return result


def _execute(
    run: Run, args: argparse.Namespace, folder: Path, reference: JobResult, warm: WarmLauncher | None
) -> tuple[str, str, JobResult]:
    script, words = _job(run.model, args.how)
    words += ["--copies", run.copies] if run.copies else []
    out = ((args.keep or folder) / f"run-{run.number:04d}").resolve()
    env = {}
    if run.model in PIPELINES:
        env = {
            "SWIFT_RECOVERY_CHECKPOINT_DIR": str(out / "checkpoints"),
            "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": str(_PIPE_CHECKPOINTS),
            "SWIFT_RECOVERY_LOG_DIR": str(out),
            "SWIFT_RECOVERY_LOG_SEGMENT_BYTES": "8192",
        }
    if run.model in REROUTED:
        env |= _REROUTE
    result = run_job(
        script,
        nproc=REROUTED.get(run.model, args.world),
        out=out,
        env=env,
        faults=run.faults,
        args=words,
        standbys=args.standbys,
        timeout_s=TIMEOUT_S,
        warm=warm,
    )
    verdict, reason = judge(result, reference)
    return verdict, reason, result


def _brief(reason: str, result: JobResult) -> str:
    """The first lines of a reason, and what the job said when it ended."""
    lines = reason.partition("\ncommand: ")[0].splitlines()[:8]
    lines += [line for line in result.stderr.splitlines() if "ends the job" in line or "ending the job" in line][:2]
    return "\n    ".join(lines)


def _stall(result: JobResult) -> float:
    """Longest time that a survivor waited in a recovery, in seconds."""
    return max((float(event.fields.get("stall_s", 0.0)) for event in result.kinds("recovered")), default=0.0)


def _row(run: Run, verdict: str, reason: str, result: JobResult) -> dict[str, Any]:
    return {
        "run": run.number,
        "model": run.model,
        "faults": [fault.to_dict() for fault in run.faults],
        "struck": len(result.struck),
        "verdict": verdict,
        "reason": reason,
        "seconds": result.duration_s,
        "stall_s": _stall(result),
    }


def _line(run: Run, verdict: str, result: JobResult, struck: int, wanted: int) -> str:
    faults = "; ".join(str(fault) for fault in run.faults)
    times = f"{result.duration_s:.1f} s, stall {_stall(result):.2f} s"
    return f"run {run.number} {run.model} {verdict}, {times} [{struck}/{wanted}]: {faults}"


def _repeat(seed: int, number: int, args: argparse.Namespace) -> str:
    words = [sys.executable, "-m", "shared_core.testing.soak", f"--seed {seed} --only {number} --world {args.world}"]
    words += [f"--model {args.model} --how {args.how} --standbys {args.standbys}"]
    if args.points:
        words.append(f"--points {' '.join(args.points)}")
    if list(args.kinds) != list(KINDS):
        words.append(f"--kinds {' '.join(args.kinds)}")
    return " ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())
