"""Copies of snapshots on a neighbour machine: what is whole is offered, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared_core.checkpoint.image import write_file
from shared_core.checkpoint.spool import Sealed, Spool
from shared_core.checkpoint.writer import CheckpointWriter
from shared_core.errors import CorruptFile, StorageFull
from shared_core.events import EventLog
from shared_core.launcher.mirror import MirrorServer
from shared_core.launcher.neighbour import NeighbourCopies, Sender
from shared_core.system import secret
from shared_core.system.wire import Link, accept, connect
from shared_core.worker.checkpoints.in_memory import find_in_memory

ROOT = Path(__file__).resolve().parents[2]
SIZE = 3 << 20
KEY = b"k" * 32


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def payload(step: int, rank: int) -> bytes:
    return bytes((step * 7 + rank * 13 + i) % 251 for i in range(251)) * (SIZE // 251)


class OneMachine:
    """An agent's part: what takes copies, and what sends them."""

    def __init__(self, folder: Path, place: int) -> None:
        self.copies = NeighbourCopies(folder / "checkpoints")
        self.server = MirrorServer(folder / "mirror", self.copies.serve, key=KEY)
        self.name = f"127.0.0.1:{self.server.port}#{place}"
        self.sender = Sender(self.copies, lambda: self.name, KEY)
        self.place, self.spool = place, Spool(folder / "checkpoints")

    def snapshot(self, step: int, attempt: int = 0) -> None:
        """This machine has two of four ranks."""
        spool = Spool(self.spool.folder, attempt)
        ranks = (2 * self.place, 2 * self.place + 1)
        for rank in ranks:
            write_file(spool.folder_of(step) / f"rank{rank}", payload(step, rank))
            spool.seal(Sealed(step, rank, 4, ranks, (f"rank{rank}",), {"run": "r", "session": f"s{attempt}"}))

    def close(self) -> None:
        self.sender.close()
        self.server.close()
        self.copies.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[OneMachine]]:
    made = [OneMachine(tmp_path / str(place), place) for place in range(2)]
    for each in made:
        each.sender.machines = tuple(other.name for other in made)
    yield made
    for each in made:
        each.close()


def steps(machine: OneMachine, rank: int) -> list[int]:
    return [step for step, _, _ in find_in_memory([machine.name], rank, 4, KEY)]


def let_go(machine: OneMachine) -> None:
    """The writer lets old snapshots go."""
    CheckpointWriter(machine.spool, EventLog(None)).work()


def test_each_has_the_other_s_newest(pair: list[OneMachine]) -> None:
    for each in pair:
        each.snapshot(10)
    until(lambda: all(each.copies.kept == (0, 10) for each in pair))
    pair[0].close()
    [(step, meta, read)] = find_in_memory([None, pair[1].name], 0, 4, KEY)
    assert step == 10 and meta["session"] == "s0"
    assert read("rank0") == payload(10, 0) and read("rank1") == payload(10, 1) and read("rank3") == payload(10, 3)
    with pytest.raises(CorruptFile, match="no machine has it"):
        read("replicated0.safetensors")
    assert not find_in_memory([pair[1].name], 0, 2, KEY), "of another number of workers"


def test_an_older_one_stays_until_the_newer_one_is_there(pair: list[OneMachine]) -> None:
    """The machine in the second place has the newer snapshot late: until then whichever fails, there is the older
    one."""
    first, second = pair
    for each in pair:
        each.snapshot(10)
    until(lambda: all(each.copies.kept == (0, 10) for each in pair))
    first.snapshot(20)
    until(lambda: second.copies.begun == (0, 20))
    let_go(first)
    assert first.spool.steps() == [10, 20], "the other's copy is of step 10"
    assert steps(first, 2) == [10], "what the second's ranks could continue from, were it failed"
    assert steps(second, 0) == [10], "and the first's: the second has no step 20 of its own"
    second.snapshot(20)
    until(lambda: all(each.copies.kept == (0, 20) for each in pair))
    for each in pair:
        until(lambda each=each: each.spool.held() == {(0, 20)})
        let_go(each)
        assert each.spool.steps() == [20] and Spool(each.spool.folder / "kept").steps() == [20]
    assert steps(first, 2) == steps(second, 0) == [20]


def test_the_last_machine_keeps_what_belongs_to_its_copy(pair: list[OneMachine]) -> None:
    """The other one fails, and nobody has its place yet: the copy is of use with this machine's own snapshot only."""
    first, second = pair
    for each in pair:
        each.snapshot(10)
    until(lambda: all(each.copies.kept == (0, 10) for each in pair))
    first.sender.machines = (first.name, None)
    second.close()
    first.snapshot(20)
    until(lambda: first.copies._holds["own"] == set())
    let_go(first)
    assert first.spool.steps() == [10, 20] and steps(first, 2) == [10]


def test_a_copy_that_is_older_than_the_kept_one_is_refused(pair: list[OneMachine]) -> None:
    """It is of a machine that the others have continued without."""
    pair[0].snapshot(20)
    until(lambda: pair[1].copies.kept == (0, 20))
    header = b'{"attempt": 0, "step": 10, "files": {}, "notes": {}}'
    with connect(pair[1].name, KEY) as link:
        link.send(b"P", data=[header])
        assert link.answer() == b"n"
    assert pair[1].copies.kept == pair[1].copies.begun == (0, 20)


def test_one_of_a_later_attempt_takes_its_place(pair: list[OneMachine]) -> None:
    for attempt, step in ((0, 30), (1, 20)):
        for each in pair:
            each.snapshot(step, attempt)
        until(lambda key=(attempt, step): all(each.copies.kept == key for each in pair))
    kept = Spool(pair[0].spool.folder / "kept")
    until(lambda: [one.attempt for one in kept.all_attempts() if one.steps()] == [1])  # the older one goes after it


def test_a_sender_killed_in_the_middle_leaves_nothing(pair: list[OneMachine], tmp_path: Path) -> None:
    """Its first file has arrived whole; what was there before stays."""
    first, second = pair
    first.snapshot(10)
    until(lambda: second.copies.kept == (0, 10))
    first.close()
    other = tmp_path / "other"
    program = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
from test_neighbour import OneMachine
from shared_core.launcher import neighbour
one = OneMachine(Path({str(other)!r}), 0)
one.snapshot(20)
send, sent = neighbour.send_file, []
def until_half(link, path, size):
    if sent:
        link.send(b"D", data=[path.read_bytes()[: 1 << 20]])
        os.kill(os.getpid(), signal.SIGKILL)
    sent.append(path)
    return send(link, path, size)
neighbour.send_file = until_half
one.sender.machines = (one.name, {second.name!r})
signal.pause()
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=30, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL and second.copies.begun == (0, 20)
    kept = Spool(second.spool.folder / "kept")
    until(lambda: not (kept.folder / "coming").exists())
    assert steps(second, 0) == [10] and kept.steps() == [10] and second.copies.kept == (0, 10)


def test_without_room_it_is_skipped(
    pair: list[OneMachine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The machine's memory is as full as it says: training continues, the other's copy is kept."""

    check_room = Spool.check_room

    def full(spool: Spool, nbytes: int) -> None:
        if spool.folder.parent == pair[1].spool.folder:
            raise StorageFull(f"{nbytes} bytes do not fit")
        check_room(spool, nbytes)

    monkeypatch.setattr(Spool, "check_room", full)
    for each in pair:
        each.snapshot(10)
    until(lambda: pair[0].copies.kept == (0, 10))
    until(lambda: pair[0].sender._sent is not None)
    assert pair[1].copies.kept is None and steps(pair[1], 0) == [] and steps(pair[0], 2) == [10]
    assert "has no room in memory" in capfd.readouterr().err
    monkeypatch.undo()
    for each in pair:
        each.snapshot(20)
    until(lambda: all(each.copies.kept == (0, 20) for each in pair))


def test_a_damaged_copy_is_refused(pair: list[OneMachine]) -> None:
    pair[0].snapshot(10)
    until(lambda: pair[1].copies.kept == (0, 10))
    pair[0].close()
    with open(Spool(pair[1].spool.folder / "kept").folder_of(10) / "rank0", "r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    [(_, _, read)] = find_in_memory([pair[1].name], 0, 4, KEY)
    with pytest.raises(CorruptFile, match="its checksum is wrong"):
        read("rank0")
    assert read("rank1") == payload(10, 1)


def test_what_was_let_go_while_it_was_sent_is_not_kept(pair: list[OneMachine], tmp_path: Path) -> None:
    """Its memory is used again at once, so what arrived may be of two steps; its checksums are right."""
    other = OneMachine(tmp_path / "other", 0)
    other.snapshot(10)
    rank0 = other.spool.folder_of(10) / "rank0"
    with open(rank0, "r+b") as file:
        file.truncate(64 << 20)  # more than sockets hold
    listener = socket.create_server(("127.0.0.1", 0))
    other.sender.machines = (other.name, f"127.0.0.1:{listener.getsockname()[1]}#x")
    with listener, listener.accept()[0] as sock:
        link = accept(sock, KEY)
        until(lambda: sock.recv(1 << 16, socket.MSG_PEEK))
        link.send(b"g")
        while len(got := sock.recv(1 << 20)) and not got.endswith(b"\0" * 1000):
            pass
        other.spool.drop(10)
        last = b""
        while more := sock.recv(1 << 20):
            last = more
    assert last[-51:-50] != b".", "the kind of the last frame, before the MAC of its head"
    other.close()


def test_notes_of_others_lead_nowhere_else(pair: list[OneMachine], tmp_path: Path) -> None:
    """Notes that call files of a copy what none of ours is called are none: nothing is read, or offered."""
    (tmp_path / "secret").write_text("secret")
    away = os.path.relpath(tmp_path / "secret", pair[0].spool.folder / "kept/attempt0/step-0000000001")
    Spool(tmp_path / "notes").folder_of(1)
    Spool(tmp_path / "notes").seal(Sealed(1, 0, 4, (0,), (away,)))
    note = (tmp_path / "notes/attempt0/step-0000000001/rank0.sealed").read_text()
    header = json.dumps({"attempt": 0, "step": 1, "files": {}, "notes": {"rank0.sealed": note}}).encode()
    with connect(pair[0].name, KEY) as link, pytest.raises(ConnectionError):
        link.send(b"P", data=[header])
        link.answer()
    assert find_in_memory([pair[0].name], 0, 4, KEY) == []


def test_machines_that_do_not_answer_are_passed_over(pair: list[OneMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    """One has gone, another is frozen: its kernel takes connections."""
    monkeypatch.setattr(secret, "PROOF_S", 0.5)
    pair[0].snapshot(10)
    with socket.create_server(("127.0.0.1", 0)) as frozen, socket.create_server(("127.0.0.1", 0)) as gone:
        places = [each.getsockname()[1] for each in (frozen, gone)]
        gone.close()
        machines = [*(f"127.0.0.1:{port}#x" for port in places), None, pair[0].name]
        assert [step for step, _, _ in find_in_memory(machines, 1, 4, KEY)] == [10]
        assert find_in_memory(machines[:3], 1, 4, KEY) == []


def test_nothing_is_left_at_the_end(pair: list[OneMachine]) -> None:
    """Also where a copy was just coming: the folder is about to be removed."""
    first, second = pair
    port = second.server.port
    header = b'{"attempt": 0, "step": 10, "files": {"rank0": 1000000}, "notes": {}}'
    with connect(second.name, KEY) as coming:
        coming.send(b"P", data=[header])
        assert coming.answer() == b"g"
        for each in pair:
            each.close()
            assert not each.sender._thread.is_alive()
        shutil.rmtree(second.spool.folder)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 5.0)
        with pytest.raises(OSError):
            coming.answer()
    assert not second.spool.folder.exists()
    late, ours = socket.socketpair()
    with late, ours, ThreadPoolExecutor(1) as own_thread:  # which gets a low priority
        with pytest.raises(ConnectionError, match="the job ends"):
            own_thread.submit(second.copies.serve, Link(late, None, serves=True), b"P", header).result()
    assert not second.spool.folder.exists()
