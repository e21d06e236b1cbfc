"""What cannot be sharded and recovered is refused with a line that says what to do; the page quotes it."""

from __future__ import annotations

from harness import Jobs

from tests.support.runner import ROOT

PAGE = " ".join((ROOT / "docs" / "sharded.md").read_text(encoding="utf-8").split())

SAYS = {
    "fsdp1": "FullyShardedDataParallel (FSDP1) cannot be recovered: use fully_shard()",
    "offload": "CPUOffloadPolicy cannot be recovered: leave offload_policy out",
    "beside_ddp": "a job has sharded models or models in DistributedDataParallel, not both",
    "tensor_parallel": "is a DTensor that fully_shard() has not made",
    "both": "only FSDP2 (one mesh dimension) and HSDP (two) can be recovered, without tensor parallelism",
    "reroute": "on_failure='reroute' does not work with sharded models: use on_failure='replace' alone",
    "shrink": "on_failure='shrink' does not work with sharded models: use on_failure='replace' alone",
    "resize": "resize.replace_timeout_s does not work with sharded models: use on_failure='replace' alone",
    "overlapped": "state.overlapped_update is for DistributedDataParallel: leave it out",
    "nothing": "not refused",
}


def test_each_is_refused_with_a_line(jobs: Jobs) -> None:
    result = jobs.run("sharded_refusals.py", nproc=1)
    assert result.status == 0, result.tail()
    refused = result.reports[0]["extra"]["refused"]
    assert refused.keys() == SAYS.keys()
    for name, words in SAYS.items():
        assert words in refused[name], (name, refused[name])
        assert refused[name].endswith("See docs/sharded.md") or name == "nothing"


def test_the_page_quotes_the_lines() -> None:
    assert not [words for name, words in SAYS.items() if name != "nothing" and words not in PAGE]


def test_a_job_that_may_not_continue_says_so(jobs: Jobs) -> None:
    result = jobs.run("sharded.py", env={"SWIFT_RECOVERY_ON_FAILURE": "shrink"})
    assert result.status == 1
    assert SAYS["shrink"] in result.stderr, result.tail()
