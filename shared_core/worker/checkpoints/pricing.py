"""What checkpoints cost and what they are worth, measured while rank 0 trains; a policy decides by it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shared_core.checkpoint import history
from shared_core.checkpoint.cost import CostMeter
from shared_core.checkpoint.curve import CurveFitter, Fit, Pieces
from shared_core.checkpoint.history import Hazard, Run, RunEnding, from_history
from shared_core.checkpoint.policy import Situation, grown, make_policy
from shared_core.config import SwiftConfig
from shared_core.events import console
from shared_core.resources import what_to_do

#: Losses are read from the device in groups of this size. The curve is fitted at most once in this many seconds.
LOSSES, FIT_S = 64, 30.0
#: How often the job-history file is told how far this run is, in seconds.
SAY_S = 600.0
#: A batch that takes so many times the median was interrupted (a recovery, a validation): it counts as a usual one.
INTERRUPTED = 10.0


class Pricing:
    """Takes times and losses at each step boundary of rank 0, and answers whether a checkpoint is due.

    Attributes:
        name: of the run, in the job-history file; nothing is written there while it is empty.
        went_back: this attempt begins with a checkpoint, because the one before failed.

    Raises:
        ConfigError: for an option that the policy does not have.
    """

    def __init__(self, config: SwiftConfig, world_size: int, command: str) -> None:
        self._config, self._world_size, self._command = config, world_size, command
        options: dict[str, Any] = (
            {"price": config.checkpoint.price} if config.checkpoint.chosen_policy == "value" else {}
        )
        self._policy = make_policy(config.checkpoint.chosen_policy, **options)
        self._meter = CostMeter()
        self._fitter, self._pieces = CurveFitter(), Pieces()
        self._losses: list[tuple[int, torch.Tensor | float]] = []
        self._fit, self._fitted = Fit(why="no failure is known"), 0.0
        self._ending: RunEnding | None = None
        self._before = Hazard()
        self._begun: dict[int, float] = {}
        self._last = self._waited = self._said = 0.0
        self._unwritten = False
        self._rule, self._rule_said = "", -SAY_S
        self._boundary = self._saved_boundary = 0
        self._useful_s = self._saved_s = self._rework_s = self._worker_s = 0.0
        self._undone: tuple[int, float, float] = (0, 0.0, 0.0)
        self._rolled_back = 0
        self.name = ""
        self.went_back = False
        self._read_history()

    @property
    def _wants_curve(self) -> bool:
        if self._policy.name == "value":
            return bool(self._config.checkpoint.price) or self._ending is not None
        return self._policy.name.startswith("coci")

    # -- what happens ------------------------------------------------------------------------------

    def step(self, boundary: int, waited_s: float, version: int, optimizers: Iterable[Optimizer]) -> None:
        """A step boundary is passed. ``waited_s``: seconds of waits for checkpoints since the process started."""
        if self._wants_curve:
            rates = [float(group.get("lr", 0.0)) for optimizer in optimizers for group in optimizer.param_groups]
            if why := self._pieces.at_boundary(boundary, version, rates):
                self._fitter.restart(boundary + 1, why)
        now = time.monotonic()
        if self._last:
            stall = waited_s - self._waited
            seconds = max(0.0, now - self._last - stall)
            usual = self._meter.step_s
            useful = seconds if not usual or seconds < INTERRUPTED * usual else usual
            self._meter.step(useful + stall)  # the wait at the fence is a part of what saving costs
            self._rework_s = grown(self._rework_s, self._hazard(), self._useful_s - self._saved_s, useful)
            self._useful_s += useful
            self._worker_s += seconds * self._world_size
        self._last, self._waited, self._boundary = now, waited_s, boundary

    def begun(self, boundary: int, stall_s: float, taken: bool) -> None:
        """A checkpoint was begun here (``taken``), or could not be; training stood still for ``stall_s``."""
        self._last += stall_s
        self._undone = (self._saved_boundary, self._saved_s, self._rework_s)
        # One that could not be is not tried again at once.
        self._saved_boundary, self._saved_s, self._rework_s = boundary, self._useful_s, 0.0
        if taken:
            self._begun[boundary] = time.monotonic()
            self._meter.begun(boundary, stall_s)

    def heed(self, committed: int, failed: int) -> None:
        """What the writer says: the newest step boundary that is committed, and one that failed (-1 for none)."""
        now = time.monotonic()
        for boundary in [boundary for boundary in self._begun if boundary <= committed]:
            begun = self._begun.pop(boundary)
            if boundary == committed:
                self._meter.durable(boundary, now - begun)
            else:
                self._meter.failed(boundary)  # a newer one took its place
        if failed in self._begun:
            del self._begun[failed]
            self._meter.failed(failed)
            if failed == self._saved_boundary:
                boundary, saved_s, rework_s = self._undone
                self._saved_boundary, self._saved_s, self._rework_s = boundary, saved_s, max(rework_s, self._rework_s)

    def loss(self, boundary: int, value: torch.Tensor | float) -> None:
        """Keep the loss of a batch. A tensor is detached, and read only when ``LOSSES`` of them have gathered."""
        if self._wants_curve:
            self._losses.append((boundary, value.detach() if isinstance(value, torch.Tensor) else value))
            if len(self._losses) >= LOSSES:
                self._feed()

    def rolled_back(self) -> None:
        self._rolled_back += 1

    # -- the decision ------------------------------------------------------------------------------

    def due(self, boundary: int) -> bool:
        if not self._meter.step_s:
            return False
        now = time.monotonic()
        if self._wants_curve and now - self._fitted > FIT_S:
            self._fitted = now
            self._feed()
            self._fit = self._fitter.fit()
        self._tell(now)
        decision = self._policy.due(self._situation(boundary))
        rule = decision.rule
        if rule and rule != self._rule and now - self._rule_said >= SAY_S:
            self._rule, self._rule_said = rule, now
            console(f"checkpoints follow {rule}")
        return decision.due

    def _situation(self, boundary: int) -> Situation:
        return Situation(
            step=boundary,
            useful_s=self._useful_s,
            saved_step=self._saved_boundary,
            saved_s=self._saved_s,
            step_s=self._meter.step_s,
            hazard=self._hazard(),
            cost=self._meter.cost,
            rework_s=self._rework_s,
            in_flight=len(self._begun),
            curve=self._fit.curve,
            exponential=self._fit.exponential,
            fit_note=self._fit.why,
            ending=self._ending,
            workers=self._world_size,
        )

    def _hazard(self) -> float:
        return self._before.seen(self._rolled_back, self._worker_s).mean(self._world_size)

    def _feed(self) -> None:
        self._fitter.feed([boundary for boundary, _ in self._losses], [float(value) for _, value in self._losses])
        self._losses.clear()

    # -- earlier runs ------------------------------------------------------------------------------

    def _read_history(self) -> None:
        path = self._config.checkpoint.history
        if path is None:
            return
        try:
            runs = history.read(path, group=self._command or None)
        except OSError as error:
            console(f"the job history {path} cannot be read: {error}")
            return
        self._ending = from_history(runs)
        for run in runs:
            self._before = self._before.seen(sum(run.rolled_back.values()), run.worker_s)

    def _tell(self, now: float, end: str = "running") -> None:
        path = self._config.checkpoint.history
        if path is None or not self.name or (end == "running" and self._said and now - self._said < SAY_S):
            return
        self._said = now
        try:
            run = Run(self.name, end, self._useful_s, self._worker_s, {"storage": self._rolled_back}, self._command)
            history.append(path, run)
        except OSError as error:
            if not self._unwritten:
                self._unwritten = True
                console(f"the job history {path} cannot be written {what_to_do(error)}. The job continues")

    def ended(self, end: str) -> None:
        """The run has ended: ``completed``, or ``stopped`` early with its state saved."""
        self._tell(time.monotonic(), end)

    # -- for replacements and restarts ----------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Plain data for a replacement, and for the next attempt."""
        return {
            "boundary": self._boundary,
            "useful_s": self._useful_s,
            "saved": [self._saved_boundary, self._saved_s, self._rework_s],
            "worker_s": self._worker_s,
            "rolled_back": self._rolled_back,
            "workers": self._world_size,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        self._boundary, self._useful_s = values["boundary"], values["useful_s"]
        self._saved_boundary, self._saved_s, self._rework_s = values["saved"]
        self._worker_s, self._rolled_back = values["worker_s"], values["rolled_back"] + int(self.went_back)
        self.went_back = False
        self._last = 0.0
        if values.get("workers", self._world_size) != self._world_size:
            self._fitter.restart(self._boundary + 1, f"{self._world_size} workers instead of {values['workers']}")
