"""Imported by a worker before its program where the DeepSpeed configuration has a ``"swift_recovery"`` section.

``deepspeed.initialize`` then makes an engine that survives. A program with a pipeline needs no change; one without
attaches the engine, and loops over ``job.steps``.
"""

import shared_core.pipeline.engine_choice  # noqa: F401
from shared_core.job import install

install()
