"""This process as a hot standby: quiet and in the background, until it takes a worker's place."""

from __future__ import annotations

import os
import sys

from shared_core.events import console, marked
from shared_core.protocol import worker_env
from shared_core.system.background import Background
from shared_core.system.title import set_title
from shared_core.worker.start.held import HeldOutput

_held: HeldOutput | None = None
_background: Background | None = None


def begin() -> None:
    """Become a hot standby if the environment says so: output is held and the process runs in the background."""
    global _held, _background
    if worker_env.SPARE in os.environ:
        _background = Background()
        _held = HeldOutput()


def is_hot_standby() -> bool:
    return _held is not None


def tell(message: str) -> None:
    """Show something to the user now, also from a hot standby, whose other output is held."""
    if _held is None:
        console(message)
    else:
        _held.write(2, f"{marked(message)}\n".encode())


def take_place(generation: int) -> None:
    """Be a worker from now on, in this generation: changes the environment, and shows the held output."""
    global _held, _background
    os.environ[worker_env.GENERATION] = str(generation)
    del os.environ[worker_env.SPARE]
    if _background is not None:
        _background.leave()
    if _held is not None:
        _held.show()
    _held = _background = None
    set_title(f"rank {os.environ['RANK']}", sys.argv[0], sys.argv[1:])
