"""Each kind of loader gives a replacement what the failed worker would have been given, bit for bit."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kinds import KINDS, LOG, ROWS, SIZE, Counter, Life, Stateful
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from shared_core import waiting
from shared_core.config import SwiftConfig
from shared_core.errors import Unsupported
from shared_core.loaders import read_random, wrap_loader
from shared_core.loaders.contents import summed
from shared_core.loaders.engine import LoaderKind, kind_of
from shared_core.loaders.indices import Drawing, Follow
from shared_core.loaders.place import Way
from shared_core.loaders.reshard import divide, order_name, taken_up, used
from shared_core.loaders.tracked import Loaders
from shared_core.worker.variables.variables import Variables

EPOCHS = 3
#: Kinds that change with each batch what nobody can put back: all is read again, for which the model must not draw from
#: the same generators, and what they were before the epoch in progress is lost.
ALL_AGAIN = {"cache", "slots", "averaged", "mixing", "counting", "count_globally", "remembering"}
IN_PROCESS = [name for name in KINDS if not name.startswith(("workers", "lasting"))]


def assert_same(one: Any, two: Any, what: str) -> None:
    assert (one is None) == (two is None), what
    assert one is None or torch.equal(one, two), (what, one, two)


def live_and_die(name: str, ahead: int, leave: int, failures: list[tuple[int, int]]) -> None:
    """One life as stock has it, beside another in which workers fail before given batches."""
    draws = name not in ALL_AGAIN
    stock = Life(name, ahead, leave, wrapped=False, draws=draws)
    expected: list[tuple[tuple[int, int], Any, Any]] = []
    while stock.epoch < EPOCHS:
        place, before = (stock.epoch, stock.number), read_random()
        expected.append((place, before, stock.next()))
    after = read_random()
    worker = Life(name, ahead, leave, draws=draws)
    for place, before, batch in expected:
        assert (worker.epoch, worker.number) == place
        state = worker.state()  # as at every step boundary
        if place in failures:
            del worker
            torch.rand(5), random.random(), np.random.rand()
            worker = Life(name, ahead, leave, state=state, draws=draws)
        assert read_random() == before, place
        assert_same(worker.next(), batch, f"{name} at {place}")
    assert read_random() == after


@pytest.mark.parametrize("name", IN_PROCESS)
def test_in_process(name: str) -> None:
    """Failed in the first epoch, twice; in the second; at the last one's first and last batch."""
    later = [] if name in ALL_AGAIN else [(1, 0), (1, 5), (2, 0), (2, 9)]
    live_and_die(name, 1, 0, [(0, 0), (0, 4), (0, 7), *later])


def test_a_far_place_is_reached_without_a_look_at_each_batch() -> None:
    rows, looked_at = RandomSampler(range(8000), generator=torch.Generator().manual_seed(0)), []
    batches = list(BatchSampler(rows, 4, drop_last=False))
    follow = Follow(Way((), 1900), prepare=looked_at.append, quiet=range(3, 1850))
    rows.generator.manual_seed(0)
    drawing = Drawing(iter(BatchSampler(rows, 4, drop_last=False)), True, 0, follow, {}, lambda: None)
    drawing.arrive()
    assert looked_at == [*range(3), *range(1850, 1900)]
    assert drawing.sum_at(1900) == zlib.crc32("".join(map(repr, batches[:1900])).encode())
    assert list(drawing) == batches[1900:]


class ByWeights(Sampler[int]):
    """Draws by weights that training changes."""

    def __init__(self) -> None:
        self.weights = torch.ones(40)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        yield from torch.multinomial(self.weights, 40).tolist()


@pytest.mark.parametrize("changed", [False, True])
def test_a_sampler_that_draws_otherwise_than_in_the_failed_worker_is_refused(changed: bool) -> None:
    loaders = []
    for _ in range(2):
        torch.manual_seed(1)
        loaders.append(wrap_loader(DataLoader(range(40), 4, sampler=ByWeights()), lazy=bool(loaders)))
    failed, replacement = loaders
    position = iter(failed)
    given = [next(position) for _ in range(4)]
    state = failed.state(position)
    torch.rand(7)
    if changed:
        replacement.sampler.weights[:20] = 9.0
    own = iter(replacement)
    replacement.restore(state, own)
    if changed:
        with pytest.raises(Unsupported, match="draws other indices in the replacement"):
            next(own)
    else:
        assert not set(torch.cat(given).tolist()) & set(next(own).tolist())


@pytest.mark.parametrize(("told", "copied"), [(True, False), (True, True), (False, False)])
def test_what_a_generator_has_seen_of_the_model_is_as_in_the_failed_worker(told: bool, copied: bool) -> None:
    """Not in a copy of another rank, whose variables may depend on that; without variables is the control."""
    model, ended = [0], []

    class Played:
        def __iter__(self) -> Any:
            seen = model[0]
            yield from range(6)
            ended.append(seen)

    failed, replacement = (
        wrap_loader(Played(), lazy=lazy, script=Variables(0) if told else None) for lazy in (False, True)
    )
    position = iter(failed)
    given = [next(position) for _ in range(3)]
    state = failed.state(position)
    model[0] = 1
    own = iter(replacement)
    replacement.restore(state, own, copied=copied)
    assert [*given, *own] == list(range(6)) and ended == [0 if told and not copied else 1]


class Cycle:
    """Begins again at the end; ``Endless`` is its own iterator."""

    def __init__(self, iterable: Any) -> None:
        self.iterable, self.passes = iterable, 0
        self.inner = iter(iterable)

    def __iter__(self) -> Any:
        while True:
            yield from self.iterable
            self.passes += 1


class Endless(Cycle):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.inner)
        except StopIteration:
            self.inner, self.passes = iter(self.iterable), self.passes + 1
            return next(self.inner)


@pytest.mark.parametrize("cls", [Cycle, Endless])
def test_what_begins_again_at_the_end_is_no_progress_bar(cls: Any) -> None:
    worker: Any = SimpleNamespace(rank=0, joining=False, orders=None, variables=None, reroutes=False)
    begun = Loaders(worker, SwiftConfig()).begin(cls(DataLoader(range(4), 2)), 0)
    first = [begun.next().tolist() for _ in range(2)]
    if cls is Cycle:
        with pytest.raises(Unsupported, match="reads its loader again"):
            begun.next()
    else:
        assert [begun.next().tolist() for _ in range(2)] == first


@pytest.mark.parametrize("name", ["plain", "lazy", "reading"])
def test_left_early(name: str) -> None:
    live_and_die(name, 0, 5, [(0, 3), (1, 0), (1, 5), (2, 2)])


@pytest.mark.parametrize(
    "name, leave, ahead",
    [
        ("lasting", 5, 0),
        pytest.param("workers_lazy", 0, 1, marks=pytest.mark.nightly),
        pytest.param("workers_prepared", 0, 0, marks=pytest.mark.nightly),
    ],
)
def test_with_loader_workers(name: str, leave: int, ahead: int) -> None:
    live_and_die(name, ahead, leave, [(0, 1), (1, 0), (2, 0)] if leave == 1 else [(0, 4), (1, 0), (1, 3), (2, 5)])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100))
def test_failures_anywhere(seed: int) -> None:
    """Several failures, each of which may be of a replacement that has only just found its place."""
    rng = random.Random(seed)
    name, ahead, leave = rng.choice(list(KINDS)), rng.randint(0, 1), rng.choice([0, 1, 2, 5])
    epochs = 1 if name in ALL_AGAIN else EPOCHS
    failures = {(rng.randrange(epochs), rng.randrange(leave or 10)) for _ in range(rng.randint(1, 6))}
    live_and_die(name, ahead, leave, sorted(failures))


@pytest.mark.parametrize(
    ("name", "ahead"), [("plain", 1), ("workers", 0), ("lasting", 1), ("workers_parts", 1), ("lasting_parts", 0)]
)
def test_delivered_items_are_not_read_again(
    name: str, ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Life(name, ahead, 0)
    used = 7
    for _ in range(used):
        worker.next()
    state = worker.state()
    del worker
    monkeypatch.setenv(LOG, str(tmp_path / "reads"))
    replacement = Life(name, ahead, 0, state=state)
    batches = 13 if "parts" in name else SIZE // ROWS  # 15 items for one loader worker and 9 for the other
    while replacement.number < batches - ahead:  # an item ahead would be the next epoch's
        replacement.next()
    reads = (tmp_path / "reads").read_text().split()
    assert len(reads) == len(set(reads)) == SIZE - used * ROWS


class Listed:
    """Where the order of each pass is published."""

    may_drop, asked = False, True

    def __init__(self) -> None:
        self.kept: dict[str, list[Any]] = {}

    def write(self, indices: list[Any]) -> str:
        name = f"order {len(self.kept)}"
        self.kept[name] = list(indices)
        return name

    def read(self, name: str) -> list[Any]:
        return self.kept[name]

    def drop(self, name: str) -> None:
        del self.kept[name]


@pytest.mark.parametrize(
    ("name", "ahead", "workers"), [("plain", 0, 1), ("plain", 1, 3), ("workers", 0, 3), ("lasting", 1, 3)]
)
def test_the_rest_of_a_pass_is_dealt_out_without_reading_what_was_used(
    name: str, ahead: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker becomes ``workers``."""
    orders = Listed()
    old = wrap_loader(KINDS[name](), ahead=ahead, orders=orders)
    position = iter(old)
    for _ in range(5 + ahead):
        next(position)
    state = old.state(position)
    rest = orders.read(order_name(state))[used(state) :]
    old.restore(state | {"live": False}, position)  # ends its loader workers
    monkeypatch.setenv(LOG, str(tmp_path / "reads"))
    for share in divide([rest], workers):
        new = wrap_loader(KINDS[name](), ahead=ahead, orders=Listed(), lazy=True)
        position = iter(new)
        new.restore({**state, **taken_up(state, share)}, position)
        batches = [*position.last_items, *position]  # type: ignore[attr-defined]
        assert [[int(row[0]) for row in batch] for batch in batches] == share
    reads = (tmp_path / "reads").read_text().split()
    assert sorted(map(int, reads)) == sorted(index for batch in rest for index in batch)
    assert len(reads) == SIZE - 5 * ROWS


@pytest.mark.parametrize("name", ["stream", "workers_stream", "workers_noisy_counter"])
def test_what_is_read_again_is_said_before_and_while_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = Life(name, 0, 0)
    for _ in range(7):
        worker.next()
    state = worker.state()
    said = capfd.readouterr().err
    assert said.count("reads again all that was read of this pass over a DataLoader") == 1, said
    del worker
    monkeypatch.setattr(waiting, "QUIET_S", 0.0)
    Life(name, 0, 0, state=state)
    said = capfd.readouterr().err
    assert "of 7 batches of the failed worker are read again; it takes as long as reading them did before" in said, said


@pytest.mark.parametrize("kind", [Counter, Stateful])
def test_who_can_say_where_it_is_is_told(kind: Any) -> None:
    name = kind.__name__.lower()
    worker = Life(name, 0, 0)
    for _ in range(9):
        worker.next()
    state = worker.state()
    kind.reads = 0
    replacement = Life(name, 0, 0, state=state)
    replacement.next()
    assert kind.reads <= ROWS


def test_a_shuffle_buffer_that_is_filled_again_is_not_trusted() -> None:
    """``datasets`` says of its ``state_dict`` that a shuffle buffer is not part of it."""
    buffered = type("IterableDataset", (Counter,), {"__module__": "datasets.iterable_dataset"})
    assert kind_of(DataLoader(Counter()), "restore") is LoaderKind.STATE
    assert kind_of(DataLoader(buffered()), "restore") is LoaderKind.REREAD


@pytest.mark.parametrize("size", [1 << 10, (1 << 20) + 3])
def test_a_checksum_of_items_sees_values_that_change_places(size: int) -> None:
    data = torch.arange(size, dtype=torch.int64)
    sums = {summed(data, 0), summed(data + (data == size - 1), 0)}
    for one, other in ((0, 1), (5, size // 2), (size // 2, size - 1), (size // 2, size // 2 + 1)):
        moved = data.clone()
        moved[[one, other]] = data[[other, one]]
        sums.add(summed(moved, 0))
    assert len(sums) == 6


def test_a_stateful_loader_that_has_begun_before_its_first_pass_is_refused() -> None:
    """Accelerate asks each for its state when it makes it."""
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(list(range(8)), batch_size=2)
    loader.state_dict()
    with pytest.raises(Unsupported, match="a StatefulDataLoader over a map-style data set was asked for its state"):
        list(wrap_loader(loader))
