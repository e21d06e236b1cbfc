"""What the pipeline benchmarks train: a stack of blocks under DeepSpeed's engine, with real or emulated compute."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

#: Environment of the workers: DeepSpeed is to use the processor.
ENV = {"DS_ACCELERATOR": "cpu"}
MICRO_BATCHES = 4
WIDTH, HEADS = 256, 4
#: Slots of the emulated optimizer.
OPTIMIZER = 3
#: Blocks in all of the stages together, with real compute.
BLOCKS = 4
#: Different micro-batches; afterwards they come again.
CYCLE = 8


@dataclass(frozen=True)
class Compute:
    """How a stage computes.

    Attributes:
        rows, tokens: shape of a micro-batch, (rows, tokens, WIDTH) float32.
        slot_s: seconds that a stage sleeps in forward, and as long in backward, of a micro-batch; 0 computes instead.
        halves: it sleeps as long for the gradient of the input, again for that of the weights, and three times as long
            in the optimizer.
    """

    rows: int
    tokens: int
    slot_s: float
    halves: bool = False


COMPUTE = {
    "emulated": Compute(4, 64, 0.05),
    "real": Compute(4, 128, 0.0),
    "halves": Compute(1, 16, 0.05, True),
    "long halves": Compute(1, 16, 0.1, True),
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Emulated(nn.Module):
    """A stage whose processor is somewhere else: it sleeps ``seconds`` in forward, and in backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Sleep.apply(self.linear(x), self.seconds)
        return y


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Halves(Emulated):
    """A stage that sleeps in forward, for the gradient of the input, and for that of the weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = _SleepBackward.apply(self.linear.bias, self.seconds)  # off the way from output to input
        y: torch.Tensor = _Sleep.apply(functional.linear(x, self.linear.weight, bias), self.seconds)
        return y


class Block(nn.Module):
    """A block of GPT: causal attention and a perceptron, each with a norm before it; dropout 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


def data(compute: Compute, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches and their targets, without end."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(compute.rows, compute.tokens, WIDTH, generator=generator) for _ in range(CYCLE)]
    return itertools.cycle([(x, x.sin()) for x in made])


def engine(
    name: str, stages: int, *, swift: bool, micro_batches: int = MICRO_BATCHES
) -> tuple[Any, Any, Iterator[Any]]:
    """The engine of a job with ``stages`` stages and as many replicas as there are workers for, its model and data.

    Args:
        name: of the compute, in :data:`COMPUTE`.
        stages: pipeline stages.
        swift: this product's engine, not DeepSpeed's own.
        micro_batches: of each pipeline in a step.
    """
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    compute = COMPUTE[name]
    torch.manual_seed(0)
    emulated = LayerSpec(Halves if compute.halves else Emulated, compute.slot_s)
    specs = [emulated] * stages if compute.slot_s else [LayerSpec(Block)] * BLOCKS
    net = PipelineModule(specs, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = {
        "train_batch_size": compute.rows * micro_batches * (dist.get_world_size() // stages),
        "train_micro_batch_size_per_gpu": compute.rows,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": None,
    }
    if swift:
        from shared_core.pipeline import initialize

        made, *_ = initialize(model=net, config=config)
    else:
        made, *_ = deepspeed.initialize(model=net, config=config)
    if compute.halves:
        # Of all optimizers: who computes at another stage has one of that stage, too.
        register_optimizer_step_pre_hook(lambda *_: time.sleep(OPTIMIZER * compute.slot_s))
    return made, net, data(compute, made.grid.get_data_parallel_rank())


def start(swift: bool) -> None:
    """Start torch.distributed as a user's script would."""
    from shared_core.pipeline import import_deepspeed, install

    torch.set_num_threads(1)
    deepspeed = import_deepspeed()
    if swift:
        install()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
