"""How machines come together: torchelastic's rendezvous with places, spare machines and leases.

torchelastic's own handler starts all workers again whenever a machine comes or goes, and needs 15 s and the machines'
clocks to find that one failed. Here a machine keeps its place for as long as it holds its lease, and a spare machine
waits in :meth:`SwiftRendezvousHandler.next_rendezvous` until a place is given to it. The document of
:mod:`~shared_core.launcher.rendezvous_store` says which machine has the store; all else is in the store.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from shared_core.errors import ConfigError, DamagedRecord, SwiftError, WaitTimeout
from shared_core.events import console
from shared_core.launcher.attempt import Team, first_of, prefix_of
from shared_core.launcher.console import host_of, ranks
from shared_core.launcher.gathering import RETRY_S, Again, Gathering, GatheringListener, JobOver, RendezvousOptions
from shared_core.launcher.lease import Lease
from shared_core.launcher.ledger import Ledger
from shared_core.launcher.local_rendezvous import KeptRendezvous
from shared_core.launcher.ports import Ports
from shared_core.launcher.rendezvous_store import C10D, ENDED, RUNNING, Register
from shared_core.protocol.generation import EntryKind
from shared_core.transport.store import MemoryStore
from shared_core.waiting import Wait

_LOOK_S = 0.05
#: After so many lengths of a lease, a failed machine is known to have failed.
_SURE = 1.25
#: The store's host waits so long for the others to leave, in seconds.
_LAST_S = 10.0


class SwiftRendezvousHandler(KeptRendezvous):
    """One machine's part in the rendezvous.

    Attributes:
        team: this machine's place, once it has one.
        run_id: id of this start of the job, equal on all machines; empty before they have met.
        keeper: name of the machine that has the job's store; empty before there is one.
        line: what the workers of the attempt continue from, if their number has changed; see :class:`Resizing`.
    """

    def __init__(self, register: Register, options: RendezvousOptions) -> None:
        self.team: Team | None = None
        self.lease: Lease | None = None
        self.ports = Ports(options.port)
        self.run_id = self.keeper = self.line = ""
        self._register, self._options = register, options
        self._listener: GatheringListener
        self._gathering: Gathering
        self._admitted = False
        self._round = self._beats = 0

    def attend(self, listener: GatheringListener) -> None:
        """Meet the others on behalf of an agent; called once, first of all."""
        self._listener = listener
        self._gathering = Gathering(self._register, self._options, self.ports, listener)

    @property
    def address(self) -> str:
        return self._gathering.address

    @property
    def name(self) -> str:
        """This machine's, until it meets again: ``ADDRESS:PORT_OF_COPIES#HOST.RANDOM``."""
        return self._gathering.name

    # -- torchelastic's face ------------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        return self._register.backend

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others; return when this machine has a place, which for a spare machine may be never.

        Raises:
            JobOver: if the job ends before.
            RendezvousTimeoutError: if the others do not come.
            ConfigError: if the job has enough machines.
        """
        while True:
            self.close()
            with suppress(Again):
                return self._take_place(self._gathering.gather())
            self._listener.pause(RETRY_S)

    def get_run_id(self) -> str:
        return self._register.run_id

    def shutdown(self) -> bool:
        self.close()
        return True

    def regroup(self, machines: Sequence[str | None], number: int) -> bool:
        assert self.team is not None
        if self.name not in machines:
            return False
        self.team = replace(self.team, slot=machines.index(self.name), machines=tuple(machines), number=number)
        return True

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> MemoryStore | None:
        """The job's store, if this machine has it."""
        return self._gathering.store

    @property
    def store_dies_here(self) -> bool:
        return self.store is not None and self._register.backend == C10D

    def job_ends_with(self, machine: str | None) -> bool:
        return machine == self.keeper and self._register.backend == C10D

    def leave(self, *, over: bool) -> None:
        """Leave, and tell the others; the store's host leaves last. ``over``: not only for this machine."""
        lease = self.lease
        if lease is None or lease.fenced:
            return
        with suppress(RuntimeError, RendezvousConnectionError, DamagedRecord):
            lease.leave()
            if self.store is not None:
                what = "the other machines to leave, because it hosts the store"
                wait = Wait("this machine", what, _LAST_S, bound="a fixed limit", ends="it leaves")
                with suppress(WaitTimeout):
                    while set(lease.alive) - {self.name} and not lease.fenced:
                        wait.look()
                        time.sleep(_LOOK_S)
                if over:
                    self._register.change(lambda doc: (doc or {}) | {"phase": ENDED})

    def close(self) -> None:
        if self.lease is not None:
            self.lease.close()
            self.lease = None
        self.team = None
        self._gathering.close()

    def _take_place(self, document: dict[str, Any]) -> RendezvousInfo:
        """Renew a lease from now on, and follow the ledger until this machine has a place."""
        host, port = document["store"]
        self._round = document["round"]
        keeper = document["members"][0]["name"]
        self.keeper, self.run_id = keeper, document["run"]
        try:
            store = self._listener.connect(keeper)
            hold = self._hold if self.store is not None and self._register.backend != C10D else None
            lease = self.lease = Lease(
                lambda: self._listener.connect(keeper),
                self.name,
                self._options.lease_s,
                self._listener.changed,
                self._listener.fence,
                hold,
                self._options.hold_s,
                guard=self.store is None or hold is not None,
            )
            first = [member["name"] for member in document["members"]]
            lease.expect(first)
            number, machines, waiting = document["attempt"], tuple(first), False
            gone: set[str] = set()
            begun = time.monotonic()
            while True:
                start = first_of(store, number)
                if start is not None:
                    machines, self.line = tuple(start["machines"]), start["line"]
                ledger = Ledger(store, prefix_of(number), len(machines) * self._options.nproc, machines)
                while True:
                    ledger.follow()
                    if ledger.over is not None:
                        break
                    if self.name in ledger.machines:
                        return self._placed(ledger, machines, number, (host, port))
                    if lease.fenced:
                        raise Again
                    if not waiting:
                        waiting = True
                        console(f"this machine, {host_of(self.name)}, waits as a spare one")
                        self._gathering.meet()
                    # Until a lease has gone by, a failed machine counts as alive.
                    if time.monotonic() - begun > _SURE * self._options.lease_s:
                        self._turn_away(lease, ledger, gone | ledger.gone)
                    self._listener.pause(_LOOK_S)
                gone |= ledger.gone
                if ledger.over.kind not in (EntryKind.RESTART, EntryKind.RESIZE):
                    self.leave(over=False)
                    failed = ledger.over.kind is not EntryKind.RELEASE
                    raise JobOver("the job ended while this machine waited", failed=failed)
                line = ledger.over.line
                number, machines, self.line = number + 1, ledger.machines, line.to_json() if line is not None else ""
        except RuntimeError as error:
            if isinstance(error, SwiftError):
                raise
            raise Again from error  # the store has ended meanwhile

    def _placed(
        self, ledger: Ledger, machines: tuple[str | None, ...], number: int, place: tuple[str, int]
    ) -> RendezvousInfo:
        slot = ledger.machines.index(self.name)
        if self._gathering.met:
            first = slot * self._options.nproc
            console(f"this machine takes over {ranks(range(first, first + self._options.nproc))}")
        self._gathering.meet()
        self._admitted = True
        self.team = Team(slot, machines, number, *place, self.keeper)
        # torchelastic's own store is not used: each agent derives the ranks from the places.
        return RendezvousInfo(HashStore(), slot, len(ledger.machines), RendezvousStoreInfo(*place))

    def _turn_away(self, lease: Lease, ledger: Ledger, gone: Collection[str]) -> None:
        """Machines beyond the number asked for leave with ConfigError; one that has once been admitted does not."""
        if self._admitted or self.name not in lease.alive:
            return
        earlier = lease.alive[: lease.alive.index(self.name)]
        before = [name for name in earlier if name not in ledger.machines and name not in gone]
        room = self._options.nnodes - sum(name is not None for name in ledger.machines)
        if len(before) >= self._options.spares + room:
            self.leave(over=False)
            raise ConfigError(
                f"the job has its {self._options.nnodes} machines and {self._options.spares} spare ones "
                "(--spare-nodes): this one is not needed"
            )
        self._admitted = True

    def _hold(self) -> bool:
        """Renew the lease of the store's host in the document; False if that cannot be done."""
        self._beats += 1

        def renew(document: dict[str, Any] | None) -> dict[str, Any] | None:
            if document is None or document["phase"] != RUNNING or document["round"] != self._round:
                return None  # the others have started over
            return document | {"beat": self._beats, "attempt": max(document["attempt"], self._listener.number)}

        try:
            document = self._register.change(renew)
        except (RendezvousConnectionError, ConfigError, DamagedRecord):
            return False
        return document is not None and document.get("beat") == self._beats and document["round"] == self._round
