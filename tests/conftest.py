"""Checks after every test that it left nothing running, listening or lying about."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from night import A_NIGHT, drawn

from tests.support.ports import free_ports
from tests.support.processes import MARK, describe, kill_marked, wait_gone

if TYPE_CHECKING:
    from harness import Jobs

HERE = Path(__file__).parent
SHM = Path("/dev/shm")
#: Seconds that what a test started has to be gone in.
GRACE_S = 10.0
#: The same for folders of jobs: a launcher that is killed in another run leaves its folder until that run's job ends.
FOLDER_GRACE_S = 60.0
#: Threads that libraries start once and keep for the life of the process.
LASTING_THREADS = ("pytest_timeout", "asyncio", "tqdm", "IPythonHistory", "ThreadPoolExecutor")

#: Unbuffered, a line and its end are two writes, and what another worker prints may come between them.
os.environ.pop("PYTHONUNBUFFERED", None)
#: Jobs find the tools of the tests from any folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than half a minute")
    config.addinivalue_line("markers", "gpu: needs a GPU, on which all workers are")


def pytest_addoption(parser: pytest.Parser) -> None:
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.addoption("--night", type=int, default=today, help="draws the nightly cases of large tests; 0 for all")


def pytest_report_header(config: pytest.Config) -> str:
    return f"nightly cases of large tests: --night {config.getoption('night')}, {A_NIGHT} each (0: all)"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Draw from the nightly cases, if any are left."""
    yield
    if night := config.getoption("night"):
        kept = drawn(items, night)
        config.hook.pytest_deselected(items=[item for item in items if item not in {*kept}])
        items[:] = kept


@pytest.fixture(autouse=True)
def leaves_nothing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Every process that a test starts inherits a mark; after it none may live, and no thread, socket or file stay."""
    request.getfixturevalue("tmp_path_factory").getbasetemp()  # before the folder for temporary files changes
    mark = uuid.uuid4().hex
    tmp = Path(tempfile.mkdtemp(prefix="st-"))  # short: some libraries put sockets there
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(tmp))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = dict(os.environ)
    threads, listening = set(threading.enumerate()), _listening()
    shared = set(SHM.glob("swift*"))
    yield
    left = [f"process {text}" for text in map(describe, wait_gone(mark, GRACE_S))]
    kill_marked(mark)
    left += [f"thread {thread.name}" for thread in _leaked_threads(threads)]
    left += [f"listening socket {inode}" for inode in sorted(_listening() - listening)]
    left += [f"file {path}" for path in _abandoned(shared)]
    left += [f"file {path}" for path in sorted(tmp.glob("swift*"))]
    shutil.rmtree(tmp, ignore_errors=True)
    for name in os.environ.keys() - before.keys():  # such as the seed that Lightning keeps there, which jobs would read
        del os.environ[name]
    os.environ.update(before)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _leaked_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    deadline = time.monotonic() + GRACE_S
    new = [
        thread
        for thread in threading.enumerate()
        if thread not in before and not thread.name.startswith(LASTING_THREADS)
    ]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in new if thread.is_alive()]


def _listening() -> set[str]:
    """Inodes of the listening sockets of this process."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                inodes.add(columns[9])
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            own.add(target[8:-1])
    return inodes & own


def _abandoned(before: set[Path]) -> list[Path]:
    """New private folders of jobs that nobody uses; another run's may be in use, or gone, a moment later."""
    deadline = time.monotonic() + FOLDER_GRACE_S
    while left := [path for path in sorted(set(SHM.glob("swift*")) - before) if not _in_use(path)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def _in_use(path: Path) -> bool:
    """Whether a living process uses a file below ``path``: then it belongs to another run on this machine."""
    needle = str(path)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if needle in (entry / "maps").read_text():
                return True
            if any(os.readlink(fd).startswith(needle) for fd in (entry / "fd").iterdir()):
                return True
            if needle.encode() in (entry / "environ").read_bytes():
                return True
        except OSError:
            continue
    return False


@pytest.fixture
def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    return free_ports()[0]


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    """Runs jobs; reference runs are kept for the session."""
    from harness import session_jobs

    with session_jobs() as running:
        yield running


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; skipped where mounting is not allowed."""
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here: /dev/full and a limit are tested instead")
    yield root
    subprocess.run(["umount", "--lazy", str(root)], check=True)  # a test may have files open there
