"""Compiled models, and DDP's static graphs, lose workers and end with the bits of stock PyTorch without a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from shared_core.worker.state.compiled import differs

#: In the middle of a backward; and the replacement's peer before the next.
FAULTS = [Fault(1, 6, "bucket", "SIGKILL"), Fault(0, 7, "forward", "SIGKILL")]
#: While DDP learns the graph, when it knows it, and when it uses it.
LEARNING = [
    Fault(1, 1, "bucket", "SIGKILL"),
    Fault(0, 2, "forward", "SIGKILL"),
    Fault(1, 3, "forward", "SIGKILL", incarnation=1),
]
TIMEOUT_S = 240.0

PLACES = ["outer", "outer_attached", "inner", "in_place", "whole_in_place"]
COMPILED: dict[str, list[str]] = {
    **{
        f"{where}-{backend}": ["--where", where, "--backend", backend]
        for where in PLACES
        for backend in ("inductor", "aot_eager")
    },
    "outer-norm": ["--where", "outer", "--norm"],
    "outer-accumulate": ["--where", "outer", "--accumulate", "2"],
    "inner-view": ["--where", "inner", "--view"],
    "outer-static": ["--where", "outer", "--static"],
    **{
        f"sharded-{where}-{backend}": ["--shard", "--where", where, "--backend", backend]
        for where in ("outer", "inner")
        for backend in ("inductor",)
    },
}
STATIC: dict[str, list[str]] = {
    "unused": ["--unused"],
    "find_unused": ["--unused", "--find"],
    "twice": ["--twice"],
    "again": ["--again", "--unused"],
    "accumulate": ["--accumulate", "2", "--unused"],
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What Inductor has compiled for one run is there for the next."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", os.fspath(folder))
        yield folder


@pytest.mark.parametrize("name", few(COMPILED, "outer-aot_eager"))
def test_a_compiled_model(name: str, jobs: Jobs) -> None:
    faults = FAULTS if "sharded" not in name else [Fault(1, 6, "forward", "SIGKILL")]
    jobs.check("compiled.py", args=COMPILED[name], faults=faults, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", few(STATIC, "again"))
@pytest.mark.parametrize("when", few(["learning", "later"], "later"))
def test_a_static_graph(name: str, when: str, jobs: Jobs) -> None:
    args = ["--where", "none", "--static", *STATIC[name]]
    jobs.check("compiled.py", args=args, faults=FAULTS if when == "later" else LEARNING)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("acc.py", ["--samples", "144", "--compile", "aot_eager"]),
        ("acc.py", ["--static"]),
        ("hf_trainer.py", ["--compile", "aot_eager"]),
    ],
    ids=lambda each: "-".join(each).strip("-") if isinstance(each, list) else each,
)
def test_the_frameworks_ways(script: str, args: list[str], jobs: Jobs) -> None:
    jobs.check(script, args=args, faults=[Fault(1, 4, "bucket", "SIGKILL")], timeout_s=TIMEOUT_S)


@pytest.mark.nightly
def test_sizes_in_another_order_are_refused_by_name(jobs: Jobs) -> None:
    """The worker fails in the first smaller batch: the replacement compiles for that first."""
    result = jobs.run("compiled.py", args=["--uneven"], faults=[Fault(1, 3, "bucket", "SIGKILL")], timeout_s=TIMEOUT_S)
    assert result.kinds("restart") and "in another order than before the failure" in result.stderr, result.tail()


@pytest.mark.nightly
def test_sizes_in_the_same_order(jobs: Jobs) -> None:
    jobs.check("compiled.py", args=["--uneven"], faults=[Fault(1, 4, "bucket", "SIGKILL")], timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("own", "before", "wrong"),
    [
        ({}, {}, ""),
        ({"x": ["8"]}, {}, ""),
        ({"x": ["8"]}, {"x": ["8", "? but 8"]}, ""),
        ({"x": ["8", "? but 8"]}, {"x": ["8"]}, ""),
        ({"x": ["5"]}, {"x": ["8"]}, "another order"),
        ({"x": ["8", "8 x ?"]}, {"x": ["8", "? x 8"]}, "another order"),
        ({}, {"x": ["?"]}, "within a batch"),
    ],
)
def test_what_a_replacement_may_compile(own: dict[str, list[str]], before: dict[str, list[str]], wrong: str) -> None:
    found = differs(own, before)
    assert wrong in found and bool(found) == bool(wrong)
