"""Decoupled backward: input gradients of a micro-batch first, weight gradients later (ReCycle's Decoupled BackProp).

A stage owes its neighbor dL/dx at once; dL/dW can fill a bubble. Nothing is patched, the forward is an ordinary one:
its autograd graph is looked at only when ``backward_input`` is called. A linear layer or convolution then keeps its
input and its output gradient; all else that the graph had saved is freed while the input gradients are computed, as in
an unsplit backward.

Gradients have the bits of ``torch.autograd.backward``: each node of the graph runs the kernel it would have run, and a
parameter used twice is summed within the micro-batch before it is added to ``.grad``. Where that cannot be had,
``backward_input`` does the whole backward, ``backward_weight`` does nothing, and ``whole`` says why.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shared_core.errors import SwiftError

# -- which part of a graph gives input gradients, and which weight gradients can wait ---------------------------------
#
# A *trunk* node lies on a path from an output to an input of the stage. A *branch* leaves the trunk and ends at
# parameters. Only matrix products and convolutions are worth a second visit: their weight gradient costs as much as
# their input gradient, and it needs nothing but the layer's input and output gradient. A branch that holds products or
# tables of its own waits as a whole. All other branches are finished together with the input gradients: a normalisation
# leaves a small gradient instead of a whole activation.
#
# Where no input needs a gradient, as in a first stage, the trunk leads to tables and to the lowest products instead, so
# that the second part is as long as that of other stages.


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
            return Survey(whole=f"{node.name()} runs its own backward pass, as re-entrant checkpointing does")
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


# -- the two parts of a backward --------------------------------------------------------------------------------------


Gradients = tuple[Tensor | None, ...]


class BackwardOrder(SwiftError, RuntimeError):
    """A part of a backward was asked for twice, or before the part it follows."""


class _State(enum.Enum):
    RECORDED = "its forward"
    INPUT_DONE = "the input gradients"
    DONE = "the weight gradients"


class StageBackward:
    """The backward of one micro-batch of one stage: whole (B), or input gradients (I) and later weight gradients (W).

    The graph is read after the forward; until then nothing is spent. Accumulation into ``.grad``, with all hooks of
    parameters (tensor hooks, hooks of ``AccumulateGrad``, post-accumulate hooks), happens in B, or in W: parameters are
    summed over micro-batches in the order of the calls of B and W. Exception: where ``whole`` is set, it happens in I.

    Where no input needs a gradient, as in a first stage, I goes down to tables and the lowest layers, and W has the
    same share as in other stages; where that cannot be, I does nothing and W is the whole backward.

    Args:
        outputs: what the forward returned.
        inputs: tensors that the forward was given; those that require a gradient must be leaves.
        apart: outputs have a backward each, one after the other, as in DeepSpeed's pipelines, and not one for all. It
            rounds differently; where there are several that require a gradient, the backward is not split then.

    Raises ValueError if an input that requires a gradient is not a leaf: its own graph would be run too.
    """

    def __init__(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor], apart: bool = False) -> None:
        self._apart = apart
        self._outputs = tuple(outputs)
        self._inputs = tuple(inputs)
        if any(x.requires_grad and not x.is_leaf for x in self._inputs):
            raise ValueError("inputs of a stage that require a gradient must be leaves: detach them before the forward")
        self._state = _State.RECORDED
        self._whole: str | None = None
        self._layers: list[_LateLayer] = []
        self._tails: list[_LateTail] = []
        self._early: list[tuple[Tensor, Tensor]] = []
        self._postponed: tuple[list[Tensor], list[Tensor]] | None = None

    def backward(self, grads: Sequence[Tensor | None] | None = None) -> Gradients:
        """B: all gradients at once, as ``torch.autograd.backward`` does it.

        ``grads`` are dL/d(output), one for each tensor of the outputs, of its shape; ``None`` where the output is not
        used further. Without it, outputs are losses. Returns dL/d(input), one for each input, of its shape; ``None``
        where it requires none or no output depends on it. BackwardOrder if a backward of this forward has begun.
        """
        outputs, given = self._begin(grads)
        self._state = _State.DONE
        return self._run_whole(outputs, given)

    def backward_input(self, grads: Sequence[Tensor | None] | None = None) -> Gradients:
        """I: the input gradients. What W does not need is freed on the way. Arguments and result as of ``backward``."""
        outputs, given = self._begin(grads)
        self._state = _State.INPUT_DONE
        wanted = [x for x in self._inputs if x.requires_grad]
        plan = self._survey(outputs)
        if not wanted and (plan.whole or not plan.layers + plan.tails):
            self._postponed = (outputs, given)
            return (None,) * len(self._inputs)
        self._whole = plan.whole
        if plan.whole:
            return self._run_whole(outputs, given)
        self._layers = [_LateLayer(layer) for layer in plan.layers]
        self._tails = [_LateTail(tail) for tail in plan.tails]
        ends = dict.fromkeys((cut.child, cut.input_nr) for tail in plan.tails for cut in tail.cuts)
        asked: list[Any] = [*wanted, *plan.early, *(GradientEdge(node, number) for node, number in ends)]
        kept: list[_Held] = []
        found: Gradients = ()
        try:
            if self._layers:
                _hold(plan, kept)
            if outputs:
                found = torch.autograd.grad(outputs, asked, given, retain_graph=bool(self._layers), allow_unused=True)
        finally:
            for layer in self._layers:
                layer.captured()
            for branch in self._tails:
                branch.captured()
            for held in kept:
                held.value = None
        gradients = iter(found or (None,) * len(wanted))
        result = tuple(next(gradients) if x.requires_grad else None for x in self._inputs)
        self._early = [(p, g) for p, g in zip(plan.early, gradients, strict=False) if g is not None]
        self._inputs = ()
        return result

    def backward_weight(self) -> None:
        """W: the weight gradients, accumulated into ``.grad``; what was held for them is freed layer by layer.

        Raises BackwardOrder if the input gradients were not computed before, or W was done already.
        """
        if self._state is not _State.INPUT_DONE:
            raise BackwardOrder(f"weight gradients need the input gradients first; last done: {self._state.value}")
        self._state = _State.DONE
        if self._postponed is not None:
            outputs, given = self._postponed
            self._postponed = None
            self._run_all(outputs, given)
        while self._early:
            parameter, gradient = self._early.pop()
            torch.autograd.backward([parameter], [gradient])
        while self._layers:
            self._layers.pop(0).accumulate()
        while self._tails:
            self._tails.pop().accumulate()

    @property
    def whole(self) -> str:
        """Why this backward is not split; empty where it is. Known before I, from a walk through the graph."""
        if self._whole is None:
            self._whole = self._survey(self._outputs).whole if any(x.requires_grad for x in self._inputs) else ""
        return self._whole

    def _begin(self, grads: Sequence[Tensor | None] | None) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs that are differentiated, with their gradients; this object frees the others."""
        if self._state is not _State.RECORDED:
            raise BackwardOrder(f"a backward follows its forward once; last done: {self._state.value}")
        given = [torch.ones_like(y) for y in self._outputs] if grads is None else list(grads)
        if len(given) != len(self._outputs):
            raise ValueError(f"{len(self._outputs)} outputs need as many gradients, {len(given)} were given")
        pairs = [(y, g) for y, g in zip(self._outputs, given, strict=True) if y.requires_grad and g is not None]
        self._outputs = ()
        return [y for y, _ in pairs], [g for _, g in pairs]

    def _run_whole(self, outputs: list[Tensor], grads: list[Tensor]) -> Gradients:
        inputs, self._inputs = self._inputs, ()
        before = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        self._run_all(outputs, grads)
        result = tuple(x.grad for x in inputs)
        for x, grad in zip(inputs, before, strict=True):
            x.grad = grad
        return result

    def _run_all(self, outputs: list[Tensor], grads: list[Tensor]) -> None:
        """The backward in one piece, or one for each output; empties the lists, to free them early."""
        while outputs:
            some = slice(1 if self._apart else len(outputs))
            torch.autograd.backward(outputs[some], grads[some], retain_graph=self._apart and len(outputs) > 1)
            del outputs[some], grads[some]

    def _survey(self, outputs: Iterable[Tensor]) -> Survey:
        roots = [get_gradient_edge(y).node for y in outputs if y.requires_grad]
        if self._apart and len(roots) > 1:
            return Survey(whole="several outputs have a backward each")
        return survey(roots, [get_gradient_edge(x).node for x in self._inputs if x.requires_grad])


class _LateLayer:
    """A layer between I and W: its node with the saved operand, and the gradient of its output."""

    def __init__(self, layer: SplitLayer) -> None:
        self.layer = layer
        self._gradients: Gradients = ()
        self._hook = layer.node.register_prehook(self._capture)

    @property
    def gradients(self) -> list[Tensor]:
        return [gradient for gradient in self._gradients if gradient is not None]

    def _capture(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def captured(self) -> None:
        self._hook.remove()

    def accumulate(self) -> None:
        """Visit the node again, for its branch alone: the engine is told the parameters, so it leaves the trunk out."""
        gradients, node = self._gradients, self.layer.node
        edges = [GradientEdge(node, i) for i, gradient in enumerate(gradients) if gradient is not None]
        if not edges:
            return  # no gradient came here
        # A user's hook on the layer's output runs again here; what it did to the gradient in I must not be done twice.
        hook = node.register_prehook(lambda _: gradients)
        try:
            torch.autograd.backward(edges, self.gradients, inputs=self.layer.parameters)
        finally:
            hook.remove()


class _LateTail:
    """A branch between I and W, and the gradients that the trunk has sent to it."""

    def __init__(self, tail: GraphTail) -> None:
        self.tail = tail
        self._received: list[tuple[GradientEdge, Tensor]] = []
        cuts: dict[Node, list[BranchEdge]] = {}
        for cut in tail.cuts:
            assert cut.trunk is not None
            cuts.setdefault(cut.trunk, []).append(cut)
        # Taken where they leave the trunk: hooks of the branch, which the engine calls on its side, then count once.
        self._hooks = [node.register_hook(_receiver(some, self._received)) for node, some in cuts.items()]

    @property
    def gradients(self) -> list[Tensor]:
        return [gradient for _, gradient in self._received]

    def captured(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def accumulate(self) -> None:
        if self._received:
            torch.autograd.backward([edge for edge, _ in self._received], self.gradients)


def _receiver(
    cuts: list[BranchEdge], received: list[tuple[GradientEdge, Tensor]]
) -> Callable[[Gradients, Gradients], None]:
    def hook(sent: Gradients, _: Gradients) -> None:
        for cut in cuts:
            gradient = sent[cut.position]
            if gradient is not None:
                received.append((GradientEdge(cut.child, cut.input_nr), gradient))

    return hook


class _Held:
    """A tensor that the graph had saved; it can be freed here although the graph stays."""

    def __init__(self, once: bool, stand_in: bool = False) -> None:
        self.value: Tensor | None = None
        self._once, self._stand_in = once, stand_in

    def pack(self, value: Tensor) -> _Held:
        self.value = value
        return self

    def unpack(self) -> Tensor:
        value = self.value
        assert value is not None, "a saved tensor is needed after the input gradients were done"
        if self._stand_in:
            self.value = value.new_zeros(()).expand(value.shape)  # of its shape, without its bytes
        elif self._once:
            self.value = None
        return value


def _hold(plan: Survey, kept: list[_Held]) -> None:
    """Take over into ``kept`` what the graph saved for the input gradients alone; each goes when its node has used it.

    Nodes of torch ask for a saved tensor once. A user's function may ask again; its tensors go after I.
    """
    for node in plan.first:
        once = not is_python(type(node))
        for raw_name, name in saved_names(type(node)):
            raw = getattr(node, raw_name)
            for one in raw if isinstance(raw, tuple | list) else (raw,):
                if one.unpack_hook is None and one.data is not None:
                    getattr(node, name)  # compares versions, which taking over would not
                    kept.append(_take(one, _Held(once)))
    for layer in plan.layers:
        for name in layer.spare:
            raw = getattr(layer.node, f"_raw_saved_{name}")
            if raw.unpack_hook is None and raw.data is not None:
                getattr(layer.node, f"_saved_{name}")
                _take(raw, _Held(once=True, stand_in=True))


def _take(raw: Any, held: _Held) -> _Held:
    raw.register_hooks(held.pack, _Held.unpack)
    return held
