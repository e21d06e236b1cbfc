"""Frames between machines, with somebody on the way who changes, repeats, moves or holds them back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from keeping import HEAD, KEY, Site

from shared_core.errors import CorruptFile
from shared_core.launcher.mirror import fetch
from shared_core.system import wire
from shared_core.system.wire import Altered, Link
from shared_core.worker.checkpoints.in_memory import find_in_memory
from shared_core.worker.state.publications import Mirror

MAC = 32


@pytest.fixture(autouse=True)
def says_it_again() -> None:
    wire._tell.cache_clear()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def written(*frames: tuple[bytes, str, bytes], key: bytes | None = KEY, serves: bool = False) -> list[bytes]:
    """What goes over the wire for these frames, sent one after the other."""
    ours, theirs = socket.socketpair()
    with Link(ours, key, serves=serves) as link, theirs:
        found = []
        for kind, name, data in frames:
            link.send(kind, 3, 4, name, [data])
            found.append(theirs.recv(1 << 20))
        return found


def read(raw: bytes, count: int, key: bytes | None = KEY) -> list[tuple[bytes, str, bytes]]:
    """What the other side makes of it, which is all that comes."""
    ours, theirs = socket.socketpair()
    with Link(ours, key, serves=True) as link, theirs:
        link.settimeout(5.0)
        theirs.sendall(raw)
        theirs.shutdown(socket.SHUT_WR)
        return [(frame.kind, frame.name, frame.data) for frame in (link.receive() for _ in range(count))]


@pytest.mark.parametrize("key", [KEY, None])
def test_frames_arrive_as_they_were_sent(key: bytes | None) -> None:
    sent = [(b"w", "boundary.1", b"state"), (b"e", "", b""), (b"a", "", b"x" * 70_000), (b"a", "n", b"")]
    raw = written(*sent, key=key)
    assert read(b"".join(raw), len(sent), key) == sent
    assert [len(each) - HEAD.size - len(name) - len(data) for each, (_, name, data) in zip(raw, sent, strict=True)] == (
        [2 * MAC, MAC, 2 * MAC, 2 * MAC] if key else [0] * 4
    )


def test_a_frame_with_any_byte_changed_is_refused() -> None:
    """Where it is one of the head, nothing after the head's own MAC is read: its lengths are not believed."""
    first, second = written((b"s", "", b""), (b"w", "boundary.1", b"state"))
    head = HEAD.size + MAC
    for at in range(len(second)):
        with pytest.raises(Altered):
            read(first + flip(second[:head] if at < head else second, at), 2)


def test_a_frame_out_of_its_place_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = written((b"w", "boundary.1", b"one"), (b"w", "boundary.2", b"two"), (b"s", "", b""))
    back, _ = written((b"w", "boundary.1", b"one"), (b"s", "", b""), serves=True)
    other, _ = written((b"w", "boundary.1", b"one"), (b"s", "", b""), key=b"o" * 32)
    bare, _ = written((b"w", "boundary.1", b"one"), (b"s", "", b""), key=None)
    cases = {"repeated": [one, one], "left out": [one, three], "moved": [two, one], "sent back": [back]}
    cases |= {"of another connection": [other], "without a MAC": [bare, bytes(100)]}
    cases["another's end"] = [one[: HEAD.size + MAC], two[HEAD.size + MAC :]]
    for what, raw in cases.items():
        with pytest.raises(Altered):
            read(b"".join(raw), len(raw))
            pytest.fail(what)
    assert capsys.readouterr().err == "", "who is not on a network has no address"


def test_what_is_cut_off_is_not_used() -> None:
    one, two = written((b"w", "boundary.1", b"one"), (b"w", "boundary.2", b"two"))
    for length in range(len(two)):
        with pytest.raises(ConnectionError, match="has gone"):
            read(one + two[:length], 2)


#: Given the number of a frame and its bytes: what goes on in its place.
Change = Callable[[int, bytes], bytes]


class Between:
    """Somebody on the way to a machine, who lets two prove what they know and then changes what goes one way.

    Attributes:
        name: of the machine, by this way.
    """

    def __init__(self, site: Site, change: Change, *, answers: bool) -> None:
        self._site, self._change, self._answers = site, change, answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.name = f"127.0.0.1:{self._listener.getsockname()[1]}#x"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, self._site.dial() as server:
                    client.sendall(server.recv(40, socket.MSG_WAITALL))
                    server.sendall(client.recv(64, socket.MSG_WAITALL))
                    client.sendall(server.recv(32, socket.MSG_WAITALL))
                    ways = [(client, server), (server, client)]
                    threads = [
                        threading.Thread(target=self._pass, args=(*way, i == self._answers))
                        for i, way in enumerate(ways)
                    ]
                    for each in threads:
                        each.start()
                    for each in threads:
                        each.join()

    def _pass(self, source: socket.socket, to: socket.socket, changes: bool) -> None:
        number = 0
        with suppress(OSError):
            while head := source.recv(HEAD.size + MAC, socket.MSG_WAITALL):
                _, _, _, name, data = HEAD.unpack(head[: HEAD.size])
                body = source.recv(name + data + MAC, socket.MSG_WAITALL) if name + data else b""
                to.sendall(self._change(number, head + body) if changes else head + body)
                number += 1
        for each in (source, to):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def flip(raw: bytes, at: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1
    return bytes(changed)


#: The frames are: begin, write, end, ask whether all is there.
CHANGES: dict[str, Change] = {
    "data": lambda number, raw: flip(raw, -MAC - 1) if number == 1 else raw,
    "rank": lambda number, raw: flip(raw, 1) if number == 1 else raw,
    "repeated": lambda number, raw: raw + raw if number == 1 else raw,
    "left out": lambda number, raw: b"" if number == 1 else raw,
    "cut": lambda number, raw: raw[:-1] if number == 1 else raw,
    "invented": lambda number, raw: HEAD.pack(b"e", 1, 0, 0, 0) + bytes(MAC) if number == 1 else raw,
}


@pytest.mark.parametrize("what", CHANGES)
def test_copies_that_are_changed_on_their_way_are_not_kept(
    what: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was kept before stays. The sender is told, and the machine that finds it out says so once."""
    monkeypatch.setattr("shared_core.worker.state.publications._TROUBLE_S", 0.0)
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "boundary.8").write_bytes(b"NEWER")
    with ExitStack() as stack:
        between = Between(site, CHANGES[what], answers=False)
        stack.callback(between.close)
        mirror = Mirror(1, 0, 0, tmp_path / "newer", KEY)
        stack.callback(mirror._drop)
        mirror.follow((None, between.name))
        mirror.sync()  # waits until all is sent
        mirror._trouble.join(10.0)
        site.check_copies()
        said = capsys.readouterr().err
        assert "rank 1: no copy of its state on another machine" in said
        assert said.count("somebody on the way from 127.0.0.1 changes what is sent") == 1
    site.check()


@pytest.mark.parametrize("number", [0, 1])
def test_answers_that_are_changed_on_their_way_are_not_used(
    number: int, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Publications: a file, then the end. A list of snapshots is one frame; the second request is for a file."""
    (tmp_path / "job2").mkdir()
    (tmp_path / "job2" / "secret").write_bytes(KEY)
    with ExitStack() as stack:
        between = Between(site, lambda at, raw: flip(raw, -1) if at == number else raw, answers=True)
        stack.callback(between.close)
        assert fetch([between.name], [1], 0, tmp_path / "job2") == {1: 0}
        assert not (tmp_path / "job2" / "rank1").exists()
        assert "somebody on the way" in capsys.readouterr().err
        if number == 0:
            assert find_in_memory([between.name], 0, 2, KEY) == []
        else:
            [(step, _, get)] = find_in_memory([between.name], 0, 2, KEY)
            assert step == 40
            with pytest.raises(CorruptFile, match="changed, repeated, left out or moved"):
                get("model")
    site.check()
