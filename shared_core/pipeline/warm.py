"""What a standby of a pipeline imports, for the device that pipelines train on."""

from contextlib import suppress

from shared_core.errors import MissingExtra
from shared_core.pipeline.deepspeed_import import import_deepspeed

with suppress(MissingExtra):
    import_deepspeed()
    import shared_core.pipeline.engine  # noqa: F401
