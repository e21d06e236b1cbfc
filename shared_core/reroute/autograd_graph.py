"""Which part of an autograd graph gives input gradients, and which weight gradients can wait.

A *trunk* node lies on a path from an output to an input of the stage. A *branch* leaves the trunk and ends at
parameters. Only matrix products and convolutions are worth a second visit: their weight gradient costs as much as their
input gradient, and it needs nothing but the layer's input and output gradient. The branches of all other nodes are
finished together with the input gradients: a normalisation leaves a small gradient instead of a whole activation.
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


#: Visited twice: once for the gradient of the activation, later for that of the weight. All honour what is asked for.
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
class Layer:
    """A product whose weight gradient can wait.

    Attributes:
        node: the product.
        parameters: those that its branch, and no other, ends at.
        needed: names of the saved operands that the weight gradient needs.
        spare: names of the saved operands that only the input gradient needs.
    """

    node: Node
    parameters: tuple[torch.Tensor, ...]
    needed: tuple[str, ...]
    spare: tuple[str, ...]


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
    layers: tuple[Layer, ...] = ()
    early: tuple[torch.Tensor, ...] = ()
    first: tuple[Node, ...] = ()


@dataclass
class _Branch:
    """Nodes outside the trunk that hang together, and the trunk nodes (``None``: an output) that they hang on."""

    nodes: list[Node] = field(default_factory=list)
    cuts: list[tuple[Node | None, int]] = field(default_factory=list)


def survey(outputs: Iterable[Node], inputs: Iterable[Node]) -> Survey:
    """Look at the graph between ``outputs`` and ``inputs`` (nodes of ``get_gradient_edge``), which stays as it is."""
    roots, ends = list(dict.fromkeys(outputs)), set(inputs)
    order = _outputs_first(roots)
    trunk, weighty = set(ends), set[Node]()
    for node in reversed(order):
        after = [child for child, _ in node.next_functions if child is not None]
        if any(child in trunk for child in after):
            trunk.add(node)
        if (is_parameter(node) and node not in ends) or any(child in weighty for child in after):
            weighty.add(node)
    for node in order:
        if (node in trunk or node in weighty) and _runs_backward(type(node)):
            return Survey(whole=f"{node.name()} runs a backward of its own, as re-entrant checkpointing does")
    compiled = any(node.name() == COMPILED for node in order)
    layers: dict[Node, Layer] = {}
    early: list[torch.Tensor] = []
    first = [node for node in order if node in trunk]
    for branch in _branches(order, roots, trunk, weighty):
        parameters = tuple(variable(node) for node in branch.nodes if is_parameter(node))
        layer = None if compiled else _layer(branch, parameters)
        if layer is not None:
            layers[layer.node] = layer
            continue
        if any(parameter._backward_hooks for parameter in parameters):
            return Survey(whole="a parameter that cannot wait has a tensor hook, which would run twice")
        early += parameters
        first += branch.nodes
    return Survey(
        layers=tuple(layers[node] for node in order if node in layers),
        early=tuple(early),
        first=tuple(node for node in first if node not in layers),
    )


def saved_names(kind: type) -> tuple[tuple[str, str], ...]:
    """Attributes under which nodes of class ``kind`` keep tensors: pairs of the raw and the unpacked one."""
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
    """Whether nodes of class ``kind`` run a user's ``torch.autograd.Function``."""
    return hasattr(kind, "_forward_cls")


def is_parameter(node: Node) -> bool:
    """Whether ``node`` adds to the ``.grad`` of a leaf."""
    return node.name() == "torch::autograd::AccumulateGrad"


def variable(node: Node) -> torch.Tensor:
    """The leaf of a node that ``is_parameter``."""
    leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
    return leaf


def raw_tensors(node: Node) -> Iterator[Any]:
    """The places where ``node`` keeps tensors (``SavedTensor``), one by one."""
    for raw, _ in saved_names(type(node)):
        value = getattr(node, raw)
        yield from value if isinstance(value, tuple | list) else (value,)


def _outputs_first(roots: list[Node]) -> list[Node]:
    """All nodes that ``roots`` lead to, each before those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order[::-1]


def _branches(order: list[Node], roots: list[Node], trunk: set[Node], weighty: set[Node]) -> list[_Branch]:
    """Everything beside the trunk that ends at parameters, in pieces that share no node."""
    beside: dict[Node, set[Node]] = {node: set() for node in order if node in weighty and node not in trunk}
    cuts: dict[Node, list[tuple[Node | None, int]]] = {root: [(None, 0)] for root in roots if root in beside}
    for node in order:
        children = [(position, child) for position, (child, _) in enumerate(node.next_functions) if child in beside]
        if node in trunk:
            for position, child in children:
                cuts.setdefault(child, []).append((node, position))
            joined = [child for _, child in children[:1]]  # one visit of the node is for all of its branches
        else:
            joined = [node] if node in beside else []
        for one in joined:
            for _, other in children:
                beside[one].add(other)
                beside[other].add(one)
    branches, seen = [], set[Node]()
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


def _layer(branch: _Branch, parameters: tuple[torch.Tensor, ...]) -> Layer | None:
    """``branch`` as a layer whose weight gradient can wait; ``None`` where it cannot or is not worth it."""
    (node, *others) = {node for node, _ in branch.cuts}
    if node is None or others or node.name() not in PRODUCTS:
        return None  # a tied weight is summed in one go, with the rounding of an unsplit backward
    product = PRODUCTS[node.name()]
    cut = {position for _, position in branch.cuts}
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
    return Layer(node, parameters, needed, spare)


def _runs_backward(kind: type) -> bool:
    """Whether the Python code of a node accumulates gradients on its own, unseen by the graph."""
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
