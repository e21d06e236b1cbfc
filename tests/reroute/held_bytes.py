"""What a split backward keeps between its two parts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from shared_core.reroute.split import StageBackward, _Held, is_parameter, raw_tensors, variable


def layers_waiting(part: StageBackward) -> int:
    """Layers whose weight gradient is still to be computed; 0 where W only accumulates, or does everything.

    What hangs on the trunk as a whole (the lowest layer of a first stage with all below it) counts once.
    """
    return len(part._layers) + len(part._tails)


def bytes_held(part: StageBackward) -> int:
    """Bytes kept between I and W: what the graph holds, output gradients, gradients done early.

    Not counted: parameters, and what a user's ``autograd.Function`` or a checkpoint keeps in places of its own.
    """
    tensors = [gradient for _, gradient in part._early]
    parameters: list[Tensor] = []
    nodes: list[Node] = []
    for late in part._layers:
        tensors += late.gradients
        nodes.append(late.layer.node)
        parameters += late.layer.parameters
    for tail in part._tails:
        tensors += tail.gradients
        nodes += tail.tail.nodes
        parameters += [variable(node) for node in tail.tail.nodes if is_parameter(node)]
    if part._postponed is not None:
        tensors += part._postponed[1]
        nodes = list(_reachable(get_gradient_edge(y).node for y in part._postponed[0]))
        parameters = [variable(node) for node in nodes if is_parameter(node)]
    for node in nodes:
        for raw in raw_tensors(node):
            value = raw.data
            value = value.value if isinstance(value, _Held) else value
            tensors += [value] if isinstance(value, Tensor) else []
    own = {p.untyped_storage().data_ptr() for p in parameters}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in storages.items() if place not in own)


def _reachable(roots: Iterable[Node]) -> set[Node]:
    seen = set(roots)
    stack = list(seen)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return seen
