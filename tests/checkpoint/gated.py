"""A kind of storage for tests: ``gated://`` is a local folder behind fsspec, whose writes wait at a gate.

``GATE`` names a pipe: each file that is written takes one byte from it first.
"""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Gated(LocalFileSystem):  # type: ignore[misc]
    protocol = ("gated",)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and "GATE" in os.environ:
            with open(os.environ["GATE"], "rb", buffering=0) as gate:
                gate.read(1)
        return super()._open(path, mode, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("gated://")))


fsspec.register_implementation("gated", Gated)
