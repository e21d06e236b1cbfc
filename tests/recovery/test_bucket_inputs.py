"""What DDP puts into its buckets can be computed again from the gradients, bit for bit, or is known not to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shared_core.errors import RecoveryFailed
from shared_core.worker.comm.op import input_checksum
from shared_core.worker.state.ddp_buckets import BucketInput

WORLD = 3


def wrapped(net: nn.Module) -> Any:
    """As much of a DDP module as is asked for; a real one would leave gloo's sockets behind."""
    return SimpleNamespace(module=net, process_group=SimpleNamespace(size=lambda: 1), parameters_to_ignore=set())


def parameters(*tensors: torch.Tensor) -> list[nn.Parameter]:
    made = [nn.Parameter(tensor) for tensor in tensors]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def filled(chosen: list[nn.Parameter]) -> torch.Tensor:
    """The bucket as DDP fills it: each gradient divided, in the parameter's own order of elements."""
    parts = []
    for parameter in chosen:
        assert parameter.grad is not None
        part = torch.empty(parameter.numel(), dtype=parameter.dtype)
        torch.mul(parameter.grad, 1.0 / WORLD, out=part.as_strided(parameter.shape, parameter.stride()))
        parts.append(part)
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_half_reduced_bucket_is_made_again(dtype: torch.dtype) -> None:
    conv = torch.randn(4, 3, 5, 5, dtype=dtype).to(memory_format=torch.channels_last)
    chosen = parameters(
        torch.randn(7, 3, dtype=dtype), conv, torch.randn(11, dtype=dtype), torch.randn((), dtype=dtype)
    )
    source, bucket = BucketInput(chosen, 1.0 / WORLD), filled(chosen)
    assert source.matches(bucket)
    wanted, checksum = bucket.clone(), input_checksum([bucket])
    bucket[5:] += 1
    source.write(bucket, checksum)
    assert torch.equal(bucket, wanted)
    assert chosen[0].grad is not None
    chosen[0].grad += 1
    with pytest.raises(RecoveryFailed, match="gradients have changed"):
        source.write(bucket, checksum)


def test_what_cannot_be_relied_on_does_not_match() -> None:
    chosen = parameters(torch.randn(8, 4), torch.randn(4))
    source, bucket = BucketInput(chosen, 1.0 / WORLD), filled(chosen)
    assert source.matches(bucket)
    assert not source.matches(torch.cat([bucket, bucket[:1]])), "another length"
    assert not source.matches(bucket.double()), "another type"
    assert not source.matches(bucket / WORLD), "divided otherwise"
    last = bucket.clone()
    last[-1] = last[-1].nextafter(torch.tensor(9.0))
    assert not source.matches(last), "one bit"
    chosen[1].register_post_accumulate_grad_hook(lambda _: None)
    assert not source.matches(bucket), "a hook may change the gradient"
    chosen = parameters(torch.randn(8, 4))
    chosen[0].grad = torch.zeros(8, 4)
    assert not BucketInput(chosen, 1.0 / WORLD).matches(torch.zeros(32)), "zeros prove nothing"
    bucket = torch.randn(32)
    chosen[0].grad = bucket.view(8, 4)
    assert not BucketInput(chosen, 1.0).matches(bucket), "the gradient lies in the bucket"
    assert not BucketInput(parameters(torch.randn(4), torch.randn(4).double()), 1.0).fits(torch.randn(8))
    assert not BucketInput([nn.Parameter(torch.randn(1, 4).expand(3, 4))], 1.0).fits(torch.randn(12))
