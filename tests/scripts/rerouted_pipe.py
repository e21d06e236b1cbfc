"""A DeepSpeed pipeline in a plain loop, for ``on_failure="reroute"``: its data depend on the pipeline alone."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.support.copies import Copies, hold
from tests.support.digest import digest, training_digest
from tests.support.report import Report

WIDTH, LAYERS = 32, 4


class Block(nn.Module):
    """Linear, with dropout.

    Attributes:
        seen: for each step, inputs that this process has computed with, by digest.
        step: the present one.
        slow_s: what a backward takes at least, slept too.
        counts: a buffer counts the forwards.
        work_s: what a forward takes at least; slept, because the test machines have few cores.
        more_s: what it takes besides, in later steps.
    """

    step, work_s, more_s, slow_s, counts = 0, 0.0, 0.0, 0.0, False

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.seen: Counter[tuple[int, str]] = Counter()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen[Block.step, digest(x.detach())] += 1
            time.sleep(Block.work_s + Block.more_s)
            if Block.counts:
                self.count += 1
        y = torch.relu(self.drop(self.linear(x))) + x
        if Block.slow_s and y.requires_grad:
            y.register_hook(lambda _: time.sleep(Block.slow_s))
        return y


class First(nn.Module):
    """A table, of which most rows are looked up seldom. From here on several tensors pass from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = nn.Embedding(64, WIDTH), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.table((x[:, :2] * 32).long() % 64)[:, 0] * self.frozen
        return y, y > -1.0, y.mean(dim=1, keepdim=True)


class Several(Block):
    """The same, for one of several tensors; another is passed on, and one more is needed at the end."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, several: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, mask, rest = several
        return super().forward(x) * mask, mask, rest * 1.5 + self.scale


class Last(Block):
    """One tensor again."""

    def forward(self, several: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return super().forward(several[0]) + several[2]


def micro_batches(
    pipeline: int, rows: int, odd: Sequence[int] = (), value: float = 0.0, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Data; one label of some micro-batches of pipeline 1 is ``value``."""
    generator = torch.Generator().manual_seed(pipeline)
    for index in itertools.count():
        x = torch.randn(rows, WIDTH, generator=generator)
        y = x.sin()
        if pipeline == 1 and index in odd:
            y[0, 0] = value
        yield x.to(dtype), y.to(dtype)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Data by index, with noise that is drawn when an item is read.

    Args:
        number: how many.
    """

    def __init__(self, number: int) -> None:
        self._x = torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index] + 0.05 * torch.randn(WIDTH), self._x[index].sin()


def keep_small(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Right after an update."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--tied", choices=["two", "three"], help="a layer that so many stages have")
    parser.add_argument("--autocast", action="store_true", help="DeepSpeed's torch_autocast, to bf16")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--zero", type=int, default=0, help="stage")
    parser.add_argument("--accumulate", help="type in which gradients of micro-batches are added")
    parser.add_argument("--checkpointing", type=int, default=0, help="of activations: layers of a segment")
    parser.add_argument("--grow", action="store_true", help="twice the batch, from the third step on")
    parser.add_argument("--counts", action="store_true", help="a buffer that forward changes")
    parser.add_argument("--several", action="store_true", help="tensors between layers")
    parser.add_argument("--in-a-row", action="store_true", help="the stages of a pipeline have consecutive ranks")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--evaluate-each", type=int, default=0, help="steps")
    parser.add_argument("--evaluate-after", type=int, default=0, help="steps; one evaluation")
    parser.add_argument("--evaluate-again", type=int, default=0, help="evaluations right after it, of other shapes")
    parser.add_argument("--sum-after", type=int, nargs="*", default=(), help="steps; a sum over all workers")
    parser.add_argument("--shared", action="store_true", help="data that any worker can read; 10 batches an epoch")
    parser.add_argument("--sum-evaluated", action="store_true", help="a sum over all workers after the evaluation")
    parser.add_argument("--copies", default="", help="10:1,12:2: step 12 waits for two failures and the copies")
    parser.add_argument(
        "--hold", type=int, default=-1, help="a rank: its replacements wait for another one to be admitted"
    )
    parser.add_argument("--decay", type=float, default=0.0, help="of the learning rate, in each step")
    parser.add_argument("--hook", choices=["optimizer", "layers"], help="it keeps parameters, or outputs, small")
    parser.add_argument("--odd", type=int, nargs="*", default=(), help="micro-batches that have an odd label")
    parser.add_argument("--odd-value", type=float, default=0.0)
    parser.add_argument("--work-ms", type=float, default=0.0)
    parser.add_argument("--slow-ms", type=float, default=0.0, help="what a layer's backward takes in rank 1")
    parser.add_argument(
        "--straggler", type=int, nargs=3, metavar=("RANK", "STEP", "MS"), help="forwards of a rank get slow"
    )
    args = parser.parse_args()
    if os.environ["RANK"] == "1":
        Block.slow_s = args.slow_ms / 1000
    Block.counts = args.counts
    Block.work_s = args.work_ms / 1000
    report = Report()
    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    from shared_core.pipeline import import_deepspeed, initialize, install

    deepspeed = import_deepspeed()
    if not baseline:
        install()
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import ProcessTopology

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    layers = [LayerSpec(Block, args.dropout) for _ in range(max(LAYERS, args.stages))]
    if args.several:
        middle = [LayerSpec(Several, args.dropout) for _ in range(args.stages)]
        layers = [LayerSpec(First), *middle, LayerSpec(Last, args.dropout)]
    if args.tied:  # first and last stage have it, and with "three" one between them
        spec = TiedLayerSpec("head", Block, 0.0, tied_weight_attr=["linear.weight", "linear.bias"])
        middle = [spec] if args.tied == "three" else []
        layers = [spec, *layers[: args.stages], *middle, *layers[args.stages :], spec]
    shape = [dist.get_world_size() // args.stages, args.stages]
    net = PipelineModule(
        layers,
        num_stages=None if args.in_a_row else args.stages,
        topology=ProcessTopology(axes=["data", "pipe"], dims=shape) if args.in_a_row else None,
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
        activation_checkpoint_interval=args.checkpointing,
    )
    config = {
        "train_batch_size": args.rows * args.micro_batches * (dist.get_world_size() // args.stages),
        "train_micro_batch_size_per_gpu": args.rows,
        "gradient_clipping": args.clip,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "torch_autocast": {"enabled": args.autocast, "dtype": "bfloat16"},
        "bf16": {"enabled": args.bf16},
        "zero_optimization": {"stage": args.zero, "reduce_bucket_size": 1 << 20},
        "steps_per_print": None,
    }
    if args.accumulate:
        config["data_types"] = {"grad_accum_dtype": args.accumulate}

    def decayed(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - args.decay) ** step)

    more = {"lr_scheduler": decayed} if args.decay else {}
    engine, *_ = (deepspeed.initialize if baseline else initialize)(model=net, config=config, **more)
    for block in net.modules() if args.hook == "layers" else ():
        if isinstance(block, Block):
            block.register_forward_hook(lambda _module, _inputs, outputs: outputs * 0.5)
    if args.hook == "optimizer":
        engine.optimizer.register_step_post_hook(keep_small)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    data = micro_batches(engine.grid.get_data_parallel_rank(), args.rows, args.odd, args.odd_value, dtype)
    if args.shared:
        from shared_core.pipeline import SharedData

        pipelines = engine.grid.data_parallel_size
        rows = Rows(10 * args.rows * pipelines)
        sampler: DistributedSampler[object] = DistributedSampler(rows, pipelines, engine.grid.get_data_parallel_rank())
        data = SharedData(DataLoader(rows, args.rows, sampler=sampler), engine)
    losses, copies = [], Copies(args.copies)
    hold(args.hold)
    for step in range(args.steps):
        Block.step = step
        copies.wait(step)
        if args.straggler:
            rank, since, more_ms = args.straggler
            Block.more_s = more_ms / 1000 if os.environ["RANK"] == str(rank) and step >= since else 0.0
        if args.grow and step == 2:
            before = engine.train_batch_size(), engine.micro_batches
            try:
                engine.set_train_batch_size(2 * before[0])
            finally:
                assert before == (engine.train_batch_size(), engine.micro_batches)
        losses.append(float(engine.train_batch(data)))
        if step + 1 in args.sum_after:
            total = torch.tensor(losses[-1])
            dist.all_reduce(total)
            losses.append(float(total))
        if args.evaluate_each and (step + 1) % args.evaluate_each == 0:
            losses.append(float(engine.eval_batch(data)))
        if step + 1 == args.evaluate_after:
            losses.append(float(engine.eval_batch(data)))
            if args.sum_evaluated:
                total = torch.tensor(losses[-1])
                dist.all_reduce(total)
                losses.append(float(total))
            for number in range(args.evaluate_again):
                engine.reset_activation_shape()
                other = micro_batches(number + 10 * engine.grid.get_data_parallel_rank(), args.rows + number)
                losses.append(float(engine.eval_batch(other, num_micro_batches=args.micro_batches + number)))
            engine.reset_activation_shape()
    digests = training_digest(net, [engine.optimizer], [], {"losses": losses})
    shard = [p for group in engine.optimizer.param_groups for p in group["params"]]
    digests["masters"] = digest([p.detach() for p in shard] if args.bf16 or args.zero else [])
    repeated = max((count for m in net.modules() if isinstance(m, Block) for count in m.seen.values()), default=0)
    blocks = [m for m in net.modules() if isinstance(m, Block)]
    computed = sum(count for (step, _), count in blocks[0].seen.items() if step == args.steps - 1)
    report.finish(
        {**digests, "losses": digest(torch.tensor(losses))},
        losses=losses,
        repeated=repeated,
        computed=computed,
        parameters=[p.tolist() for p in net.parameters()],
    )


if __name__ == "__main__":
    main()
