"""Messages to or from one member of an inner group, several of them under way at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from shared_core.errors import GenerationAbandoned
from shared_core.system import threads
from shared_core.waiting import Wait
from shared_core.worker.comm.gloo import STUCK_S, InnerGroup

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
        """Block until all messages are complete.

        Args:
            new_wait: for one message.
            stuck_s: how long gloo may take to give a message back after a cut, in seconds.

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
