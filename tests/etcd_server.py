"""A real etcd, the one of the system or the one that ``make`` has put into ``.venv``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.namespaces import Machine
from tests.support.ports import free_ports

#: ETCD chooses another one.
BINARY = os.environ.get("ETCD") or shutil.which("etcd") or shutil.which("etcd", path=str(Path(sys.executable).parent))
needs_etcd = pytest.mark.skipif(
    BINARY is None, reason="no etcd: install Debian's etcd-server, or set ETCD to the program (3.4 or later)"
)


class Member:
    """One etcd. It can be killed and started again with what it had written.

    Attributes:
        endpoint: for clients.

    Args:
        name: of the member.
        folder: what it writes.
        options: more of its options.
        on: the machine it runs on; None for this one.
    """

    def __init__(self, name: str, folder: Path, options: Sequence[str], on: Machine | None) -> None:
        self._folder, self._name = folder, name
        address, self._on = (on.address if on is not None else "127.0.0.1"), on
        port, peer = (2379, 2380) if on is not None else free_ports(2)
        self.endpoint, self.peer = f"{address}:{port}", f"{name}=http://{address}:{peer}"
        self._options = list(options)
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: Iterable[str]) -> None:
        """Start it; see :meth:`wait`."""
        self._starts += 1
        scheme = "https" if "--cert-file" in self._options else "http"
        peer = self.peer.partition("=")[2]
        words = [str(BINARY), "--name", self._name, "--data-dir", str(self._folder / self._name), *self._options]
        words += ["--listen-client-urls", f"{scheme}://{self.endpoint}"]
        words += ["--advertise-client-urls", f"{scheme}://{self.endpoint}"]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster", ",".join(cluster)]
        command = self._on.command(*words) if self._on is not None else words
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"ETCD_ENABLE_V2": "false"}
            )

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._name}.{self._starts}.txt"

    def wait(self, timeout_s: float = 20.0) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + timeout_s
        while "ready to serve client requests" not in (said := self._log.read_text()):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"etcd does not start: {said[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send it one."""
        assert self._process is not None
        self._process.send_signal(number)


class Etcd:
    """A running etcd; of one member by default, on this machine. Use it in a ``with`` statement.

    Attributes:
        members: see :class:`Member`.
        endpoints: of all, as ``--rdzv-endpoint`` takes them.

    Args:
        folder: what it writes.
        options: more options of the members.
        on: the machine of each member; None for this one.
    """

    def __init__(self, folder: Path, *options: str, on: Sequence[Machine | None] = (None,)) -> None:
        self.members = [Member(f"m{place}", folder, options, machine) for place, machine in enumerate(on)]
        self.endpoints = ",".join(member.endpoint for member in self.members)
        self._cluster = [member.peer for member in self.members]

    def __enter__(self) -> Etcd:
        try:
            for member in self.members:
                member.start(self._cluster)
            for member in self.members:
                member.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *why: object) -> None:
        for member in self.members:
            member.kill()

    def restart(self, place: int = 0) -> None:
        """SIGKILL a member and start it again with its data."""
        self.members[place].kill()
        self.members[place].start(self._cluster)
        self.members[place].wait()
