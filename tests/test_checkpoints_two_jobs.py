"""The same command twice at once: the second does not touch the run of the first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from checkpointed import ROOT, committed, continued_from, descendants, options, running, saved
from harness import SCRIPTS, Jobs, until

from tests.support.report import OUT

pytestmark = pytest.mark.timeout(300)

SCRIPT, ARGS = "plain_ddp.py", ["--norm", "--steps", "100000"]
RESTART = ["--on-failure=restart"]


@contextlib.contextmanager
def beside(out: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A job that runs beside those of the test, until all its processes are killed."""
    out.mkdir()
    words = [sys.executable, "-m", "shared_core.cli.swiftrun", "--nproc-per-node=1", "--events=", *RESTART]
    full = os.environ | {OUT: str(out), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    with open(out / "said", "wb") as said:
        job = subprocess.Popen([*words, str(SCRIPTS / SCRIPT), *ARGS], env=full, cwd=out, stdout=said, stderr=said)
    try:
        yield job
    finally:
        for pid in reversed(descendants(job.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


@pytest.mark.nightly
def test_the_second_is_refused_and_continues_once_the_first_is_gone(jobs: Jobs, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    env = options(folder, 5)
    scratch = env | {"SWIFT_RECOVERY_CHECKPOINT_RESUME": "never"}

    def runs() -> list[str]:
        return list(dict.fromkeys(each.run for each in saved(folder)))

    with beside(tmp_path / "first", env):
        until(lambda: bool(committed(folder, 1)), "a checkpoint of the first", 90)
        with running(jobs, SCRIPT, ARGS, env=env, launcher_args=RESTART, nproc=1) as second:
            refused = second.end()
        (run,) = runs()
        assert refused.status == 1 and "RunInUse: another job (process " in refused.stderr, refused.tail()
        assert run in refused.stderr and "checkpoint.resume='never'" in refused.stderr and not continued_from(refused)
        newest = committed(folder, 1)[-1]
        until(lambda: committed(folder, 1)[-1] > newest, "the first to train on", 60)
        with running(jobs, SCRIPT, ARGS, env=scratch, launcher_args=RESTART, nproc=1) as other:
            other.until(lambda: len(runs()) == 2, 60)
            other.kill()
            other.end()
    begun = max(each.step for each in saved(folder) if each.run != run)
    with running(jobs, SCRIPT, ARGS, env=env, launcher_args=RESTART, nproc=1) as again:
        again.until(lambda: again.boundaries() > begun, 60)
        again.kill()
        assert continued_from(again.end()) == {begun}
