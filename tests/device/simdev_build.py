"""Compiles the simulated device for the torch that is installed, once; the result is kept in the user's cache folder.

The same result serves every copy of these sources with that version of torch and Python.

This module does not load it: a process that does has another accelerator than before.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

#: Names the folder of the builds, instead of the one in the user's cache folder.
BUILD = "SIMDEV_BUILD"
SOURCE = Path(__file__).parent / "simdev" / "sim.cpp"
_FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-pthread", "-DTORCH_EXTENSION_NAME=_C")


class CannotBuild(RuntimeError):
    """The simulated device cannot be compiled here; says why in one line."""


def folder() -> Path:
    """Where builds are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(BUILD) or Path(cache, "swift-recovery", "simdev"))


def library() -> Path:
    """The compiled module, made if it is not there. Several processes may ask at once: one compiles, others wait.

    Raises:
        CannotBuild: without a compiler, or without the headers of Python or torch.
    """
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    key = hashlib.sha256(SOURCE.read_bytes() + "\0".join(flags).encode()).hexdigest()[:16]
    found = folder() / f"simdev-torch{torch.__version__}-py{sys.version_info[0]}{sys.version_info[1]}-{key}.so"
    if found.exists():
        return found
    found.parent.mkdir(parents=True, exist_ok=True)
    with open(found.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when its holder is killed
        if not found.exists():
            partial = found.with_suffix(".partial")
            done = subprocess.run(_command(flags, partial), capture_output=True, text=True)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
                raise CannotBuild(f"the simulated device does not compile with torch {torch.__version__}: {said[0]}")
            partial.replace(found)
    return found


def _command(flags: list[str], out: Path) -> list[str]:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuild("the simulated device needs a C++ compiler: there is no g++, and CXX names none")
    root, python = Path(torch.__file__).parent, Path(sysconfig.get_paths()["include"])
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include", python]
    for header in (includes[0] / "ATen" / "ATen.h", python / "Python.h"):
        if not header.exists():
            raise CannotBuild(f"the simulated device needs the header {header}, which is not there")
    # No path of the libraries: they are loaded already when this is, by torch.
    libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    return [compiler, *flags, *(f"-I{each}" for each in includes), str(SOURCE), *libraries, "-o", str(out)]
