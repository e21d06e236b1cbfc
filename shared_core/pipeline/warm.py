"""What a standby of a DeepSpeed script imports, for the device that it trains on."""

import importlib
from contextlib import suppress

from shared_core.errors import MissingExtra
from shared_core.pipeline.compat import import_deepspeed

with suppress(MissingExtra):
    import_deepspeed()
    import shared_core.pipeline.engine  # noqa: F401

    with suppress(ImportError):
        # The first engine with ZeRO imports it, and with it the compiler of torch, which takes more than a second.
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
