"""Machines for tests: network namespaces on one bridge, which can be killed whole, cut off and healed.

Namespaces share ``/proc``, ``/dev/shm`` and the disk; only the network is each one's own. A machine that is killed
goes silently: its link is down before its processes end, so that no connection is closed in an orderly way.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared_core.system import jobdir


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if check and done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def unavailable() -> str:
    """Why machines cannot be made here; empty if they can."""
    name = f"swt{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", f"{name}b", "type", "bridge")
            _ip("link", "del", f"{name}b")
        finally:
            _ip("netns", "del", name, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces cannot be made here (root and iproute2 are needed): {error}"
    return ""


class Machine:
    """One namespace.

    Attributes:
        name: of the namespace.
        address: its IPv4 address on the bridge.
    """

    def __init__(self, name: str, address: str, port: str) -> None:
        self.name, self.address = name, address
        self._port = port

    @property
    def path(self) -> str:
        """Handle of the namespace."""
        return f"/run/netns/{self.name}"

    def processes(self) -> list[int]:
        """All that run in it."""
        inode = os.stat(self.path).st_ino
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and os.stat(entry / "ns/net").st_ino == inode:
                    found.append(int(entry.name))
        return found

    def command(self, *words: str, hosts: Path | None = None) -> list[str]:
        """The command that runs ``words`` on it, with a file of its own as ``/etc/hosts`` if ``hosts`` is given."""
        named = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)] if hosts is not None else []
        return ["ip", "netns", "exec", self.name, *named, *words]

    def popen(self, *command: str, output: Path) -> subprocess.Popen[bytes]:
        """Run a program on it."""
        with open(output, "wb") as file:
            return subprocess.Popen(
                self.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut(self) -> None:
        """Take its link down."""
        _ip("link", "set", self._port, "down")

    def heal(self) -> None:
        """Take its link up again."""
        _ip("link", "set", self._port, "up")

    def kill(self) -> None:
        """The machine is gone: silently, with all that ran there and all that lay in its memory."""
        self.cut()
        for _ in range(100):
            pids = self.processes()
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        jobdir.sweep(Path("/dev/shm"))


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """So many machines that reach each other; everything is removed afterwards."""
    tag = uuid.uuid4().hex[:6]
    net = f"10.{200 + os.getpid() % 50}.{int(tag[:2], 16)}"
    bridge = f"sb{tag}"
    made: list[Machine] = []
    try:
        _ip("link", "add", bridge, "type", "bridge", "forward_delay", "0")
        _ip("link", "set", bridge, "up")
        for place in range(count):
            name, port, address = f"sn{tag}{place}", f"sv{tag}{place}", f"{net}.{place + 1}"
            _ip("netns", "add", name)
            made.append(Machine(name, address, port))
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        for machine in made:
            if machine.processes():
                machine.kill()
            _ip("netns", "del", machine.name, check=False)
            _ip("link", "del", machine._port, check=False)
        _ip("link", "del", bridge, check=False)


def write_hosts(on: Sequence[Machine], path: Path, called: Sequence[str] = ()) -> Path:
    """Write an ``/etc/hosts`` for these machines, also called node1, node2, ..., or as ``called`` says: torch looks up
    its peers' names, and there is no name server.
    """
    called = called or [f"node{place}" for place in range(1, len(on) + 1)]
    names = [f"{machine.address} {machine.name} {name}" for machine, name in zip(on, called, strict=True)]
    path.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
    return path
