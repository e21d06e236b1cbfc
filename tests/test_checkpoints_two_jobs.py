"""The same command twice at once: the second does not touch the run of the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointed import committed, options, running, saved, went_on_from
from harness import Jobs

pytestmark = pytest.mark.timeout(300)

SCRIPT, ARGS = "plain_ddp.py", ["--norm", "--steps", "2000"]
RESTART = ["--on-failure=restart"]


@pytest.mark.parametrize("kind", ["a folder", "a url"])
def test_the_second_is_refused_and_goes_on_once_the_first_is_gone(kind: str, jobs: Jobs, tmp_path: Path) -> None:
    where = str(tmp_path) if kind == "a folder" else f"local://{tmp_path}"
    env = options(tmp_path, 5, **{"checkpoint.dir": where})
    scratch = env | {"SWIFT_RECOVERY_CHECKPOINT_RESUME": "never"}
    with running(jobs, SCRIPT, ARGS, env=env, launcher_args=RESTART, nproc=1) as first:
        first.until(lambda: bool(committed(tmp_path, 1)), 60)
        with running(jobs, SCRIPT, ARGS, env=env, launcher_args=RESTART, nproc=1) as second:
            refused = second.end()
        (run,) = {each.run for each in saved(tmp_path)}
        assert refused.status == 1 and "RunInUse" in refused.stderr, refused.tail()
        assert " on " in refused.stderr and run in refused.stderr and "resume='never'" in refused.stderr
        assert not went_on_from(refused)
        with running(jobs, SCRIPT, ARGS, env=scratch, launcher_args=RESTART, nproc=1) as other:
            other.until(lambda: len({each.run for each in saved(tmp_path)}) == 2, 60)
            other.kill()
            other.end()
        newest = committed(tmp_path, 1)[0]
        first.until(lambda: saved(tmp_path)[0].step > newest, 60)  # and it trains on
        first.kill()
        first.end()
    begun = max(each.step for each in saved(tmp_path) if each.run != run)
    with running(jobs, SCRIPT, ARGS, env=env, launcher_args=RESTART, nproc=1) as again:
        again.until(lambda: again.tops() > begun, 60)
        again.kill()
        assert went_on_from(again.end()) == {begun}
