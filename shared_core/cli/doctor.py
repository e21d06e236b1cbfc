"""``swiftctl doctor``: whether training can survive a failure on this machine, and what to do where it cannot."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shared_core.cli.arguments import DISTRIBUTION, one_line
from shared_core.errors import SwiftError
from shared_core.system.jobdir import MEMORY
from shared_core.versions import installed

_GIB = 1 << 30
#: Packages beside torch that recovery is made for; none of them is needed.
_FRAMEWORKS = ("lightning", "accelerate", "transformers", "deepspeed")
#: Open files: a worker has a few dozen beside those of the script, and the launcher some for each worker.
_FEW_FILES, _SOME_FILES = 128, 1024
#: The clocks of this machine and of its file system may differ by so much, in seconds.
_CLOCKS_S = 5.0


Verdict = Literal["ok", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    """What was looked at.

    Attributes:
        verdict: ``bad`` where a job cannot survive a failure, or cannot run.
        remedy: what to do, where something is wrong.
    """

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


def _judged(what: str, good: bool, found: str, remedy: str, otherwise: Verdict = "warning") -> Finding:
    """The remedy is for what is not good."""
    return Finding(what, "ok" if good else otherwise, found, "" if good else remedy)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether training can survive a failure on this machine",
        description="Print versions and what this machine offers, with a remedy for what is wrong. The status is 1 if "
        "training cannot survive a failure here.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    findings = list(examine())
    if options.json:
        print(json.dumps([asdict(each) for each in findings], indent=2), flush=True)
    else:
        for each in findings:
            print(f"{each.verdict:<8} {each.what:<14} {each.found}")
            if each.remedy:
                print(f"{'':<24}-> {each.remedy}")
    return int(any(each.verdict == "bad" for each in findings))


def examine() -> Iterator[Finding]:
    """Look at everything; what cannot be looked at is a finding too."""
    for what, look in _LOOKS.items():
        try:
            yield from look()
        except Exception as error:  # a broken installation raises anything
            yield Finding(what, "bad", one_line(f"{type(error).__name__}: {error}"), "mend what the error names")


def _system() -> Iterator[Finding]:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield _judged("system", sys.platform == "linux", found, "use Linux: nothing else is supported", "bad")
    yield Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")
    ours = installed(DISTRIBUTION)
    checkout = "the sources of a checkout, not installed"
    yield _judged(DISTRIBUTION, ours is not None, ours or checkout, "pip install -e .")
    yield Finding("processors", "ok", f"{len(os.sched_getaffinity(0))} for this process")


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("torch", "bad", f"cannot be imported: {one_line(error)}", "pip install torch")
        return
    from shared_core.versions import check_version
    from shared_core.worker.comm import compat

    try:
        check_version(compat.TESTED, compat.NAMES)
        yield Finding("torch", "ok", f"{torch.__version__} ({compat.TESTED} were tested)")
    except SwiftError as error:
        yield Finding("torch", "bad", one_line(error), "install one of the tested versions")
    gloo = dist.is_available() and dist.is_gloo_available()
    there = "is there" if gloo else "is not in this torch"
    yield _judged("gloo", gloo, there, "install a torch that has it", "bad")
    if torch.cuda.is_available():
        yield Finding(
            "GPUs", "warning", f"{torch.cuda.device_count()}", "recovery on GPUs is experimental: docs/devices.md"
        )
    else:
        yield Finding("GPUs", "ok", "none: training on CPUs")


def _frameworks() -> Iterator[Finding]:
    for name in _FRAMEWORKS:
        yield Finding(name, "ok", installed(name) or "not installed")


def _memory() -> Iterator[Finding]:
    """State and logs lie in memory that other processes see; on a disk, if there is too little."""
    if not os.access(MEMORY, os.W_OK):
        yield Finding(
            MEMORY, "warning", "cannot be written: a disk takes its place, which is slow", f"mount a tmpfs at {MEMORY}"
        )
    else:
        free = shutil.disk_usage(MEMORY).free
        remedy = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        yield _judged(MEMORY, free >= _GIB, f"{free / _GIB:.1f} GiB free", remedy)
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        apart = abs(os.fstat(file.fileno()).st_mtime - time.time())
    yield Finding("TMPDIR", "ok", f"{folder}, {shutil.disk_usage(folder).free / _GIB:.1f} GiB free")
    found = f"{apart:.1f} s apart from that of {folder}"
    yield _judged("clock", apart <= _CLOCKS_S, found, "synchronise the clocks (NTP)")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    verdict: Verdict = "bad" if soft < _FEW_FILES else "warning"
    yield _judged("open files", soft >= _SOME_FILES, f"at most {soft}", f"ulimit -n {min(hard, 65536)}", verdict)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    unlimited = soft == resource.RLIM_INFINITY
    found = "no limit" if unlimited else f"at most {soft}"
    yield _judged("processes", unlimited or soft >= _SOME_FILES, found, "ulimit -u 4096")


def _network() -> Iterator[Finding]:
    with socket.socket() as server, socket.socket() as client:
        server.settimeout(5.0)
        client.settimeout(5.0)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.connect(server.getsockname())
        server.accept()[0].close()
    yield Finding("ports", "ok", "127.0.0.1 can be listened on and reached")
    name = socket.gethostname()
    try:
        yield Finding("host name", "ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        yield Finding(
            "host name",
            "warning",
            f"{name} is not known to this machine",
            "add it to /etc/hosts, or set MASTER_ADDR, for jobs on several machines",
        )


_LOOKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "system": _system,
    "torch": _torch,
    "frameworks": _frameworks,
    "memory": _memory,
    "limits": _limits,
    "network": _network,
}
