"""Find and end the processes of a job by a variable of their environment, whoever their parent is by now."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

MARK = "SWIFT_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Living processes that inherited ``SWIFT_TEST_MARK=mark``, this one excluded; zombies have no environment."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked, or is another user's
    return sorted(found)


def describe(pid: int) -> str:
    """Number, state and command line of a process, for a message."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} [{state}] {command[:200]}"


def wait_gone(mark: str, timeout_s: float) -> list[int]:
    """Wait until no marked process lives; those left after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while left := marked(mark):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def kill_marked(mark: str) -> list[int]:
    """SIGKILL all marked processes until none is left; those that were killed."""
    killed: set[int] = set()
    for _ in range(50):
        left = marked(mark)
        if not left:
            break
        for pid in left:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    return sorted(killed)
