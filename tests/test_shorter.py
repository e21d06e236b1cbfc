"""A pass that is shorter in a replacement is named, not a bare ``StopIteration``."""

from __future__ import annotations

from harness import Jobs

from shared_core.faults import Fault


def test_a_shorter_pass_is_named(jobs: Jobs) -> None:
    result = jobs.run("shorter.py", faults=[Fault(1, 7, "bucket", "SIGKILL")])
    assert result.status == 1
    said = "this pass over the data has 3 items in the replacement, and the failed worker had read 6 of it"
    assert said in result.stderr, result.tail()
    assert "generator raised StopIteration" not in result.stderr
