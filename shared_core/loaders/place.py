"""Where a pass over the data is, as plain data, and how a replacement gets there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared_core.loaders.owned import changes
from shared_core.loaders.randomness import RandomParts

#: Number of a draw and the random parts it started from, for each draw that consumed global randomness.
Draws = dict[int, RandomParts]


@dataclass
class ReadingRecord:
    """What is needed to run one ``iter()`` of a loader again.

    Attributes:
        before: state of the random parts that ``iter()`` drew from.
        owned: generators and counters of the loader before ``iter()``.
        owned_first: the same before the first fetch, where most samplers start.
        loaded: ``state_dict`` given to the loader before ``iter()``.
        fetches: what fetches of a stream drew from.
        draws: what the sampler drew from.
        order: name under which its indices were published; empty if they were not.
        first: number of its first batch, where this is the divided rest of a pass; else 0.
        dealt: its indices are the published ones, not the sampler's.
        length: of the pass, if ``dealt``.
        rereads: batches whose reading changed what cannot be put back, with the state in which each was read. None: all
            batches are such, or it is unknown.
        items_sum: checksum of all items delivered, where all are read again; else None.
        indices_sum: checksum of the indices of the batches delivered; None if not computed.
        loader_workers: state of each loader worker before the first batch that it has to read again.
        turn: the loader worker that reads the first batch of a stream to be read again.
        stream: state of a loader or data set that can tell its place, before the first batch to be read.
        contents: what is read, as far as it shows; None where nobody has looked.
        numbers: start, stop and step of a ``range``; None for anything else.
        held: the script's variables when loader workers were started; empty where none were.
        suspended: plain variables of the generators that a stream is read from.
        models: checksums of tensors of models that loader workers have called, as they were then.
        redrawn: the script has changed what the sampler holds since the pass began.
    """

    epoch: int = 0
    before: RandomParts = field(default_factory=dict)
    owned: dict[str, Any] = field(default_factory=dict)
    owned_first: dict[str, Any] = field(default_factory=dict)
    loaded: Any = None
    fetches: Draws = field(default_factory=dict)
    draws: Draws = field(default_factory=dict)
    delivered: int = 0
    exhausted: bool = False
    order: str = ""
    first: int = 0
    dealt: bool = False
    length: int = 0
    rereads: dict[int, Any] | None = None
    items_sum: int | None = None
    indices_sum: int | None = None
    loader_workers: dict[int, Any] = field(default_factory=dict)
    turn: int = 0
    stream: Any = None
    contents: str | None = None
    numbers: list[Any] | None = None
    held: dict[str, Any] = field(default_factory=dict)
    suspended: list[dict[str, Any]] = field(default_factory=list)
    models: dict[str, int] = field(default_factory=dict)
    redrawn: bool = False

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Way:
    """How to reach a place.

    Attributes:
        lead: batches that are read only for what reading them changes, in order. None: a loader worker is skipped, so
            that each batch is read by the worker that read it before.
        begin: the first batch whose items are wanted; those before it that are not in ``lead`` are drawn, not read.
    """

    lead: Sequence[int | None]
    begin: int


def way_to(
    record: ReadingRecord, *, ahead: int, workers: int, seeded: bool = False, taken: int = 0, told: bool = False
) -> Way:
    """How a replacement reaches the place of the failed worker.

    Args:
        ahead: items that were fetched before their use.
        seeded: what an item draws is a function of its place.
        taken: items that this process has taken of a loader that cannot be started again.
        told: the loader workers of a stream go to the states that they have told.
    """
    begin = record.delivered - min(ahead, record.delivered)
    if seeded or record.stream is not None:
        return Way((), begin)
    if record.rereads is None:
        return Way(range(min(taken, record.delivered), max(begin, taken)), max(begin, taken))
    if told:
        return Way([None] * record.turn, begin)
    return Way(_by_turns([number for number in sorted(record.rereads) if number < begin], begin, workers), begin)


def _by_turns(numbers: Collection[int], begin: int, workers: int) -> list[int | None]:
    """``numbers``, with None wherever the next loader worker is not the one that has to read what comes next."""
    lead: list[int | None] = []
    for number in (*numbers, begin):
        while workers and (number - len(lead)) % workers:
            lead.append(None)
        if number != begin:
            lead.append(number)
    return lead


def needed(records: Sequence[ReadingRecord], *, workers: int) -> list[tuple[ReadingRecord, bool]]:
    """The passes that shape a loader's next one, where they do: its workers persist, or it is its own iterator.

    A pass is needed if it changed what cannot be put back, or if the next that is needed begins with loader workers
    that have not told their state in it. In the first pass the workers are started. Each comes with whether it has to
    be read; otherwise it is only begun.
    """
    if records and records[-1].stream is not None:
        return [(records[-1], True)]
    found: list[tuple[ReadingRecord, bool]] = []
    wanted = True
    for number in reversed(range(len(records))):
        each = records[number]
        read = wanted or each.rereads != {}
        if read or number == 0:
            found.append((each, read))
        if read:
            wanted = each.rereads != {} or len(each.loader_workers) < workers
    return found[::-1]


def of_a_peer(state: Mapping[str, Any]) -> dict[str, Any]:
    """As :func:`as_copy`, for a loader whose place in the data is kept by another worker."""
    owned = {**state["owned"], "scalars": state["moved"]}
    return {**state, "owned": owned, "iterations": [], "recent": [], "hand": [], "live": False}


def draws_otherwise(record: ReadingRecord, rank: int) -> str:
    """Why the indices of a pass that a rank was in cannot be drawn again; empty if they can."""
    if not record.redrawn or record.exhausted or record.dealt:
        return ""
    return (
        f"rank {rank}: the script has changed what the sampler of this pass holds since the pass began, such as "
        "weights that follow the losses: a replacement would draw other indices. Draw by a copy that is made between "
        "epochs (docs/loops.md)"
    )


def from_origin(state: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """A place in the data, where what a ``range`` goes through is the script's own as far as that may be another.

    Args:
        state: of a loader.
        origin: whose state it is: of the ``same`` run, a replacement goes through the failed worker's; of a
            ``checkpoint``, a later start of the script may make the pass longer; of an ``other`` rank.
    """

    def kept(numbers: list[Any]) -> list[Any] | None:
        return [numbers[0], None, numbers[2]] if origin == "checkpoint" else None

    if origin == "same" or not any(each.get("numbers") for each in state["iterations"]):
        return state
    return {
        **state,
        "iterations": [
            {**each, "numbers": kept(each["numbers"])} if each.get("numbers") else each for each in state["iterations"]
        ],
    }


def as_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """A place in the data without what sampler and data set were built with, nor what only its rank has read."""

    def moved(owned: Mapping[str, Any]) -> dict[str, Any]:
        return {**owned, "scalars": changes(state["built"], owned["scalars"])} if owned else {}

    iterations = [
        {
            **each,
            "owned": moved(each["owned"]),
            "owned_first": moved(each["owned_first"]),
            "rereads": None,
            "items_sum": None,
            "stream": None,
            "contents": None,
            "numbers": None,
            "held": {},
            "suspended": [],
            "models": {},
        }
        for each in state["iterations"]
    ]
    recent = [{**each, "owned": moved(each["owned"]), "where": None} for each in state["recent"]]
    kept = {"owned": moved(state["owned"]), "iterations": iterations, "recent": recent, "hand": [], "where": None}
    return {**state, **kept}
