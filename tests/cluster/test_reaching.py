"""Where a store of torch should be, something listens and says nothing."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from util import Job, start_command, tagged

from shared_core.launcher.ports import StoreConnection, serve_store
from shared_core.launcher.rendezvous_store import C10D, Register
from tests.support.ports import free_ports

#: Longest wait for the rendezvous that the tests ask for, in seconds, and the most that start-up and end take.
JOIN_S, REST_S = 3, 45


@pytest.fixture
def silent() -> Iterator[int]:
    """Port of a service that lets everybody connect and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _join(folder: Path, port: int, join_s: int = JOIN_S) -> Job:
    (folder / "job.py").write_text("")
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one"]
    words += ["--rdzv-conf", f"join_timeout={join_s}", "--standbys", "0", "--events", "", "job.py"]
    return start_command(folder, [sys.executable, "-m", "shared_core.cli.swiftrun", *words])


def test_the_wait_for_a_silent_rendezvous_ends_in_time(silent: int, tmp_path: Path) -> None:
    job = _join(tmp_path, silent).finish(JOIN_S + REST_S)
    assert job.code == 1
    last = job.stderr.splitlines()[-1]
    assert last.startswith(f"swiftrun: no rendezvous at 127.0.0.1:{silent} (c10d) in {JOIN_S} s: something listens")
    assert "another --rdzv-endpoint" in last and "Traceback" not in job.stderr, job.stderr
    assert tagged(job.tag) == []


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_silent_rendezvous(number: signal.Signals, silent: int, tmp_path: Path) -> None:
    job = _join(tmp_path, silent, 500)
    assert job.process.stderr is not None
    line = job.process.stderr.readline()
    assert "waits for the rendezvous" in line, line
    job.process.send_signal(number)
    job.finish(REST_S)
    assert job.code == 1 and "Traceback" not in job.stderr, job.stderr
    assert f"received {number.name}" in job.stderr


@pytest.mark.nightly
def test_the_wait_for_a_silent_store_of_the_job_ends_in_time(silent: int, tmp_path: Path) -> None:
    """The machines have met; the one that comes now is sent to a store that does not answer."""
    (port,) = free_ports(1)
    register = Register(C10D, [("127.0.0.1", port)], "one", {}, 5.0)
    register.open()
    assert register.hosts
    member = {"name": f"127.0.0.1:{silent}#here.x", "nproc": 1, "nnodes": "2:2", "host": True}
    met = {"phase": "running", "round": 0, "attempt": 0, "run": "a", "members": [member]}
    register.change(lambda _: met | {"store": ["127.0.0.1", port]})
    job = _join(tmp_path, port).finish(JOIN_S + REST_S)
    assert job.code == 1 and "Traceback" not in job.stderr, job.stderr
    whom = f"the machine 127.0.0.1:{silent}#here.x, which has the job's store, to answer"
    assert whom in job.stderr.splitlines()[-1], job.stderr


def test_a_connection_is_there_once_the_store_is(silent: int) -> None:
    waits = StoreConnection("127.0.0.1", silent, 1.0)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="does not answer as a store"):
        waits.client(0.2)
    assert time.monotonic() - begun < 5
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = serve_store("127.0.0.1", listener)
    client = StoreConnection("127.0.0.1", port, 5.0).client(30.0)
    server.set("key", "value")
    assert client.get("key") == b"value"
