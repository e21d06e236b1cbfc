"""How machines come together: each enters itself in one document, and the first has the job's store.

Anybody may be able to write the document (torch's rendezvous checks nobody). So it only says where the machines are;
they prove to each other that they know the job's secret.
"""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from shared_core.errors import ConfigError, SwiftError
from shared_core.events import console
from shared_core.launcher.console import host_of
from shared_core.launcher.lease import FIRST_S
from shared_core.launcher.ports import Ports, serve_store
from shared_core.launcher.rendezvous_store import C10D, ENDED, FORMING, RUNNING, Gone, Register, own_address
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

    @property
    def number(self) -> int:
        """Of the attempt that this machine is in."""

    def listen(self, address: str) -> int:
        """Answer agents that know the job's secret; returns the port at this address."""

    def connect(self, machine: str) -> Store:
        """The job's store on that machine; its waits have no time-out.

        Raises:
            StoreError: it cannot be reached.
            NotAuthenticated: who answers there does not know the job's secret.
        """

    def pause(self, seconds: float) -> None:
        """Wait so long; may raise to give up."""

    def changed(self) -> None:
        """A machine came or failed. Called on a thread."""

    def fence(self, reason: str) -> None:
        """Stop the workers of this machine at once. Called on a thread."""


class Gathering:
    """One machine's way to the others.

    Attributes:
        name: of this machine until it meets again, ``ADDRESS:PORT_OF_COPIES#HOST.RANDOM``.
        store: the job's, if it is here.
        met: whether this machine has had, or waited for, a place.
    """

    def __init__(
        self, register: Register, options: RendezvousOptions, ports: Ports, listener: GatheringListener
    ) -> None:
        self._register, self._options, self._ports, self._listener = register, options, ports, listener
        self.address = options.address or ""
        self.name = ""
        self.store: MemoryStore | None = None
        self._scripts: Any = None  # torch's store, for the script's process groups
        self.met = False
        self._enough = False

    def close(self) -> None:
        if self._register.backend != C10D and self.store is not None:  # with c10d all stores end with the process
            self.store.close()
            self.store = self._scripts = None

    def meet(self) -> None:
        self.met = True

    def gather(self) -> dict[str, Any]:
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
                if self.met:
                    raise JobOver(
                        f"nobody listens at {where} any more: the job has ended, or has lost the machine that "
                        "hosted the rendezvous (--rdzv-backend etcd survives that). Start it again; with --resume it "
                        "continues from its newest checkpoint",
                        failed=True,
                    ) from error
                why = str(error)
            except (OSError, RendezvousConnectionError) as error:
                why = str(error)
            if not said and self.met:
                said = True
                console(
                    f"this machine cannot reach {where} ({why}); it tries for {self._options.join_s:.0f} s to come "
                    "back as a spare machine"
                )
            elif not self.met:
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
                self._scripts = serve_store(self.address, self._ports.take(self.address, self._ports.store))
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
