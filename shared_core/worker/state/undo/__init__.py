"""Exact undo of optimizer updates (Swift's update-undo), and the update overlapped with backward in
which it is needed.
"""

from shared_core.worker.state.undo.parts import Parts
from shared_core.worker.state.undo.stepping import Arguments, HiddenGradients, begin_after_closure
from shared_core.worker.state.undo.undo import Undo

__all__ = ["Arguments", "HiddenGradients", "Parts", "Undo", "begin_after_closure"]
