"""What the job's store holds: ledger entries, frontiers, offers, places in calls, what workers say, the meeting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.launcher.ledger import Ledger
from shared_core.launcher.rendezvous_store import read_document
from shared_core.protocol.cut import Offer, choose_cut
from shared_core.protocol.frontier import Frontier, GroupFrontier, StepBoundary, read_frontiers
from shared_core.protocol.generation import Cause, CauseKind, Entry, EntryKind
from shared_core.protocol.plan import Agreed, Plan
from shared_core.protocol.standstill import WaitStatus, awaited, describe, stuck
from shared_core.protocol.worker_env import Resized
from shared_core.protocol.worker_messages import SHAPES, read
from shared_core.worker.recovery.replicas import ReplicaSums

from ..harness import Target, only_errors, stable

counts = st.integers(0, 9)
channels = st.dictionaries(st.sampled_from(["0,1,0", "1,0,0"]), counts, max_size=2)
boundaries = st.builds(
    lambda index, version, seq: StepBoundary(index, version, 0, "batch", {"default": seq}, members={"default": "0,1"}),
    st.integers(1, 9),
    counts,
    counts,
)
frontiers = st.builds(
    Frontier,
    rank=st.just(0),
    incarnation=counts,
    replacement=st.booleans(),
    version=counts,
    boundaries=st.lists(boundaries, max_size=2).map(tuple),
    groups=st.fixed_dictionaries(
        {},
        optional={
            "default": st.builds(lambda n, sent: GroupFrontier("0,1", n, [n], [0], [], sent=sent), counts, channels)
        },
    ),
)
offers = st.builds(
    lambda rank, boundaries, version: Offer(rank, 0, tuple((n, n, "batch") for n in boundaries), version),
    st.integers(0, 1),
    st.lists(counts, max_size=3, unique=True).map(sorted),
    st.none() | counts,
)
statuses = st.builds(
    WaitStatus,
    rank=st.integers(0, 1),
    generation=counts,
    look=counts,
    waited_s=st.floats(0, 9),
    call=st.sampled_from(["", "all_reduce(float32[4])", "barrier()"]),
    group=st.sampled_from(["", "default"]),
    members=st.just((0, 1)),
    number=counts,
    issued=st.fixed_dictionaries({"default": counts}),
    pending=st.fixed_dictionaries({"default": st.dictionaries(counts.map(str), st.just("barrier()"), max_size=1)}),
)
causes = st.builds(Cause, st.sampled_from(CauseKind), st.just("SIGKILL"), st.integers(0, 3))
entries = st.builds(
    Entry,
    kind=st.sampled_from([EntryKind.FORM, EntryKind.DRAIN, EntryKind.RESTART, EntryKind.RESIZE]),
    causes=st.lists(causes, max_size=2).map(tuple),
    detected=st.floats(0, 9),
    machines=st.sampled_from([(), ("a:1#x", None)]),
    stay=st.sampled_from([(), (0, 1)]),
    after=st.sampled_from([(), ("b:1#x",)]),
    workers=counts,
    line=st.none() | st.builds(Resized, counts, counts, st.just((0, 2)), counts),
)
lines = st.builds(Resized, counts, counts, st.lists(counts, max_size=3).map(tuple), counts)
members = st.fixed_dictionaries(
    {"name": st.sampled_from(["a:1#x", "b:1#y"]), "nproc": counts, "nnodes": st.just("1:2"), "secret": st.just("")},
    optional={"host": st.booleans()},
)
meetings = st.fixed_dictionaries(
    {
        "phase": st.sampled_from(["forming", "running", "ended"]),
        "round": counts,
        "attempt": counts,
        "run": st.just("0123456789ab"),
        "members": st.lists(members, min_size=1, max_size=2),
        "store": st.just(["127.0.0.1", 29500]),
        "secret": st.just("a" * 32),
    },
    optional={"beat": counts},
)
words = st.sampled_from(
    [
        ("fail", {"message": "no", "rank": 1}),
        ("restart", {"reason": "failed"}),
        ("saved", {"done": True, "boundary": 3}),
        ("checkpoints", {"checkpoint.keep": 3, "checkpoint.dir": None}),
        ("handed", {"generation": 1, "boundary": 3}),
        ("declined", {"generation": 1, "reason": "no"}),
        ("reports", {"rank": 0, "time": 1.5, "pid": 7, "boundary": 3, "whence": "step 40"}),
        ("divergent", [0, 1]),
        ("damaged", {"rank": 0, "pid": 7, "what": "parameter 0 differs"}),
        ("fail", "no"),
    ]
)
agreed = st.builds(
    lambda boundary, redo, failed: Agreed(
        None if failed else Plan({0: boundary}, {0: 1}, (), {"default": redo}), failed
    ),
    st.none() | boundaries,
    st.sets(counts, max_size=3),
    st.sampled_from(["", "nobody is left"]),
)
sums = st.builds(
    lambda version, sums: {"version": version, "sums": sums}, counts, st.lists(counts, min_size=2, max_size=2)
)


class _Store:
    """A store of two keys."""

    def __init__(self, **values: bytes) -> None:
        self.values = {name.replace("_", "/"): value for name, value in values.items()}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def compare_set(self, key: str, _expected: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())


def _append(value: Any, _folder: Path) -> bytes:
    store = _Store()
    Ledger(store, "", 4).append(lambda: value)
    return store.values["gen/1"]


def _follow(data: bytes, _folder: Path) -> Any:
    ledger = Ledger(_Store(gen_1=data), "", 4, ["a:1#x"])
    news = ledger.follow()
    ledger.present()
    ledger.append(lambda: Entry(causes=(Cause(CauseKind.DIED, "SIGKILL", 0),)))
    return news


def _cut(data: bytes, _folder: Path | None = None) -> Offer:
    offer = Offer.from_json(data)
    choose_cut({offer.rank: offer, 7: Offer(7, 1, ((1, 1, "batch"), (2, 2, "batch")), 2)})
    return offer


def _stand(data: bytes, _folder: Path) -> WaitStatus:
    one, other = (
        WaitStatus.from_json(data),
        WaitStatus(9, 0, 1, call="barrier()", group="default", members=(0, 9), number=3),
    )
    both = {0: one, 9: other}
    describe(both, stuck(both))
    awaited(one, both)
    return one


def _front(data: bytes, _folder: Path | None = None) -> Frontier:
    """Beside the frontier of another rank."""
    other = Frontier(1, 0, False, 0, (), {"default": GroupFrontier("0,1", 1, [1], [0], [])})
    read_frontiers({0: data, 1: other.to_json().encode()}, {0: "front/0", 1: "front/1"}, 2)
    return Frontier.from_json(data)


def _agreed(data: bytes, _folder: Path | None = None) -> Agreed:
    return Agreed.from_json(data, "plan", 2)


def _said(data: bytes, _folder: Path) -> Any:
    name, _, raw = data.partition(b" ")
    said = name.decode(errors="replace")
    return read(said, raw) if said in SHAPES else None


def _json(value: Any) -> bytes:
    return value.to_json().encode()


def _plain(value: Any) -> bytes:
    return json.dumps(value).encode()


TARGETS = [
    Target("records.ledger", entries, _append, _follow, only_errors),
    Target(
        "records.frontier",
        frontiers,
        lambda value, _: _json(value),
        _front,
        stable(_json, _front),
    ),
    Target("records.plan", agreed, lambda value, _: _json(value), _agreed, stable(_json, _agreed)),
    Target("records.offer", offers, lambda value, _: _json(value), _cut, only_errors),
    Target("records.standing", statuses, lambda value, _: _json(value), _stand, stable(_json, WaitStatus.from_json)),
    Target(
        "records.line",
        lines,
        lambda value, _: _json(value),
        lambda data, _: Resized.from_json(data),
        stable(_json, Resized.from_json),
    ),
    Target(
        "records.meeting",
        meetings,
        lambda value, _: _plain(value),
        lambda data, _: read_document(data, "meeting"),
        stable(_plain, lambda data: read_document(data, "meeting")),
    ),
    Target("records.word", words, lambda value, _: f"{value[0]} {json.dumps(value[1])}".encode(), _said, only_errors),
    Target(
        "records.sums",
        sums,
        lambda value, _: _plain(value),
        lambda data, _: ReplicaSums.read(data, "sums", 2),
        only_errors,
    ),
]
