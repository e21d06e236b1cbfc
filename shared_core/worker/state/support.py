"""What of optimizers and ``DistributedDataParallel`` cannot be recovered exactly: refused, with what to do instead."""

from __future__ import annotations

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shared_core.errors import ConfigError, Unsupported, UnsupportedOptimizer

#: Hooks of torch whose state is kept from batch to batch, or lets replicas differ.
_KEEPING = "torch.distributed.algorithms."
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raises UnsupportedOptimizer for one whose state no other rank could give to a replacement."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizer(
            "LBFGS evaluates its closure several times in a step, so a replacement cannot take over in the "
            "middle; use another optimizer"
        )
    zero = sys.modules.get(_ZERO)  # what is not imported is not used
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        raise UnsupportedOptimizer(
            f"{name} divides the optimizer's state over the ranks, so nobody has that of a failed one: use the "
            "optimizer inside by itself, or fully_shard() (docs/sharded.md)"
        )
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise UnsupportedOptimizer(
            f"{name} wraps another optimizer and is none itself (its class does not call Optimizer.__init__), so its "
            "updates cannot be seen: attach the one inside. Where it lets ranks have different parameters between "
            "averages, as PostLocalSGDOptimizer does, nobody can give a replacement its own: use a plain optimizer"
        )


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
    """Raises Unsupported for what a module may be given later and cannot be recovered: communication hooks,
    uneven inputs.
    """
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


def not_attached(optimizer: Optimizer, name: str) -> ConfigError:
    """The error for an optimizer that steps what is trained, unseen. ``name`` is a parameter that it has changed."""
    return ConfigError(
        f"{type(optimizer).__name__} has stepped parameter {name}, which is attached without this optimizer, so its "
        "updates and its state would not be a replacement's: pass it to attach() or prepare(), or return it from "
        "configure_optimizers(). Of one that wraps another (Lookahead, SAM) attach the one inside, and job.register() "
        "the outer one if it also has state"
    )
