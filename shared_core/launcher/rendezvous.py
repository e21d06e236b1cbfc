"""How machines come together: torchelastic's rendezvous with places, spare machines and leases.

torchelastic's own handler starts all workers anew whenever a machine comes or goes, calls a machine lost by comparing
clocks, and after 15 s. Here a machine keeps its place for as long as it holds its lease, and a spare machine waits in
:meth:`Meeting.next_rendezvous` until a place is given to it. The document of
:mod:`~shared_core.launcher.rendezvous_store` says where the store is; all else is in the store.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from shared_core.errors import ConfigError, DamagedRecord, SwiftError, WaitTimeout
from shared_core.events import console
from shared_core.launcher.attempt import Team, connect, first_of, prefix_of
from shared_core.launcher.console import host_of, ranks
from shared_core.launcher.lease import FIRST_S, Lease
from shared_core.launcher.ledger import Ledger
from shared_core.launcher.ports import Ports, serve_store
from shared_core.launcher.rendezvous_store import C10D, Gone, Register, own_address, probe
from shared_core.protocol.generation import Kind
from shared_core.protocol.meeting_document import ENDED, FORMING, RUNNING
from shared_core.system.secret import common
from shared_core.waiting import Wait

_LOOK_S = 0.05
_RETRY_S = 0.25
#: Leases after which a machine that is lost has been seen to be.
_SURE = 1.25
#: How long the store's host waits for the others to go, in seconds.
_LAST_S = 10.0
#: The least length of the lease of the store's host in etcd, in seconds. Members of etcd that have lost their leader
#: answer nobody until they have another; up to 3 s were measured.
HOLD_S = 6.0


class JobOver(SwiftError):
    """The job ended without this machine.

    Attributes:
        failed: whether it failed.
    """

    def __init__(self, message: str, *, failed: bool) -> None:
        super().__init__(message)
        self.failed = failed


class _Again(Exception):  # noqa: N818 (not an error: begin anew)
    pass


@dataclass(frozen=True)
class MeetingOptions:
    """What a job on several machines is.

    Attributes:
        nnodes: places, at most.
        least: machines that are enough.
        last_call_s: how long to wait for more of them then, in seconds.
        spares: machines that may wait beyond them.
        nproc: workers of each machine.
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


class Meeting(RendezvousHandler):
    """One machine's part in the rendezvous.

    Attributes:
        team: this machine's place, once it has one.
        lease: its lease, once it has met the others.
        address: of this machine.
        name: of this machine in this part of its life, ``ADDRESS:PORT_OF_COPIES#HOST.RANDOM``.
        run_id: id of this start of the job, equal on all machines; empty before they have met.
        ports: that this machine opens.
        port: of the store, 0 before there is one.
        mark: of this machine's own secret; empty for none.
        agreed: the mark that all machines had when the job began; empty if they differed.
        listen: called with the address of this machine; gives the port where its agent keeps copies for others.
        pause: called to wait so many seconds; may raise to give up.
        changed: called on a thread when a machine came or was lost.
        fence: called on a thread when this machine must stop its workers at once.
        attempt: gives the number of the attempt that this machine is in.

    Args:
        register: where the machines meet.
        options: see :class:`MeetingOptions`.
    """

    def __init__(self, register: Register, options: MeetingOptions) -> None:
        self.team: Team | None = None
        self.lease: Lease | None = None
        self.address = options.address or ""
        self.name = self.run_id = ""
        self.ports = Ports(options.port)
        self.port = 0
        self.mark = self.agreed = ""
        self.listen: Callable[[str], int] = lambda address: 0
        self.pause: Callable[[float], None] = time.sleep
        self.changed: Callable[[], None] = lambda: None
        self.fence: Callable[[str], None] = lambda reason: None
        self.attempt: Callable[[], int] = lambda: 0
        self._register, self._options = register, options
        self._server: Any = None
        self._met = self._admitted = False
        self._round = 0
        self._beats = 0
        self._enough = False
        #: What the workers of the attempt go on from, if their number has changed; see :class:`Resizing`.
        self.line = ""

    # -- torchelastic's face ------------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """Name of the backend."""
        return self._register.backend

    @property
    def use_agent_store(self) -> bool:
        """Workers use the agents' store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others; return when this machine has a place, which for a spare machine may be never.

        Raises:
            JobOver: if the job ends before.
            RendezvousTimeoutError: if the others do not come.
        """
        while True:
            self.close()
            with suppress(_Again):
                return self._join()
            self.pause(_RETRY_S)

    def is_closed(self) -> bool:
        """Whether the job ended."""
        return False

    def set_closed(self) -> None:
        """Nothing: :meth:`leave` does it."""

    def num_nodes_waiting(self) -> int:
        """Machines without a place."""
        return 0

    def get_run_id(self) -> str:
        """Name of the job."""
        return self._register.run_id

    def shutdown(self) -> bool:
        """Give up everything; called last."""
        self.close()
        return True

    def regroup(self, machines: Sequence[str | None], number: int) -> bool:
        """The machines of the attempt that begins are these. Returns whether this one is among them."""
        assert self.team is not None
        if self.name not in machines:
            return False
        self.team = Team(machines.index(self.name), tuple(machines), number, self.team.host, self.team.port)
        return True

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def hosts_store(self) -> bool:
        """Whether this machine hosts the store."""
        return self._server is not None

    @property
    def store_dies_here(self) -> bool:
        """Whether the job cannot outlive this machine."""
        return self.hosts_store and self._register.backend == C10D

    def leave(self, *, over: bool) -> None:
        """Go, and say so. The store's host goes last.

        Args:
            over: the job is over, not only for this machine.
        """
        lease = self.lease
        if lease is None or lease.fenced:
            return
        with suppress(RuntimeError, RendezvousConnectionError, DamagedRecord):
            lease.leave()
            if self.hosts_store:
                what = "the other machines to leave, because it hosts the store"
                wait = Wait("this machine", what, _LAST_S, bound="a fixed limit", ends="it leaves")
                with suppress(WaitTimeout):
                    while set(lease.alive) - {self.name} and not lease.fenced:
                        wait.look()
                        time.sleep(_LOOK_S)
                if over:
                    self._register.change(lambda doc: (doc or {}) | {"phase": ENDED})

    def close(self) -> None:
        """End the lease's threads, and the store if it is here."""
        if self.lease is not None:
            self.lease.close()
            self.lease = None
        self.team = None
        if self._register.backend != C10D:  # there, both stores go with the process
            self._server = None

    # -- joining ------------------------------------------------------------------------------------------------------

    def _join(self) -> RendezvousInfo:
        deadline = time.monotonic() + self._options.join_s
        self._open(deadline)
        whom = ""
        wait = Wait("this machine", lambda: whom, self._options.join_s + _RETRY_S, bound="--rdzv-conf join_timeout")
        self.address = self.address or own_address(self._register.endpoint)
        self.name = f"{self.address}:{self.listen(self.address)}#{socket.gethostname()}.{uuid.uuid4().hex[:8]}"
        seen: tuple[Any, float] = (None, 0.0)
        while True:
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"{self._options.nnodes} machines did not meet at {self._register.where} within "
                    f"{self._options.join_s:.0f} s (--rdzv-conf join_timeout=...)"
                )
            try:
                document = self._register.change(self._enter)
            except RendezvousConnectionError as error:
                raise _Again from error
            assert document is not None
            if document["phase"] == ENDED:
                raise JobOver(f"the job {self._register.run_id} at {self._register.where} has ended", failed=False)
            if seen[0] != document:
                seen = (document, time.monotonic())
            least = self._options.least or self._options.nnodes
            waited = time.monotonic() - seen[1]
            self._enough = least <= len(document["members"]) and waited > self._options.last_call_s
            if document["phase"] == RUNNING:
                whom = f"the store at {':'.join(map(str, document['store']))} to answer"
            else:
                come = f"{len(document['members'])} of {self._options.nnodes} have come"
                whom = f"other machines at {self._register.where}: {come}"
            wait.look()
            if document["phase"] == RUNNING and self._reach(tuple(document["store"])):
                self._round = document["round"]
                return self._take_place(document)
            # A host that renews nothing is lost: it has stopped its workers by now, so the others begin anew.
            patience = self._hold_s if document["phase"] == RUNNING else max(self._options.lease_s, FIRST_S)
            complete = document["phase"] == RUNNING or len(document["members"]) == self._options.nnodes
            if self._register.backend != C10D and complete and time.monotonic() - seen[1] > 1.25 * patience:
                self._begin_anew(document)
            self.pause(_LOOK_S)

    @property
    def _hold_s(self) -> float:
        return max(self._options.lease_s, HOLD_S)

    def _open(self, deadline: float) -> None:
        said, why, where = False, "", self._register.where
        limit_s = deadline - time.monotonic() + 2 * _RETRY_S
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
                        f"nobody listens at {where} any more: the job has ended, or the machine that hosted the "
                        "rendezvous was lost, which with c10d ends the job. Start it again with --resume to go on from "
                        "its newest checkpoint; with --rdzv-backend etcd it would have survived",
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
                    f"no rendezvous at {self._register.where} in {self._options.join_s:.0f} s: {why}"
                )
            self.pause(_RETRY_S)

    def _enter(self, document: dict[str, Any] | None) -> dict[str, Any] | None:
        """The document with this machine in it, if there is room."""
        options = self._options
        nnodes = f"{options.least or options.nnodes}:{options.nnodes}"
        me = {"name": self.name, "nproc": options.nproc, "nnodes": nnodes, "secret": self.mark}
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
                members = [me | {"host": True}, *members]  # with c10d both stores are lost together, or neither
            else:
                reserved = self._register.backend == C10D and not (members and members[0].get("host"))
                if len(members) + reserved >= options.nnodes:
                    return None
                members = [*members, me]
            return document | {"members": members}
        if (len(members) == options.nnodes or self._enough) and members[0]["name"] == self.name:
            if self._server is None:  # else somebody else has changed the document meanwhile
                self._server = serve_store(self.address, self.ports.take(self.address, self.ports.store))
            # Whether there is a secret is decided once: nobody makes a job that has begun with one go on without.
            agreed = document.get("secret", common(member["secret"] for member in members))
            store = [self.address, int(self._server.port)]
            return document | {"phase": RUNNING, "store": store, "beat": 0, "secret": agreed}
        return None

    def _reach(self, store: tuple[str, int]) -> bool:
        try:
            probe(store)
        except OSError:
            return False
        return True

    def _begin_anew(self, document: dict[str, Any]) -> None:
        console("the machine that hosts the store is lost: the machines meet again, and all workers start again")
        fresh = {"phase": FORMING, "round": document["round"] + 1, "attempt": document["attempt"] + 1, "members": []}
        fresh |= {key: document[key] for key in ("run", "secret") if key in document}
        with suppress(RendezvousConnectionError):
            self._register.change(lambda newest: fresh if newest == document else None)

    def _take_place(self, document: dict[str, Any]) -> RendezvousInfo:
        """Renew a lease from now on, and follow the ledger until this machine has a place."""
        host, port = document["store"]
        self.port, self.run_id, self.agreed = int(port), document["run"], document["secret"]
        try:
            store = connect(host, port)
            hold = self._hold if self.hosts_store and self._register.backend != C10D else None
            lease = self.lease = Lease(
                lambda: connect(host, port),
                self.name,
                self._options.lease_s,
                lambda: self.changed(),
                lambda reason: self.fence(reason),
                hold,
                self._hold_s,
                guard=not self.hosts_store or hold is not None,
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
                        return self._placed(ledger, machines, number, (host, port), store)
                    if lease.fenced:
                        raise _Again
                    if not waiting:
                        waiting = True
                        console(f"this machine, {host_of(self.name)}, waits as a spare one")
                        self._met = True
                    # Until a lease has gone by, a machine that is lost counts as one that lives.
                    if time.monotonic() - begun > _SURE * self._options.lease_s:
                        self._turn_away(lease, ledger, gone | ledger.gone)
                    self.pause(_LOOK_S)
                gone |= ledger.gone
                if ledger.over.kind not in (Kind.RESTART, Kind.RESIZE):
                    self.leave(over=False)
                    failed = ledger.over.kind is not Kind.RELEASE
                    raise JobOver("the job ended while this machine waited", failed=failed)
                line = ledger.over.line
                number, machines, self.line = number + 1, ledger.machines, line.to_json() if line is not None else ""
        except RuntimeError as error:
            if isinstance(error, SwiftError):
                raise
            raise _Again from error  # the store went meanwhile

    def _placed(
        self, ledger: Ledger, machines: tuple[str | None, ...], number: int, place: tuple[str, int], store: Any
    ) -> RendezvousInfo:
        slot = ledger.machines.index(self.name)
        if self._met:
            first = slot * self._options.nproc
            console(f"this machine takes over {ranks(range(first, first + self._options.nproc))}")
        self._met = self._admitted = True
        self.team = Team(slot, machines, number, *place)
        prefixed = PrefixStore(prefix_of(number) + "ranks", store)
        return RendezvousInfo(prefixed, slot, len(ledger.machines), RendezvousStoreInfo(*place))

    def _turn_away(self, lease: Lease, ledger: Ledger, gone: Collection[str]) -> None:
        """More machines than were asked for are sent home; one that comes back is not."""
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
        """Renew the lease of the store's host where all machines meet; False if that cannot be done."""
        self._beats += 1

        def renew(document: dict[str, Any] | None) -> dict[str, Any] | None:
            if document is None or document["phase"] != RUNNING or document["round"] != self._round:
                return None  # the others have begun anew
            return document | {"beat": self._beats, "attempt": max(document["attempt"], self.attempt())}

        try:
            document = self._register.change(renew)
        except (RendezvousConnectionError, ConfigError, DamagedRecord):
            return False
        return document is not None and document.get("beat") == self._beats and document["round"] == self._round
