"""Imported by a worker before a program that uses DeepSpeed: ``deepspeed.initialize`` then makes engines that survive,
where it is given a configuration with a ``"swift_recovery"`` section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared_core.job import install
from shared_core.pipeline.compat import choose_engines, import_deepspeed

deepspeed = import_deepspeed()  # before the engines' modules import it
from shared_core.pipeline.engine import SwiftPipelineEngine  # noqa: E402
from shared_core.pipeline.zero import SwiftZeroEngine  # noqa: E402


def _choose(name: str, ours: type) -> None:
    stock: type = getattr(deepspeed, name)

    def choose(given: Mapping[str, Any]) -> type:
        config = given.get("config")
        if not isinstance(config, dict) or "swift_recovery" not in config:
            return stock
        if (job := install()) is not None:
            # The launcher has read a section that is in a file or in the script, and not one made at run time.
            job.options.check_told(config["swift_recovery"], late=False)
        return ours

    choose_engines(name, choose)


_choose("PipelineEngine", SwiftPipelineEngine)
_choose("DeepSpeedEngine", SwiftZeroEngine)
