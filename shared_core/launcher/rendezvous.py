"""How machines come together: torchelastic's rendezvous with places, spare machines and leases.

torchelastic's own handler starts all workers again whenever a machine comes or goes, and needs 15 s and the machines'
clocks to find that one failed. Here a machine keeps its place for as long as it holds its lease, and a spare machine
waits in :meth:`Rendezvous.meet` until a place is given to it. Each machine enters itself in the
document of :mod:`~shared_core.launcher.rendezvous_store`, and the first has the job's store; all else is in the store.

Anybody may be able to write the document (torch's rendezvous checks nobody). So it only says where the machines are;
they prove to each other that they know the job's secret.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from shared_core.errors import ConfigError, DamagedRecord, SwiftError, WaitTimeout
from shared_core.events import console
from shared_core.launcher.attempt import Team, first_of, prefix_of
from shared_core.launcher.console import host_of, ranks
from shared_core.launcher.lease import FIRST_S, Lease
from shared_core.launcher.ledger import Ledger
from shared_core.launcher.ports import Ports, serve_store
from shared_core.launcher.rendezvous_store import C10D, ENDED, FORMING, RUNNING, Gone, Register, own_address
from shared_core.protocol.generation import EntryKind
from shared_core.system.secret import NotAuthenticated
from shared_core.transport.store import MemoryStore, Store, StoreError
from shared_core.waiting import Wait

_LOOK_S = 0.05
#: Pause before the machines meet again, in seconds.
RETRY_S = 0.25
#: Least length of the lease of the store's host in etcd, in seconds. Members of etcd without a leader do not answer
#: until they have one; up to 3 s were measured.
HOLD_S = 6.0


class JobOver(SwiftError):
    """The job ended without this machine; ``failed``: whether it failed."""

    def __init__(self, message: str, *, failed: bool) -> None:
        super().__init__(message)
        self.failed = failed


class Again(Exception):  # noqa: N818 (not an error)
    """The machines must meet again."""


@dataclass(frozen=True)
class RendezvousOptions:
    """What this machine expects of a job on several machines.

    Attributes:
        nnodes: places, at most.
        least: machines that are enough; 0 for ``nnodes``.
        last_call_s: how long to wait for more of them then, in seconds.
        spares: machines that may wait beyond ``nnodes``.
        lease_s: length of a machine's lease, in seconds.
        join_s: longest wait for the other machines, in seconds.
        resume: begin with the newest checkpoint of a job of this name.
        address: of this machine; None finds the one by which it reaches the rendezvous.
        port: the first of those that it opens; 0 takes free ones.
    """

    nnodes: int
    spares: int
    nproc: int
    lease_s: float
    join_s: float
    resume: bool = False
    address: str | None = None
    least: int = 0
    last_call_s: float = 30.0
    port: int = 0

    @property
    def hold_s(self) -> float:
        return max(self.lease_s, HOLD_S)


class GatheringListener(Protocol):
    """The agent of this machine, as the rendezvous sees it."""

    def number(self) -> int:
        """Of the attempt that this machine is in."""

    def listen(self, address: str) -> int:
        """Answer agents that know the job's secret; returns the port at this address."""

    def connect(self, machine: str) -> Store:
        """The job's store on that machine; its waits have no time-out. Raises StoreError if it cannot be reached,
        NotAuthenticated if who answers there does not know the job's secret.
        """

    def pause(self, seconds: float) -> None:
        """Wait so long; may raise to give up."""

    def changed(self) -> None:
        """A machine came or failed. Called on a thread."""

    def fence(self, reason: str) -> None:
        """Stop the workers of this machine at once. Called on a thread."""


#: After so many lengths of a lease, a failed machine is known to have failed.
_SURE = 1.25
#: The store's host waits so long for the others to leave, in seconds.
_LAST_S = 10.0


class Rendezvous:
    """One machine's part in the rendezvous.

    Attributes:
        name: of this machine until it meets again, ``ADDRESS:PORT_OF_COPIES#HOST.RANDOM``.
        store: the job's, if it is here.
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
        self.name, self.address = "", options.address or ""
        self.store: MemoryStore | None = None
        self._scripts: Any = None  # torch's store, for the script's process groups
        self._listener: GatheringListener
        self._met = False  # whether this machine has had, or waited for, a place
        self._enough = self._admitted = False
        self._round = self._beats = 0

    def attend(self, listener: GatheringListener) -> None:
        """Meet the others on behalf of an agent; called once, first of all."""
        self._listener = listener

    @property
    def backend(self) -> str:
        return self._register.backend

    def meet(self) -> tuple[int, int]:
        """Meet the others; return when this machine has a place, which for a spare machine may be never: the place, and
        how many there are. Raises as :meth:`_gather`; ConfigError also if the job has enough machines.
        """
        while True:
            self.close()
            with suppress(Again):
                return self._take_place(self._gather())
            self._listener.pause(RETRY_S)

    def regroup(self, machines: Sequence[str | None], number: int) -> bool:
        assert self.team is not None
        if self.name not in machines:
            return False
        self.team = replace(self.team, slot=machines.index(self.name), machines=tuple(machines), number=number)
        return True

    # -- the end ------------------------------------------------------------------------------------------------------

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
        if self._register.backend != C10D and self.store is not None:  # with c10d all stores end with the process
            self.store.close()
            self.store = self._scripts = None

    # -- the way to the others -------------------------------------------------------------------------------------

    def _gather(self) -> dict[str, Any]:
        """Meet the others; returns the document when the store that it names answers.

        Raises:
            Again: if the rendezvous does not answer any more.
            JobOver: if the job ends before.
            RendezvousTimeoutError: if the others do not come.
            ConfigError: if machines were started with different options or secrets.
        """
        deadline = time.monotonic() + self._options.join_s
        self._open(deadline)
        whom = ""
        wait = Wait("this machine", lambda: whom, self._options.join_s + RETRY_S, bound="--rdzv-conf join_timeout")
        self.address = self.address or own_address(self._register.endpoint)
        port = self._listener.listen(self.address)
        self.name = f"{self.address}:{port}#{socket.gethostname()}.{uuid.uuid4().hex[:8]}"
        seen: tuple[Any, float] = (None, 0.0)
        while True:
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"{self._options.nnodes} machines did not meet at {self._register.where} within "
                    f"{self._options.join_s:.0f} s (--rdzv-conf join_timeout=...): this one waited for "
                    + (whom or "an answer")
                )
            try:
                document = self._register.change(self._enter)
            except RendezvousConnectionError as error:
                raise Again from error
            assert document is not None
            if document["phase"] == ENDED:
                raise JobOver(f"the job {self._register.run_id} at {self._register.where} has ended", failed=False)
            if seen[0] != document:
                seen = (document, time.monotonic())
            least = self._options.least or self._options.nnodes
            waited = time.monotonic() - seen[1]
            self._enough = least <= len(document["members"]) and waited > self._options.last_call_s
            if document["phase"] == RUNNING:
                whom = f"the machine {document['members'][0]['name']}, which has the job's store, to answer"
            else:
                come = f"{len(document['members'])} of {self._options.nnodes} have come"
                whom = f"other machines at {self._register.where}: {come}"
            wait.look()
            if document["phase"] == RUNNING and self._reach(document["members"][0]["name"]):
                return document
            # A host that renews nothing has failed: it has stopped its workers by now, so the others start over.
            limit_s = self._options.hold_s if document["phase"] == RUNNING else max(self._options.lease_s, FIRST_S)
            complete = document["phase"] == RUNNING or len(document["members"]) == self._options.nnodes
            if self._register.backend != C10D and complete and time.monotonic() - seen[1] > 1.25 * limit_s:
                self._start_over(document)
            self._listener.pause(_LOOK_S)

    def _open(self, deadline: float) -> None:
        said, why, where = False, "", self._register.where
        limit_s = deadline - time.monotonic() + 2 * RETRY_S
        wait = Wait(
            "this machine",
            lambda: f"the rendezvous at {where} to answer ({why})",
            limit_s,
            bound="--rdzv-conf join_timeout",
        )
        while True:
            try:
                return self._register.open()
            except Gone as error:
                if self._met:
                    raise JobOver(
                        f"nobody listens at {where} any more: the job has ended, or has lost the machine that "
                        "hosted the rendezvous (--rdzv-backend etcd survives that). Start it again; with --resume it "
                        "continues from its newest checkpoint",
                        failed=True,
                    ) from error
                why = str(error)
            except (OSError, RendezvousConnectionError) as error:
                why = str(error)
            if not said and self._met:
                said = True
                console(
                    f"this machine cannot reach {where} ({why}); it tries for {self._options.join_s:.0f} s to come "
                    "back as a spare machine"
                )
            elif not self._met:
                wait.look()
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"no rendezvous at {where} in {self._options.join_s:.0f} s: {why}. See what listens there, and "
                    "give all machines another --rdzv-endpoint, or a longer --rdzv-conf join_timeout=SECONDS"
                )
            self._listener.pause(RETRY_S)

    def _enter(self, document: dict[str, Any] | None) -> dict[str, Any] | None:
        """The document with this machine in it, or with the job running if all are there; None if nothing changes."""
        options = self._options
        nnodes = f"{options.least or options.nnodes}:{options.nnodes}"
        me = {"name": self.name, "nproc": options.nproc, "nnodes": nnodes}
        if document is None:
            attempt = int(self._options.resume)
            document = {"phase": FORMING, "round": 0, "attempt": attempt, "run": uuid.uuid4().hex[:12], "members": []}
        members = document["members"]
        if members and any(members[0][key] != me[key] for key in ("nproc", "nnodes")):
            raise ConfigError(
                f"this machine was started with --nnodes {me['nnodes']} and {me['nproc']} workers, the first one with "
                f"{members[0]['nnodes']} and {members[0]['nproc']}: they must be equal on all machines"
            )
        if document["phase"] != FORMING:
            return None
        if self.name not in (member["name"] for member in members):
            if self._register.hosts:
                members = [me | {"host": True}, *members]  # with c10d both stores are on one machine, and fail together
            else:
                reserved = self._register.backend == C10D and not (members and members[0].get("host"))
                if len(members) + reserved >= options.nnodes:
                    return None
                members = [*members, me]
            return document | {"members": members}
        if (len(members) == options.nnodes or self._enough) and members[0]["name"] == self.name:
            if self.store is None:  # else this machine has it already: somebody changed the document at the same time
                self._scripts = serve_store(self.address, self.ports.take(self.address, self.ports.store))
                self.store = MemoryStore()
            store = [self.address, int(self._scripts.port)]
            return document | {"phase": RUNNING, "store": store, "beat": 0}
        return None

    def _reach(self, keeper: str) -> bool:
        try:
            self._listener.connect(keeper)
        except NotAuthenticated as error:
            raise ConfigError(
                f"the machine {host_of(keeper)} has another secret than this one, or is none of this job ({error}): "
                "give all machines the same --secret-file, or copy ~/.config/swift-recovery/secret from one to the "
                "others (docs/machines.md#security)"
            ) from error
        except StoreError:
            return False
        return True

    def _start_over(self, document: dict[str, Any]) -> None:
        console("the machine that hosts the store failed: the machines meet again, and all workers start again")
        fresh = {"phase": FORMING, "round": document["round"] + 1, "attempt": document["attempt"] + 1, "members": []}
        fresh |= {key: document[key] for key in ("run",) if key in document}
        with suppress(RendezvousConnectionError):
            self._register.change(lambda newest: fresh if newest == document else None)

    # -- a place ---------------------------------------------------------------------------------------------------

    def _take_place(self, document: dict[str, Any]) -> tuple[int, int]:
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
                        self._met = True
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
    ) -> tuple[int, int]:
        slot = ledger.machines.index(self.name)
        if self._met:
            first = slot * self._options.nproc
            console(f"this machine takes over {ranks(range(first, first + self._options.nproc))}")
        self._met = True
        self._admitted = True
        self.team = Team(slot, machines, number, *place, self.keeper)
        return slot, len(ledger.machines)

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
            return document | {"beat": self._beats, "attempt": max(document["attempt"], self._listener.number())}

        try:
            document = self._register.change(renew)
        except (RendezvousConnectionError, ConfigError, DamagedRecord):
            return False
        return document is not None and document.get("beat") == self._beats and document["round"] == self._round
