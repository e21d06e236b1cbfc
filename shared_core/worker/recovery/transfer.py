"""Plain data and tensors between two members of a group that is being formed, named by their index in it. Large tensors
go from the memory where they are to the memory where they belong; small ones travel in bundles.

All functions that send or receive block. They raise RuntimeError if a connection breaks, GenerationAbandoned if the
group was cut, and WaitTimeout if the other does not take part in time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from shared_core.devices import apart, await_all, to_host
from shared_core.errors import GenerationAbandoned
from shared_core.system import threads
from shared_core.waiting import Wait
from shared_core.worker.comm.gloo import STUCK_S, InnerGroup
from shared_core.worker.spans import Span, bundled
from shared_core.worker.state.checksums import raw_bytes
from shared_core.worker.state.replicated import pack, unpack

_TAG = 2**30
#: What is smaller travels in bundles, and the size of these, in bytes.
_ALONE, _BUNDLE = 256 << 10, 4 << 20


class StillWriting(GenerationAbandoned):
    """What was to be received may still be written into memory that is in use."""


def send(inner: InnerGroup, destination: int, head: dict[str, Any], tensors: Sequence[torch.Tensor]) -> None:
    """Send plain data and tensors to a member, which calls :func:`receive`. Devices are waited for."""
    await_all(apart(tensors))
    packed = pack({"head": head, "layout": layout(tensors)})

    def messages() -> Iterator[Message]:
        yield torch.tensor([packed.numel()]), ()
        yield packed, ()
        yield from _messages([raw_bytes(t) for t in tensors], whole(tensors), gather=True)

    _outgoing(inner, destination, messages())


def receive(
    inner: InnerGroup,
    source: int,
    what: str = "to send state and logged messages in the recovery",
    limit_s: float | None = None,
    *,
    idle: bool = False,
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What :func:`send` was given; the tensors are new and on the CPU.

    Args:
        source: index of the sender in the group.
        what: the sender is to do, for the line that a long wait prints.
        limit_s: of one message; ``wait_timeout_s`` if None.
        idle: nothing depends on this message, so that a long wait is not worth a line.
    """

    def get(messages: Iterable[Message]) -> None:
        _incoming(inner, source, messages).finish(lambda: _wait(inner, source, what, limit_s, idle=idle))

    size = torch.zeros(1, dtype=torch.int64)
    get([(size, ())])
    packed = torch.empty(int(size), dtype=torch.uint8)
    get([(packed, ())])
    described = unpack(packed)
    tensors = room(described["layout"])
    if tensors:
        get(_messages([raw_bytes(t) for t in tensors], whole(tensors), gather=False))
    return described["head"], tensors


def send_spans(inner: InnerGroup, destination: int, tensors: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
    """Send parts of tensors whose layout the other knows; it calls :func:`receive_spans`."""
    await_all(apart(tensors))
    messages = _messages([raw_bytes(t) for t in tensors], spans, gather=True)
    _outgoing(inner, destination, messages)


def receive_spans(
    inner: InnerGroup, tensors: Sequence[torch.Tensor], spans: Mapping[int, Sequence[Span]], stuck_s: float
) -> None:
    """Fill contiguous CPU tensors, in place, with what several members give at once.

    Args:
        spans: by index of the member that gives them.
        stuck_s: how long gloo may take to let the tensors go after a cut, in seconds.

    Raises:
        StillWriting: if the group was cut and something may still be written into the tensors.
    """
    views = [raw_bytes(t) for t in tensors]
    flows = {place: _incoming(inner, place, _messages(views, each, gather=False)) for place, each in spans.items()}
    failed: RuntimeError | None = None
    for place, flow in flows.items():
        new_wait = partial(_wait, inner, place, "to send state in the recovery")
        try:
            flow.finish(new_wait, stuck_s)
        except NotGivenBack as error:
            failed = StillWriting(str(error))
        except RuntimeError as error:
            failed = failed or error
            inner.sever()
    if failed is not None:
        raise failed


def layout(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    return [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]


def room(described: Sequence[Sequence[Any]], places: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Contiguous CPU tensors of a layout, contents undefined; the first are ``places`` where these fit."""
    found = []
    for number, (shape, dtype) in enumerate(described):
        kind: torch.dtype = getattr(torch, dtype)
        place = places[number] if number < len(places) else None
        if (
            place is not None
            and list(place.shape) == shape
            and place.dtype == kind
            and place.is_contiguous()
            and place.is_cpu
        ):
            found.append(place)
        else:
            found.append(torch.empty(shape, dtype=kind))
    return found


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def whole(tensors: Sequence[torch.Tensor]) -> list[Span]:
    return [Span(place, 0, t.nbytes) for place, t in enumerate(tensors) if t.numel()]


def _messages(views: Sequence[torch.Tensor], spans: Sequence[Span], *, gather: bool) -> Iterator[Message]:
    """Both ends make the same of the same spans. ``views`` are the tensors as flat uint8. With ``gather`` they are read
    now, also from devices, to send them; else what has come is dealt out, on the host.
    """
    for bundle in bundled(spans, _ALONE, _BUNDLE):
        parts = [views[span.tensor][span.start : span.stop] for span in bundle]
        if len(parts) == 1:
            yield to_host(parts[0]) if gather else parts[0], ()
        elif gather:
            yield torch.cat([to_host(part) for part in parts]), ()
        else:
            yield torch.empty(sum(span.size for span in bundle), dtype=torch.uint8), parts


def _outgoing(inner: InnerGroup, place: int, messages: Iterable[Message]) -> None:
    pg, what = _connected(inner), "to take over what this one sends it in the recovery"
    Flow(inner, lambda tensor: pg.send([tensor], place, _TAG), messages).finish(lambda: _wait(inner, place, what))


def _incoming(inner: InnerGroup, place: int, messages: Iterable[Message]) -> Flow:
    pg = _connected(inner)
    return Flow(inner, lambda tensor: pg.recv([tensor], place, _TAG), messages)


def _connected(inner: InnerGroup) -> Any:
    """Raises GenerationAbandoned if the group was cut."""
    if (pg := inner.pg) is None:
        raise GenerationAbandoned("the group was cut")
    return pg


def _wait(inner: InnerGroup, place: int, what: str, limit_s: float | None = None, *, idle: bool = False) -> Wait:
    return Wait(
        f"rank {inner.rank}",
        f"rank {inner.members[place]} {what}",
        inner.wait_timeout_s if limit_s is None else limit_s,
        bound="detection.wait_timeout_s" if limit_s is None else "a fixed limit",
        advice="It may hang, or the network is too slow"
        + (": raise detection.wait_timeout_s." if limit_s is None else "."),
        speaks=lambda: not idle,
    )


#: Gloo's own time-out of a message; ours ends it before, and a failure at once.
_FOREVER = timedelta(days=10)
#: Messages under way: while one is copied, both ends agree on the next.
_DEPTH = 4

#: The tensor that is sent or received, and those, of its type, to which its contents are copied then.
Message = tuple[torch.Tensor, Sequence[torch.Tensor]]


class NotGivenBack(GenerationAbandoned):
    """A message was cut, and gloo does not give it back: what it is received into may still be written to."""


class Flow:
    """Runs messages on a thread of its own, which can be left behind: a sender whose connection is cut while its
    message waits for room in the socket's buffer is not woken by gloo.

    Args:
        begin: starts a message of a tensor, as gloo's ``send`` and ``recv``.
        messages: flat CPU tensors, in order, each with those to which its contents are then copied in parts. Iterated
            on the thread, so at most four are alive at once.
    """

    def __init__(
        self,
        inner: InnerGroup,
        begin: Callable[[torch.Tensor], Any],
        messages: Iterable[Message],
    ) -> None:
        self._inner, self._begin = inner, begin
        self._finished = 0
        self._failed: Exception | None = None
        self._done = threading.Event()
        threads.start(self._run, (messages,), name="swift-message")

    def _run(self, messages: Iterable[Message]) -> None:
        under_way: deque[tuple[Any, Message]] = deque()
        try:
            for message in messages:
                under_way.append((self._begin(message[0]), message))
                if len(under_way) >= _DEPTH:
                    self._end(*under_way.popleft())
            while under_way:
                self._end(*under_way.popleft())
        except Exception as error:  # noqa: BLE001 (whoever waits raises it)
            self._failed = error
        under_way.clear()  # gloo writes nothing more into what it has let go
        self._done.set()

    def _end(self, work: Any, message: Message) -> None:
        work.wait(_FOREVER)
        contents, places = message
        for place, part in zip(
            places, contents.split([each.numel() for each in places]) if places else (), strict=True
        ):
            place.copy_(part)
        self._finished += 1

    def finish(self, new_wait: Callable[[], Wait], stuck_s: float = STUCK_S) -> None:
        """Block until all messages are complete. ``stuck_s``: how long gloo may take to give a message back after a
        cut, in seconds.

        Raises:
            RuntimeError: what gloo reported.
            NotGivenBack: if the group was cut, and gloo does not give a message back.
            WaitTimeout: at the limit of a wait.
        """
        wait, seen = new_wait(), 0
        while not self._done.wait(0.05):
            if self._inner.severed and not self._done.wait(stuck_s):
                raise NotGivenBack(wait.text)
            if self._finished != seen:
                wait, seen = new_wait(), self._finished
            wait.look()
        if self._failed is not None:
            raise self._failed
