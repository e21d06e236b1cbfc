"""Runs a module as the program, with the plugin in each ``Accelerator`` that it makes unless it is a stock run."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from accelerate import Accelerator


def main() -> None:
    module = sys.argv.pop(1)
    if not os.environ.get("SWIFT_BASELINE"):
        from accelerate_swift import SwiftPlugin

        stock = Accelerator.__init__

        def with_plugin(self: Accelerator, *args: Any, kwargs_handlers: Any = None, **kwargs: Any) -> None:
            stock(self, *args, kwargs_handlers=[*(kwargs_handlers or []), SwiftPlugin()], **kwargs)

        Accelerator.__init__ = with_plugin
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
