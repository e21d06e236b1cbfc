"""Storage is down when the job begins: training continues, and checkpoints are written once it is up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from checkpointed import options, running
from harness import Jobs

from shared_core.checkpoint import lineage

sys.path.append(str(Path(__file__).parent / "checkpoint"))
from ftp_server import FtpServer  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.mark.nightly
def test_a_job_trains_on_and_writes_once_the_server_is_up(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    server = FtpServer(tmp_path / "served")
    env = options(tmp_path, 5) | {"SWIFT_RECOVERY_CHECKPOINT_DIR": server.url}
    try:
        args = ["--norm", "--steps", "100000"]
        with running(jobs, "plain_ddp.py", args, env=env, launcher_args=["--on-failure=restart"], nproc=1) as job:
            says = lambda text: text in (job.out / "stderr.txt").read_text()  # noqa: E731
            job.until(lambda: job.boundaries() > 50 and says("cannot be reached"), 120)
            server.up()
            job.until(lambda: says("checkpoints can be written again"), 120)
            job.kill()
            result = job.end()
    finally:
        server.close()
    assert lineage.contents(tmp_path / "served" / "storage").saved
    said = [line for line in result.stderr.splitlines() if server.url in line and "events" not in line]
    assert sum("cannot be listed" in line for line in said) == 1, result.tail()
    assert sum("cannot be reached" in line for line in said) == 1, result.tail()
    assert result.stderr.count("checkpoints can be written again") == 1, result.tail()
