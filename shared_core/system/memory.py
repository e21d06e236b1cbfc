"""Memory of this machine, and of one process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def private_bytes(pid: int) -> int:
    """Memory that a process has to itself; 0 if nobody knows."""
    found = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return sum(found.get(name, 0) for name in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"))


def machine_bytes(root: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """``(free, total)``: what processes can still get, and all there is; limits of the container (cgroups 2) count."""
    found = _fields(meminfo)
    free, total = found.get("MemAvailable", 0), found.get("MemTotal", 0)
    with suppress(OSError, ValueError):
        limit = int((root / "memory.max").read_text())  # "max" where there is none
        used = int((root / "memory.current").read_text())
        counts = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(counts.get("inactive_file", 0)))
        total = min(total, limit)
    return max(0, free), total


def _fields(path: Path) -> dict[str, int]:
    """The ``Name: N kB`` lines of a file in ``/proc``, in bytes."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[1] == "kB":
                found[name] = int(words[0]) << 10
    return found
