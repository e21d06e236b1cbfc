"""The private folders of jobs: nobody else's, and nobody takes them away while the job lives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from shared_core.errors import ConfigError
from shared_core.system.jobdir import TRAINS, JobDir, log_folder, own

ROOT = Path(__file__).resolve().parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")
#: A job that logs, and lives until its standard input ends.
LIVE = """
import sys
from shared_core.system.jobdir import JobDir, log_folder, own
job = JobDir(sys.argv[1])
segment = log_folder(sys.argv[1], job.path) / "rank0" / "attempt0" / "00000000.log"
segment.parent.mkdir(parents=True)
segment.write_bytes(b"x")
print(job.path, flush=True)
sys.stdin.read()
print(segment.exists() and job.path.exists(), flush=True)
job.remove()
"""


def _live(logs: Path, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", LIVE, str(logs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_no_folder_is_removed_under_its_owner() -> None:
    """Jobs that start and end at once sweep where others are between making a folder and locking it."""
    started = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            bad = 1
            try:
                bad = 0
                for _ in range(300):
                    job = JobDir()
                    bad += not job.path.exists()
                    job.remove()
            finally:
                os._exit(min(bad, 100))
        started.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started] == [0] * 6


def test_folders_are_private_and_go_with_the_job(tmp_path: Path) -> None:
    job = JobDir(str(tmp_path / "shared"))
    logs = log_folder(tmp_path / "shared", job.path)
    assert [folder.stat().st_mode & 0o777 for folder in (job.path, logs)] == [0o700] * 2
    (logs / "rank0").mkdir()
    for name in ("rank0", f"{TRAINS}0"):
        (job.path / name).touch()
    job.clear()
    assert logs.exists() and not (logs / "rank0").exists()
    assert (job.path / f"{TRAINS}0").exists() and not (job.path / "rank0").exists()
    job.remove()
    assert not job.path.exists() and not logs.exists()


def test_what_a_killed_job_has_left_is_swept(tmp_path: Path) -> None:
    live = _live(tmp_path)
    assert live.stdout is not None
    left = Path(live.stdout.readline().strip())
    assert log_folder(tmp_path, left).exists()
    live.send_signal(signal.SIGKILL)
    live.communicate()
    JobDir(str(tmp_path)).remove()
    assert not left.exists() and list(tmp_path.iterdir()) == []


@as_root
def test_logs_of_a_live_job_in_another_container_stay(tmp_path: Path) -> None:
    """Its folder in memory cannot be seen from here."""
    apart = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    live = _live(tmp_path, *apart)
    assert live.stdout is not None
    path = live.stdout.readline().strip()
    assert path and not Path(path).exists()
    JobDir(str(tmp_path)).remove()
    out, _ = live.communicate("", timeout=30)
    assert out.strip() == "True"


@as_root
def test_a_folder_of_another_user_is_neither_used_nor_swept(tmp_path: Path) -> None:
    foreign = tmp_path / "swift-log-swift_foreign"
    foreign.mkdir()
    (foreign / "lock").touch()
    os.chown(foreign, 10002, 10002)
    link = tmp_path / "swift-log-swift_link"
    link.symlink_to(foreign)
    for folder in (foreign, link):
        with pytest.raises(ConfigError, match="is not a folder of this user"):
            own(folder)
    JobDir(str(tmp_path)).remove()
    assert (foreign / "lock").exists() and link.is_symlink()


def test_a_folder_that_others_can_enter_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert not own(folder) and folder.stat().st_mode & 0o777 == 0o700


#: A launcher that has a caretaker for the folders that it is given, and lives until it is killed.
CARED_FOR = """
import sys
from shared_core.system.caretaker import Caretaker
keeper = Caretaker(sys.argv[2:])
if sys.argv[1] == "close":
    keeper.close()
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("way", [pytest.param("keep", marks=pytest.mark.nightly), "close"])
def test_a_killed_launcher_leaves_no_folder(way: str, tmp_path: Path) -> None:
    """Its caretaker removes them, also while somebody tells that one to end. Without it they stay."""
    folders = [tmp_path / "memory", tmp_path / "disk"]
    for each in folders:
        (each / "rank0").mkdir(parents=True)
    words = [sys.executable, "-c", CARED_FOR, way, *map(str, folders)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    live = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert live.stdout is not None and live.stdout.readline() == "here\n"
    keepers = psutil.Process(live.pid).children()
    assert len(keepers) == (way == "keep")
    for keeper in keepers:
        while keeper.name() != "swift caretaker":  # the test's time-out is the limit
            os.sched_yield()
    live.kill()
    for keeper in keepers:
        with suppress(psutil.NoSuchProcess):
            keeper.terminate()
    live.communicate()
    psutil.wait_procs(keepers, timeout=30)
    assert [each.exists() for each in folders] == [way == "close"] * 2


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder of a job that was killed, in a folder of temporary files."""
    live = subprocess.Popen(
        [sys.executable, "-c", LIVE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert live.stdout is not None
    path = Path(live.stdout.readline().strip())
    live.kill()
    live.communicate()
    return log_folder(tmp_path, path)


def swept(folder: Path) -> bool:
    """Whether a job that starts now removes it."""
    JobDir(str(folder.parent)).remove()
    return not folder.exists()


def test_the_sweep_removes_only_what_this_product_made(left: Path) -> None:
    """A folder of the user's with such a name and a lock, one of ours that was renamed, and a copy of it all stay."""
    own = left.with_name(f"{left.name}_ios_project")
    own.mkdir()
    (own / "lock").touch()
    (own / "thesis.tex").write_text("three years")
    copy = left.with_name(f"{left.name}_copy")
    shutil.copytree(left, copy)
    assert swept(left) and copy.exists() and (own / "thesis.tex").exists()


def test_a_renamed_folder_stays(left: Path) -> None:
    kept = left.rename(left.with_name(f"{left.name}_kept"))
    assert not swept(kept)


def test_the_sweep_follows_no_link(left: Path) -> None:
    away = left.rename(left.parent / "away")
    left.symlink_to(away)
    assert not swept(left) and left.is_symlink() and (away / "lock").exists()
