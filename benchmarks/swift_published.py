"""What is published of Swift's selective logging: its inputs, its greedy, the groups it ran, and what it measured.

From the code of Swift (arXiv 2302.06173, github.com/jasperzhong/swift) and the data of its plots, dated 2022-01-13; the
figures in the paper may differ. Bytes are of one direction, as counted there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MACHINES = 16
STAGES_PER_MACHINE = 8
STEPS_BETWEEN_CHECKPOINTS = 100
#: Steps that were replayed: the failure was at step 150, the checkpoint at step 100.
REPLAYED_STEPS = 50
LINK_BYTES_PER_S = 5e10
#: Of the blocks of both models.
WIDTH = 1024

#: Compute seconds of a step of each machine, ViT-128. Taken on the host, so with time spent waiting in them.
VIT_COMPUTE_S = (
    4.190398454666138,
    3.9173083305358887,
    3.6475815773010254,
    3.350229263305664,
    3.1106820106506348,
    2.7829363346099854,
    2.6102020740509033,
    2.3116931915283203,
    2.051832437515259,
    1.8167130947113037,
    1.6026933193206787,
    0.4898104667663574,
    0.46216487884521484,
    0.2429513931274414,
    0.38614392280578613,
    0.9754316806793213,
)

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Model:
    """A published pipeline.

    Attributes:
        name: as in the paper.
        boundary_bytes: bytes over a boundary in a step, in one direction: micro-batch x sequence x width x 4 x number.
        micro_batches: of a step.
        step_s: seconds of a normal step: global batch over the median throughput.
        recovery_s: measured recovery time by storage budget in bytes; the largest budget logs everything.
        ran: groups that were run, by budget; not all are known.
    """

    name: str
    boundary_bytes: int
    micro_batches: int
    step_s: float
    recovery_s: Mapping[float, float]
    ran: Mapping[float, Groups]

    @property
    def stage_bytes(self) -> int:
        """Of a stage's parameters, which is one block: attention and a perceptron of 4 times the width, in float32."""
        return (12 * WIDTH * WIDTH + 13 * WIDTH) * 4


def _groups(*ends: int) -> Groups:
    """Groups of machines from the last machine of each."""
    starts = (0, *(end + 1 for end in ends[:-1]))
    return tuple(tuple(range(start, end + 1)) for start, end in zip(starts, ends, strict=True))


VIT = Model(
    "ViT-128",
    16 * 50 * 1024 * 4 * 256,
    256,
    4096 / 1245.6,
    {1.4e12: 126.0, 1.2e12: 136.2, 9e11: 147.5, 6e11: 156.0, 3e11: 171.7, 1e11: 198.6},
    {
        1.2e12: _groups(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15),
        8e11: _groups(0, 1, 2, 3, 4, 5, 6, 8, 10, 15),  # the list in pipeline_vit/main.py
        6e11: _groups(0, 1, 3, 5, 7, 9, 15),
        3e11: _groups(1, 5, 15),
    },
)
BERT = Model(
    "BERT-128",
    4 * 128 * 1024 * 4 * 128,
    128,
    512 * 128 / 19711,
    {5e11: 76.5, 4e11: 76.5, 1.5e11: 83.0, 8e10: 160.8, 5e10: 184.4},
    {},
)


def greedy(
    compute_s: Sequence[float], boundary_bytes: Sequence[int], storage: float, *, right_sizes: bool = False
) -> list[list[int]]:
    """Swift's grouping (``merge_groups``): merge the neighbours that cost least per byte saved until the rest fits.

    Its cost of a merge takes both groups for single machines; ``right_sizes`` mends that.
    """
    seconds, between = list(compute_s), list(boundary_bytes)
    groups = [[i] for i in range(len(seconds))]
    while sum(between) * STEPS_BETWEEN_CHECKPOINTS > storage:
        costs = []
        for i, nbytes in enumerate(between):
            merged = seconds[i] + seconds[i + 1] + nbytes / LINK_BYTES_PER_S
            left, right = (len(groups[i]), len(groups[i + 1])) if right_sizes else (1, 1)
            extra = (left + right) * merged - left * seconds[i] - right * seconds[i + 1]
            costs.append((extra / (nbytes * STEPS_BETWEEN_CHECKPOINTS), i, merged))
        _, i, merged = min(costs)
        groups[i] += groups.pop(i + 1)
        seconds[i : i + 2] = [merged]
        del between[i]
    return groups
