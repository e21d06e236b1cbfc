"""``log.groups="plan"``: the pipeline is measured while it trains, and who restarts together follows from that.

At each checkpoint's step boundary all ranks exchange what they have measured since the last, and make the same plan:
from that and from the plan before, which a replacement finds in its checkpoint. A grouping holds from a step boundary
on at which a checkpoint is written, so that what is logged since that checkpoint was logged for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shared_core.job import Job
from shared_core.kinds import whole_of_environment
from shared_core.pipeline.grouping import Budget, ChainMachine, ChainProfile, drifted, plan_groups
from shared_core.pipeline.instrumented_engine import InstrumentedEngine
from shared_core.worker.messages.log_budget import PARTS

#: Groups are planned again where the time between checkpoints has changed by more than this share.
INTERVAL_DRIFT = 0.2


def profile_of(rows: Sequence[Sequence[float]], stages: int, steps: int, micro_batches: int) -> ChainProfile:
    """The chain's profile; ``rows``: of each stage, seconds and bytes to and from the next stage in a step."""
    machines = [rows[first : first + stages] for first in range(0, len(rows), stages)]
    return ChainProfile(
        tuple(ChainMachine(max(row[0] for row in each), stages=stages) for each in machines),
        tuple(int(each[-1][1]) for each in machines[:-1]),
        steps,
        micro_batches,
    )


class PlannedGroups:
    def __init__(self, engine: InstrumentedEngine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._last_boundary = 0
        nproc = whole_of_environment("LOCAL_WORLD_SIZE", 1)
        self._stages = nproc if job.world_size > nproc else 1
        self._planned: list[list[float]] | None = None
        self._together: list[int] | None = None
        self._before = (0.0, 0)
        job.checkpoints.keep_number("with log.groups='plan' ranks were in groups that belong to their stages")
        job.register("swift.groups", self._capture, self._restore)

    def _capture(self) -> Any:
        return [self._planned, self._together, self._last_boundary]

    def _restore(self, values: Any) -> None:
        self._planned, self._together, self._last_boundary = values
        if self._together is not None:
            self._job.replays.regroup(self._together)

    def at_boundary(self) -> None:
        """Call after each step boundary, on all ranks; a collective where a checkpoint is due."""
        if not self._job.checkpoints.due:
            return
        every, self._last_boundary = self._job.position.boundaries - self._last_boundary, self._job.position.boundaries
        engine, (compute_s, timed) = self._engine, self._before
        self._before = (engine.compute_s, engine.timed)
        made = (engine.timed - timed) / engine.micro_batches
        # 0 if this process has computed nothing: it begins here, or others have computed for it. An interval that the
        # budget has cut short says nothing of the policy's: it is tried twice as long.
        wanted = every * (1 + self._job.replays.pressed)
        row = [(engine.compute_s - compute_s) / made if made else 0.0, float(engine.bytes_to_next()), float(wanted)]
        mine = torch.tensor(row, dtype=torch.float64)
        all_rows = [torch.zeros_like(mine) for _ in range(self._job.world_size)]
        with self._job.runtime.unchecked():  # a replacement measures something else, and is served what was said
            dist.all_gather(all_rows, mine)
        self._plan([each.tolist() for each in all_rows])

    def _plan(self, rows: list[list[float]]) -> None:
        if not all(row[0] for row in rows):
            return
        every = int(rows[0][2])
        engine, config = self._engine, self._job.config
        profile = profile_of(rows, self._stages, every, engine.micro_batches)
        if self._planned is not None:
            before = int(self._planned[0][2])
            planned = profile_of(self._planned, self._stages, every, engine.micro_batches)
            if not drifted(profile, planned) and abs(every - before) <= INTERVAL_DRIFT * before:
                return
        self._planned = rows
        plan = plan_groups(profile, Budget(storage_bytes=config.log.budget_bytes / PARTS or None))
        mine = next(group for group in plan.groups if engine.stage_id // self._stages in group)
        self._together = [
            engine.grid.stage_to_global(stage_id=machine * self._stages + stage)
            for machine in mine
            for stage in range(self._stages)
        ]
        self._job.replays.regroup(self._together)
        if self._job.rank == 0:
            groups = [list(group) for group in plan.groups]
            self._job.reporter.emit("groups", groups=groups, storage_bytes=plan.storage_bytes, replay_s=plan.replay_s)
