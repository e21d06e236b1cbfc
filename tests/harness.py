"""Run jobs in tests and compare them with reference runs, which are run once in a session."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from shared_core.faults import Fault
from tests.support.plain import PlainLauncher
from tests.support.runner import JobResult, check_clean, check_survivors, compare, unconfirmed
from tests.support.runner import run_job as _run_job
from tests.support.warm import WarmLauncher

SCRIPTS = Path(__file__).parent / "scripts"


def armed(fault: Fault) -> str:
    """Lines at the beginning of a script that is not started by ``swiftrun --faults``: its workers arm the fault."""
    return f"""
import os
from shared_core.faults import Fault, arm
if "SWIFT_RECOVERY_INCARNATION" in os.environ:
    arm([{fault!r}], int(os.environ["RANK"]), int(os.environ["SWIFT_RECOVERY_INCARNATION"]))
"""


class Jobs:
    """Runs jobs for the tests of one session, from servers that hold the imports (unless ``SWIFT_TESTS_COLD`` is set).

    Args:
        folder: where each job gets a folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._plain: PlainLauncher | None = None
        self._warm: WarmLauncher | None = None
        self._references: dict[str, JobResult] = {}

    def run(
        self,
        script: str,
        *,
        nproc: int = 2,
        faults: Sequence[Fault] = (),
        launcher: str = "swiftrun",
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        launcher_args: Sequence[str] = (),
        standbys: int = 1,
        timeout_s: float = 60.0,
    ) -> JobResult:
        """Run a script of ``tests/scripts`` as ``runner.run_job`` does, and check that nothing is left."""
        warm = self.warm if launcher == "swiftrun" and not os.environ.get("SWIFT_TESTS_COLD") else None
        self._count += 1
        result = _run_job(
            SCRIPTS / script,
            nproc=nproc,
            out=self._folder / f"{self._count:03d}-{Path(script).stem}-{launcher}",
            faults=faults,
            launcher=launcher,
            env=env,
            args=args,
            launcher_args=launcher_args,
            standbys=standbys,
            timeout_s=timeout_s,
            plain=self.plain if launcher == "plain" else None,
            warm=warm,
        )
        check_clean(result)
        return result

    @property
    def plain(self) -> PlainLauncher:
        """The server that runs scripts without this product."""
        if self._plain is None:
            self._plain = PlainLauncher()
        return self._plain

    @property
    def warm(self) -> WarmLauncher:
        """The server that starts launchers."""
        if self._warm is None:
            self._warm = WarmLauncher()
        return self._warm

    def folder(self, name: str) -> Path:
        """A new folder for a job."""
        self._count += 1
        folder = self._folder / f"{self._count:03d}-{name}"
        folder.mkdir()
        return folder

    def reference(
        self,
        script: str,
        *,
        nproc: int = 2,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        launcher: str = "plain",
        timeout_s: float = 60.0,
    ) -> JobResult:
        """The run without faults and without this product; the same script, arguments and environment are run once."""
        key = json.dumps([script, nproc, sorted((env or {}).items()), list(args), launcher])
        name = hashlib.sha256(key.encode()).hexdigest()
        if name not in self._references:
            self._references[name] = self.run(
                script, nproc=nproc, env=env, args=args, launcher=launcher, timeout_s=timeout_s
            )
        return self._references[name]

    def check(
        self,
        script: str,
        *,
        faults: Sequence[Fault],
        nproc: int = 2,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        standbys: int = 1,
        timeout_s: float = 60.0,
        reference_launcher: str = "plain",
        parts: Sequence[str] | None = None,
    ) -> JobResult:
        """Run a script with faults and check that all struck, that survivors were untouched and the result is the same.

        Raises:
            Mismatch: saying what is not.
        """
        reference = self.reference(
            script, nproc=nproc, env=env, args=args, launcher=reference_launcher, timeout_s=max(60.0, timeout_s)
        )
        result = self.run(
            script, nproc=nproc, faults=faults, env=env, args=args, standbys=standbys, timeout_s=timeout_s
        )
        compare(result, reference, parts)
        assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
        check_survivors(result, reference)
        return result

    def close(self) -> None:
        """End the servers."""
        for server in (self._plain, self._warm):
            if server is not None:
                server.close()


_Found = TypeVar("_Found")


def until(what: Callable[[], _Found], why_not: Callable[[], str] | str, timeout_s: float = 30.0) -> _Found:
    """Wait until ``what`` gives something true, and give that.

    Args:
        what: looks for it.
        why_not: gives what to say when it does not come; or what is waited for.
        timeout_s: longest wait, in seconds.

    Raises:
        AssertionError: if it does not come.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"waited for {why_not}" if isinstance(why_not, str) else why_not()
        time.sleep(0.005)
    return found


def most(cases: Iterable[str], *rare: str) -> list[Any]:
    """Parameters of a test: the cases, of which the ``rare`` ones are left to the night."""
    return [pytest.param(name, marks=pytest.mark.nightly) if name in rare else name for name in cases]


def few(cases: Collection[str], *usual: str) -> list[Any]:
    """Parameters of a test: the cases, of which all but the ``usual`` ones are left to the night."""
    return most(cases, *(name for name in cases if name not in usual))


@contextmanager
def session_jobs() -> Iterator[Jobs]:
    """Jobs in a folder of their own, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="swift-tests-") as folder:
        jobs = Jobs(Path(folder))
        try:
            yield jobs
        finally:
            jobs.close()
