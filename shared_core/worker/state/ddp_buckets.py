"""DDP's agreement on its gradient buckets, which it makes once, after the first backward, and what it learns of a
static graph in the first iteration.

A replacement learns the order by running that backward, or, later, from the record of what was agreed; in between there
is no recovery point. A static graph it learns again, from as many gradients, none of which it is given.

DDP writes ``gradient / number of ranks`` into a bucket when the last gradient of it is there, has the bucket reduced,
and copies the sums to the gradients when all buckets are reduced. Until then the gradients still say what was in the
bucket, so that a reduction in place that was cut off can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from shared_core.errors import ConfigError, RecoveryFailed, Unsupported
from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.comm import Runtime, compat
from shared_core.worker.comm.op import Op, input_checksum
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.publications import RecordKey, Records, SharedMemoryPublisher

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
        """How often each parameter's gradient came, and how many ranks use it: int32, on the CPU."""
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


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BucketInput:
    """The parameters of one bucket, which holds their gradients flat, one after the other, multiplied by ``scale``."""

    def __init__(self, parameters: Sequence[nn.Parameter], scale: float) -> None:
        self._parameters, self._scale = list(parameters), scale
        self.numel = sum(p.numel() for p in parameters)
        same = len({p.dtype for p in parameters}) == 1 and parameters[0].element_size() in _BITS
        self._dense = same and all(_span(p) == p.numel() for p in parameters)

    def fits(self, bucket: torch.Tensor) -> bool:
        """Whether a bucket has this one's length, dtype and device, and its parameters are dense."""
        first = self._parameters[0]
        alike = bucket.dtype == first.dtype and bucket.device == first.device
        return self._dense and bucket.numel() == self.numel and alike

    def matches(self, bucket: torch.Tensor) -> bool:
        """Whether the bucket holds, bit for bit, what the gradients say, and is memory of its own.

        A bucket of zeros proves nothing, and neither does one whose gradients something may still change.
        """
        if not self.fits(bucket) or not bool(bucket.any()):
            return False
        begin, end = bucket.data_ptr(), bucket.data_ptr() + bucket.nbytes
        as_bits = _BITS[bucket.element_size()]
        for parameter, part in self.parts(bucket):
            grad = parameter.grad
            if grad is None or parameter._post_accumulate_grad_hooks or grad.layout is not torch.strided:
                return False
            if begin <= grad.data_ptr() < end:  # gradient_as_bucket_view
                return False
            if not torch.equal(part.view(as_bits), (grad.detach() * self._scale).view(as_bits)):
                return False
        return True

    def write(self, bucket: torch.Tensor, checksum: int) -> None:
        """Overwrite the bucket with what was there before its reduction: zeros for a parameter without a gradient.
        Raises RecoveryFailed if the result does not have this checksum, of :func:`input_checksum`.
        """
        with torch.no_grad():
            for parameter, part in self.parts(bucket):
                if parameter.grad is None:
                    part.zero_()
                else:
                    torch.mul(parameter.grad, self._scale, out=part)
        if input_checksum([bucket]) != checksum:
            raise RecoveryFailed(
                "a reduction of gradients was cut off, and the gradients have changed since it began, so that it "
                "cannot be made again: do not write to gradients during backward"
            )

    def parts(self, bucket: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its part of the bucket, a view in the parameter's shape and strides."""
        flat, at, parts = bucket.detach().view(-1), 0, []
        for parameter in self._parameters:
            part = flat[at : at + parameter.numel()]
            parts.append((parameter, part.as_strided(parameter.shape, parameter.stride())))
            at += parameter.numel()
        return parts


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first of a tensor to the last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


class _Module:
    """What is known of one DDP module's buckets: ``inputs``, empty until DDP has settled them, and how many are
    ``left`` that it has not handed over since its last forward.
    """

    def __init__(self) -> None:
        self.inputs: list[BucketInput] = []
        self.left = 0


class BucketInputs:
    """Knows which parameters are in which bucket, as DDP modules have agreed. That a bucket is computed in this way is
    verified, bit for bit, before it is relied on. Modules may agree on a thread of the group while another one's
    backward runs.
    """

    #: A bucket that matches nothing is looked at so many times.
    _TRIES = 3

    def __init__(self) -> None:
        self._modules: dict[int, _Module] = {}
        self._found: dict[int, tuple[_Module, BucketInput]] = {}
        self._tried: dict[int, int] = {}

    def clear(self) -> None:
        self._modules = {}
        self._found.clear()
        self._tried.clear()

    def agreed(self, ddp: DistributedDataParallel, indices: Sequence[int], sizes: Sequence[int]) -> None:
        """DDP has settled: ``indices`` of parameters, bucket by bucket, and the number in each bucket."""
        parameters, module, at = trained(ddp), _Module(), 0
        if sorted(indices) == list(range(len(parameters))) and sum(sizes) == len(indices):
            for size in sizes:
                inside = [parameters[i] for i in indices[at : at + size]]
                module.inputs.append(BucketInput(inside, 1.0 / ddp.process_group.size()))
                at += size
        # Else parameters were frozen or ignored since: nothing is known.
        self._modules = {**self._modules, id(ddp): module}  # whole at once: a backward may be going through the old one
        self._found.clear()
        self._tried.clear()

    def forward(self, ddp: nn.Module) -> None:
        module = self._modules.get(id(ddp))
        if module is not None:
            module.left = len(module.inputs)

    def awaits(self, ddp: nn.Module) -> bool:
        """Whether a module has handed over none of its buckets since its last forward. False if they are not known."""
        module = self._modules.get(id(ddp))
        return module is not None and 0 < module.left == len(module.inputs)

    def layout(self, ddp: nn.Module) -> Sequence[BucketInput]:
        """The buckets of a module in the order in which it hands them over; empty before that is known."""
        module = self._modules.get(id(ddp))
        return module.inputs if module is not None else ()

    def of(self, bucket: torch.Tensor) -> BucketInput | None:
        """What recomputes a bucket that DDP hands over, once after a forward; None if that is not known."""
        place = bucket.data_ptr()
        module, found = self._found.get(place) or self._find(bucket)
        if found is None or module is None or not found.fits(bucket) or module.left == 0:
            return None
        module.left -= 1
        return found

    def _find(self, bucket: torch.Tensor) -> tuple[_Module | None, BucketInput | None]:
        place = bucket.data_ptr()
        if self._tried.get(place, 0) < self._TRIES:
            for module in self._modules.values():
                for each in module.inputs:
                    if each.matches(bucket):
                        self._found[place] = module, each
                        return module, each
            self._tried[place] = self._tried.get(place, 0) + 1
        return None, None


#: Kinds of records.
BUCKETS = "ddp buckets"
GRAPH = "ddp graph"
#: Boundaries in which DDP may settle its buckets without a recovery point.
_BOUNDARIES = 3


class Buckets:
    """The DDP modules of this worker, and which of them have settled their buckets.

    Args:
        unattached: called when a module is trained and nothing is attached.

    Attributes:
        eligible: step boundaries since :meth:`attach` that could have been recovery points.
    """

    def __init__(
        self,
        runtime: Runtime,
        publisher: SharedMemoryPublisher,
        position: BoundaryPosition,
        unattached: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime, self._publisher, self._position, self._unattached = runtime, publisher, position, unattached
        self._attached = False
        self.modules: list[DistributedDataParallel] = []
        self.eligible = 0
        self._settled: set[int] = set()
        self._agreed: dict[int, int] = {}
        self._inputs = BucketInputs()
        self._awaiting: set[int] = set()
        self._counted = False
        self._broadcasts: dict[int, list[torch.Tensor]] = {}
        self._first: dict[int, FirstIteration] = {}

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Look for DDP modules in ``modules``. Raises Unsupported for one that cannot be recovered."""
        self._attached = True
        self.modules = [m for module in modules for m in module.modules() if isinstance(m, DistributedDataParallel)]
        for ddp in self.modules:
            refuse_ddp(ddp, self._runtime.world_size)
        self._settled.clear()
        self._agreed.clear()
        self._inputs.clear()
        self._awaiting.clear()
        self.eligible = 0
        known = {id(each.ddp): each for each in self._first.values()}
        static = [(number, ddp) for number, ddp in enumerate(self.modules) if ddp.static_graph]
        self._first = {number: known.get(id(ddp)) or FirstIteration(ddp) for number, ddp in static}

    @property
    def may_be_unused(self) -> bool:
        """Whether some parameter may have no gradient: then buckets hold leftovers that mean nothing."""
        return any(ddp.find_unused_parameters or ddp.static_graph for ddp in self.modules)

    def flags(self) -> list[int]:
        """Of each module, 1 if its last forward had gradients: DDP broadcasts buffers before the next only then. 2 is
        added if no backward has come since, as after a forward for a metric: DDP then reduces gradients in the next
        one, even in one inside ``no_sync``.
        """
        return [int(ddp.require_forward_param_sync) + 2 * self._awaits(ddp) for ddp in self.modules]

    def set_flags(self, flags: list[int]) -> None:
        for ddp, flag in zip(self.modules, flags, strict=False):
            ddp.require_forward_param_sync = bool(flag & 1)
            if flag & 2:
                ddp.reducer.prepare_for_backward([])
                self._inputs.forward(ddp)
                self._awaiting.add(id(ddp))

    def _awaits(self, ddp: DistributedDataParallel) -> bool:
        return id(ddp) in self._awaiting and not ddp.static_graph and self._inputs.awaits(ddp)

    def unsettled(self) -> bool:
        """Whether this step boundary, which could be a recovery point, is none. Counts it: call it once a boundary."""
        # Until a static graph is known, a replacement runs the iteration itself in which DDP learns it.
        if any(first.begun and not first.ended for first in self._first.values()):
            return True
        asked = [i for i, ddp in enumerate(self.modules) if not (ddp.find_unused_parameters or ddp.static_graph)]
        waiting = [i for i in asked if i not in self._settled]
        if not waiting:
            return False
        self.eligible += 1
        return 1 < self.eligible <= _BOUNDARIES

    def handed_over(self) -> None:
        if not self._attached:
            self._unattached()
        if not self._counted:  # a bucket of some module
            self._awaiting.clear()
        self._counted = False

    def note(self, ddp: DistributedDataParallel, op: Op) -> None:
        """DDP agrees on the order of the buckets of ``ddp`` by the operation ``op``; its result is recorded when it is
        there, on the thread that completes it. Raises ConfigError if other modules are attached, and ``ddp`` is not.
        """
        number = next((i for i, known in enumerate(self.modules) if known is ddp), None)
        if number is None and not self._attached:
            return
        if number is None:
            raise ConfigError(
                f"rank {self._runtime.rank}: a DistributedDataParallel module is trained that is not attached: call "
                "shared_core.attach(model, optimizer) before training, with the wrapper and not the module inside"
            )
        self._settled.add(number)
        first = self._first.get(number)
        if first is not None and number not in self._agreed:
            first.end()
            self._publisher.records.add(
                RecordKey(self._position.entry, GRAPH, str(number), self._position.boundaries), first.seen()
            )
        ordinal = self._agreed[number] = self._agreed.get(number, -1) + 1
        key = RecordKey(self._position.entry, BUCKETS, f"{number}.{ordinal}", self._position.boundaries)
        op.future.add_done_callback(lambda _: self._publisher.records.add(key, op.results))
        self._broadcasts.setdefault(number, []).append(op.results[0])
        if ordinal % 2:
            op.future.add_done_callback(lambda _: self._know(ddp, self._broadcasts.pop(number)))

    def _know(self, ddp: DistributedDataParallel, agreed: Sequence[torch.Tensor]) -> None:
        """DDP broadcasts the places of parameters by bucket, with the number of buckets; then their sizes."""
        places, sizes = (tensor.tolist() for tensor in agreed)
        self._inputs.agreed(ddp, places[:-1], sizes)

    def forward_done(self, ddp: DistributedDataParallel) -> None:
        """A backward follows, which overwrites the buckets of ``ddp``, and in which it may learn a static graph. Raises
        Unsupported if the module was given what cannot be recovered since it was attached.
        """
        refuse_hooks(ddp)
        for first in self._first.values():
            first.forward(ddp)
        self._inputs.forward(ddp)
        self._awaiting.add(id(ddp))
        self._runtime.results.release()

    def input_of(self, bucket: torch.Tensor) -> BucketInput | None:
        """What recomputes a bucket that DDP hands over; None if that is not known."""
        found = self._inputs.of(bucket)
        self._counted = found is not None
        return found

    def layout(self) -> Sequence[BucketInput]:
        """The buckets of the one DDP module in the order in which it hands them over; empty before that is known."""
        return self._inputs.layout(self.modules[0]) if len(self.modules) == 1 else ()

    def settle(self, records: Records, boundary: StepBoundary) -> None:
        """Give DDP the buckets that were agreed on before ``boundary``, without a backward: the broadcasts of that
        agreement are served from the record. So is what it learned of a static graph.
        """
        graphs = {
            key.name: results
            for key, results in records
            if (key.entry, key.kind) == (boundary.entry, GRAPH) and key.number < boundary.index
        }
        for number, ddp in enumerate(self.modules):
            agreed = {
                key.name: results
                for key, results in records
                if (key.entry, key.kind) == (boundary.entry, BUCKETS)
                and key.name.startswith(f"{number}.")
                and key.number < boundary.index
            }
            if not agreed:
                continue
            if number in self._first:
                self._first[number].end()
                counts, used = graphs[str(number)]
                repeat(ddp, counts, used, self._runtime.operations.answered)
            with self._runtime.operations.scripted(agreed[f"{number}.{ordinal}"] for ordinal in range(len(agreed))):
                ddp.reducer._push_all_rebuilt_params()
                ddp.reducer._rebuild_buckets()
            self._know(ddp, [agreed[f"{number}.{ordinal}"][0] for ordinal in (len(agreed) - 2, len(agreed) - 1)])
            self._settled.add(number)


#: Hooks of torch whose state is kept from batch to batch, or lets replicas differ.
_KEEPING = "torch.distributed.algorithms."


def refuse_ddp(ddp: DistributedDataParallel, world_size: int) -> None:
    """Raises Unsupported for a module over a group without all ranks, and for what :func:`refuse_hooks` refuses."""
    size = ddp.process_group.size()
    if size != world_size:
        raise Unsupported(
            f"DistributedDataParallel over a group of {size} of the job's {world_size} ranks: a replacement is given "
            "the parameters of any other rank, so all ranks must train the same. Leave process_group out; a module "
            "that ranks train apart goes without DistributedDataParallel, and to job.register(module, its_optimizer)"
        )
    refuse_hooks(ddp)


def refuse_hooks(ddp: DistributedDataParallel) -> None:
    """Raises Unsupported for communication hooks and uneven inputs, which it may be given later."""
    kept = [type(state) for _, state in ddp._comm_hooks if type(state).__module__.startswith(_KEEPING)]
    if kept:
        raise Unsupported(
            f"the communication hook of a DistributedDataParallel module keeps a {kept[0].__name__} from batch to "
            "batch, which a replacement cannot be given: use a hook without such state (fp16_compress_hook), or none"
        )
    if ddp._join_config.enable:
        raise Unsupported(
            "Join and model.join() let ranks end a pass after different numbers of batches, so that their optimizers "
            "are not at the same update, and none can stand in for another: give all ranks as many batches "
            "(DistributedSampler, drop_last), and leave join() out"
        )
