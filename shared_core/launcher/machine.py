"""An agent among those of other machines: its place, its lease, copies, and who takes a failed machine's place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from shared_core.events import console
from shared_core.launcher import mirror
from shared_core.launcher.attempt import Attempt, Team
from shared_core.launcher.console import host_of, listed
from shared_core.launcher.lease import Fenced, sever
from shared_core.launcher.ledger import Ledger
from shared_core.launcher.mirror import MirrorServer
from shared_core.launcher.neighbour import NeighbourCopies, Sender
from shared_core.launcher.rendezvous import Rendezvous
from shared_core.protocol import mirroring
from shared_core.protocol.generation import Cause, CauseKind, Entry, EntryKind
from shared_core.protocol.resizing import Reassignment, Resizing, reassign
from shared_core.protocol.worker_env import Resized
from shared_core.system import wire
from shared_core.system.jobdir import CHECKPOINTS, MIRROR
from shared_core.system.secret import NotAuthenticated, leave
from shared_core.system.wire import Link
from shared_core.transport import remote_store
from shared_core.transport.remote_store import RemoteStore
from shared_core.transport.store import Store, StoreError
from shared_core.waiting import FOREVER_S, Wait, ranks_text


class MachineMembership:
    """What an agent needs of the other machines.

    Args:
        pause: waits so many seconds while this machine has no place; may raise to give up.
        wake: called on a thread when there is something to look at.
        stop_workers: called on a thread when the workers of this machine must be killed at once.
        key: of the job.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        job_dir: Path,
        *,
        pause: Callable[[float], None],
        wake: Callable[[], None],
        stop_workers: Callable[[], None],
        number: Callable[[], int],
        key: bytes,
    ) -> None:
        self.rendezvous, self._job_dir = rendezvous, job_dir
        self.number, self.pause, self.changed, self._stop_workers = number, pause, wake, stop_workers
        self._gone: set[str] = set()
        self._copies = NeighbourCopies(job_dir / CHECKPOINTS)
        self._key = key
        leave(job_dir, key)
        self._server: MirrorServer | None = None
        self._sender: Sender | None = None
        rendezvous.attend(self)

    # -- what the rendezvous asks of this machine ---------------------------------------------------------------------

    def listen(self, address: str) -> int:
        """See :class:`GatheringListener`. Takes all of this machine's ports."""
        if self._server is None:
            ports = self.rendezvous.ports
            if ports.store:
                ports.take(address, ports.store).close()  # if this machine is to host the script's store
            listener = ports.take(address, ports.copies)
            self._server = MirrorServer(self._job_dir / MIRROR, self._serve, key=self._key, listener=listener)
        return self._server.port

    def connect(self, machine: str) -> Store:
        try:
            return RemoteStore(wire.connect(machine, self._key), FOREVER_S)
        except NotAuthenticated:
            raise
        except OSError as error:
            raise StoreError(f"the job's store at {machine} cannot be reached: {error}") from error

    def fence(self, reason: str) -> None:
        """See :class:`GatheringListener`. Also cuts the main thread's connection to the store."""
        self._stop_workers()
        if self.rendezvous.keeper:
            sever(wire.place_of(self.rendezvous.keeper)[1])  # the agent's main thread may be waiting there
        self.changed()

    # -- what the agent asks of the others ----------------------------------------------------------------------------

    def team(self, before: Attempt | None, number: int) -> Team | None:
        """This machine's place in the attempt that begins; None before it has one.

        ``before``: the attempt that ends.
        """
        team = self.rendezvous.team
        if team is not None and self._sender is None:
            self._sender = Sender(self._copies, lambda: self.rendezvous.name, self._key)
        if team is None or before is None:
            return team
        return replace(team, machines=before.ledger.machines, number=number)

    def _serve(self, link: Link, kind: bytes, data: bytes) -> None:
        """Answer a frame that is not about a copy of a publication."""
        if kind != remote_store.OPEN:
            self._copies.serve(link, kind, data)
        elif (store := self.rendezvous.store) is not None:
            remote_store.serve(store, link)
        else:
            raise ConnectionError("the job's store is not here")

    def check(self, ledger: Ledger) -> None:
        """Raises Fenced if this machine's workers may not continue."""
        lease, team = self.rendezvous.lease, self.rendezvous.team
        if self._sender is not None:
            self._sender.machines = ledger.machines
        if lease is None or team is None:
            return
        if lease.fenced:
            raise Fenced(lease.fenced)
        if ledger.machines[team.slot] != self.rendezvous.name:
            raise Fenced("its lease ran out, and its place was given away")

    def why(self, error: Exception) -> str:
        return (self.rendezvous.lease.fenced if self.rendezvous.lease is not None else "") or str(error)

    def spares(self, ledger: Ledger) -> int:
        """Machines that wait for a place."""
        lease = self.rendezvous.lease
        alive = lease.alive if lease is not None else ()
        return len([name for name in alive if name not in ledger.machines and name not in ledger.gone])

    def replace_machines(self, attempt: Attempt, nproc: int, resizing: Resizing, *, leaves: str = "") -> Entry | None:
        """Give the places of failed machines to spare ones, or continue with another number of machines. ``leaves``:
        this machine's place is given away too, for that reason.

        Returns the ledger's entry; None if there is nothing to do, or another agent was first.
        """
        lease, ledger = self.rendezvous.lease, attempt.ledger
        if lease is None:
            return None
        lease.expect(ledger.machines)
        detected = time.time()

        def make() -> Entry | None:
            self._gone |= ledger.gone  # this agent may still believe in a lease that another has seen end
            alive = [name for name in lease.alive if name not in self._gone]
            mine = {self.rendezvous.name} if leaves else set()
            change = reassign(ledger.machines, lease.failed | mine, alive)
            machines = ledger.machines if change is None else change.machines
            entry, why = Entry(detected=detected, machines=machines), ""
            if change is not None:
                planned = bool(leaves) and set(change.failed.values()) == mine
                why = _reason(change, f"leaves ({leaves})" if planned else "failed")
                if resizing.config.restarts:
                    return Entry(kind=EntryKind.RESTART, reason=why, machines=machines)
                kind = CauseKind.PLANNED if planned else CauseKind.MACHINE
                causes = tuple(Cause(kind, why, rank) for rank in change.ranks(nproc))
                entry = replace(entry, causes=causes)
            after = resizing.machines(machines, alive, changed=change is not None, now=time.monotonic())
            if after is not None:
                held = [place for place, name in enumerate(machines) if name is not None]
                stay = [place * nproc + local_rank for place in held for local_rank in range(nproc)]
                stay = [rank for rank in stay if rank not in entry.failed]
                entry = replace(entry, kind=EntryKind.DRAIN, stay=tuple(stay), after=after)
                why = f"{why}; " if why else ""
                why += "1 machine continues" if len(after) == 1 else f"{len(after)} machines continue"
            return replace(entry, reason=why) if why else None

        entry = attempt.append(make)
        if entry is not None:
            console(entry.reason)
        return entry

    def regroup(self, machines: Sequence[str | None], number: int) -> int:
        """Attempt ``number`` has these machines; returns this machine's place. Raises Fenced if it has none."""
        if not self.rendezvous.regroup(machines, number) or self.rendezvous.team is None:
            raise Fenced("the others continue without this machine")
        return self.rendezvous.team.slot

    def gather(self, machines: Sequence[str | None], line: Resized) -> None:
        """Get all publications of the attempt before that are not here, and the replicated state of the change."""

        def here(rank: int) -> Path:
            return self._job_dir / f"rank{rank}" / f"attempt{line.attempt}"

        away = [rank for rank in range(line.world_size) if not here(rank).exists()]
        with _from_others(away):
            mirror.fetch(machines, away, line.attempt, self._job_dir)
            if not any((here(rank) / mirroring.REPLICATED).exists() for rank in line.stay):
                mirror.fetch_replicated(machines, line.stay, line.attempt, self._job_dir)

    def fetch(self, ledger: Ledger, ranks: Sequence[int], number: int) -> None:
        """Fetch what the workers of ``ranks`` had published on a failed machine from the machines that keep copies."""
        taken = [rank for rank in ranks if ledger.incarnations[rank] > 0]
        if taken:
            others = [machine for machine in ledger.machines if machine != self.rendezvous.name]
            with _from_others(taken):
                mirror.fetch(others, taken, number, self._job_dir)

    def send_no_more(self) -> None:
        """The job ends on this machine: copy no more of its snapshots. Others may still ask for what is here."""
        if self._sender is not None:
            self._sender.close()

    def close(self) -> None:
        self.send_no_more()
        if self._server is not None:
            self._server.close()
        self._copies.close()


def _reason(change: Reassignment, what: str) -> str:
    takers = {place: host_of(str(change.machines[place])) for place in change.filled}
    parts = []
    for place, name in change.failed.items():
        taker = takers.pop(place, "")
        after = f" and {taker} takes its place" if taker else ", and no spare one is there"
        parts.append(f"machine {host_of(name)} {what}{after}")
    if takers:
        parts.append(f"machine {listed(list(takers.values()))} takes the place of a failed one")
    return "; ".join(parts)


def _from_others(ranks: Sequence[int]) -> AbstractContextManager[None]:
    """Print a line if the fetch takes long. It has no limit, because each connection has a time-out."""
    whom = f"other machines to send what {ranks_text(ranks)} had published"
    ends = "what does not come is done without"
    return Wait("this machine", whom, math.inf, ends=ends).announced()
