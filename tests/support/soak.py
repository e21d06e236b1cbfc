"""Random faults until enough have struck: ``python -m tests.support.soak --faults N --seed S``.

Each run trains a small model with one to three faults drawn from the seed (:mod:`tests.support.draws`), in plain and
Accelerate jobs also with workers that leave as planned or are slow. It is compared, on every rank and bit for bit, with
the run of the same script under the stock strategy on plain gloo (three pipelines that continue without failed workers,
and jobs on other devices: with the same run without faults). Failures of machines need network namespaces, so root.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared_core.faults.spec import KINDS, POINTS, Fault
from tests.support.cluster import Cluster
from tests.support.device import DEVICES, environment
from tests.support.draws import (
    CHECKPOINTS,
    CORRUPTED,
    MODELS,
    ON_MACHINES,
    OUTSIDE,
    PIPELINES,
    REROUTED,
    SHARDED,
    STEPS,
    ZERO,
    Run,
    plan,
)
from tests.support.namespaces import machines, unavailable
from tests.support.plain import PlainLauncher
from tests.support.report import DRAIN
from tests.support.runner import JobResult, Mismatch, check_clean, check_survivors, compare, run_job, unconfirmed
from tests.support.warm import WarmLauncher

JOBS, SCRIPTS = Path(__file__).parent / "jobs", Path(__file__).parents[1] / "scripts"
#: A run of the job takes some seconds; one that takes so long hangs.
TIMEOUT_S = 90.0

#: Models whose jobs train on any device.
_ON_DEVICES = ("plain", "fsdp2", "hsdp")
_REROUTE = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}
#: Of all pipelines; an evaluation follows each third step.
_PIPE = ["--steps", "11", "--clip", "0.5"]
_TIED = ["--tied", "two", "--checkpointing", "1"]
#: Of those that continue without failed workers: steps that take so long that workers move in it, or that a machine
#: fails in one.
_WORDS = {
    "rerouted-2x2": _TIED,
    "rerouted-3x2": _TIED,
    "shared-3x2": [*_TIED, "--shared"],
    "moved-3x2": ["--work-ms", "5"],
    "machines-3x2": [*_TIED, "--work-ms", "20"],
}


def _job(model: str, how: str, world: int) -> tuple[Path, list[str]]:
    """Script of a model and its arguments."""
    if model in ("plain", CORRUPTED):
        return SCRIPTS / "plain_ddp.py", ["--norm", "--steps", str(STEPS)]
    if model in OUTSIDE:
        return JOBS / "outside_job.py", ["--what", model]
    if model == "accelerate":
        return SCRIPTS / "acc.py", ["--samples", str(56 * world), "--small-buckets"]
    if model in ZERO:
        return SCRIPTS / "zero.py", ["--stage", str(ZERO[model]), "--epochs", "3", "--evaluate"]
    if model in SHARDED:
        return SCRIPTS / "sharded.py", ["--replicas", str(SHARDED[model]), "--epochs", "3", "--evaluate"]
    if model in REROUTED:  # dropout would draw from the generators of each rank
        words = ["--stages", str(PIPELINES[model]), *_PIPE, "--dropout", "0", "--evaluate-each", "3", *_WORDS[model]]
        return SCRIPTS / "rerouted_pipe.py", words
    if model in PIPELINES:
        words = ["--stages", str(PIPELINES[model]), *_PIPE, "--evaluate", "3"]
        return SCRIPTS / "pipe.py", [*words, "--tied", "--checkpointing", "1", "--schedule"]
    return JOBS / "soak_job.py", ["--model", model, "--how", how]


def judge(result: JobResult, reference: JobResult, cut: Collection[int] = ()) -> tuple[str, str]:
    """Verdict on a run.

    Args:
        result: the run.
        reference: the one without faults.
        cut: ranks whose machine was to fail.

    Returns:
        ``ok``, ``restarted`` (a pipeline went back to a checkpoint with all its ranks, and said so), ``not counted`` (a
        fault was not met) or ``FAILED``, and the reason.
    """
    restarts = len(result.kinds("restart"))
    script = next((Path(word).name for word in result.command if word.endswith(".py")), "")
    rerouted = script == "rerouted_pipe.py"
    if rerouted:  # the others may end before a replacement comes
        away = {*cut, *(fault.rank for fault in result.faults)} - result.reports.keys()
        kept = {rank: report for rank, report in reference.reports.items() if rank not in away}
        reference = replace(reference, reports=kept)
    try:
        compare(result, reference)
        check_clean(result)
        if result.stderr.count(" workers are back") != restarts:
            raise Mismatch(f"{restarts} restarts are not on the console\n{result.tail()}")
        if rerouted and restarts:
            raise Mismatch(f"all started again, and each stage had a replica left\n{result.tail()}")
        if not rerouted and (not restarts or script != "pipe.py"):
            check_survivors(result, reference, [event.rank for event in result.kinds("drained")])
    except Mismatch as error:
        return "FAILED", str(error)
    missed = unconfirmed(result)
    missed += [
        f"{Fault.from_dict(record['fault'])}: struck in the last step"
        for record in result.struck
        if record["boundaries"] >= STEPS
    ]
    missed += [
        f"rank {rank} outlived its machine" for rank in set(cut) - {each.rank for each in result.kinds("failed")}
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
    if ON_MACHINES.keys() & set(models) and (why := "--cold starts no machines" if args.cold else unavailable()):
        print(f"soak: no machines fail: {why}", flush=True)
        models = tuple(model for model in models if model not in ON_MACHINES)
        if not models:
            return 1
    if args.device != "cpu" and not {*models} <= {*_ON_DEVICES}:
        raise SystemExit(f"soak: on a device, --model is one of {', '.join(_ON_DEVICES)}")
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
                references[run.model] = _reference(run.model, args, Path(folder), plain)
            verdict, reason, result = _execute(run, args, Path(folder), references[run.model], warm)
            if verdict in ("ok", "restarted"):
                struck += run.strikes
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
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=60, help="stop when so many have struck")
    parser.add_argument("--seed", type=int, help="repeats a soak; drawn and printed when not given")
    parser.add_argument("--world", type=int, default=4, help="ranks")
    parser.add_argument(
        "--model", choices=[*MODELS, CORRUPTED, *SHARDED, *PIPELINES, "all", "pipelines"], default="all"
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="the simulated one, or a GPU for all ranks")
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


def _reference(model: str, args: argparse.Namespace, folder: Path, plain: PlainLauncher) -> JobResult:
    script, words = _job(model, "strategy", args.world)
    # gloo adds three addends in an order of its own, and takes no tensors of most devices
    stock = REROUTED.get(model, 4) == 4 and args.device == "cpu"
    result = run_job(
        script,
        nproc=REROUTED.get(model, args.world),
        out=folder / f"reference-{model}",
        launcher="plain" if stock else "swiftrun",
        env=environment(args.device) | (_REROUTE if model in REROUTED and not stock else {}),
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
    script, words = _job(run.model, args.how, args.world)
    words += ["--copies", run.copies] if run.copies else []
    out = ((args.keep or folder) / f"run-{run.number:04d}").resolve()
    env = environment(args.device) | {DRAIN: json.dumps(dict(run.drained))}
    if run.model in PIPELINES:
        env |= {
            "SWIFT_RECOVERY_CHECKPOINT_DIR": str(out / "checkpoints"),
            "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": str(CHECKPOINTS),
            "SWIFT_RECOVERY_LOG_DIR": str(out),
            "SWIFT_RECOVERY_LOG_SEGMENT_BYTES": "8192",
        }
    if run.model == CORRUPTED:
        env |= {"SWIFT_RECOVERY_STATE_VERIFY_EVERY": "1", "SWIFT_RECOVERY_STATE_RECOMPUTE_EVERY": "1"}
    if run.model in REROUTED:
        env |= _REROUTE
    if run.model == "moved-3x2":  # replacements come when workers have moved
        env["SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S"] = "2"
    if run.cut is not None:
        assert warm is not None
        result = _on_machines(run, warm, out, script, words, env)
        verdict, reason = judge(result, reference, run.cut.ranks)
        return verdict, reason, result
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


def _on_machines(
    run: Run, warm: WarmLauncher, out: Path, script: Path, words: Sequence[str], env: Mapping[str, str]
) -> JobResult:
    """Run the job on machines, of which one fails."""
    assert run.cut is not None
    count, (ranks, boundary, later_s) = ON_MACHINES[run.model], run.cut
    out.mkdir(parents=True, exist_ok=True)
    with machines(count) as made:
        cluster = Cluster(
            warm, made, out, script, nnodes=count, nproc=len(ranks), faults=run.faults, args=words, env=env
        )
        try:
            cluster.until(lambda: cluster.boundaries(0) >= boundary, TIMEOUT_S)
            time.sleep(later_s)
            made[cluster.place_of(ranks[0])].kill()
            return cluster.finish(TIMEOUT_S)[0]
        except AssertionError:  # it did not come so far
            return cluster.result(124, [])
        finally:
            cluster.stop()


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
        "machine": run.cut.ranks if run.cut is not None else [],
        "struck": len(result.struck),
        "verdict": verdict,
        "reason": reason,
        "seconds": result.duration_s,
        "stall_s": _stall(result),
    }


def _line(run: Run, verdict: str, result: JobResult, struck: int, wanted: int) -> str:
    times = f"{result.duration_s:.1f} s, stall {_stall(result):.2f} s"
    return f"run {run.number} {run.model} {verdict}, {times} [{struck}/{wanted}]: {run}"


def _repeat(seed: int, number: int, args: argparse.Namespace) -> str:
    words = [sys.executable, "-m", "tests.support.soak", f"--seed {seed} --only {number} --world {args.world}"]
    words += [f"--model {args.model} --device {args.device} --how {args.how} --standbys {args.standbys}"]
    if args.points:
        words.append(f"--points {' '.join(args.points)}")
    if list(args.kinds) != list(KINDS):
        words.append(f"--kinds {' '.join(args.kinds)}")
    return " ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())
