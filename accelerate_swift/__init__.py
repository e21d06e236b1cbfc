"""Recovery for Hugging Face Accelerate: ``Accelerator(kwargs_handlers=[SwiftPlugin()])``.

For DeepSpeed pipelines: ``Accelerator(deepspeed_plugin=SwiftDeepSpeedPipelinePlugin(num_stages, micro_batches))``.
"""

from accelerate_swift.pipeline import SwiftDeepSpeedPipelinePlugin
from accelerate_swift.plugin import SwiftPlugin

__all__ = ["SwiftDeepSpeedPipelinePlugin", "SwiftPlugin"]
