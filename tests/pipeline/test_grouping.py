"""Selective logging: exact plans against brute force and published figures, the curve, and when to plan again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.logging_tradeoff import swift_cost
from benchmarks.swift_published import VIT, VIT_COMPUTE_S, greedy
from shared_core.pipeline.grouping import (
    Budget,
    ChainMachine,
    ChainProfile,
    GroupPlan,
    evaluate,
    plan_groups,
    trade_off,
)


@st.composite
def profiles(draw: st.DrawFn) -> ChainProfile:
    """Small profiles whose costs are whole multiples of a power of two, so that sums in any order are the same."""
    count = draw(st.integers(1, 10))
    machine = st.builds(ChainMachine, st.integers(0, 9), st.integers(0, 4), st.integers(1, 3))
    machines = draw(st.lists(machine, min_size=count, max_size=count).filter(lambda all: any(m.weight for m in all)))
    nbytes = draw(st.sampled_from([st.just(3), st.integers(0, 5), st.integers(0, 10**6)]))
    return ChainProfile(
        tuple(machines),
        tuple(draw(st.lists(nbytes, min_size=count - 1, max_size=count - 1))),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 8])),
        draw(st.sampled_from([None, 1.0, 2.0**16])),
    )


def groupings(count: int) -> Iterator[list[list[int]]]:
    """All 2^(count - 1) of them."""
    for cuts in range(2 ** (count - 1)):
        groups = [[0]]
        for i in range(1, count):
            if cuts >> (i - 1) & 1:
                groups.append([i])
            else:
                groups[-1].append(i)
        yield groups


def cost(profile: ChainProfile, groups: list[list[int]]) -> tuple[int, float]:
    """Bytes of all logs and expected replay seconds, written down again from the definition."""
    logged, expected = 0, 0.0
    for group in groups:
        line = [profile.machines[i].compute_s for i in group for _ in range(profile.machines[i].stages)]
        if profile.link_bytes_per_s is not None:
            line += [profile.boundary_bytes[i] / profile.link_bytes_per_s for i in group[:-1]]
        replay = sum(line) / profile.micro_batches + (1 - 1 / profile.micro_batches) * max(line)
        expected += sum(profile.machines[i].weight for i in group) * replay
        if group[-1] + 1 < len(profile.machines):
            logged += profile.boundary_bytes[group[-1]]
    return logged * profile.steps_between_checkpoints, expected / sum(m.weight for m in profile.machines)


def costs(plan: GroupPlan) -> tuple[int, float]:
    return plan.storage_bytes, plan.replay_s


@settings(max_examples=60, deadline=None)
@given(profiles(), st.integers(0, 30))
def test_exact_against_brute_force(profile: ChainProfile, budget: int) -> None:
    every = sorted(cost(profile, groups) for groups in groupings(len(profile.machines)))
    best: list[tuple[int, float]] = []
    for one in every:
        if not best or one[1] < best[-1][1]:
            best.append(one)
    curve = trade_off(profile)
    assert [costs(plan) for plan in curve] == best
    for plan in curve:
        assert cost(profile, [list(group) for group in plan.groups]) == costs(plan)
    for storage in (0, budget, every[-1][0] // 2, every[-1][0]):
        plan = plan_groups(profile, Budget(storage))
        assert costs(plan) == min((one for one in every if one[0] <= storage), key=lambda one: one[::-1])


# -- what is published ------------------------------------------------------------------------------------


def test_swifts_greedy_gives_the_published_groups() -> None:
    groups = greedy(VIT_COMPUTE_S, (VIT.boundary_bytes,) * 15, 8e11)
    assert groups == [[0], [1], [2], [3], [4], [5], [6], [7, 8], [9, 10], [11, 12, 13, 14, 15]]
    assert groups == [list(group) for group in VIT.ran[8e11]]


@pytest.mark.parametrize(
    ("storage", "published", "right_sizes", "exact"),
    [
        (9e11, 3.00, 2.88, 2.86),
        (8e11, 3.27, 3.22, 3.19),
        (6e11, 5.02, 4.02, 4.02),
        (3e11, 8.13, 7.96, 7.75),
        (1e11, 16.65, 16.26, 16.09),
    ],
)
def test_replay_of_a_step_of_vit_128(storage: float, published: float, right_sizes: float, exact: float) -> None:
    profile = swift_cost()
    plan = plan_groups(profile, Budget(storage))
    assert plan.replay_s == pytest.approx(exact, abs=0.005) and plan.storage_bytes <= storage
    assert plan in trade_off(profile)
    for mended, expected in ((False, published), (True, right_sizes)):
        groups = greedy(VIT_COMPUTE_S, profile.boundary_bytes, storage, right_sizes=mended)
        assert evaluate(profile, groups).replay_s == pytest.approx(expected, abs=0.0051)


@pytest.mark.parametrize(("micro_batches", "bound"), [(256, 263 / 383), (128, 135 / 255)])
def test_equal_stages_give_swifts_bound(micro_batches: int, bound: float) -> None:
    """(M + S_group - 1) / (M + S - 1) of a normal step, for one machine with 8 stages of 16."""
    profile = ChainProfile((ChainMachine(3.0, stages=8),) * 16, (10,) * 15, 100, micro_batches)
    normal, alone = trade_off(profile)[0], trade_off(profile)[-1]
    assert normal.groups == (tuple(range(16)),) and len(alone.groups) == 16
    assert alone.replay_s / normal.replay_s == pytest.approx(bound)


# -- one thing at a time ----------------------------------------------------------------------------------


def chain(*compute_s: float, **options: Any) -> ChainProfile:
    values = {"boundary_bytes": (100,) * (len(compute_s) - 1), "steps_between_checkpoints": 10} | options
    return ChainProfile(tuple(map(ChainMachine, compute_s)), **values)


def test_a_budget_is_kept_to_the_byte() -> None:
    profile = chain(1, 1, 1)
    kept = {storage: plan_groups(profile, Budget(storage)).storage_bytes for storage in (0, 999, 1000, 1999, 2000)}
    assert kept == {0: 0, 999: 0, 1000: 1000, 1999: 1000, 2000: 2000}
    assert plan_groups(profile, Budget(1000)).logged in ((0,), (1,))
