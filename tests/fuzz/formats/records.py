"""What the job's store holds: ledger entries, frontiers, offers, places in calls, the rendezvous' document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.launcher.ledger import Ledger
from shared_core.protocol.cut import Offer, choose_cut
from shared_core.protocol.frontier import Frontier, GroupFrontier, Top
from shared_core.protocol.standstill import Standing, awaited, describe, stuck

from ..harness import Target, only_errors, stable

counts = st.integers(0, 9)
channels = st.dictionaries(st.sampled_from(["0,1,0", "1,0,0"]), counts, max_size=2)
tops = st.builds(
    lambda index, version, seq: Top(index, version, 0, "batch", {"default": seq}, members={"default": [0, 1]}),
    st.integers(1, 9),
    counts,
    counts,
)
frontiers = st.builds(
    Frontier,
    rank=st.integers(0, 1),
    incarnation=counts,
    newcomer=st.booleans(),
    version=counts,
    tops=st.lists(tops, max_size=2).map(tuple),
    groups=st.fixed_dictionaries(
        {},
        optional={
            "default": st.builds(lambda n, sent: GroupFrontier((0, 1), n, [n], [0], [], sent=sent), counts, channels)
        },
    ),
)
offers = st.builds(
    lambda rank, tops, version: Offer(rank, 0, tuple((n, n, "batch") for n in tops), version),
    st.integers(0, 1),
    st.lists(counts, max_size=3, unique=True).map(sorted),
    st.none() | counts,
)
standings = st.builds(
    Standing,
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
entries = st.builds(
    lambda lost, over, names: {"lost": lost, "detected": 1.5} | over | names,
    st.lists(st.integers(0, 3), unique=True, max_size=2),
    st.sampled_from([{}, {"over": "restart"}]),
    st.sampled_from([{}, {"machines": ["a:1#x", None]}, {"stay": [0, 1], "after": ["b:1#x"]}]),
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
    Ledger(store, "", 4).append(lambda: dict(value))
    return store.values["gen/1"]


def _follow(data: bytes, _folder: Path) -> Any:
    ledger = Ledger(_Store(gen_1=data), "", 4, ["a:1#x"])
    news = ledger.follow()
    ledger.present()
    ledger.append(lambda: {"lost": [0]})
    return news


def _cut(data: bytes, _folder: Path | None = None) -> Offer:
    offer = Offer.from_json(data)
    choose_cut({offer.rank: offer, 7: Offer(7, 1, ((1, 1, "batch"), (2, 2, "batch")), 2)})
    return offer


def _stand(data: bytes, _folder: Path) -> Standing:
    one, other = (
        Standing.from_json(data),
        Standing(9, 0, 1, call="barrier()", group="default", members=(0, 9), number=3),
    )
    both = {0: one, 9: other}
    describe(both, stuck(both))
    awaited(one, both)
    return one


def _json(value: Any) -> bytes:
    return value.to_json().encode()


TARGETS = [
    Target("records.ledger", entries, _append, _follow, only_errors),
    Target(
        "records.frontier",
        frontiers,
        lambda value, _: _json(value),
        lambda data, _: Frontier.from_json(data),
        stable(_json, Frontier.from_json),
    ),
    Target("records.offer", offers, lambda value, _: _json(value), _cut, only_errors),
    Target("records.standing", standings, lambda value, _: _json(value), _stand, stable(_json, Standing.from_json)),
]
