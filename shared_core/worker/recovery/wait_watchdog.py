"""Says whom the training waits for when it takes long, and ends it when nobody can ever continue.

A collective of the training may wait for a peer as long as torch's own time-out allows: a healthy peer may be slow. So
one rank says once who is waited for, then nothing for a while. A *standstill* is another matter: all that wait, wait
for each other, as when a replacement has taken another branch of the script than its peers. That ends within seconds
where nothing else happens in these processes; where a thread of one of them computes, or calls collectives too, it ends
when the wait does.

Each rank that waits reports to the store where it stands; one of them, the speaker, reads all reports. Nothing is
reported while waits are short.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from shared_core.codec import Count, decode
from shared_core.errors import DamagedRecord, Deadlock, ReplayDivergence
from shared_core.events import console
from shared_core.protocol.frontier import channel_key
from shared_core.protocol.standstill import ANY_SOURCE, WaitStatus, awaited, describe, lasts, left_s, stuck
from shared_core.system import threads
from shared_core.transport.store import Store
from shared_core.waiting import ends_text, quiet_s, ranks_text
from shared_core.worker.comm.groups import GroupState
from shared_core.worker.comm.op import KeptResults, Op
from shared_core.worker.comm.op import describe as call_text
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.link import at_end
from shared_core.worker.recovery.recovery import WorkerRecovery


def wait_status(runtime: Runtime, look: int, *, idle: bool) -> WaitStatus | None:
    """What the program waits for in the live generation; None if it does not wait, or if a recovery is under way, which
    says itself whom it waits for. ``look`` is the number of the report; ``idle``: the process does nothing else.
    """
    with runtime.lock:
        live = not runtime.broken and runtime.generation == runtime.latest
        # With ranks absent no generation is formed, and the program waits on survivor groups.
        if runtime.starting or runtime.generation < 0 or not (live or runtime.beside):
            return None
        found = _wait(runtime)
        if found is None:
            return None
        begun, wait = found
        waited_s = time.monotonic() - begun
        return WaitStatus(runtime.rank, runtime.latest, look, waited_s=waited_s, idle=idle, **wait, **_done(runtime))


def finished(runtime: Runtime, look: int) -> WaitStatus:
    with runtime.lock:
        return WaitStatus(runtime.rank, runtime.generation, look, **_done(runtime))


def _wait(runtime: Runtime) -> tuple[float, dict[str, Any]] | None:
    """Since when (``time.monotonic()``) the program waits, and fields of :class:`WaitStatus`."""
    world = runtime.world
    if runtime.beside is not None:
        begun, members, call = runtime.beside
        limit_s = world.timeout.total_seconds() if world is not None else runtime.wait_timeout_s
        return begun, {"call": call, "members": members, "limit_s": limit_s}
    for group in runtime.groups.values():
        if (message := group.channels.waits()) is not None:
            source = group.ranks[message.channel[0]] if message.channel[0] >= 0 else ANY_SOURCE
            place = {"channel": channel_key(message.channel), "number": message.index, "source": source}
            return message.begun, _named(runtime, group) | place | {"call": "recv"}
    if (waited := _collective(runtime)) is not None:
        group, op = waited
        return op.begun, _named(runtime, group) | {"call": call_text(op.signature), "number": op.seq}
    return None


def _named(runtime: Runtime, group: GroupState) -> dict[str, Any]:
    limit_s = group.timeout.total_seconds()
    return {"group": group.name, "called": runtime.groups.called(group), "members": group.ranks, "limit_s": limit_s}


def _collective(runtime: Runtime) -> tuple[GroupState, Op] | None:
    """The one that the program waits for. DDP waits in C++ for the first of its buckets, and does nothing before."""
    pending = [
        (group, group.pending[seq])
        for group in runtime.groups.values()
        if group.size > 1
        for seq in sorted(group.pending)
    ]
    asked = [each for each in pending if each[1].awaited]
    buckets = [each for each in pending if each[1].lazy or each[1].keeps is KeptResults.BUCKET]
    return next(iter(asked or buckets), None)


def _done(runtime: Runtime) -> dict[str, Any]:
    groups = runtime.groups
    return {
        "issued": {name: group.next for name, group in groups.items()},
        "pending": {
            name: {str(seq): call_text(op.signature) for seq, op in group.pending.items()}
            for name, group in groups.items()
            if group.pending
        },
        "sent": {name: sent for name, group in groups.items() if (sent := group.channels.watermarks()[1])},
    }


#: A wait that lasts longer is reported, in seconds.
_REPORT_S = 1.0
#: Between two looks, in seconds; longer in a long wait.
_LOOK_S = (0.5, 2.0)
#: A process is idle whose threads together compute for less than this share of the time.
_IDLE = 0.2
#: After a line about a wait in which nothing is wrong the next one comes after so many seconds, or the next recovery.
AGAIN_S = 600.0


class WaitWatchdog:
    """Watches the waits of one worker's program, on a thread of its own."""

    def __init__(self, recovery: WorkerRecovery) -> None:
        self._recovery, self._runtime = recovery, recovery.runtime
        self.begin()

    def begin(self) -> None:
        """Watch nothing yet; again in a forked copy of the process."""
        recovery, self._env = self._recovery, self._recovery.env
        self._events, self._fatal_actions = recovery.events, recovery.fatal_actions
        self._limit_s = recovery.env.config.detection.wait_timeout_s
        self._clocks = time.monotonic(), time.process_time()
        self._lock = threading.Lock()
        self._over = False
        self._looks = 0
        self._reported = False
        self._speaks: int | None = None
        self._said: tuple[int, frozenset[int]] = (-1, frozenset())
        self._before: dict[int, WaitStatus] = {}
        #: Where the ranks are that are waited for, in a sentence and a space; empty if it is not known.
        self.whereabouts = ""
        self._last: WaitStatus | None = None

    def watch(self) -> None:
        """Watch from now on; the default process group is about to be made."""
        at_end(self._finish)
        if self._env.incarnation:
            self._store().set(self._key(self._env.rank), "")  # what the failed worker has reported
        threads.start(self._run, name="swift-watchdog")

    def _finish(self) -> None:
        if self._env.world_size == 1 or self._runtime.generation < 0:
            return
        with self._lock:
            self._over = True  # this report is the last
            with suppress(RuntimeError):  # the agent is gone
                self._store().set(self._key(self._env.rank), finished(self._runtime, self._looks).to_json())

    def _run(self) -> None:
        pause = threading.Event()
        limit_s = self._limit_s
        short = min(_LOOK_S[0], quiet_s(limit_s) / 4)
        while self._runtime.ended is None:
            waited = self._last.waited_s if self._last else 0.0
            pause.wait(max(short, min(0.1 * waited, _LOOK_S[1], limit_s - waited)))
            try:
                with self._lock:
                    if self._over:
                        return
                    self._look()
            except RuntimeError:
                return  # the store is gone: so is the agent

    def _store(self) -> Store:
        return self._recovery.store.below()

    def _key(self, rank: int) -> str:
        return f"stand/{rank}"

    def _look(self) -> None:
        """Report where this rank stands, and speak if that falls to it."""
        self._looks += 1
        mine = wait_status(self._runtime, self._looks, idle=self._idle())
        quiet = quiet_s(self._limit_s)
        if mine is not None and mine.waited_s < min(_REPORT_S, quiet / 2):
            mine = None
        self._last = mine
        self._runtime.operations.end_if_apart()
        if mine is None:
            self._retire()
            return
        store = self._store()
        store.set(self._key(self._env.rank), mine.to_json())
        self._reported = True
        if self._speaks != mine.generation:
            self._speaks = None
            if not self._may_speak(store, f"stand/speaker/{mine.generation}"):
                return
            self._speaks = mine.generation
        if mine.waited_s >= min(quiet, quiet_s(mine.limit_s)) / 2:
            self._speak(store, mine)

    def _may_speak(self, store: Store, key: str) -> bool:
        speaker = store.compare_set(key, "", str(self._env.rank))
        try:
            return bool(decode(speaker, Count, key) == self._env.rank)
        except DamagedRecord:  # nobody's: taken over
            store.set(key, str(self._env.rank))
            return True

    def _retire(self) -> None:
        if self._reported:
            self._reported = False
            self._store().set(self._key(self._env.rank), "")
        if self._speaks is not None:
            self._store().compare_set(f"stand/speaker/{self._speaks}", str(self._env.rank), "")
            self._speaks = None
        self._before = {}

    def _speak(self, store: Store, mine: WaitStatus) -> None:
        statuses = self._read(store, mine)
        held = stuck(statuses)
        sure = lasts(held, self._before, statuses)
        if not held or not self._before or not _same(held, self._before, statuses):
            self._before = statuses  # the next looks are compared with this one
        if sure:
            self._stand_still(statuses, held)
        elif not held and mine.waited_s >= min(quiet_s(self._limit_s), quiet_s(mine.limit_s)):
            self._wait_on(store, mine, statuses)

    def _read(self, store: Store, mine: WaitStatus) -> dict[int, WaitStatus]:
        """Reports of this generation. A damaged one is passed over: its rank may be computing."""
        keys = {rank: key for rank in range(self._env.world_size) if store.check([key := self._key(rank)])}
        statuses = []
        for (rank, key), raw in zip(keys.items(), store.multi_get(list(keys.values())), strict=True):
            with suppress(DamagedRecord):
                statuses += [WaitStatus.from_json(raw, key, rank)] if raw else []
        return {each.rank: each for each in statuses if each.finished or each.generation == mine.generation}

    def _stand_still(self, statuses: dict[int, WaitStatus], held: dict[int, tuple[int, ...]]) -> None:
        """Nobody can continue. Without a recovery that ends when torch's time-out does."""
        generation = statuses[next(iter(held))].generation
        waits = {rank: statuses[rank] for rank in held}
        begun = max(each.waited_s for each in waits.values())
        bound_s, bound = min(each.limit_s for each in waits.values()), "time-out of the process group"
        if generation > 0 and self._limit_s < bound_s:
            bound_s, bound = self._limit_s, "detection.wait_timeout_s"
        left = left_s(held, statuses, bound_s)
        if left < bound_s - begun:
            bound = "none of them does anything else"
        text = describe(statuses, held)
        self.whereabouts = f"{text}. "
        if self._said[0] != generation or self._said[1].isdisjoint(held):
            self._said = (generation, frozenset(held))
            self._say(f"no rank can continue: {text}; {ends_text(left, bound)}", generation)
        if left <= 0:
            self._end(generation, f"no rank can continue, for {begun:.0f} s ({bound}): {text}")

    def _end(self, generation: int, why: str) -> None:
        """Go back to the checkpoint once, where there is one; else end the job."""
        if self._env.config.checkpoint.dir is not None and not self._env.restart:
            self._fatal_actions.fall_back(why)
        if generation > 0:
            self._runtime.end(
                ReplayDivergence(
                    f"after the recovery in generation {generation} {why}. A replacement makes other calls than its "
                    "peers: the script took another branch there. Let branches depend only on what is restored "
                    "(registered state, the loop's place), not on files, the time, or whether this process has run "
                    "before"
                )
            )
            return
        self._runtime.end(
            Deadlock(
                f"{why}. The ranks do not make the same calls in the same order: look for a branch on the rank around "
                "one of these calls, or for ranks that run different numbers of batches"
            )
        )

    def _idle(self) -> bool:
        """Whether this process has hardly computed since the last look, and only the program calls collectives."""
        wall, cpu = time.monotonic(), time.process_time()
        (wall_before, cpu_before), self._clocks = self._clocks, (wall, cpu)
        return cpu - cpu_before < _IDLE * (wall - wall_before) and not self._runtime.others.call

    def _wait_on(self, store: Store, mine: WaitStatus, statuses: dict[int, WaitStatus]) -> None:
        """Somebody is late. One line in a while, and one after each recovery."""
        whom = awaited(mine, statuses)
        text = describe(statuses, {mine.rank: whom}) if whom else ""
        self.whereabouts = f"{text}. " if text else ""
        key = f"stand/said/{mine.generation}"
        if not whom or time.time() - _when(store, key) < AGAIN_S:
            return
        store.set(key, str(time.time()))
        at = {rank: statuses[rank].where for rank in whom if rank in statuses and not statuses[rank].finished}
        where = "; ".join(f"rank {rank} is in {place}" for rank, place in list(at.items())[:4])
        limit_s = self._env.config.detection.progress_timeout_s
        busy = [rank for rank in whom if rank not in statuses]
        if busy:
            is_are = "is" if len(busy) == 1 else "are"
            where += f"{'; ' if where else ''}{ranks_text(busy)} {is_are} not in a collective"
            where += f" (replaced after {limit_s:g} s without progress: detection.progress_timeout_s)"
        late = f": {where}" if where else ""
        ends = ends_text(mine.limit_s - mine.waited_s, "time-out of the process group")
        self._say(f"{text}{late}; {ends}", mine.generation)

    def _say(self, line: str, generation: int) -> None:
        console(line)
        self._events.emit("warning", rank=self._env.rank, generation=generation, message=line)


def _when(store: Store, key: str) -> float:
    """When something was said last, in seconds since the epoch; 0 if it was not."""
    try:
        return float(decode(store.get(key), float, key)) if store.check([key]) else 0.0
    except DamagedRecord:
        return 0.0


def _same(held: dict[int, tuple[int, ...]], before: dict[int, WaitStatus], now: dict[int, WaitStatus]) -> bool:
    return all(rank in before and before[rank].place == now[rank].place for rank in held)
