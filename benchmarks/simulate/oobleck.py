"""Oobleck (Jang et al., SOSP 2023) from its mechanism: pipelines of several lengths that together use all nodes.

A *template* for n nodes is a pipeline of n stages with the layers cut evenly. After a change the live nodes are covered
again by templates (*instantiation*), the micro-batches of the step are shared so that all pipelines end together,
layers that a node lacks are copied, and the step in flight is made again. One worker is a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from benchmarks.simulate.engine import FailureCost
from benchmarks.simulate.layout import Layout, Pattern, wiped_out
from benchmarks.simulate.rerouting import CheckpointInterval
from benchmarks.simulate.trace import TraceEvent


@dataclass(frozen=True)
class Oobleck:
    """Oobleck on equal workers.

    Attributes:
        layout: without failures; the throughput there is the given one, and no instantiation is taken to be better.
        layers: equal layers of the model.
        smallest: nodes of the smallest template (n0: where the model fits); None for one less than the layout's stages.
        reconfigure_s: stall of a change, without detection and copying: 2 to 10 s in its artifact's simulator.
        copy_s: copying the layers of a stage to a node that lacks them.
        detect_s: its agents are pinged every 0.4 s.
        checkpoints: for when all copies of a layer are gone.
    """

    layout: Layout
    layers: int = 32
    smallest: int | None = None
    reconfigure_s: float = 10.0
    copy_s: float = 0.0
    detect_s: float = 0.4
    checkpoints: CheckpointInterval = CheckpointInterval()
    name: str = "Oobleck"

    @property
    def templates(self) -> tuple[int, ...]:
        """Nodes of each template, from the smallest upwards: so many that they cover any number of nodes."""
        least = self.smallest or max(1, self.layout.stages - 1)
        more = min(least - 1, max(8, 2 * least // self.layout.pipelines))
        return tuple(range(least, max(least + more, self.layout.stages + 1) + 1))

    def throughput(self, pattern: Pattern) -> float:
        """Step time of the layout over that of the best instantiation on the live nodes."""
        batch = self.layout.pipelines * self.layout.micro_batches
        normal = step_time(self.layers, self.layout.stages, self.layout.micro_batches)
        best = instantiate(pattern.live, self.templates, self.layers, batch)
        return min(1.0, normal / best) if best else 0.0

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        """Detection, a new process group, missing layers, and the step in flight."""
        return self.checkpoints.cost if wiped_out(before, event.lost) else self.join(before, after)

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        """The same: the process group is made again, and the data loaders go back to the last finished step."""
        return FailureCost(self.detect_s + self.reconfigure_s + self.copy_s, self.layout.step_s)


def step_time(layers: int, stages: int, micro_batches: int) -> int:
    """Step time of a pipeline in layers: equal jobs through a line, ``sum + (m - 1) max`` of the stages' layers."""
    return layers + (micro_batches - 1) * _largest(layers, stages)


def capacity(layers: int, stages: int, time: int) -> int:
    """Most micro-batches that a pipeline of so many stages finishes in ``time``."""
    return (time - layers) // _largest(layers, stages) + 1 if time >= layers else 0


@cache
def instantiate(nodes: int, templates: tuple[int, ...], layers: int, batch: int) -> int | None:
    """Step time, in layers, of the best set of templates that uses exactly ``nodes`` nodes for ``batch`` micro-batches.

    The time is the least T in which the set's capacities add up to the batch: a bisection over T, for each a knapsack.
    None if the nodes are too few for any template. Oobleck itself shares micro-batches by least squares, which is never
    faster.
    """
    low, high = layers - 1, step_time(layers, templates[0], batch)
    if _most(nodes, templates, [capacity(layers, size, high) for size in templates]) < batch:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        enough = _most(nodes, templates, [capacity(layers, size, middle) for size in templates]) >= batch
        low, high = (low, middle) if enough else (middle, high)
    return high


def _most(nodes: int, sizes: tuple[int, ...], values: list[int]) -> int:
    """Greatest sum of values over multisets of sizes that add up to ``nodes``; -1 if there is none.

    Of any b items, b the size worth most a node, some add up to a multiple of b and can be exchanged for items of that
    size. So there is a best set with fewer than b others, and the knapsack need not grow with the nodes.
    """
    best = max(range(len(sizes)), key=lambda i: values[i] / sizes[i])
    surplus = max(0, nodes - sizes[best] * sizes[-1]) // sizes[best]
    table = [0]
    for total in range(1, nodes - surplus * sizes[best] + 1):
        options = [table[total - s] + v for s, v in zip(sizes, values, strict=True) if s <= total]
        table.append(max((option for option in options if option >= 0), default=-(10**12)))
    return table[-1] + surplus * values[best] if table[-1] >= 0 else -1


def _largest(layers: int, stages: int) -> int:
    return -(-layers // stages)
