"""The ``torch.distributed`` backend ``swift``: gloo that survives the loss of ranks."""

from shared_core.comm.backend import install
from shared_core.comm.group import SwiftProcessGroup
from shared_core.comm.runtime import Runtime

__all__ = ["Runtime", "SwiftProcessGroup", "install"]
