"""What the agent asks a zygote, or a fresh interpreter, to become."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from shared_core.errors import DamagedRecord
from shared_core.plain_json import is_count, parse

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
class StartRequest:
    """One worker to start.

    Attributes:
        token: chosen by the agent, returned with the pid.
        mode: ``script`` (a path), ``module`` (as ``python -m``) or ``exec`` (a program that is no Python script).
        agent: pid of the agent, which must be the parent; the worker dies with it.
        stdout: file to append standard output to; empty leaves it on the console.
        first: modules to import before the program.
        threads: intra-op threads that a fresh interpreter with this environment would use; 0 leaves torch alone.
    """

    token: int
    mode: Mode
    target: str
    args: tuple[str, ...]
    env: dict[str, str]
    agent: int
    stdout: str = ""
    stderr: str = ""
    threads: int = 0
    first: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> StartRequest:
        """Inverse of :meth:`to_json`; raises DamagedRecord."""
        try:
            raw: dict[str, Any] = parse(line)
            request = cls(**(raw | {"args": tuple(raw["args"]), "first": tuple(raw["first"])}))
            texts = (request.target, request.stdout, request.stderr, *request.args, *request.first)
            good = (
                all(map(is_count, (request.token, request.agent, request.threads)))
                and request.mode in get_args(Mode)
                and all(isinstance(text, str) for text in (*texts, *request.env.values()))
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamagedRecord(f"this does not start a worker: {error!r}") from error
        if not good:
            raise DamagedRecord("this does not start a worker: its values are of other types")
        return request
