"""Code that a replacement runs again before it has the trained parameters, and what that code does with them.

Between two loops over epochs, at the top of an epoch and between two passes a replacement, and a worker that resumes,
run the script with the variables that were there, but with models that nobody has trained. What they compute from such
a model, or save of it, would be other than without a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shared_core.errors import Unsupported
from shared_core.events import console
from shared_core.worker.comm.compat import compilations, hook_saving
from shared_core.worker.variables.kinds import OURS, of_libraries

_WHY = (
    "a worker that takes the place of a failed one, or resumes, runs that line before it has the trained parameters. "
    "Evaluate and save after the last pass of an epoch; or, where each pass needs new data of the model, make all "
    "of it part of a step: for step, _ in job.steps(range(n)) (docs/loops.md)"
)
_USES = "rank {}: {} uses a model that is not trained there: " + _WHY
_LOST = "rank {}: {} saves {}, which does not lie there from before the failure: " + _WHY
_KEPT = "rank {}: {} saves {} again, where the model is not trained: the file stays as it was saved before the failure"


class UntrainedUse:
    """Watches what the script does with attached models. Main thread only."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._fall_back: Callable[[str], Any] | None = None
        self._told: set[str] = set()
        self._undo: list[Callable[[], Any]] = []

    def begin(self, models: list[nn.Module], fall_back: Callable[[str], Any] | None) -> None:
        """Training of these was skipped. Again before :meth:`end`, does nothing. ``fall_back``: given a reason, has all
        workers start again, and does not return; None where this worker is one of those, because then a model that is
        used is only told of.
        """
        if not self._undo:
            self._fall_back = fall_back
            self._undo = [hook_saving(self._saves), _hook_forward(models, self._uses)]

    def end(self) -> None:
        """The models are as they were at the place that this worker begins from."""
        for each in self._undo:
            each()
        self._undo = []

    def _uses(self, where: str) -> None:
        message = _USES.format(self._rank, where)
        if self._fall_back is not None:
            self._fall_back(message)
        self._tell(message)

    def _saves(self, file: Any) -> bool:
        """Whether a file is not to be written. Raises Unsupported where it ought to be there and is not."""
        if not isinstance(file, (str, os.PathLike)) or not (where := _in_script()):
            return False
        if os.path.exists(file):
            self._tell(_KEPT.format(self._rank, where, os.fspath(file)))
            return True
        message = _LOST.format(self._rank, where, os.fspath(file))
        if self._fall_back is not None:
            self._fall_back(message)
        raise Unsupported(f"{message}. Or start from scratch with checkpoint.resume='never'")

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            console(message)


class TrainedUse:
    """Notes the first place where a worker that has trained uses attached models between two loops over epochs.
    ``where``: that place; empty where there is none.
    """

    def __init__(self) -> None:
        self.where = ""
        self._undo: Callable[[], Any] = lambda: None

    def begin(self, models: list[nn.Module]) -> None:
        if compilations():  # a hook would change what is compiled
            self.where = self.where or "compiled code"
        self._undo = _hook_forward(models, self._uses) if not self.where else lambda: None

    def end(self) -> None:
        self._undo()

    def _uses(self, where: str) -> None:
        self.where = where
        self._undo()


def _hook_forward(models: list[nn.Module], uses: Callable[[str], Any]) -> Callable[[], Any]:
    """Have ``uses`` called with the place whenever the script calls a part of the models; returns what undoes it."""
    parts = {id(each) for model in models for each in model.modules()}

    def called(module: nn.Module, _: Any) -> None:
        if id(module) in parts and (where := _in_script()):
            uses(where)

    return register_module_forward_pre_hook(called).remove


def _in_script() -> str:
    """File and line of the script that calls, through whatever library; empty where this product does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):  # what is hooked in
        frame = frame.f_back
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS):
            return ""
        if not of_libraries(file):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
