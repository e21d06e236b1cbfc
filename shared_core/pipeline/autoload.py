"""Imported by a worker before its program where the DeepSpeed configuration has a ``"swift_recovery"`` section.

``deepspeed.initialize`` then makes an engine that survives. A program with a pipeline needs no change; one without
attaches the engine, and loops over ``job.steps``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared_core.pipeline.compat import choose_engines, import_deepspeed

deepspeed = import_deepspeed()  # before the engines' modules import it
from shared_core.pipeline.engine import SwiftPipelineEngine, install  # noqa: E402
from shared_core.pipeline.zero import SwiftZeroEngine  # noqa: E402


def _choose(name: str, ours: type) -> None:
    stock: type = getattr(deepspeed, name)

    def choose(given: Mapping[str, Any]) -> type:
        config = given.get("config")
        return ours if isinstance(config, dict) and "swift_recovery" in config else stock

    choose_engines(name, choose)


install()
_choose("PipelineEngine", SwiftPipelineEngine)
_choose("DeepSpeedEngine", SwiftZeroEngine)
