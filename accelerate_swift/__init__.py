"""Recovery for Hugging Face Accelerate: ``Accelerator(kwargs_handlers=[SwiftPlugin()])``."""

from accelerate_swift.plugin import SwiftPlugin

__all__ = ["SwiftPlugin"]
