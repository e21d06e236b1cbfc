"""The parts that jobs on several machines are made of, without processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_core.errors import ConfigError
from shared_core.launcher.lease import FENCE, FIRST_S, Lease, Observations
from shared_core.launcher.ledger import Ledger
from shared_core.launcher.mirror import MirrorServer
from shared_core.launcher.rendezvous_store import is_here, parse_endpoints
from shared_core.protocol.generation import Cause, CauseKind, Entry, EntryKind, survivor_group_key
from shared_core.protocol.mirroring import keeper
from shared_core.protocol.resizing import reassign
from shared_core.protocol.rounds import admit_key
from shared_core.protocol.worker_env import Resized
from shared_core.system.wire import place_of
from shared_core.transport.store import MemoryStore

KEY = b"k" * 32


def test_a_counter_that_stands_still_is_late() -> None:
    seen = Observations(2.0)
    assert seen.look(100.0, {"a": 1, "b": 1, "c": 0}) == set()
    assert seen.look(101.0, {"a": 2, "b": 1, "c": 0}) == set()
    assert seen.look(102.0, {"a": 3, "b": 1, "c": 0}) == set()
    assert seen.look(102.1, {"a": 4, "b": 1, "c": 0}) == {"b"}
    now = 102.1
    while now + 0.5 < 100.0 + FIRST_S:  # one that never renewed has more time: it may still be starting
        now += 0.5
        assert "c" not in seen.look(now, {"a": int(now * 10), "c": 0})
    assert "c" in seen.look(now + 0.6, {"a": 0, "c": 0})


def test_an_observer_that_stood_still_itself_starts_over() -> None:
    seen = Observations(2.0)
    seen.look(100.0, {"a": 1})
    assert seen.look(110.0, {"a": 1}) == set()
    assert seen.look(110.9, {"a": 1}) == set()
    assert seen.look(111.8, {"a": 1}) == set()
    assert seen.look(112.1, {"a": 1}) == {"a"}


@pytest.mark.parametrize(
    ("machines", "failed", "alive", "after", "ranks"),
    [
        (["a", "b"], set(), ["a", "b", "c"], None, []),
        (["a", "b"], {"b"}, ["a", "c"], ("a", "c"), [2, 3]),
        (["a", "b"], {"b"}, ["a"], ("a", None), [2, 3]),
        (["a", None], {"b"}, ["a"], None, []),
        (["a", None], {"b"}, ["a", "b2"], ("a", "b2"), [2, 3]),
        (["a", "b", "c"], {"a", "c"}, ["b", "d"], ("d", "b", None), [0, 1, 4, 5]),
        (["a", "b"], {"b", "c"}, ["a", "c", "d"], ("a", "d"), [2, 3]),
    ],
)
def test_places_of_failed_machines_go_to_spare_ones(
    machines: list[str | None], failed: set[str], alive: list[str], after: tuple[str | None, ...], ranks: list[int]
) -> None:
    change = reassign(machines, failed, alive)
    if after is None:
        assert change is None
    else:
        assert change is not None
        assert (change.machines, change.ranks(2)) == (after, ranks)


def losing(*ranks: int) -> Entry:
    return Entry(causes=tuple(Cause(CauseKind.DIED, "killed by SIGKILL", rank) for rank in ranks))


def test_two_writers_form_one_order() -> None:
    """Eight agents append at once; all see the same list, in which every failure is counted once."""
    store = MemoryStore()
    ledgers = [Ledger(store, "p/", 8, ["m"]) for _ in range(8)]
    begin = threading.Barrier(8)

    def lose(rank: int) -> None:
        begin.wait()
        assert ledgers[rank].append(lambda: losing(rank)) is not None

    threads = [threading.Thread(target=lose, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ledger in ledgers:
        ledger.follow()
        assert (ledger.generation, ledger.incarnations, ledger.machines) == (8, (1,) * 8, ("m",))


def test_nothing_follows_the_last_entry() -> None:
    store = MemoryStore()
    one, other = Ledger(store, "p/", 2), Ledger(store, "p/", 2)
    assert one.append(lambda: Entry(kind=EntryKind.FAIL, reason="x")) is not None
    assert other.append(lambda: losing(1)) is None
    assert [entry.kind for entry in other.follow()] == [EntryKind.FAIL]
    assert other.generation == 0 and other.follow() == []


def test_a_machine_that_comes_when_the_attempt_is_over_learns_so() -> None:
    """Another entry gave it its place: that one is no news."""
    store = MemoryStore()
    one, late = Ledger(store, "p/", 2), Ledger(store, "p/", 2)
    assert one.append(lambda: losing(1)) and one.append(lambda: Entry(kind=EntryKind.RESTART, reason="x"))
    late.catch_up()
    assert late.incarnations == (0, 1)
    assert [entry.kind for entry in late.follow()] == [EntryKind.RESTART] and late.follow() == []


def test_an_entry_comes_back_as_it_was() -> None:
    causes = (Cause(CauseKind.DIVERGENT, "it differs", 1), Cause(CauseKind.MACHINE, "machine b failed", 2))
    line = Resized(0, 3, (0, 1), 7)
    full = Entry(
        generation=4, incarnations=(0, 1, 2), absent=frozenset({2}), kind=EntryKind.DRAIN, causes=causes, detected=1.5,
        machines=("a", None), stay=(0, 1), after=("a",), reason="why", rank=1, workers=2, line=line,
    )  # fmt: skip
    assert Entry.from_json(full.to_json().encode(), 4, 3) == full
    assert full.divergent(1) and not full.divergent(2) and full.failed == (1, 2)


def test_who_is_absent() -> None:
    """Nobody is until all workers use survivor groups; then whoever fails, until it is said first that replacements are
    in.
    """
    store = MemoryStore()
    one, other = Ledger(store, "p/", 3), Ledger(store, "p/", 3)
    lose = lambda ledger, *failed: ledger.append(lambda: losing(*failed))  # noqa: E731
    for rank in range(3):
        store.set("p/" + survivor_group_key(rank, 0), "1")
    store.delete_key("p/" + survivor_group_key(2, 0))
    assert lose(one, 1).absent is None
    store.set("p/" + survivor_group_key(2, 0), "1")
    assert lose(other, 2).absent is None, "the replacement of rank 1 does not use survivor groups yet"
    for rank in (1, 2):
        store.set("p/" + survivor_group_key(rank, 1), "1")
    assert lose(one, 1).absent == {1} and one.present() == [0, 2]
    assert lose(other, 2).absent == {1, 2} and other.present() == [0]
    assert store.compare_set("p/" + admit_key(3, 1), "", "[1]") == b"[]", "too late for replacements to be admitted"
    assert store.compare_set("p/" + admit_key(4, 2), "", "[2]") == b"[2]" and other.present() == [0, 2]
    assert lose(one, 0).absent == {0, 1}, "rank 2 is in, and rank 1 is not"
    assert store.compare_set("p/" + admit_key(4, 1), "", "[1]") == b"[]", "the next round came too late"
    for key, ranks in ((admit_key(5, 2), "[0]"), (admit_key(5, 1), "[1]")):
        assert store.compare_set("p/" + key, "", ranks) == ranks.encode()
    assert other.follow() and other.present() == [0, 1, 2]
    assert lose(other, 2).absent == {2}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MirrorServer]:
    running = MirrorServer(tmp_path / "mirror", key=KEY)
    yield running
    running.close()


def test_the_next_place_keeps_the_copies() -> None:
    assert keeper(["a", "b", "c"], 2) == "a"
    assert keeper(["a", None, "c"], 0) == "c"
    assert keeper(["a", None], 0) is None
    assert place_of("10.0.0.1:5#x") == ("10.0.0.1", 5) and place_of("::1:5#x") == ("::1", 5)


def test_a_lease_that_cannot_be_renewed_fences(tmp_path: Path) -> None:
    """The holder stops before the lease is over; an orderly leave is seen at once. Where etcd hangs, the other lease of
    the store's host is renewed as ever."""
    store = MemoryStore()
    connect = lambda: store  # noqa: E731
    fenced: list[float] = []
    reachable = threading.Event()
    reachable.set()
    changed = threading.Event()
    one = Lease(connect, "one", 0.6, changed.set, lambda _: None)
    two = Lease(connect, "two", 0.6, changed.set, lambda _: fenced.append(time.monotonic()), reachable.wait, 1.2)
    try:
        while "two" not in one.alive:
            assert changed.wait(5.0)
            changed.clear()
        began = time.monotonic()
        reachable.clear()
        two._threads[-1].join(5.0)
        assert fenced and fenced[0] - began < 1.2
        assert fenced[0] - began > FENCE * 1.2 - 1.2 / 10 - 0.05
        assert "two" in one.alive and "two" not in one.failed
        assert "its lease in etcd could not be renewed" in two.fenced
        two.leave()
        while "two" not in one.failed:
            assert changed.wait(5.0)
            changed.clear()
    finally:
        reachable.set()
        one.close()
        two.close()


def test_endpoints() -> None:
    assert parse_endpoints("node1:29500", "c10d") == (("node1", 29500),)
    assert parse_endpoints("node1", "c10d") == (("node1", 29400),)
    assert parse_endpoints("[fd00::2]:7", "c10d") == (("fd00::2", 7),)
    assert parse_endpoints("node1, node2:5,[fd00::2]", "etcd") == (("node1", 2379), ("node2", 5), ("fd00::2", 2379))
    for wrong in ("", ":5", "host:port", "a,", "http://a:1"):
        with pytest.raises(ConfigError, match="HOST:PORT is needed"):
            parse_endpoints(wrong, "etcd")
    with pytest.raises(ConfigError, match="for --rdzv-backend etcd"):
        parse_endpoints("a,b", "c10d")
    assert is_here("127.0.0.1") and not is_here("198.51.100.7")
