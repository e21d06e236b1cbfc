"""What the agent asks a zygote, or a fresh interpreter, to become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared_core.codec import Count, OsText, Record, fit
from shared_core.errors import DamagedRecord
from shared_core.plain_json import parse

Mode = Literal["script", "module", "exec"]
#: A zygote's environment. Libraries read it when they are loaded: with more than one thread they start them at once,
#: and a fork would lose them.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting devices must not create a CUDA context
}


@dataclass(frozen=True)
class StartRequest(Record):
    """One worker to start.

    Attributes:
        token: chosen by the agent, returned with the pid.
        mode: ``script`` (a path), ``module`` (as ``python -m``) or ``exec`` (a program that is no Python script).
        agent: pid of the agent, which must be the parent; the worker dies with it.
        stdout: file to append standard output to; empty leaves it on the console.
        first: modules to import before the program.
        threads: intra-op threads that a fresh interpreter with this environment would use; 0 leaves torch alone.
    """

    token: Count
    mode: Mode
    target: OsText
    args: tuple[OsText, ...]
    env: dict[str, OsText]
    agent: Count
    stdout: OsText = ""
    stderr: OsText = ""
    threads: Count = 0
    first: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, line: str | bytes) -> StartRequest:
        """Inverse of :meth:`to_json`; raises DamagedRecord."""
        try:
            request: StartRequest = fit(parse(line), cls)
            return request
        except ValueError as error:
            raise DamagedRecord(f"this does not start a worker: {error}") from error
