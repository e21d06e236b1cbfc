"""What a standby is told to import (``--preload``) where pipelines are trained: DeepSpeed and our engine.

On a processor DeepSpeed also looks for a compiler and loads an operator when it initializes torch.distributed; done
here, a newcomer has it already.
"""

import deepspeed.pipe  # noqa: F401
from deepspeed.comm.torch import build_shm_op

import shared_core.job  # noqa: F401
import shared_core.pipeline.engine  # noqa: F401

build_shm_op()
