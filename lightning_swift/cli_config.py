"""``config.yaml`` of ``LightningCLI``, which refuses to write over a file.

Whoever takes a failed worker's place, or continues from a checkpoint, writes the same file again.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl

#: At the end of the name that Lightning looks for; nothing is ever written there.
_AGAIN = ".again"


class _Rewriting:
    """The parser of a command line, writing over the file that is there, and restoring its name."""

    def __init__(self, callback: Any) -> None:
        self._callback, self._parser, self._name = callback, callback.parser, callback.config_filename

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def save(self, config: Any, path: str, **options: Any) -> None:
        self._callback.parser, self._callback.config_filename = self._parser, self._name
        self._parser.save(config, path.removesuffix(_AGAIN), **options | {"overwrite": True})


def write_again(trainer: pl.Trainer) -> None:
    """In rank 0, before an entry call: the configuration has been written by another worker of this run.

    Lightning still asks whether the file exists, and tells all ranks: a replacement must issue the same collectives.
    """
    cli = sys.modules.get("lightning.pytorch.cli")  # whoever has such a callback has imported it
    if cli is None:
        return
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, cli.SaveConfigCallback) and callback.save_to_log_dir and not callback.already_saved:
            callback.parser = _Rewriting(callback)
            callback.config_filename += _AGAIN
