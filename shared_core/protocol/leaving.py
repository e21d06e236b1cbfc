"""Planned leaves: a worker, or all workers of a machine, give their places to others at a step boundary. Pure.

A leave is asked for at the socket of a machine's agent. The worker that is to go finds a file at its next step boundary
and ends there, with :data:`EXIT_LEFT`; what follows is the recovery from a failure that nobody had to detect.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared_core.codec import Count
from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError

#: Kind of the frame that asks an agent for a leave, with the rank or host as its data; and longest answer, in bytes.
LEAVE, ANSWER_BYTES = b"D", 4096
#: Kinds of the answer: it will be so, or why not; as text.
AGREED, REFUSED = b"A", b"R"
#: Exit code of a worker that was told to leave and has published the step boundary where it did.
EXIT_LEFT = 77
#: File in a rank's folder that holds the pid of the worker that is to leave.
FILE = "leave"


@dataclass(frozen=True)
class Leave:
    """``leaves``, from one agent to another: who of the other's machine is to leave, and why.

    Attributes:
        rank: None for all ranks of the machine.
    """

    why: str
    rank: Count | None = None


def chosen(target: str, hosts: Sequence[str], workers: int) -> tuple[int, int | None]:
    """The place of the machine that is meant, and the rank, None for all of its ranks.

    Args:
        target: a rank, a host name or an address.
        hosts: by place of the machines, as :func:`~shared_core.launcher.console.host_of` names them.
        workers: of each machine.

    Raises:
        ConfigError: nothing is meant, or several machines; it says what is there.
    """
    if target.isdecimal() and int(target) < len(hosts) * workers:
        return int(target) // workers, int(target)
    found = [place for place, host in enumerate(hosts) if target in host.replace("(", "").replace(")", "").split()]
    if len(found) == 1:
        return found[0], None
    there = [f"{host}: {_span(place * workers, workers)}" for place, host in enumerate(hosts)]
    raise ConfigError(
        f"{target!r} is {'several machines' if found else 'no rank or host of this job'}: {'; '.join(there)}"
    )


def _span(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def refused(config: SwiftConfig, rank: int | None, present: Collection[int], *, spares: int, keeps_store: bool) -> str:
    """Why nobody can leave; empty if they can.

    Args:
        rank: that is to leave; None for all of a machine.
        present: ranks that a worker holds, of all machines.
        spares: machines that wait.
        keeps_store: the job ends with the machine.
    """
    if not (config.replaces or config.reroutes):
        return f"with on_failure={config.on_failure!r} nobody takes a rank's place: use replace"
    if rank is not None:
        return "" if set(present) - {rank} else f"rank {rank} is the only worker, and nobody else has its state"
    if keeps_store:
        return "this machine hosts the job's store, without which the job ends: use etcd for the rendezvous"
    return "" if spares else "no spare machine waits to take its ranks: start one (--spare-nodes)"
