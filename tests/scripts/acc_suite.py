"""Runs a module as the program, with the plugin in each ``Accelerator`` that it makes unless it is a stock run.

Names after that of the module are functions of it that are left out: then its ``main`` is called.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

from accelerate import Accelerator


def main() -> None:
    module, left_out = sys.argv[1], sys.argv[2:]
    del sys.argv[1:]
    if not os.environ.get("SWIFT_BASELINE"):
        from accelerate_swift import SwiftPlugin

        stock = Accelerator.__init__

        def with_plugin(self: Accelerator, *args: Any, kwargs_handlers: Any = None, **kwargs: Any) -> None:
            stock(self, *args, kwargs_handlers=[*(kwargs_handlers or []), SwiftPlugin()], **kwargs)

        Accelerator.__init__ = with_plugin
    if not left_out:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    program = importlib.import_module(module)
    for name in left_out:
        getattr(program, name)  # an error if there is none
        setattr(program, name, lambda *args, **kwargs: None)
    program.main()


if __name__ == "__main__":
    main()
