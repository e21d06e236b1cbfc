"""Whatever stands in the place of a record in the job's store is refused with a line, or passed over with one."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Jobs

from shared_core.checkpoint.history import Run
from shared_core.checkpoint.spool import Sealed, Status
from shared_core.checkpoint.store import StoreMark
from shared_core.codec import decode
from shared_core.config import SwiftConfig
from shared_core.errors import DamagedRecord
from shared_core.faults import Fault
from shared_core.launcher.attempt import KeyWatcher, first_of
from shared_core.launcher.lease import Lease
from shared_core.launcher.ledger import Ledger
from shared_core.launcher.rendezvous_store import read_document
from shared_core.protocol import worker_messages as said
from shared_core.protocol.cut import Offer
from shared_core.protocol.frontier import Frontier, GroupFrontier, StepBoundary, read_frontiers
from shared_core.protocol.generation import Cause, CauseKind, Entry, EntryKind, join_request_key
from shared_core.protocol.plan import Agreed, Plan, Transfer
from shared_core.protocol.request import StartRequest
from shared_core.protocol.rounds import admit_key
from shared_core.protocol.standstill import WaitStatus
from shared_core.protocol.worker_env import Resized, WorkerEnv
from shared_core.system.jobdir import Card
from shared_core.system.wire import connect
from shared_core.transport.store import MemoryStore
from shared_core.worker.checkpoints import recovery_line
from shared_core.worker.checkpoints.due import Decisions, StoreEntries
from shared_core.worker.recovery.replicas import ReplicaSums
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.state.local_state import BoundaryPosition
from tests.support.runner import compare

BOUNDARY = StepBoundary(
    1, 0, -1, "batch", {"w": 3}, {"w": {"0,1,0": 2}}, {"w": {"0,1,-1": 2}}, {"w": "0,1"}, [0, 1], saved=True, own=True
)
GROUP = GroupFrontier("0,1", 7, [5, 6], [4, 5], [4], {"0,1,0": 2}, {"0,1,0": 2}, {"0,1,0": 1})
FRONT = Frontier(1, 0, False, 3, (BOUNDARY,), {"w": GROUP}, [1], 2, [1], outside=True)
PLAN = Plan(
    {1: BOUNDARY, 0: None},
    {1: 0},
    (Transfer(0, 1, {"0": [4, 5]}),),
    {"0": {4}},
    {"w": {"0,1,0": 2}},
    frozenset({0}),
    newest=3,
    oldest=2,
)
FAILURE = Cause(CauseKind.DIED, "killed", 1)
ENTRY = Entry(
    generation=1,
    incarnations=(0, 1),
    absent=frozenset({1}),
    kind=EntryKind.CARRY_ON,
    causes=(FAILURE,),
    detected=1.5,
    machines=("a", "b"),
    stay=(0,),
    after=("a",),
    reason="failed",
)
LAST = Entry(generation=1, incarnations=(0, 1), kind=EntryKind.RESIZE, rank=0, workers=3, line=Resized(0, 2, (0, 1), 7))
MEMBER = {"name": "10.0.0.1:1#a.1", "nproc": 2, "nnodes": "2:2", "host": True}


def as_frontiers(raw: bytes) -> Any:
    """Read by rank 0, whose own is whole."""
    own = Frontier(0, 0, False, 3, (), {"w": GROUP}).to_json().encode()
    return read_frontiers({0: own, 1: raw}, {0: "gen/1/front/0", 1: "gen/1/front/1"}, 2)


def as_agreed(raw: bytes) -> Agreed:
    return Agreed.from_json(raw, "gen/1/plan", 2)


def ledger(raw: bytes) -> Any:
    store = MemoryStore()
    store.set("p/gen/1", raw)
    return Ledger(store, "p/", 2).follow()


def first(raw: bytes) -> Any:
    store = MemoryStore()
    store.set("swift/3/first", raw)
    return first_of(store, 3)


def has(raw: bytes) -> Any:
    """Which checkpoints another rank says it has."""
    store = MemoryStore()
    store.set("line/has/1", raw)
    return recovery_line.agree(
        WorkerEnv(0, 2, 0, 0, 0, Path(), "", None, SwiftConfig.from_dict({"detection.wait_timeout_s": 5.0})),
        store,
        [],
    )


def shaped(shape: Any) -> Callable[[bytes], Any]:
    """Reads a file, which is damaged likewise."""
    return lambda raw: decode(raw, shape, "a file")


OPTIONAL = {
    "groups",
    "together",
    "boundary",
    "kept",
    "outside",
    "received",
    "sent",
    "held",
    "over",
    "members",
    "replicas",
    "saved",
    "own",
}
#: By key: what is right there, who reads it, and what need not be there.
READERS: dict[str, tuple[Any, Callable[[bytes], Any], set[str]]] = {
    "gen/1": (json.loads(ENTRY.to_json()), ledger, set()),
    "gen/1 (the last)": (json.loads(LAST.to_json()), ledger, set()),
    "first": ({"machines": ["a", "b"], "line": ""}, first, set()),
    "line": (asdict(Resized(0, 2, (0, 1), 7)), Resized.from_json, set()),
    "front": (asdict(FRONT), as_frontiers, OPTIONAL),
    "plan": (json.loads(Agreed(PLAN).to_json()), as_agreed, OPTIONAL),
    "plan (none)": (json.loads(Agreed(None, "failed").to_json()), as_agreed, set()),
    "offer": (asdict(Offer(1, 0, ((1, 2, "batch"),), 2)), lambda raw: Offer.from_json(raw, "offer/1", 1), set()),
    "stand": (
        asdict(WaitStatus(1, 0, 3, 1.5, 9.0, "recv", "w", "group w", (0, 1), 3, sent={"w": {"0,1,0": 1}})),
        lambda raw: WaitStatus.from_json(raw, "stand/1", 1),
        {"waited_s", "limit_s", "call", "group", "called", "members", "number", "channel", "source"}
        | {"issued", "pending", "sent", "idle"},
    ),
    "sums": (asdict(ReplicaSums(3, [2**64 - 1, 7])), lambda raw: ReplicaSums.read(raw, "sums/1/3/1", 2), set()),
    "line/has": (["7/memory/s"], has, set()),
    "document": (
        {"phase": "running", "round": 0, "attempt": 0, "run": "r", "members": [MEMBER]}
        | {"store": ["h", 1], "beat": 3},
        lambda raw: read_document(raw, "of the job"),
        {"beat", "host"},
    ),
    "saved": ({"done": True, "boundary": 3}, lambda raw: said.read("saved", raw), {"done", "boundary"}),
    "handed": ({"generation": 1, "boundary": 3}, lambda raw: said.read("handed", raw), set()),
    "declined": ({"generation": 1, "reason": "full"}, lambda raw: said.read("declined", raw), set()),
    "reports": (
        {"rank": 0, "time": 1.5, "pid": 7, "boundary": 3, "whence": "x"},
        lambda raw: said.read("reports", raw),
        {"pid", "boundary", "whence"},
    ),
    "divergent": ([1], lambda raw: said.read("divergent", raw), set()),
    "damaged": ({"rank": 0, "pid": 7, "what": "x"}, lambda raw: said.read("damaged", raw), set()),
    "a snapshot": (asdict(Sealed(40, 0, 2, (0,), ("rank0",), {})), shaped(Sealed), set()),
    "the writer's report": (asdict(Status(cause="full")), shaped(Status), set()),
    "a job's card": (asdict(Card("a", "b", "train.py", "c", 7, 1.5, "e", 3)), shaped(Card), set()),
    "a start": (
        asdict(StartRequest(1, "script", "train.py", ("x",), {"A": "b"}, 7, first=("m",))),
        shaped(StartRequest),
        set(),
    ),
    "a run": (asdict(Run("a", "killed", 1.5, 3.0, {"memory": 1}, "g", 2.5)), shaped(Run), set()),
    "a mark": ({"parts": {"rank0": ["a", 4]}, "meta": {}}, shaped(StoreMark), set()),
}
#: What a value of each type is replaced by.
WRONG: dict[type, list[Any]] = {
    int: ["3", 1.5, 10**30, True, [1], {"0": 1}, None],
    float: ["3", float("nan"), float("inf"), 10**400, True, [], {}, None],
    str: [5, True, [], {}, "\ud800"],
    bool: [1, "true", [], None],
    list: [5, "text", {"0": 1}, None],
    dict: [5, "text", [], None],
    type(None): [5, "text", True],
}
NOT_JSON = {"empty": b"", "torn": b'{"a": [1', "binary": b"\x80\x81\xff", "deep": b"[" * 200_000, "words": b"hello"}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all parts of plain data."""
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], wrong: Any, *, gone: bool = False) -> bytes:
    """The record with another value in one place, or with nothing there."""
    if not path:
        return json.dumps(wrong).encode()
    value = at = copy.deepcopy(value)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = wrong
    if gone:
        del at[path[-1]]
    return json.dumps(value).encode()


@pytest.mark.parametrize("key", READERS)
def test_a_damaged_record_is_refused(key: str) -> None:
    right, read, optional = READERS[key]
    right = json.loads(json.dumps(right))
    read(json.dumps(right).encode())
    for name, raw in NOT_JSON.items():
        with pytest.raises(DamagedRecord, match="damaged or was written by something else"):
            pytest.fail(f"{name}: {read(raw)}")
    for path in places(right):
        at = right
        for step in path:
            at = at[step]
        for wrong in WRONG[type(at)]:
            if wrong is None and path and path[-1] in {"pid", "boundary", "version", "absent", "line", 0, 1, "1"}:
                continue  # some of these may be null
            if wrong == "3" and path == ("checkpoint.keep",):
                continue  # options are also given as text
            with pytest.raises(DamagedRecord) as error:
                pytest.fail(f"{path} = {wrong!r:.80}: {read(changed(right, path, wrong))}")
            assert len(str(error.value)) < 700 and "\n" not in str(error.value)
        if path and isinstance(path[-1], str) and path[-1] not in optional and not path[-1][0].isdigit():
            if len(path) > 1 and path[-2] in ("groups", "members", "received", "sent", "env", "rolled_back", "parts"):
                continue  # a name, not a key
            with pytest.raises(DamagedRecord):
                pytest.fail(f"without {path}: {read(changed(right, path, None, gone=True))}")


@pytest.mark.parametrize(
    "damage",
    [
        {"rank": 0},
        {"rank": 7},
        {"groups": {"w": asdict(GROUP) | {"next": 2**52}}},
        {"groups": {"w": asdict(GROUP) | {"done": []}}},
        {"groups": {"w": asdict(GROUP) | {"done": [2**52]}}},
        {"groups": {"w": asdict(GROUP) | {"ranks": "0,2"}}},
        {"groups": {"w": asdict(GROUP) | {"ranks": "0-999999999"}}},
        {"groups": {"w": asdict(GROUP) | {"ranks": "0,0"}}},
        {"groups": {"w": asdict(GROUP) | {"ranks": "0-1:0"}}},
        {"groups": {"w": asdict(GROUP) | {"sent": {"0,2,0": 1}}}},
        {"groups": {"w": asdict(GROUP) | {"sent": {"0;1": 1}}}},
        {"boundaries": [asdict(BOUNDARY) | {"sent": {"w": {"5,0,0": 1}}}]},
    ],
)
def test_a_frontier_that_would_take_for_ever_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(DamagedRecord, match="gen/1/front/1"):
        as_frontiers(json.dumps(asdict(FRONT) | damage).encode())


@pytest.mark.parametrize("raw", [b"perhaps", b"", b"\xff", b"1", b"[0]", b"[1, 2]", b"[-1]", b'["1"]'])
def test_who_was_admitted_was_absent(raw: bytes) -> None:
    store = MemoryStore()
    one = Ledger(store, "p/", 2)
    store.set("p/gen/1", ENTRY.to_json())
    one.follow()
    store.set("p/" + admit_key(1, 1), raw)
    with pytest.raises(DamagedRecord, match="gen/1/admit"):
        one.present()


@pytest.mark.parametrize("raw", [b"x", b"-1", b"9" * 30, b"\xff", b"[3]"])
def test_a_damaged_decision_is_passed_over(raw: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    entries = StoreEntries(lambda: store)
    store.set("checkpoint/due/0", raw)
    first, other = Decisions(entries), Decisions(StoreEntries(lambda: store))
    first.joined(0), other.joined(0)
    first.add(3)
    assert [version for version in range(1, 9) if other.due(version)[0]] == [5]
    assert "the entry checkpoint/due/0 in the job's store is damaged" in capsys.readouterr().err


def test_what_no_worker_says_is_passed_over_once(capsys: pytest.CaptureFixture[str]) -> None:
    server = MemoryStore()
    connects = lambda: server  # noqa: E731
    watcher = KeyWatcher(connects, "p/", lambda: None, ranks=[1])
    try:
        for key in ("fail", "saved", "handed", "declined", "divergent"):
            server.set(f"p/{key}", '{"boundary": "x"}')
        server.queue_push("p/reports/0", "[" * 100_000)
        assert watcher.look() == watcher.look() == []
        assert capsys.readouterr().err.count("cannot be read and is ignored") == 6
        server.set("p/handed", '{"generation": 1, "boundary": 3}')
        server.set("p/divergent", "[0, 1]")
        server.set("p/saved", '{"done": true, "boundary": 3}')
        server.set("p/restart", '{"reason": "x"}')
        assert watcher.look() == [
            ("restart", said.Restart("x")),
            ("saved", said.CheckpointSaved(True, 3)),
            ("handed", said.Handed(1, 3)),
            ("divergent", [1]),
        ]
    finally:
        watcher.close()


@pytest.mark.parametrize("raw", ["x", "", "-1", "9" * 30, "20000"])
def test_a_damaged_count_of_machines_ends_the_machines_part(raw: str) -> None:
    """To add to it would break the connection."""
    store = MemoryStore()
    connects = lambda: store  # noqa: E731
    fenced, said_why = threading.Event(), []

    def fence(reason: str) -> None:
        said_why.append(reason)
        fenced.set()

    one = Lease(connects, "one", 0.4, lambda: None, fence)
    try:
        store.set("machines/count", raw)
        assert fenced.wait(5.0) and "the entry machines/count in the job's store is damaged" in said_why[0]
        with pytest.raises(DamagedRecord, match="machines/count"):
            Lease(connects, "two", 0.4, lambda: None, fence)
    finally:
        one.close()


@pytest.mark.parametrize("name", ["", "x", ":", "h:x#y", "h:99999#y", "h:-1#", "\0:1#", "h:" + "9" * 5000])
def test_what_is_no_machines_name_is_not_connected_to(name: str) -> None:
    with pytest.raises(OSError, match="is not the name of a machine"):
        connect(name, b"")


def test_a_damaged_join_request_admits_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    runtime = SimpleNamespace(lock=threading.RLock(), latest=1, absent={1})
    env = SimpleNamespace(rank=0, config=SwiftConfig())
    job_store, lifecycle = SimpleNamespace(below=lambda: store), SimpleNamespace(entry=ENTRY)
    recovery: Any = SimpleNamespace(runtime=runtime, env=env, lifecycle=lifecycle, store=job_store)
    unused: Any = None
    survivor_groups = SurvivorGroups(recovery, unused, BoundaryPosition())
    store.set(join_request_key(1, 1), "x")
    assert survivor_groups.joining_ranks() == survivor_groups.joining_ranks() == ()
    assert capsys.readouterr().err.count(f"the entry {join_request_key(1, 1)} in the job's store is damaged") == 1
    store.set(join_request_key(1, 1), "-1")
    assert survivor_groups.joining_ranks() == (1,)


HOSTILE = "hostile.py"


def test_damaged_records_that_can_be_passed_over_change_nothing(jobs: Jobs) -> None:
    """Written by somebody else while a job trains that then loses a worker."""
    records = {"stand/0": "[", "stand/1": "x", "stand/speaker/1": "x", "stand/said/1": "x", "saved": "[["}
    records |= {"handed": "{}", "declined": "[" * 50_000, "divergent": '{"1": 1}', "sums/1/*": "x"}
    records |= {"queue:reports/0": '{"rank": "x"}'}
    faults = [Fault(1, 6, "bucket", "SIGKILL")]
    result = jobs.run(HOSTILE, faults=faults, env={"HOSTILE": json.dumps(records)})
    compare(result, jobs.reference("plain_ddp.py"))
    assert len(result.struck) == 1 and result.kinds("recovered"), result.tail()
    assert "cannot be read and is ignored" in result.stderr, result.tail()
    assert "Traceback" not in result.stderr, result.tail()


@pytest.mark.nightly
def test_a_damaged_plan_ends_the_job_with_a_line(jobs: Jobs) -> None:
    faults = [Fault(1, 6, "bucket", "SIGKILL")]
    result = jobs.run(HOSTILE, faults=faults, env={"HOSTILE": json.dumps({"gen/1/plan": '{"rank": 1}'})})
    assert result.status == 1, result.tail()
    assert "DamagedRecord: the entry gen/1/plan in the job's store is damaged" in result.stderr, result.tail()
    assert result.stderr.count("Traceback") == 1, "only the launcher's, as of torchrun"
