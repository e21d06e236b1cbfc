"""The groups of a process, with their logs, and the messages of their members.

Point-to-point messages are one numbered sequence per (source, destination, tag), ranks being those in the group. The
sender keeps a copy of each until the receiver cannot need it again.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch

from shared_core.errors import ConfigError, SwiftError, Unsupported
from shared_core.faults import inject
from shared_core.protocol.frontier import Channel, Done, StepBoundary, channel_key
from shared_core.protocol.members import members_text
from shared_core.system import threads
from shared_core.waiting import ranks_text
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.comm.op import BaseWork, Op
from shared_core.worker.comm.other_threads import OtherThreads
from shared_core.worker.comm.places import GroupPlaces, mismatch
from shared_core.worker.comm.startup import StartUp
from shared_core.worker.comm.state import SharedState
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import BufferPool, GroupLog, Logged

#: Stands for the source of a message that may come from anybody.
_ANY: Final = -1


class P2PWork(BaseWork):
    """A send, done when posted, or a receive. Gloo gives no future for receives: whoever waits, waits on gloo and,
    after a failure, for its repetition. The runtime's lock guards the attributes.
    """

    def __init__(self, channels: Channels, channel: Channel, index: int, tensor: torch.Tensor) -> None:
        super().__init__()
        self.channels, self.channel, self.index, self.tensor = channels, channel, index, tensor
        self.place = b""  # from where it was called, packed
        self.inner_work: Any = None
        self.done = False
        self.awaited = False
        self.begun = time.monotonic()
        self.error: Exception | None = None
        self.keep: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is through, across failures. ``timeout`` has no effect: the group's limits
        each attempt.

        Raises:
            PlaceMismatch: if it was sent from another place of the program.
            SwiftError: what ended the job.
            RuntimeError: what gloo reported, when no rank failed.
        """
        self.channels.wait(self)
        return True

    def is_completed(self) -> bool:
        return self.done

    def source_rank(self) -> int:
        return self.channel[0]

    _source_rank = source_rank


class AnyWork(P2PWork):
    """A receive from whoever sends first. Its channel is known when the message is there. ``number`` counts the
    messages with its tag that were received, or waited for, before it.
    """

    def __init__(self, channels: Channels, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        super().__init__(channels, channel, number, tensor)
        self.number = number

    def came_from(self, source: int, index: int) -> None:
        """The message is number ``index`` of those that ``source``, a rank in the group, sent with this tag."""
        self.channel, self.index = (source, *self.channel[1:]), index


class Channels:
    """All channels of one group at one rank. The runtime's lock guards them: ``send``, ``recv``, ``recv_any`` and
    ``wait`` take it, callers of the others hold it, but for :meth:`archive_all`. ``suspect``: told of errors of gloo
    that a failure may explain.
    """

    def __init__(
        self,
        group: GroupState,
        state: SharedState,
        disk: DiskLog,
        suspect: Callable[[Exception], None],
        others: OtherThreads,
    ) -> None:
        self._group, self._state, self._disk, self._suspect, self._others = group, state, disk, suspect, others
        self._startup = StartUp(state)
        self.begin_again()

    def begin_again(self) -> None:
        """As if nothing had been sent or received; what was answered in the start-up still counts."""
        self._sent: dict[Channel, int] = {}
        self._posted: dict[Channel, int] = {}
        self._received: dict[Channel, Done] = {}
        self._log: dict[Channel, deque[tuple[int, int, torch.Tensor]]] = {}
        self._works: dict[Channel, list[P2PWork]] = {}
        self._has: dict[str, int] = {}  # how many messages receivers had when this generation began
        self._again: list[Any] = []  # repeated receives nobody waits for
        self._sending: deque[Any] = deque(maxlen=4096)  # gloo needs the works of sends to stay alive
        self._streams: set[Channel] = set()  # sent by a thread of their own until it is level with the program
        self.nbytes = 0

    # -- use ---------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> P2PWork:
        """Send ``tensor``, of host memory; ``dst`` is a rank in the group. A contiguous copy stays here for a receiver
        that has to start over. The work returned is done.
        """
        channel = (self._group.rank, dst, tag)
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self._state.lock:
            if self._state.starting:
                return self._finished(P2PWork(self, channel, -1, copy))
            self._check_present("send")
            index = self._sent.get(channel, 0)
            self._sent[channel] = index + 1
            if self._group.places is not None:
                self._group.places.sent(channel, index, self._state.place.packed())
            self._log.setdefault(channel, deque()).append((index, self._state.boundary, copy))
            self.nbytes += copy.numel() * copy.element_size()
            # The copy is ours, so the caller need not wait: a send is done when it is posted.
            work = self._finished(P2PWork(self, channel, index, copy))
            live = self._group.inner is not None and channel not in self._streams
            if live and index >= self._has.get(channel_key(channel), 0):
                self._post_send(copy, channel)
        self._archive(channel, index, self._state.boundary, copy)
        return work

    def _archive(self, channel: Channel, index: int, boundary: int, copy: torch.Tensor) -> None:
        if self._disk.archive is not None:
            self._disk.put_message(self._group.ranks[channel[1]], self._name(channel), index, boundary, copy)

    def _name(self, channel: Channel) -> str:
        return f"{self._group.name}|{channel_key(channel)}"

    def archive_all(self) -> None:
        """Put everything that is kept into the archive, which has just been opened. May block for the disk."""
        with self._state.lock:
            kept = [(channel, *item) for channel, log in self._log.items() for item in log]
        for channel, index, boundary, copy in kept:
            self._archive(channel, index, boundary, copy)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> P2PWork:
        """Receive into ``tensor``, of host memory; ``src`` is a rank in the group. Raises Unsupported in a
        replacement's start-up, if the failed worker's message was too large to be kept.
        """
        channel = (src, self._group.rank, tag)
        with self._state.lock:
            work = P2PWork(self, channel, self._posted.get(channel, 0), tensor)
            key = self._startup.place(self._group.name, f"recv from {src} with tag {tag}")
            if self._state.starting:
                for message in self._startup.recorded(key, [tensor]) or ():
                    tensor.data.copy_(message)
                return self._finished(work)
            self._check_present("recv")
            self._others.called(lambda: f"recv of group {self._group.name!r}", work.is_completed)
            # The sender does not send it again to a replacement, which begins at a later place.
            work.keep = self._startup.keeper(key, [tensor]) if key is not None else None
            self._posted[channel] = work.index + 1
            work.place = self._state.place.packed()
            self._works.setdefault(channel, []).append(work)
            self._post(work)
        return work

    def recv_any(self, tensor: torch.Tensor, tag: int) -> P2PWork:
        """Receive into ``tensor`` from whoever sends first. Who that was is published before the program gets the
        message, and a replacement receives from the same members in the same order. Raises Unsupported where messages
        are logged to disk, and in a replacement's start-up.
        """
        channel = (_ANY, self._group.rank, tag)
        with self._state.lock:
            if self._disk.archive is not None:
                raise Unsupported("recv from any source where messages are logged to disk: name the source rank")
            work = AnyWork(self, channel, self._number_any(tag), tensor)
            known = self._state.sources.pop((self._any_id(tag), work.number), None)
            if known is None and not self._state.starting:
                self._check_present("recv")
                self._check_known(tag, work.number)
                self._others.called(lambda: f"recv of group {self._group.name!r}", work.is_completed)
                work.place = self._state.place.packed()
                self._works.setdefault(channel, []).append(work)
                self._post(work)
        if self._state.starting:
            raise Unsupported("recv from any source before the training begins: name the source rank")
        return work if known is None else self.recv(tensor, known, tag)

    def _number_any(self, tag: int) -> int:
        named = sum(count for channel, count in self._posted.items() if channel[2] == tag)
        return named + len(self._works.get((_ANY, self._group.rank, tag), ()))

    def _any_id(self, tag: int) -> int:
        return zlib.crc32(f"{self._group.name}|{tag}".encode())

    def _check_known(self, tag: int, number: int) -> None:
        """A failed worker has not received this message, or it is known from whom. Ends the job otherwise."""
        name = self._any_id(tag)
        if any(group == name and number < later for group, later in self._state.sources):
            self._state.fatal_actions.fall_back(
                f"rank {self._state.rank}: a failed worker received more messages from any source since its step "
                "boundary than their senders are kept of"
            )

    def _check_present(self, name: str) -> None:
        if self._state.absent:
            self._state.fatal_actions.cannot_complete(f"{name} in group {self._group.name!r}")

    def awaited(self) -> bool:
        return any(self._works.values())

    def waits(self) -> P2PWork | None:
        """The receive that the program's thread waits for. Callers hold the lock."""
        return next((work for works in self._works.values() for work in works if work.awaited and not work.done), None)

    def wait(self, work: P2PWork) -> None:
        work.awaited = threading.current_thread() is threading.main_thread()
        with self._state.compute_lock.passed_on():
            self._wait(work)

    def _wait(self, work: P2PWork) -> None:
        state, group = self._state, self._group
        while True:
            with state.lock:
                while not work.done and work.inner_work is None and work.error is None:
                    state.raise_if_ended()
                    state.changed.wait(1.0)
                if work.done:
                    return
                if work.error is not None:
                    raise work.error
                inner = work.inner_work
                group.inflight += 1
                state.note_waiting(+1)
            error: RuntimeError | None = None
            try:
                # Explicitly, because gloo otherwise keeps to the time-out it was connected with.
                inner.wait(group.timeout)
            except RuntimeError as caught:
                error = caught
            with state.lock:
                state.note_waiting(-1)
                if work.inner_work is not inner:
                    # A recovery had given it up and told the others that the message is not here: it comes again.
                    continue
                group.inflight -= 1
                apart = self._apart(work) if error is None else None
                if error is None:
                    self._complete(work)
                else:
                    work.inner_work = None
                state.changed.notify_all()
            if apart is not None:
                raise state.end(apart)
            if error is None:
                if work.keep is not None:
                    work.keep()
                return
            self._suspect(error)

    def _apart(self, work: P2PWork) -> SwiftError | None:
        """The error, if the message was sent from another place of the program."""
        group, state = self._group, self._state
        if group.places is None:
            return None
        recovered = state.generation > 0
        other = group.places.sent_elsewhere(work.channel, work.index, work.place, recovered=recovered)
        if other is None:
            return None
        return mismatch(state.rank, f"recv (message {work.index} from rank {other[0]})", work.place, other)

    # -- failures ----------------------------------------------------------------------------------

    def watermarks(self) -> tuple[dict[str, int], dict[str, int]]:
        """How many messages of each channel were received, without a gap, and sent."""
        received = {channel_key(c): done.upto for c, done in self._received.items()}
        return received, {channel_key(c): n for c, n in self._sent.items()}

    def held(self) -> dict[str, int]:
        """Per channel, the first message from which on all are kept, in memory or on disk."""
        return {channel_key(c): self._first(c) for c in self._sent}

    def _first(self, channel: Channel) -> int:
        log = self._log.get(channel)
        first = log[0][0] if log else self._sent[channel]
        archive = self._disk.archive
        # What is on disk counts if it reaches up to what is in memory: the disk may have failed, and the receiver may
        # have come into this rank's group since.
        on_disk = archive.first(self._name(channel), before=first) if archive is not None else None
        return first if on_disk is None else on_disk

    def start_from(self, received: dict[str, int], sent: dict[str, int]) -> None:
        for key, count in received.items():
            channel = _channel(key)
            self._received[channel] = Done(count)
            self._posted[channel] = count
        for key, count in sent.items():
            self._sent[_channel(key)] = count

    def repeat(self, has: dict[str, int]) -> None:
        """Start over on a fresh inner group: post the receives again, and send what receivers lack. ``has`` says per
        channel how many messages its receiver has. Callers hold the lock.
        """
        self._has = dict(has)
        self._again.clear()
        self._sending.clear()
        self._streams.clear()
        for channel, sent in self._sent.items():
            log, wanted = self._log.get(channel, ()), has.get(channel_key(channel), 0)
            if wanted < (log[0][0] if log else sent):
                self._streams.add(channel)
                name = f"swift-stream-{channel[1]}"
                threads.start(self._stream, (channel, wanted), name=name)
                continue
            for index, _, tensor in log:
                if index >= wanted:
                    self._post_send(tensor, channel)
        for channel, works in list(self._works.items()):
            if channel[0] == _ANY:
                for work in works:
                    self._post(work)
                continue
            done = self._received.setdefault(channel, Done())
            by_index = {work.index: work for work in works}
            for index in range(done.upto, self._posted.get(channel, 0)):
                if index in by_index:
                    self._post(by_index[index])
                else:  # finished out of order: the sender repeats it, nobody needs it
                    like = next(iter(works)).tensor
                    self._again.append(self._group.pg.recv([torch.empty_like(like)], channel[0], channel[2]))

    def _stream(self, channel: Channel, index: int) -> None:
        """Thread: send from disk, in order, until it is level with the program. Ends with the generation."""
        inner, archive = self._group.inner, self._disk.archive
        assert inner is not None and archive is not None
        try:
            while True:
                with self._state.lock:
                    if self._group.inner is not inner:
                        return  # the next generation starts from scratch
                    if index >= self._sent[channel]:
                        self._streams.discard(channel)
                        return
                    log = self._log.get(channel)
                    kept = log[index - log[0][0]][2] if log and index >= log[0][0] else None
                tensor = kept if kept is not None else archive.read(self._name(channel), index)[1][0]
                # With a time-out of its own: gloo's is that of connecting, and a receiver may begin much later.
                inner.pg.send([tensor], channel[1], channel[2]).wait(self._group.timeout)
                index += 1
                inject.point("recovery.streamed")
        except SwiftError as error:
            self._state.fatal_actions.fall_back(f"rank {self._state.rank}: the log on disk cannot be read: {error}")
        except RuntimeError as error:
            self._suspect(error)

    def cut(self) -> None:
        """The inner group is gone. Callers hold the lock."""
        for works in self._works.values():
            for work in works:
                work.inner_work = None

    def fail(self, error: Exception) -> None:
        """No failure explains the errors: whoever waits for a message gets this. Callers hold the lock."""
        for works in self._works.values():
            for work in works:
                if work.inner_work is None:
                    work.error = error

    def drop_before(self, boundary: int) -> None:
        """Drop messages sent before step boundary ``boundary`` from memory. Callers hold the lock."""
        for log in self._log.values():
            while log and log[0][1] < boundary:
                tensor = log.popleft()[2]
                self.nbytes -= tensor.numel() * tensor.element_size()

    # -- inner -------------------------------------------------------------------------------------

    def _post(self, work: P2PWork) -> None:
        if self._group.inner is None:
            return  # posted when the next generation is there
        source, _, tag = work.channel
        pg = self._group.pg
        try:
            work.inner_work = (
                pg.recv_anysource([work.tensor], tag) if source == _ANY else pg.recv([work.tensor], source, tag)
            )
            work.begun = time.monotonic()
        except RuntimeError as error:
            self._refused(error)
        self._state.changed.notify_all()

    def _post_send(self, tensor: torch.Tensor, channel: Channel) -> None:
        try:
            self._sending.append(self._group.pg.send([tensor], channel[1], channel[2]))
        except RuntimeError as error:
            self._refused(error)

    def _refused(self, error: RuntimeError) -> None:
        """Gloo takes no message: the peer is gone, or arguments are wrong; raises RuntimeError for these."""
        if "gloo/transport" not in str(error):
            raise error
        self._suspect(error)

    def _complete(self, work: P2PWork) -> None:
        if work.done:
            return
        works = self._works.get(work.channel, [])
        if work in works:
            works.remove(work)
        if isinstance(work, AnyWork):
            source = work.inner_work._source_rank()
            channel = (source, *work.channel[1:])
            work.came_from(source, self._posted.get(channel, 0))
            self._posted[channel] = work.index + 1
            self._state.publisher.sources.add(self._any_id(channel[2]), work.number, source)
        self._received.setdefault(work.channel, Done()).add(work.index)
        self._finished(work)

    def _finished(self, work: P2PWork) -> P2PWork:
        work.done = True
        work.inner_work = None
        return work


def _channel(key: str) -> Channel:
    source, destination, tag = key.split(",")
    return int(source), int(destination), int(tag)


class GroupState:
    """What this rank knows of one group. The runtime's lock guards it.

    Attributes:
        name: unique in the job and equal on all members.
        id: CRC32 of the name.
        rank: of this process in the group.
        ranks: global ranks of the members, in group order.
        members: ``ranks`` as a short text.
        inner: the gloo group of the live generation; None while there is none.
        inflight: operations that gloo has not yet finished or failed.
        places: from where its members have called; None where nobody compares that.
        next: sequence number of the next collective.
        done: finished collectives.
        pending: issued and not finished, by sequence number.
        replay: results to serve instead of running, by sequence number.
        destroyed_at: step boundary before the program destroyed it; -1 while it has not.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        ranks: tuple[int, ...],
        timeout: timedelta,
        *,
        state: SharedState,
        disk: DiskLog,
        pool: BufferPool,
        suspect: Callable[[Exception], None],
        others: OtherThreads,
    ) -> None:
        self.rank, self.size, self.ranks, self.timeout = rank, size, ranks, timeout
        self.members = members_text(ranks)
        self.rename(name)
        self.inner: InnerGroup | None = None
        self.inflight = 0
        self.places: GroupPlaces | None = None
        self.channels = Channels(self, state, disk, suspect, others)
        self._pool = pool
        self.destroyed_at = -1
        self._begin()

    def rename(self, name: str) -> None:
        self.name, self.id = name, zlib.crc32(name.encode())

    def cut(self) -> None:
        """Drop its connections, if it has any. Callers hold the lock."""
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.discard()

    @property
    def pg(self) -> Any:
        assert self.inner is not None
        return self.inner.pg

    def _begin(self) -> None:
        self.log = GroupLog(self._pool)
        self.next = 0
        self.done = Done()
        self.pending: dict[int, Op] = {}
        self.replay: dict[int, Logged] = {}

    def begin_again(self) -> None:
        """In a forked copy of the process: nothing was called here, and nobody is connected."""
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.abandon()
        self.inflight = 0
        self._begin()
        self.channels.begin_again()

    @property
    def over(self) -> bool:
        """The program has destroyed it and waits for nothing in it. Others may still need its log."""
        return self.destroyed_at >= 0 and not self.pending and not self.channels.awaited()

    def destroy(self, boundary: int) -> None:
        self.destroyed_at = boundary

    def start_from(self, boundary: StepBoundary) -> None:
        """Take the failed worker's counts at its step boundary."""
        self.next = boundary.groups.get(self.name, 0)
        self.done.upto = self.next
        self.channels.start_from(boundary.received.get(self.name, {}), boundary.sent.get(self.name, {}))


class Groups(dict[str, GroupState]):
    """By name, in the order they were made; ``given`` counts how often the program has given each. Callers hold the
    lock where others may add one. ``world``: the default group; None before it is made.
    """

    def __init__(self, state: SharedState) -> None:
        super().__init__()
        self._state = state
        self.given: Counter[str] = Counter()
        self.world: GroupState | None = None

    def all(self) -> list[GroupState]:
        return list(self.values())

    def add(self, group: GroupState) -> None:
        """Take in a new group. The first one is the default group. A name that was given before gets an apostrophe for
        each time. Raises ConfigError if the first one has not all ranks.
        """
        self.given[group.name] += 1  # destroyed and made again: others may still have the first one, or have it no more
        group.rename(group.name + "'" * (self.given[group.name] - 1))
        self[group.name] = group
        if self.world is not None:
            return
        if group.size != self._state.world_size:
            raise ConfigError(
                f"the first process group has {group.size} ranks, but the job has {self._state.world_size}; create "
                "the default group first"
            )
        self.world = group

    def drop(self, group: GroupState) -> None:
        """Let go of a group that was destroyed. Callers hold the lock."""
        del self[group.name]
        group.cut()

    def called(self, group: GroupState) -> str:
        """The group in the user's words."""
        return "the default group" if group is self.world else f"group {group.name!r} of {ranks_text(group.ranks)}"

    def longest_s(self, group: GroupState) -> float:
        """How long a member that never failed is waited for, in seconds: as long as torch does, at least."""
        return max(self._state.wait_timeout_s, group.timeout.total_seconds())

    def log_bytes(self) -> int:
        return sum(group.log.nbytes + group.channels.nbytes for group in self.values())
