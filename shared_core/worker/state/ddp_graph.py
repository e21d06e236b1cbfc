"""What DDP learns of a static graph, in the first iteration alone: how often each gradient comes in a backward, and
which parameters no rank uses.

It keeps that inside its reducer, and uses it in each later iteration. It is seen here while it is learned. A
replacement that begins later has DDP learn it again, from as many gradients, none of which it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from shared_core.errors import Unsupported
from shared_core.worker.comm import compat

#: Has each operation give what the function says, of the tensors that it is called with.
Answered = Callable[[Callable[[list[torch.Tensor]], list[torch.Tensor]]], AbstractContextManager[None]]


class FirstIteration:
    """Sees the first iteration of a module with a static graph, which it is given before that.

    Attributes:
        begun: DDP has learned the graph, or is about to.
        ended: it has used it for its buckets; nothing is left to be seen.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self._parameters = trained(ddp)
        self._counts = [0] * len(self._parameters)
        self._handles: list[Any] = []
        self._used: torch.Tensor = torch.zeros(0, dtype=torch.int32)
        self._forwards = 0
        self.ended = False

    @property
    def begun(self) -> bool:
        return self._forwards > 0

    def forward(self, ddp: DistributedDataParallel) -> None:
        if ddp is not self.ddp:
            return
        self._forwards += 1
        if self._forwards == 2:
            self._let_go()
            # Here, because where DDP settles its buckets it may not be asked.
            self._used = ddp.reducer._get_local_used_map().detach().cpu().clone()
        if self._forwards > 1 or self.ended:
            return
        for place, parameter in enumerate(self._parameters):
            # DDP counts here too: also a gradient that comes and is not defined.
            node = get_gradient_edge(parameter).node
            self._handles.append(node.register_hook(lambda *_, place=place: self._count(place)))

    def _count(self, place: int) -> None:
        self._counts[place] += 1

    def end(self) -> None:
        self.ended = True
        self._let_go()

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def seen(self) -> list[torch.Tensor]:
        """How often the gradient of each parameter came, and how many ranks use it: int32, one element a parameter, on
        the CPU.
        """
        return [torch.tensor(self._counts, dtype=torch.int32), self._used]


def trained(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters whose gradients DDP reduces, in its order."""
    ignored = ddp.parameters_to_ignore
    return [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]


def repeat(ddp: DistributedDataParallel, counts: torch.Tensor, used: torch.Tensor, answered: Answered) -> None:
    """Have DDP learn a static graph again.

    Args:
        ddp: before its first iteration. Gradients of its parameters are as they were, afterwards.
        counts: int32; how often the gradient of each parameter came.
        used: int32; how many ranks use each.

    Raises:
        Unsupported: other parameters are trained than then.
    """
    parameters = trained(ddp)
    if counts.numel() != len(parameters):
        raise Unsupported(
            "parameters of a DistributedDataParallel(static_graph=True) were frozen or thawed after its first "
            "iteration, so that a replacement cannot repeat what it has learned: freeze before it is wrapped"
        )
    gradients = [parameter.grad for parameter in parameters]

    def answer(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [used] if inputs[0].dtype == torch.int32 else [each.detach() for each in inputs]

    reducer: Any = ddp.reducer  # torch's stubs leave out most of it
    with answered(answer):
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        for place, count in enumerate(counts.tolist()):
            for _ in range(count):
                reducer._autograd_hook(place)
        reducer._delay_all_reduce()
    compat.graph_is_known(ddp)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
