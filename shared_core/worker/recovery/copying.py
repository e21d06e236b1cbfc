"""Both ends of a copy of the replicated state that is made while training continues; one thread at each."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from shared_core.errors import RecoveryFailed, SwiftError
from shared_core.faults import inject
from shared_core.system import threads
from shared_core.waiting import Wait
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.recovery.transfer import nbytes, receive, send
from shared_core.worker.state.incremental_copy import CopyPiece, CopySums, IncrementalCopy, LoggedUpdate
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.update_replay import compare, in_order, put, repeat
from shared_core.worker.state.updates import Updates


@dataclass
class Sent:
    """Bytes that a copy has sent so far, and when it began (``time.monotonic()``)."""

    nbytes: int
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def give(inner: InnerGroup, replacement: int, updates: Updates, incremental_copy: IncrementalCopy, sent: Sent) -> None:
    """Send a copy until it is closed, and wait until the replacement, by its index in the group, says that it has it.
    ``sent`` is counted on. Raises what :func:`transfer.send` raises.
    """

    def say(head: dict[str, Any], tensors: Any = ()) -> None:
        inject.point("copy.give")
        send(inner, replacement, head, tensors)
        sent.nbytes += nbytes(tensors)

    for item in incremental_copy.next_items(updates.gate.held, lambda: updates.state_version):
        if isinstance(item, CopyPiece):
            say({"what": "piece", "places": item.places, "states": item.description}, item.tensors)
        elif isinstance(item, LoggedUpdate):
            facts = {"version": item.version, "optimizer": item.optimizer, "groups": item.groups}
            say({"what": "update", "places": item.places} | facts, item.gradients)
        elif isinstance(item, CopySums):
            say({"what": "sums", "places": item.places, "sums": item.sums})
        else:
            say({"what": "level"})
    say({"what": "end", "failed": incremental_copy.failed})
    receive(inner, replacement, "to say that it has its copy")  # before the connection is cut


class Taking:
    """A replacement's side, on a thread of its own. It clears the optimizers' state and then writes parameters and
    optimizer state in place; the program's thread waits meanwhile. ``donor`` is an index in the group.

    Attributes:
        level: all of the state is here, but for the newest update.
        failed: why the copy is of no use; empty while it is of use.
    """

    def __init__(self, runtime: Runtime, inner: InnerGroup, donor: int, replicated: Replicated) -> None:
        self._runtime, self._inner, self._donor, self._replicated = runtime, inner, donor, replicated
        self._ended = threading.Event()
        self.level, self.failed = False, ""
        for optimizer in replicated.optimizers:
            optimizer.state.clear()
        self._thread = threads.start(self._run, name="swift-copy")

    def _run(self) -> None:
        try:
            while self._take():
                pass
        except (SwiftError, RuntimeError, ValueError, KeyError) as error:
            self.failed = str(error) or type(error).__name__
        self._ended.set()

    def _take(self) -> bool:
        head, tensors = receive(self._inner, self._donor, "to send its state", math.inf, idle=True)
        inject.point("copy.take")
        what, replicated = head["what"], self._replicated
        if what == "piece":
            put(replicated, CopyPiece(head["places"], head["states"], tensors))
        elif what == "update":
            repeat(
                replicated,
                LoggedUpdate(head["version"], head["optimizer"], head["groups"], head["places"], tensors, []),
            )
        elif what == "sums":
            compare(replicated, CopySums(head["places"], head["sums"]))
        elif what == "level":
            self.level = True
        else:
            self.failed = head["failed"]
            send(self._inner, self._donor, {}, [])
            return False
        return True

    @property
    def over(self) -> bool:
        return self._ended.is_set()

    def finish(self, states: list[list[Any]]) -> str:
        """Block until all is here, in the order of ``states``, the donor's. Returns why it will not be; empty if it is.
        Raises WaitTimeout if it does not come.
        """
        wait = Wait(
            f"rank {self._runtime.rank}",
            f"rank {self._inner.members[self._donor]} to send the last updates",
            self._runtime.wait_timeout_s,
        )
        while not self._ended.wait(wait.next_s()):
            wait.look()
        if not self.failed:
            try:
                in_order(self._replicated, states)
            except RecoveryFailed as error:
                self.failed = str(error)
        return self.failed

    def stop(self) -> None:
        """Cut the connection and wait for the thread."""
        self._runtime.connections.drop_side(self._inner)
        self._thread.join()


def started() -> Sent:
    return Sent(0, time.monotonic())
