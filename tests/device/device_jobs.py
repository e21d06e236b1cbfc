"""Jobs on a device, and where their workers are killed: the same for the simulated device and for a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared_core.faults import Fault


def in_turn(*faults: Fault) -> list[Fault]:
    """Faults of one run in the order in which they strike: a rank that is struck again is a later incarnation then."""
    seen: Counter[int] = Counter()
    turned = []
    for fault in faults:
        turned.append(replace(fault, incarnation=seen[fault.rank]))
        seen[fault.rank] += 1
    return turned


def kill(rank: int, step: int, point: str, nth: int = 1) -> Fault:
    """SIGKILL of a rank."""
    return Fault(rank, step, point, "SIGKILL", nth=nth)


@dataclass(frozen=True)
class Job:
    """A job that trains on any device.

    Attributes:
        script: in ``tests/scripts``.
        nproc: workers.
        args: of the script.
        kills: by name, each for a run of its own; an update on a device has few operations, so ``nth`` is small.
        many: ten of them, in a single run. Two steps apart: a survivor gets as far as into the next step.
    """

    script: str
    nproc: int
    args: tuple[str, ...]
    kills: dict[str, Fault]
    many: Sequence[Fault]

    @property
    def without_dropout(self) -> list[str]:
        """Arguments with which the end does not depend on the device: nothing is drawn there."""
        return [*self.args, "--dropout", "0"]


_OF_DDP = {
    "in_forward": kill(0, 3, "forward"),
    "in_backward": kill(1, 4, "bucket", 2),
    "in_the_update": kill(1, 5, "update.during", 4),
    "after_the_update": kill(0, 5, "update.after"),
    "between_steps": kill(1, 5, "step_boundary"),
}

JOBS: dict[str, Job] = {
    "ddp": Job(
        "plain_ddp.py",
        3,
        ("--norm", "--steps", "22"),
        _OF_DDP,
        in_turn(
            kill(1, 2, "collective.before", 2),
            kill(2, 4, "bucket", 2),
            kill(0, 6, "update.during", 4),
            kill(1, 8, "step_boundary"),
            kill(2, 10, "forward"),
            kill(0, 12, "collective.after", 2),
            kill(1, 14, "bucket"),
            kill(2, 16, "update.before"),
            kill(0, 18, "collective.before"),
            kill(1, 20, "update.after"),
        ),
    ),
    "accumulate": Job(
        "plain_ddp.py",
        2,
        ("--way", "accumulate", "--steps", "22"),
        {name: _OF_DDP[name] for name in ("in_backward", "in_the_update")},
        in_turn(
            kill(1, 2, "bucket"),
            kill(0, 4, "update.during", 4),
            kill(1, 6, "forward"),
            kill(0, 8, "collective.before"),
            kill(1, 10, "bucket", 2),
            kill(0, 12, "step_boundary"),
            kill(1, 14, "update.before"),
            kill(0, 16, "collective.after"),
            kill(1, 18, "update.after"),
            kill(0, 20, "bucket"),
        ),
    ),
    # In each batch a forward gathers four times, a backward gathers three times and reduces four times, and clipping
    # sums once; an epoch has six batches and one step boundary more.
    "fsdp2": Job(
        "sharded.py",
        2,
        ("--epochs", "4"),
        {
            "a_gather_in_forward": kill(1, 4, "collective.before", 3),
            "a_reduction_in_backward": kill(0, 4, "collective.before", 9),
            "in_the_update": kill(0, 5, "update.during", 4),
        },
        in_turn(
            kill(1, 2, "collective.before", 3),
            kill(0, 4, "collective.before", 9),
            kill(1, 6, "update.during", 4),
            kill(0, 8, "update.before"),
            kill(1, 10, "collective.after", 7),
            kill(0, 12, "forward"),
            kill(1, 14, "step_boundary"),
            kill(0, 16, "collective.before", 12),
            kill(1, 18, "update.after"),
            kill(0, 20, "collective.after", 2),
        ),
    ),
    # An epoch has six batches and a validation.
    "lightning": Job(
        "lit_device.py",
        2,
        ("--epochs", "4"),
        {
            "in_backward": kill(0, 4, "bucket"),
            "in_the_update": kill(1, 9, "update.during", 4),
            "validation": kill(1, 6, "validation"),
        },
        in_turn(
            kill(1, 2, "bucket"),
            kill(0, 4, "collective.before"),
            kill(1, 6, "update.during", 4),
            kill(0, 8, "step_boundary"),
            kill(1, 10, "update.before"),
            kill(0, 12, "validation"),
            kill(1, 14, "forward"),
            kill(0, 16, "bucket"),
            kill(1, 18, "update.after"),
            kill(0, 20, "collective.after"),
        ),
    ),
    # An epoch has ten batches.
    "accelerate": Job(
        "acc_device.py",
        2,
        ("--epochs", "3"),
        {
            "in_backward": kill(0, 4, "bucket"),
            "in_the_update": kill(1, 14, "update.during", 4),
        },
        in_turn(
            kill(1, 2, "bucket"),
            kill(0, 4, "collective.before"),
            kill(1, 6, "update.during", 4),
            kill(0, 8, "step_boundary"),
            kill(1, 10, "forward"),
            kill(0, 12, "bucket"),
            kill(1, 14, "update.before"),
            kill(0, 16, "collective.after"),
            kill(1, 18, "update.after"),
            kill(0, 20, "collective.before", 2),
        ),
    ),
}

#: All workers start again from the newest checkpoint, three times in a run; nobody is a later incarnation then.
RESTART = Job(
    "plain_ddp.py",
    2,
    ("--norm", "--steps", "22"),
    {},
    [kill(1, 5, "bucket"), kill(0, 11, "update.during", 4), kill(1, 17, "forward")],
)
RESTARTS = ["--on-failure=restart"]
