"""The ``torch.distributed`` backend ``swift``: gloo that survives failures of ranks."""

from shared_core.worker.comm.backend import install, prepare
from shared_core.worker.comm.compat import group_name, group_named, groups_made, skip_groups
from shared_core.worker.comm.group import SwiftProcessGroup
from shared_core.worker.comm.runtime import Runtime

__all__ = [
    "Runtime",
    "SwiftProcessGroup",
    "group_name",
    "group_named",
    "groups_made",
    "install",
    "prepare",
    "skip_groups",
]
