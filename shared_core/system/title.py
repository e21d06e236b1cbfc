"""What ``ps`` and ``top`` show of a process of the job: its rank and the user's script.

``ps`` reads the memory that held the command line. It is written over in place: that needs no privilege and no other
package, and a forked child has its own copy. The title has at most the room of the command line before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_NAME = 15
#: Longest name in ``top`` and ``ps -e``, in bytes.
_NAME_BYTES = 15
#: Places of ``arg_start`` and ``arg_end`` in ``/proc/PID/stat`` after the name, which is the second field.
_ARG_START, _ARG_END = 45, 46

_bounds: tuple[int, int] | None = None


def set_title(role: str, target: str = "", args: Sequence[str] = ()) -> None:
    """Have this process shown as ``swift ROLE: TARGET ARGS``, as far as there is room; else nothing happens."""
    set_name(role)
    with suppress(OSError, ValueError, IndexError):
        start, end = _arguments()
        text = fitting(f"swift {role}", target, args, end - start - 1)
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def set_name(role: str) -> None:
    """Have this process named ``swift ROLE`` in ``top``; its command line stays."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"swift {role}".encode()[:_NAME_BYTES], 0, 0, 0)


def fitting(name: str, target: str, args: Sequence[str], room: int) -> bytes:
    """The title in at most ``room`` bytes; of a long path the end is kept, by which it can be found.

    A last byte of zero must follow, by which the kernel knows that the title ends where the command line did.
    """
    if not target:
        return name.encode(errors="surrogateescape")[:room]
    head = f"{name}: ".encode()
    path = target.encode(errors="surrogateescape")
    if len(head) + len(path) > room:
        path = Path(target).name.encode(errors="surrogateescape")
    rest = b"".join(b" " + arg.encode(errors="surrogateescape") for arg in args)
    return (head + path + rest).replace(b"\0", b" ")[:room]


def _arguments() -> tuple[int, int]:
    """Where the command line of this process lies in its memory; of a forked child where its parent's did."""
    global _bounds
    if _bounds is None:
        raw = Path("/proc/self/stat").read_bytes()
        fields = raw[raw.rindex(b")") + 2 :].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if not 0 < start < end:
            raise ValueError("the command line of this process cannot be found")
        _bounds = start, end
    return _bounds
