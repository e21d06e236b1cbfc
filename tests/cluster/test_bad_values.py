"""Values that cannot be: one line for people, status 2 or 1, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from util import start, start_command

from shared_core.cli.job_options import build_config, check_folders
from shared_core.cli.swiftrun import parse_args
from shared_core.errors import ConfigError
from shared_core.handover import srun_tasks
from shared_core.watch.server import DashboardServer

LONG = "x" * 300


@pytest.mark.parametrize("value", ["1.5", "\x1b[2K"])
def test_a_variable_of_the_scheduler_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", value)
    with pytest.raises(ConfigError, match="the environment variable SLURM_STEP_NUM_TASKS must be a whole number"):
        srun_tasks()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "")
    assert srun_tasks() == 1


@pytest.mark.parametrize("run_id", [LONG, "../x", "a\n[swift] done"])
def test_a_name_of_a_job_that_no_folder_can_have(run_id: str) -> None:
    with pytest.raises(ConfigError, match="folders are named after it"):
        parse_args(["--rdzv-id", run_id, "x.py"])


@pytest.mark.parametrize("host", [LONG, "\udcff"])
def test_a_name_that_no_machine_can_have(host: str) -> None:
    for words in (["--nnodes", "2", "--rdzv-endpoint", f"{host}:29400"], ["--local-addr", host]):
        with pytest.raises(ConfigError, match="no name or address of a machine"):
            parse_args([*words, "x.py"])
    with pytest.raises(ConfigError, match="no name or address of a machine"):
        DashboardServer("--metrics-port", host, 0)


@pytest.mark.parametrize("option", ["--checkpoint-dir", "--resume-from"])
def test_a_folder_whose_name_is_too_long(option: str, tmp_path: Path) -> None:
    args = parse_args([option, str(tmp_path / LONG), "x.py"])
    with pytest.raises(ConfigError, match="is too long"):
        check_folders(args, build_config(args))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount small devices")
def test_no_room_in_memory_and_on_disk_at_the_start(tmp_path: Path) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    mounts = f'mount -t tmpfs -o size=64k none /dev/shm && mount -t tmpfs -o size=64k none {temporary} && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", mounts, "sh", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    (tmp_path / "job.py").write_text("")
    command = ["unshare", "-m", "sh", "-c", mounts, "sh", sys.executable, "-m", "shared_core.cli.swiftrun"]
    words = ["--standbys", "0", "--nproc-per-node", "2", "job.py"]
    job = start_command(tmp_path, [*command, *words], {"TMPDIR": str(temporary)}).finish()
    assert job.code == 1 and job.stderr.count("\n") == 1, job.stderr
    assert job.stderr.startswith("swiftrun: OutOfResources: ") and "set TMPDIR" in job.stderr, job.stderr


#: Rank 1 fails, and its replacement tells the test where in its life it is.
INTERRUPTED = """
import os, signal
from shared_core.protocol import worker_env
me = worker_env.env()
if me.rank == 1 and me.incarnation == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if me.rank == 1:
    print("the replacement is here", flush=True)
signal.pause()
"""


@pytest.mark.nightly
def test_ctrl_c_during_a_recovery_prints_no_traceback(tmp_path: Path) -> None:
    job = start(tmp_path, INTERRUPTED, options=["--standbys", "1", "--shutdown-timeout", "2"])
    assert job.process.stdout is not None and "is here" in job.process.stdout.readline()
    os.kill(job.process.pid, signal.SIGINT)
    job.finish(40)
    job.check_nothing_left()
    assert job.code == 1 and "received SIGINT" in job.stderr
    assert "Traceback" not in job.stderr and "KeyboardInterrupt" not in job.stderr, job.stderr
