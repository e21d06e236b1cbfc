"""What DDP puts into its gradient buckets, computed again from the gradients.

DDP writes ``gradient / number of ranks`` into a bucket when the last gradient of it is there, has the bucket reduced,
and copies the sums to the gradients when all buckets are reduced. Until then the gradients still say what was in the
bucket, so that a reduction in place that was cut off can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared_core.errors import RecoveryFailed
from shared_core.worker.comm.op import input_checksum

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
        """DDP has settled its buckets: ``indices`` of its parameters, bucket by bucket, and how many parameters each
        bucket has.
        """
        ignored = getattr(ddp, "parameters_to_ignore", ())
        named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
        parameters = [p for name, p in named if name not in ignored]
        module, at = _Module(), 0
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
        """A module will hand over its buckets, each once."""
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
        """What recomputes this bucket, which DDP hands over; None if that is not known. Each bucket once after
        a forward.
        """
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
