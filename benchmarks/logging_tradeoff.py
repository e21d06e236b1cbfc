"""Recovery time against storage of logs: exact plans beside Swift's, for the pipelines that Swift was measured on.

Everything is computed from published inputs, in two ways:

- with Swift's own cost (machines of a group replay one after another), for which ViT-128's compute times are known;
- with equal stages, of a pipeline whose normal step takes as long as the published one. This is Swift's bound on
  replay, (M + S_group - 1) / (M + S - 1) of a normal step, averaged over the machine that fails. It predicts the
  replay that a recovery contains, by the failed group alone and shared with the survivors as this product shares it.

Published recovery times are Swift's, on 16 machines with 8 GPUs. They are not judged: they contain what is not
published (see the list at the end of the output), and are of one failed rank.

But with ``--quick`` a small pipeline of this product with emulated compute runs with several groupings; each of its
stages fails once, as each machine is equally likely to fail.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Sequence

from benchmarks.common import QUICK, Row, arguments, at_most, begin, finish, say, scratch
from benchmarks.lab.plan_logging import format_groups
from benchmarks.swift_published import (
    BERT,
    LINK_BYTES_PER_S,
    MACHINES,
    REPLAYED_STEPS,
    STAGES_PER_MACHINE,
    STEPS_BETWEEN_CHECKPOINTS,
    VIT,
    VIT_COMPUTE_S,
    Model,
    greedy,
)
from shared_core.pipeline.cost import ReplayCost
from shared_core.pipeline.grouping import Budget, ChainMachine, ChainProfile, GroupPlan, evaluate, plan_groups

NOT_COMPUTED = (
    "BERT-128, Swift's cost and greedy: the compute times of its machines are not published",
    "ViT-128, the groups that Swift ran with 900 GB (10 of them, but not which) and with 100 GB",
    "groups that Swift ran for BERT-128: not known at any budget",
    "recovery time but for its replay: noticing the failure, starting again, loading the checkpoint and reading logs "
    "are not published apart, nor which runs had parallel recovery, nor the bytes of a stage's parameters (taken to be "
    "those of one block of the published width)",
)


def swift_cost() -> ChainProfile:
    """ViT-128 as Swift's grouping sees it: one micro-batch, one stage a machine."""
    machines = tuple(ChainMachine(seconds) for seconds in VIT_COMPUTE_S)
    boundaries = (VIT.boundary_bytes,) * (MACHINES - 1)
    return ChainProfile(machines, boundaries, STEPS_BETWEEN_CHECKPOINTS, 1, LINK_BYTES_PER_S)


def equal_stages(model: Model) -> ChainProfile:
    """A pipeline of equal stages whose step takes as long as the model's."""
    stages = MACHINES * STAGES_PER_MACHINE
    compute_s = model.step_s * model.micro_batches / (model.micro_batches + stages - 1)
    machines = (ChainMachine(compute_s, stages=STAGES_PER_MACHINE),) * MACHINES
    boundaries = (model.boundary_bytes,) * (MACHINES - 1)
    return ChainProfile(machines, boundaries, STEPS_BETWEEN_CHECKPOINTS, model.micro_batches, step_s=model.step_s)


def swift_rows(budget: float) -> list[Row]:
    """ViT-128 with Swift's cost: the exact plan, the greedy's, and the groups that Swift ran."""
    profile, case = swift_cost(), f"{VIT.name}, {budget / 1e9:g} GB, Swift's cost"
    exact = plan_groups(profile, Budget(budget))
    published = evaluate(profile, greedy(VIT_COMPUTE_S, profile.boundary_bytes, budget))
    mended = evaluate(profile, greedy(VIT_COMPUTE_S, profile.boundary_bytes, budget, right_sizes=True))
    say(f"{case}: exact plan {format_groups(exact.groups)}; Swift's greedy {format_groups(published.groups)}")
    rows = [
        Row(case, "logs of the exact plan", exact.storage_bytes / 1e9, "GB"),
        at_most(case, "replay of a step, exact plan (target: greedy)", exact.replay_s, "s", published.replay_s),
        Row(case, "replay of a step, Swift's greedy", published.replay_s, "s"),
        Row(case, "replay of a step, greedy with the right group sizes", mended.replay_s, "s"),
    ]
    if budget in VIT.ran:
        ran = evaluate(profile, VIT.ran[budget])
        same = "the greedy's" if ran == published else format_groups(ran.groups)
        say(f"{case}: Swift ran {same}")
        rows.append(Row(case, "replay of a step, groups that Swift ran", ran.replay_s, "s"))
    return rows


def bound_rows(model: Model, budget: float) -> list[Row]:
    """Equal stages: the exact plan, and what Swift measured with this budget."""
    profile, case = equal_stages(model), f"{model.name}, {budget / 1e9:g} GB, equal stages"
    exact = plan_groups(profile, Budget(budget))
    say(f"{case}: exact plan {format_groups(exact.groups)}")
    rows = [
        Row(case, "logs of the exact plan", exact.storage_bytes / 1e9, "GB"),
        Row(case, f"replay of {REPLAYED_STEPS} steps, exact plan", REPLAYED_STEPS * exact.replay_s, "s"),
    ]
    for ordered, sums in ((True, "ordered"), (False, "slices")):
        seconds = REPLAYED_STEPS * shared_s(model, exact, ordered)
        rows.append(Row(case, f"the same, shared with survivors where it pays, replay.sums={sums}", seconds, "s"))
    if budget in model.ran:
        ran = REPLAYED_STEPS * evaluate(profile, model.ran[budget]).replay_s
        rows.append(Row(case, f"replay of {REPLAYED_STEPS} steps, groups that Swift ran", ran, "s"))
    if budget in model.recovery_s:
        rows.append(Row(case, "recovery that Swift measured", model.recovery_s[budget], "s"))
    return rows


def shared_s(model: Model, plan: GroupPlan, ordered: bool) -> float:
    """Expected seconds of a replayed step that survivors share where it pays; each machine is as likely to fail."""
    machine, stages = equal_stages(model).machines[0], MACHINES * STAGES_PER_MACHINE

    @functools.cache
    def of(line: int) -> float:
        message_bytes = 2 * (line + 1) * model.boundary_bytes // model.micro_batches
        stage_s = (machine.compute_s / model.micro_batches,) * line
        replay = ReplayCost(
            model.micro_batches, stage_s, line * model.stage_bytes, message_bytes, LINK_BYTES_PER_S, ordered
        )
        return replay.seconds(replay.best(stages - line + 1))

    return sum(len(group) / MACHINES * of(len(group) * STAGES_PER_MACHINE) for group in plan.groups)


def measured_rows(stages: int, groupings: Sequence[str], every: int, since: int) -> list[Row]:
    """Our own pipeline of equal stages: bytes logged and replay of a step, measured beside the bound, by grouping."""
    from benchmarks import pipeline_recovery as pipeline

    rows = []
    failures = tuple((stage,) for stage in range(stages))
    for groups in groupings:
        case = pipeline.Case(stages, 1, "replay", failures, groups=groups)
        with scratch() as folder:
            outcome = pipeline.run(case, 1, folder, every, since)
        kills, micro_batches = outcome.kills, pipeline.MICRO_BATCHES
        expected = statistics.mean(micro_batches + case.replays_together(kill.failed) - 1 for kill in kills)
        ratios = [(kill.replay_s or 0.0) / (kill.replayed * outcome.step_s) for kill in kills if kill.replayed]
        name = f"{stages} emulated stages, measured, log_groups={groups}"
        rows += [
            Row(name, "logs on disk at the failure, mean", statistics.mean(kill.logged for kill in kills) / 1e6, "MB"),
            Row(name, "replay of a step / normal step, mean", statistics.mean(ratios) if ratios else None, "ratio"),
            Row(name, "the same by Swift's bound", expected / (micro_batches + stages - 1), "ratio"),
            Row(name, "delay of the job, mean", statistics.mean(kill.delay_s for kill in kills), "s"),
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a greedy plan is better than the exact one."""
    parser = arguments("logging_tradeoff", "Recovery time against storage of logs, for the pipelines of Swift's paper.")
    options = begin(parser, argv)
    vit = sorted({*VIT.recovery_s, *VIT.ran}, reverse=True)
    rows = [row for budget in vit for row in swift_rows(budget)]
    for model, budgets in ((VIT, vit), (BERT, list(BERT.recovery_s))):
        rows.append(Row(model.name, f"{REPLAYED_STEPS} normal steps", REPLAYED_STEPS * model.step_s, "s"))
        rows += [row for budget in budgets for row in bound_rows(model, budget)]
    if options.size > QUICK:
        rows += measured_rows(4, ("worker", "0-1,2-3", "0-3"), 4, 2)
    status = finish(rows, options)
    print("\nNot computed:")
    for text in NOT_COMPUTED:
        print(f"- {text}")
    return status


if __name__ == "__main__":
    sys.exit(main())
