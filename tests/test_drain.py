"""Workers leave as planned: the bits are those of the run without, and nobody calls it a failure."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.report import DRAIN
from tests.support.runner import JobResult, compare, unconfirmed


def run(
    jobs: Jobs,
    script: str,
    drained: dict[str, str],
    *,
    faults: Sequence[Fault] = (),
    args: Sequence[str] = (),
    nproc: int = 2,
    env: dict[str, str] | None = None,
) -> JobResult:
    """``drained``: see :data:`DRAIN`. The result is that of the run without any of it."""
    more = {DRAIN: json.dumps(drained)} | (env or {})
    result = jobs.run(script, nproc=nproc, faults=faults, env=more, args=args)
    compare(result, jobs.reference(script, nproc=nproc, args=args))
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    assert len(result.kinds("failed")) == len(faults), result.tail()
    return result


SCRIPTS = {
    "plain": ("plain_ddp.py", ["--norm"], {"1:3": "1"}),
    "rank 0": ("plain_ddp.py", ["--norm"], {"1:3": "0"}),
    "lightning": ("lit.py", ["--feature", "all"], {"0:6": "1", "0:9": "0"}),
    "accelerate": ("acc.py", [], {"0:5": "1", "1:14": "0"}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, jobs: Jobs) -> None:
    script, args, drained = SCRIPTS[name]
    result = run(jobs, script, drained, args=args)
    assert sorted(str(event.rank) for event in result.kinds("drained")) == sorted(drained.values()), result.tail()
    print(result.stderr)
