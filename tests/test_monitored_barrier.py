"""A monitored barrier names who is missing, in the words of plain gloo."""

from __future__ import annotations

import re

import pytest
from harness import Jobs, few

from tests.support.runner import JobResult

#: Who does not come, and what rank 0 says of it.
MISSING = {
    "one": (["2"], "Rank 2 failed to pass monitoredBarrier in 2000 ms"),
    "first": (["1", "2"], "Rank 1 failed to pass monitoredBarrier in 2000 ms"),
    "all": (["1", "2", "--all"], "Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms"),
    "nobody": ([], ""),
}
#: What others that have come say.
OTHERS = "Rank 3 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
_SAID = re.compile(r"Ranks? [\d, ]+ (?:failed|successfully)[^.]*?(?=$|\n|\.)")


@pytest.mark.parametrize("who", few(MISSING, "nobody"))
def test_it_names_the_missing_rank_as_plain_gloo_does(who: str, jobs: Jobs) -> None:
    args, expected = MISSING[who]
    for result in (jobs.reference("monitored.py", nproc=4, args=args), jobs.run("monitored.py", nproc=4, args=args)):
        assert result.status == 0, result.tail()
        assert _said(result, 0) == expected, result.tail()
        assert _said(result, 3) == (OTHERS if expected else ""), result.tail()


def _said(result: JobResult, rank: int) -> str:
    found = _SAID.search(result.reports[rank]["extra"]["said"])
    return found[0] if found else ""
