"""Imported by a worker before its program where the DeepSpeed configuration has a ``"swift_recovery"`` section:
``deepspeed.initialize`` then makes an engine whose stages survive, and nothing in the program changes.
"""

from __future__ import annotations

from typing import Any

from shared_core.pipeline.deepspeed_import import import_deepspeed

deepspeed = import_deepspeed()  # before the engine's module imports it
from shared_core.pipeline.engine import SwiftPipelineEngine, install  # noqa: E402

_Stock = deepspeed.PipelineEngine


def _make(*args: Any, **kwargs: Any) -> Any:
    config = kwargs.get("config")
    wanted = isinstance(config, dict) and "swift_recovery" in config
    return (SwiftPipelineEngine if wanted else _Stock)(*args, **kwargs)


install()
# deepspeed.initialize names the class of the engine, and offers no hook to say another.
deepspeed.PipelineEngine = _make
