"""Frames between machines, with somebody on the way who changes, repeats, moves or holds them back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeping import HEAD, KEY, Site

from shared_core.system import wire
from shared_core.system.wire import Altered, Link

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


def flip(raw: bytes, at: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1
    return bytes(changed)
