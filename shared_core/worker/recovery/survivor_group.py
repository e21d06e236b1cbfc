"""``on_failure="reroute"``: the workers that are there continue without a failed one, and admit a replacement later.

A *survivor group* connects the ranks that are present. An executor does all communication of a training step over it,
so that a step waits for nobody who is absent; at a failure the survivor group breaks, and the executor asks for
another. Everything else that communicates continues to mean all ranks. A replacement runs the user's script up to its
first step boundary and asks to join there; the others admit it when all of them stand at a step boundary, as a copy of
one of its replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from shared_core.errors import (
    SurvivorGroupBroken,
)
from shared_core.faults import inject
from shared_core.system import threads
from shared_core.waiting import ranks_text
from shared_core.worker.comm.gloo import STUCK_S, InnerGroup, finish
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.comm.suspicion import SUSPECT_S
from shared_core.worker.state.replicated import pack, unpack

#: Longest that an unsent tensor is kept.
LONGEST_WAIT = timedelta(days=10)


class SurvivorGroupWork:
    """A message that is being received."""

    def __init__(self, survivor_group: SurvivorGroup, work: Any, rank: int) -> None:
        self._survivor_group, self._work, self._rank = survivor_group, work, rank
        self._error: RuntimeError | None = None
        self._waiter: threading.Thread | None = None

    def wait(self) -> None:
        """Block until the message is in the tensor given to :meth:`SurvivorGroup.recv`.

        Raises:
            SurvivorGroupBroken: if a worker failed meanwhile.
            CollectiveTimeout: if gloo timed out although no worker failed.
            RuntimeError: what else gloo reported, if no worker failed.
        """
        inject.point("survivor_group.wait")
        with self._survivor_group.waiting((self._rank,), "the training step (a message)"):
            if self._waiter is None:
                self._run()
            else:
                self._waiter.join(STUCK_S)
                while self._waiter.is_alive():
                    if self._survivor_group.broken():
                        raise SurvivorGroupBroken("gloo does not give a message back that was cut")
                    self._waiter.join(STUCK_S)
        if self._error is not None:
            self._survivor_group.explain(self._error)

    def done(self) -> bool:
        """Whether :meth:`wait` returns, or raises, at once. The first call starts a thread."""
        # Gloo cannot be asked, so somebody waits: a thread, and only for works that are asked about.
        if self._waiter is None:
            self._waiter = threads.start(self._run, name="swift-group")
        return not self._waiter.is_alive()

    def _run(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return  # waited for before
        try:
            work.wait(self._survivor_group.timeout)
        except RuntimeError as error:
            self._error = error


class SurvivorGroup:
    """Connects the ranks that are present in one generation. Used by the program's thread.

    Attributes:
        number: rises with each survivor group: a generation has several, each with more ranks.
        ranks: who is connected, ascending; global.
        finished: ranks that had left the program for good before this survivor group was formed; neither here
            nor absent.
        timeout: of one operation; a failure ends it at once.
    """

    def __init__(
        self, runtime: Runtime, inner: InnerGroup, generation: int, ranks: tuple[int, ...], finished: tuple[int, ...]
    ) -> None:
        self.generation, self.ranks, self.finished = generation, ranks, finished
        self.number = generation * (runtime.world_size + 1) + len(ranks) + len(finished)
        self._runtime, self._inner = runtime, inner
        #: Of one operation; a failure ends it at once.
        self.timeout = runtime.world.timeout if runtime.world is not None else LONGEST_WAIT
        self._sent: SimpleQueue[tuple[Any, torch.Tensor] | None] = SimpleQueue()
        threads.start(_keep, (self._sent,), name="swift-group-sends")

    def broken(self) -> bool:
        """Whether a worker failed since: what is under way may never finish."""
        return self._runtime.latest > self.generation

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Send, without waiting. The tensor is not copied: it is kept until it is sent, and must not change until the
        step ends.

        Args:
            tensor: contiguous, on the CPU.
            rank: global rank of the receiver.
            tag: at least 0; tells messages between the same two ranks apart that are under way together.

        Raises:
            SurvivorGroupBroken: if a worker failed meanwhile.
        """
        inject.point("survivor_group.send")
        tensor = tensor.detach()
        self._sent.put((self._issue(lambda pg: pg.send([tensor], self.ranks.index(rank), tag)), tensor))

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> SurvivorGroupWork:
        """Begin to receive into ``tensor``, which is undefined until :meth:`SurvivorGroupWork.wait` returns.

        Args:
            tensor: contiguous, on the CPU, of the message's shape and dtype.
            rank: global rank of the sender.
            tag: the sender's.

        Raises:
            SurvivorGroupBroken: if a worker failed meanwhile.
        """
        return SurvivorGroupWork(self, self._issue(lambda pg: pg.recv([tensor], self.ranks.index(rank), tag)), rank)

    def exchange(self, value: Any) -> dict[int, Any]:
        """What each rank gives, by global rank. All ranks call it; blocks. ``value``: plain data that JSON can hold.
        Raises SurvivorGroupBroken if a worker failed meanwhile; others may have got the answer.
        """
        mine = pack(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        self._run(lambda pg: pg.allgather([sizes], [torch.tensor([mine.numel()])]))
        most = max(int(size) for size in sizes)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = [torch.empty_like(padded) for _ in self.ranks]
        self._run(lambda pg: pg.allgather([parts], [padded]))
        return {rank: unpack(part[: int(size)]) for rank, part, size in zip(self.ranks, parts, sizes, strict=True)}

    def barrier(self) -> None:
        """Block until all ranks have called it. Raises SurvivorGroupBroken if a worker failed meanwhile; others may
        have returned.
        """
        self._run(lambda pg: pg.barrier(dist.BarrierOptions()))

    def waiting(self, ranks: Sequence[int], what: str) -> AbstractContextManager[None]:
        """In here this worker waits for others: the progress time-out does not run, and helpers may compute. ``what``:
        what they are to do, for the line that a long wait prints.
        """
        return self._runtime.waiting_beside(ranks, what)

    def explain(self, error: RuntimeError) -> None:
        """An operation failed. Waits ``SUSPECT_S`` for a failure that explains it, then raises.

        Raises:
            SurvivorGroupBroken: a failure was announced.
            CollectiveTimeout: none was, and gloo timed out.
            RuntimeError: ``error``, if none was.
        """
        with self._runtime.lock:
            self._runtime.changed.wait_for(lambda: self.broken() or self._runtime.ended, timeout=SUSPECT_S)
            self._runtime.raise_if_ended()
        if self.broken():
            raise SurvivorGroupBroken(f"a worker failed after generation {self.generation}") from error
        assert self._runtime.world is not None
        others = ranks_text(rank for rank in self.ranks if rank != self._runtime.rank)
        raise self._runtime.suspicion.overdue(error, self._runtime.world, f"the training step (with {others},")

    def close(self) -> None:
        """Cut the connections."""
        self._runtime.connections.drop_side(self._inner)
        self._sent.put(None)

    def _issue(self, start: Callable[[Any], Any]) -> Any:
        pg = self._inner.pg
        if pg is None or self.broken():
            raise SurvivorGroupBroken(f"a worker failed after generation {self.generation}")
        try:
            return start(pg)
        except RuntimeError as error:
            self.explain(error)

    def _run(self, start: Callable[[Any], Any]) -> None:
        inject.point("survivor_group.wait")
        work = self._issue(start)
        with self.waiting(
            [rank for rank in self.ranks if rank != self._runtime.rank], "the training step (an exchange)"
        ):
            try:
                finish(work, self.broken, "a survivor group that is cut")
                return
            except RuntimeError as error:
                failed = error
        self.explain(failed)


def _keep(sent: SimpleQueue[tuple[Any, torch.Tensor] | None]) -> None:
    """Thread: keep tensors until they are sent. Receivers take them in any order, so some are kept a little longer."""
    while (item := sent.get()) is not None:
        try:
            item[0].wait(LONGEST_WAIT)
        except RuntimeError:
            pass  # the survivor group is broken: whoever receives notices
