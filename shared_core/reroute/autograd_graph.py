"""Which part of an autograd graph gives input gradients, and which weight gradients can wait.

A *trunk* node lies on a path from an output to an input of the stage. A *branch* leaves the trunk and ends at
parameters. Only matrix products and convolutions are worth a second visit: their weight gradient costs as much as their
input gradient, and it needs nothing but the layer's input and output gradient. A branch that holds products or tables
of its own waits as a whole. All other branches are finished together with the input gradients: a normalisation leaves
a small gradient instead of a whole activation.

Where no input needs a gradient, as in a first stage, the trunk leads to tables and to the lowest products instead, so
that the second part is as long as that of other stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node


class _Product(NamedTuple):
    """A bilinear node: where its two operands are among its edges, and under which names it saves them."""

    edges: tuple[int, int]
    saved: tuple[str, str]
    replaceable: bool  # whether an operand whose values are not needed may be replaced by a stand-in of its shape


#: Visited twice: for the gradient of the activation, later for that of the weight. They compute only what is asked for.
PRODUCTS = {
    "MmBackward0": _Product((0, 1), ("self", "mat2"), True),
    "AddmmBackward0": _Product((1, 2), ("mat1", "mat2"), True),
    "BmmBackward0": _Product((0, 1), ("self", "mat2"), True),
    "BaddbmmBackward0": _Product((1, 2), ("batch1", "batch2"), True),
    "ConvolutionBackward0": _Product((0, 1), ("input", "weight"), False),
}
#: Compiled code frees its buffers at the first visit and refuses a graph that is kept.
COMPILED = "CompiledFunctionBackward"


@dataclass(frozen=True)
class SplitLayer:
    """A product whose weight gradient can wait; only the input gradient needs the operands named ``spare``."""

    node: Node
    parameters: tuple[torch.Tensor, ...]
    spare: tuple[str, ...]


class BranchEdge(NamedTuple):
    """Edge from output ``position`` of ``trunk`` (``None``: from a root of the graph) to an input of ``child``."""

    trunk: Node | None
    position: int
    child: Node
    input_nr: int


@dataclass(frozen=True)
class GraphTail:
    """A branch that waits as a whole: where it leaves the trunk, and all its nodes down to the parameters."""

    cuts: tuple[BranchEdge, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Survey:
    """What to do with one graph.

    Attributes:
        whole: why the backward must stay in one piece; empty where it need not.
        layers: products whose weight gradients wait, outputs first.
        early: parameters whose gradients are computed together with the input gradients.
        first: nodes that the input gradients and ``early`` visit, without those of ``layers``.
    """

    whole: str = ""
    layers: tuple[SplitLayer, ...] = ()
    tails: tuple[GraphTail, ...] = ()
    early: tuple[torch.Tensor, ...] = ()
    first: tuple[Node, ...] = ()


@dataclass
class _Branch:
    """Connected nodes outside the trunk, and where they leave it."""

    nodes: list[Node] = field(default_factory=list)
    cuts: list[BranchEdge] = field(default_factory=list)


#: Each node's edges; the node is ``None`` where no gradient is needed.
Edges = dict[Node, tuple[tuple[Node | None, int], ...]]


def survey(outputs: Iterable[Node], inputs: Iterable[Node]) -> Survey:
    """Decide what of the graph from ``outputs`` to ``inputs`` (nodes of ``get_gradient_edge``) can wait."""
    roots, ends = list(dict.fromkeys(outputs)), set(inputs)
    edges = _edges(roots)
    trunk, weighty = set(ends), set[Node]()
    for node, below in reversed(edges.items()):
        for child, _ in below:
            if child in trunk or (not ends and child in weighty and _is_goal(child)):
                trunk.add(node)
            if child in weighty:
                weighty.add(node)
        if not below and node not in ends and is_parameter(node):
            weighty.add(node)
    for node in edges:
        if (node in trunk or node in weighty) and _runs_backward(type(node)):
            return Survey(whole=f"{node.name()} runs a backward of its own, as re-entrant checkpointing does")
    if not ends and any(map(_is_taken, edges)):
        return Survey(whole="what was saved is checkpointed or off-loaded, and no input needs a gradient")
    compiled = any(node.name() == COMPILED for node in edges)
    layers: dict[Node, SplitLayer] = {}
    tails: list[GraphTail] = []
    early: list[torch.Tensor] = []
    first = [node for node in edges if node in trunk]
    for branch in _branches(edges, roots, trunk, weighty):
        parameters = tuple(variable(node) for node in branch.nodes if is_parameter(node))
        layer = None if compiled else _layer(branch, parameters, trunk)
        if layer is not None:
            layers[layer.node] = layer
        elif _can_wait(branch, edges):
            tails.append(GraphTail(tuple(branch.cuts), tuple(branch.nodes)))
        elif any(parameter._backward_hooks for parameter in parameters):
            return Survey(whole="a parameter that cannot wait has a tensor hook, which would run twice")
        else:
            early += parameters
            first += branch.nodes
    return Survey(
        layers=tuple(layers[node] for node in edges if node in layers),
        tails=tuple(tails),
        early=tuple(early),
        first=tuple(node for node in first if node not in layers),
    )


def saved_names(kind: type) -> tuple[tuple[str, str], ...]:
    """Pairs of attributes of nodes of class ``kind``: that of the ``SavedTensor`` and that of the unpacked tensor."""
    found = _NAMES.get(kind)
    if found is None:
        raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        if is_python(kind):
            found = tuple((name, name.removeprefix("_raw_")) for name in raw)
        else:
            found = tuple((name, name.removeprefix("_raw")) for name in raw)
        _NAMES[kind] = found
    return found


_NAMES: dict[type, tuple[tuple[str, str], ...]] = {}


def is_python(kind: type) -> bool:
    return hasattr(kind, "_forward_cls")


def is_parameter(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"


def variable(node: Node) -> torch.Tensor:
    leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
    return leaf


def raw_tensors(node: Node) -> Iterator[Any]:
    for raw, _ in saved_names(type(node)):
        value = getattr(node, raw)
        yield from value if isinstance(value, tuple | list) else (value,)


def kept_tensors(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors that the graph of ``outputs`` saves for its backward."""
    for node in _edges([one.grad_fn for one in outputs if one.grad_fn is not None]):
        for raw in raw_tensors(node):
            if isinstance(raw.data, torch.Tensor):
                yield raw.data


def _edges(roots: list[Node]) -> Edges:
    """Edges of all nodes below ``roots``, in topological order: a node comes before those that it leads to."""
    found: Edges = {}
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in found:
            found[node] = below = node.next_functions
            stack.append((node, True))
            stack += [(child, False) for child, _ in below if child is not None and child not in found]
    return {node: found[node] for node in reversed(order)}


def _branches(edges: Edges, roots: list[Node], trunk: set[Node], weighty: set[Node]) -> list[_Branch]:
    """Everything beside the trunk that ends at parameters, in pieces that share no node."""
    beside: dict[Node, set[Node]] = {node: set() for node in edges if node in weighty and node not in trunk}
    cuts: dict[Node, list[BranchEdge]] = {root: [BranchEdge(None, 0, root, 0)] for root in roots if root in beside}
    for node, below in edges.items():
        if node not in trunk and node not in beside:
            continue
        cut = [BranchEdge(node, i, child, nr) for i, (child, nr) in enumerate(below) if child in beside]
        joined = node
        if node in trunk:
            for one in cut:
                cuts.setdefault(one.child, []).append(one)
            if cut:
                joined = cut[0].child  # one visit of the node is for all of its branches
        for one in cut:
            if one.child is not joined:
                beside[joined].add(one.child)
                beside[one.child].add(joined)
    branches: list[_Branch] = []
    seen = set[Node]()
    for start in beside:
        if start in seen:
            continue
        branch, stack = _Branch(), [start]
        seen.add(start)
        while stack:
            node = stack.pop()
            branch.nodes.append(node)
            branch.cuts += cuts.get(node, [])
            for other in beside[node]:
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        branches.append(branch)
    return branches


def _can_wait(branch: _Branch, edges: Edges) -> bool:
    """Whether ``branch`` waits as a whole: it holds a product or a table, and I runs nothing of it."""
    if not any(map(_is_goal, branch.nodes)):
        return False
    if any(cut.trunk is None for cut in branch.cuts) or any(map(_is_taken, branch.nodes)):
        return False
    # What the trunk sends to is its end for the engine: a branch that leads there again would be run too soon.
    inside = {child for node in branch.nodes for child, _ in edges[node]}
    return not any(cut.child in inside for cut in branch.cuts)


def _is_goal(node: Node) -> bool:
    return node.name() in PRODUCTS or node.name().startswith("Embedding")


def _is_taken(node: Node) -> bool:
    """Whether saved-tensor hooks hold what ``node`` saves: a second pass would compute or fetch it again."""
    return any(raw.unpack_hook is not None for raw in raw_tensors(node))


def _layer(branch: _Branch, parameters: tuple[torch.Tensor, ...], trunk: set[Node]) -> SplitLayer | None:
    """``branch`` as a layer whose weight gradient can wait; ``None`` where it cannot or is not worth it."""
    (node, *others) = {cut.trunk for cut in branch.cuts}
    if node is None or others or node.name() not in PRODUCTS:
        return None  # a tied weight is summed in one go, with the rounding of an unsplit backward
    if not any(child in trunk for child, _ in node.next_functions):
        return None  # the first part would not come here
    product = PRODUCTS[node.name()]
    cut = {one.position for one in branch.cuts}
    asked = [edge in cut for edge in product.edges]
    if not any(asked):
        return None
    # The gradient of an operand needs the other operand.
    needed = tuple(name for name, other in zip(product.saved, reversed(asked), strict=True) if other)
    for name in needed:
        raw = getattr(node, f"_raw_saved_{name}")
        if raw.unpack_hook is not None or raw.data is None:
            return None  # checkpointed or off-loaded: a second visit would compute or fetch it a second time
    spare = tuple(name for name in product.saved if name not in needed) if product.replaceable else ()
    return SplitLayer(node, parameters, spare)


def _runs_backward(kind: type) -> bool:
    """Whether a user's function accumulates gradients itself; from the names in the code of its backward."""
    if not is_python(kind):
        return False
    if kind not in _RUNS:
        code = getattr(inspect.unwrap(kind._forward_cls.backward), "__code__", None)  # type: ignore[attr-defined]
        _RUNS[kind] = code is None or not {"backward", "_is_checkpoint_valid"}.isdisjoint(_words(code))
    return _RUNS[kind]


_RUNS: dict[type, bool] = {}


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
