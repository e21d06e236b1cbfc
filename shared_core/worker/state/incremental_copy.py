"""Copying the replicated state while updates continue, as the worker sees it that gives the state.

The state is copied piece by piece, each piece between two updates: some parameters with their optimizer state. Of the
updates made since, the log keeps what the optimizer was given: gradients as the script has left them, and
hyper-parameters. The same optimizer makes the same of them elsewhere. That holds for optimizers that step each
parameter by itself, as torch's do, and while nothing else changes the state. Both are checked: sums of every piece are
compared after it has been through an update.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from shared_core.errors import RecoveryFailed
from shared_core.worker.state.checksums import checksum
from shared_core.worker.state.external_mutation import ChangeWatch
from shared_core.worker.state.replicated import VALUE, Replicated, beside, entries_of

#: Size of a piece, in bytes; one parameter with its optimizer state may be larger.
PIECE = 16 << 20
#: The log holds at most so many gradients of the whole model, or so many bytes if that is more.
_GRADIENTS, _LEAST = 3, 64 << 20


@dataclass(frozen=True)
class LoggedUpdate:
    """What an optimizer was given.

    Attributes:
        version: updates in the state before it.
        places: of the parameters that it stepped, as far as they had been copied.
        gradients: theirs, live: not copied.
        counts: version counters of the gradients.
    """

    version: int
    optimizer: int
    groups: list[dict[str, Any]]
    places: list[int]
    gradients: list[torch.Tensor]
    counts: list[int]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.gradients)

    @property
    def intact(self) -> bool:
        return [gradient._version for gradient in self.gradients] == self.counts


@dataclass(frozen=True)
class CopyPiece:
    """A copy of the parameters at ``places`` with their optimizer state; see :func:`described`."""

    places: list[int]
    description: list[list[Any]]
    tensors: list[torch.Tensor]


@dataclass(frozen=True)
class CopySums:
    """Checksums of some parameters together with their optimizer state; see :func:`sums`."""

    places: list[int]
    sums: list[int]


def followable(replicated: Replicated) -> bool:
    """Whether the optimizers are torch's own, which step each parameter by itself."""
    own = all(type(each).__module__.startswith("torch.optim.") for each in replicated.optimizers)
    return bool(replicated.optimizers) and own and not any(isinstance(each, LBFGS) for each in replicated.optimizers)


class IncrementalCopy:
    """One copy in the making. The program's thread logs updates, another one takes what is to be sent. ``failed`` says
    why the copy is of no use; empty while it is of use.
    """

    def __init__(self, replicated: Replicated) -> None:
        self._replicated = replicated
        self._changed = threading.Condition()
        self._left = deque(_pieces(replicated))
        self._unchecked: deque[list[int]] = deque()
        self._taken: dict[int, int] = {}
        self._queue: deque[LoggedUpdate | CopySums] = deque()
        self._bytes = 0
        self._most = max(_GRADIENTS * replicated.nbytes, _LEAST)
        self._watch = ChangeWatch(replicated)
        self._watch.note(values=False)
        self._over = self._level = False
        self._ticks = 0
        self.failed = ""

    # -- the program's thread ----------------------------------------------------------------------

    def begin(self, version: int, optimizer: Optimizer) -> None:
        """An update by ``optimizer`` begins; ``version`` counts the updates in the state before it."""
        with self._changed:
            if self.failed or self._over:
                return
            if self._watch.counted:
                self._fail("the script has changed parameters or optimizer state outside an update")
                return
            index = self._replicated.index_of
            places = {index(p): p.grad for group in optimizer.param_groups for p in group["params"]}
            given = {place: grad for place, grad in places.items() if grad is not None and place in self._taken}
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            if not all(_plain(value) for group in groups for value in group.values()):
                self._fail("a hyper-parameter of the optimizer is no plain value")
                return
            gradients = list(given.values())
            number = next(i for i, each in enumerate(self._replicated.optimizers) if each is optimizer)
            counts = [each._version for each in gradients]
            update = LoggedUpdate(version, number, groups, list(given), gradients, counts)
            self._bytes += update.nbytes
            self._queue.append(update)
            if self._bytes > self._most:
                self._fail("training is faster than the copy")
            self._tick()

    def updated(self) -> None:
        with self._changed:
            self._watch.note(values=False)
            self._tick()

    def taken_back(self, version: int) -> None:
        """The last update was undone; the state has ``version`` updates. What was copied with it is copied again."""
        with self._changed:
            while self._queue:
                last = self._queue.pop()
                if isinstance(last, LoggedUpdate):
                    self._bytes -= last.nbytes
                    break
                self._unchecked.append(last.places)
            for place in [place for place, taken in self._taken.items() if taken > version]:
                del self._taken[place]
                self._left.append([place])
            self._watch.note(values=False)

    def close(self) -> bool:
        """Nothing is changed any more. Whether what follows in :meth:`next_items` completes the copy."""
        with self._changed:
            if not self._level or self._left or self._unchecked or self._watch.counted:
                self._fail("it was not complete when the replacement was admitted")
            self._over = True
            self._tick()
            return not self.failed

    def cancel(self, why: str) -> None:
        with self._changed:
            self._fail(why)

    def _tick(self) -> None:
        """Wake the thread that sends. Callers hold the condition."""
        self._ticks += 1
        self._changed.notify_all()

    # -- the thread that sends -----------------------------------------------------------------------

    def next_items(self, frozen: Callable[[], Any], version: Callable[[], int]) -> Iterator[Any]:
        """What is to be sent, in order: :class:`CopyPiece`, :class:`LoggedUpdate`, :class:`CopySums`; None once all
        but the newest update is there. Blocks between items. Ends when the copy is closed, or has failed.

        The newest update comes last, or when another one follows: until then it may be taken back.

        Args:
            frozen: a context in which no update runs.
            version: updates in the state, in there.
        """
        while True:
            seen = self._ticks
            item = self._settled()
            if item is not None:
                yield item
            elif self.failed or self._over:
                return
            elif self._left or (self._unchecked and self._may_check(version())):
                with frozen(), self._changed:
                    piece = self._look(version())
                if piece is not None:
                    yield piece
            elif not self._level and not self._unchecked and not self._waiting_sums():
                self._level = True
                yield None
            else:
                with self._changed:
                    self._changed.wait_for(lambda seen=seen: self._ticks != seen)  # type: ignore[misc]

    def _settled(self) -> LoggedUpdate | CopySums | None:
        with self._changed:
            if self.failed or not self._queue:
                return None
            first, more = self._queue[0], any(isinstance(each, LoggedUpdate) for each in list(self._queue)[1:])
            if isinstance(first, LoggedUpdate) and not (more or self._over):
                return None
            self._queue.popleft()
            if isinstance(first, LoggedUpdate):
                self._bytes -= first.nbytes
                if not first.intact:
                    self._fail("the script has changed gradients after the update that they were for")
                    return None
            return first

    def _waiting_sums(self) -> bool:
        with self._changed:
            return any(isinstance(each, CopySums) for each in self._queue)

    def _may_check(self, version: int) -> bool:
        """Whether the next piece has been through an update since it was copied."""
        return all(self._taken.get(place, version) < version for place in self._unchecked[0])

    def _look(self, version: int) -> CopyPiece | None:
        """Copy the next piece, or sum one. No update runs."""
        if self._left:
            places = self._left.popleft()
            self._taken.update(dict.fromkeys(places, version))
            self._unchecked.append(places)
            description, tensors = described(self._replicated, places)
            return CopyPiece(places, description, [tensor.clone() for tensor in tensors])
        if self._may_check(version):
            places = self._unchecked.popleft()
            self._queue.append(CopySums(places, sums(self._replicated, places)))
        return None

    def _fail(self, why: str) -> None:
        self.failed = self.failed or why
        self._queue.clear()
        self._tick()


class Followers:
    """The copies that are made of one worker's state. ``able``: updates are made by the optimizers' ``step``."""

    def __init__(self) -> None:
        self._all: list[IncrementalCopy] = []
        self.able = True

    def start(self, replicated: Replicated | None) -> IncrementalCopy | None:
        """Begin a copy, in a context in which no update runs; None where updates cannot be followed."""
        if replicated is None or not self.able or not followable(replicated):
            return None
        self._all = [*self._all, incremental_copy := IncrementalCopy(replicated)]
        return incremental_copy

    def end(self, incremental_copy: IncrementalCopy) -> None:
        self._all = [each for each in self._all if each is not incremental_copy]

    def begin(self, version: int, optimizer: Optimizer) -> None:
        for each in self._all:
            each.begin(version, optimizer)

    def updated(self) -> None:
        for each in self._all:
            each.updated()

    def taken_back(self, version: int) -> None:
        for each in self._all:
            each.taken_back(version)


def described(replicated: Replicated, places: Sequence[int]) -> tuple[list[list[Any]], list[torch.Tensor]]:
    """Optimizer state of some parameters as plain data, ``[number of the optimizer, place, entries]``, and the tensors:
    first those parameters, then what of their state is one. The tensors are live.
    """
    tensors = [replicated.parameters[place].detach() for place in places]
    rows: list[list[Any]] = []
    for number, optimizer in enumerate(replicated.optimizers):
        for place in places:
            if entries := entries_of(optimizer, replicated.parameters[place], tensors):
                rows.append([number, place, entries])
    return rows, tensors


def sums(replicated: Replicated, places: Sequence[int]) -> list[int]:
    """Checksums in the order of :func:`described`; the last is of plain values."""
    rows, tensors = described(replicated, places)
    values = [value for _, _, entries in rows for _, kind, value in entries if kind == VALUE]
    return [*(checksum(tensor) for tensor in tensors), checksum(torch.tensor(bytearray(repr(values).encode())))]


def _pieces(replicated: Replicated) -> Iterator[list[int]]:
    """Places of the parameters that optimizers step, divided into pieces. All others are rank-local state."""
    stepped, piece, size = replicated.stepped(), list[int](), 0
    for place, parameter in enumerate(replicated.parameters):
        if id(parameter) not in stepped:
            continue
        own = sum(tensor.nbytes for tensor in described(replicated, [place])[1])
        if piece and size + own > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(place)
        size += own
    if piece:
        yield piece


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


@torch.no_grad()
def put(replicated: Replicated, piece: CopyPiece) -> None:
    """Copy a piece of another worker's state to the parameters; its other tensors become optimizer state. Raises
    RecoveryFailed if shape or dtype of a parameter differ.
    """
    for place, tensor in zip(piece.places, piece.tensors, strict=False):
        own = replicated.parameters[place]
        if own.shape != tensor.shape or own.dtype != tensor.dtype:
            raise RecoveryFailed(f"parameter {replicated.names[place]} differs in shape or type between ranks")
        own.data.copy_(tensor)
        for optimizer in replicated.optimizers:
            optimizer.state.pop(own, None)
    for number, place, entries in piece.description:
        parameter = replicated.parameters[place]
        state = replicated.optimizers[number].state[parameter]
        for key, kind, value in entries:
            state[key] = value if kind == VALUE else beside(parameter, piece.tensors[value], kind)


@torch.no_grad()
def repeat(replicated: Replicated, update: LoggedUpdate) -> None:
    """Make an update that another worker has made. Neither hooks nor schedulers see it; gradients and hyper-parameters
    are afterwards what they were. Raises ValueError if the optimizer has other groups here.
    """
    optimizer = replicated.optimizers[update.optimizer]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    gradients = [p.grad for p in parameters]
    try:
        for group, values in zip(optimizer.param_groups, update.groups, strict=True):
            group.update(values)
        for parameter in parameters:
            parameter.grad = None
        for place, gradient in zip(update.places, update.gradients, strict=True):
            parameter = replicated.parameters[place]
            parameter.grad = gradient.to(parameter.device)
        inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = own


def compare(replicated: Replicated, expected: CopySums) -> None:
    """Compare the sums of another worker. Raises RecoveryFailed if they are others here."""
    if sums(replicated, expected.places) != expected.sums:
        names = ", ".join(replicated.names[place] for place in expected.places[:3])
        raise RecoveryFailed(
            f"updates made again give other values in one of the parameters {names}, ...: the script changes them "
            "outside an optimizer's step"
        )


def in_order(replicated: Replicated, states: Sequence[Sequence[Any]]) -> None:
    """Bring optimizer state into the order of ``states``, of the other worker's description, so that checkpoints have
    the same bytes. Raises RecoveryFailed if there is other state here.
    """
    for number, optimizer in enumerate(replicated.optimizers):
        theirs = [replicated.parameters[place] for each, place, _ in states if each == number]
        keys = [[key for key, _, _ in entries] for each, _, entries in states if each == number]
        if {id(p) for p in theirs} != {id(p) for p in optimizer.state}:
            raise RecoveryFailed(
                "the optimizer has state of other parameters than at the worker that it was copied from"
            )
        for parameter, names in zip(theirs, keys, strict=True):
            state = optimizer.state.pop(parameter)
            optimizer.state[parameter] = {key: state[key] for key in names}
