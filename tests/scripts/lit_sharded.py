"""Lightning with a model that ``configure_model`` shards: FSDP2 over all ranks, or HSDP over replicas of shards.

With ``SWIFT_BASELINE`` it uses the stock ``ModelParallelStrategy``; otherwise ``--how`` says how the product gets in.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from features import Sums
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lit_parts import OUT, loader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.support.digest import digest
from tests.support.jobs.common import Counting, final_digests, without_folder, without_ours
from tests.support.report import Report, end_group
from tests.support.runner import BASELINE

warnings.filterwarnings("ignore")
WORKERS = int(os.environ["WORLD_SIZE"])


class Sharded(Sums):
    """Four groups of parameters, one of which ranks cannot divide evenly; statistics; all that can be logged."""

    def __init__(self, replicas: int, shards: bool) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(32))
        self.scheduler = "step"
        self.replicas, self.shards = replicas, shards

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule) or not self.shards:
            return
        if self.replicas == 1:
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
        else:
            shape = (self.replicas, WORKERS // self.replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def digests(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
    """As of any job, of this rank's shards: an evaluation leaves parameters of the root gathered."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    found = final_digests(trainer, module)
    trainer.strategy.barrier()
    rows = Path(OUT, "csv", "version_0", "metrics.csv")
    return found | {"rows": digest(rows.read_text()) if trainer.is_global_zero else ""}


def files() -> dict[str, str]:
    """Digest of each file of the run's checkpoints, but for the one with a random number in it."""
    found = {}
    for path in sorted(Path(OUT).rglob("*.distcp")):
        found[str(path.relative_to(OUT))] = digest(path.read_bytes())
    for path in sorted(Path(OUT).rglob("meta.pt")):
        saved = torch.load(path, weights_only=False)
        parts = {key: saved[key] for key in ("epoch", "global_step", "lr_schedulers", "loops")}
        parts["callbacks"] = without_ours(saved["callbacks"])
        found[str(path.relative_to(OUT))] = digest(repr(without_folder(parts)))
    for path in sorted(Path(OUT).rglob("*.ckpt")):
        if path.is_file():
            saved = torch.load(path, weights_only=False)
            found[str(path.relative_to(OUT))] = digest([saved["state_dict"], saved["optimizer_states"]])
    return found


def train(trainer: pl.Trainer, module: pl.LightningModule, data: dict[str, Any], what: str) -> dict[str, Any]:
    """Returns digests of the end, and of earlier ends, which replacements in later calls do not have."""
    trainer.fit(module, **data)
    if what == "fit":
        return {"digests": digests(trainer, module)}
    first = digests(trainer, module)
    trainer.fit_loop.max_epochs = 3
    if what == "calls":
        tested = trainer.test(module, loader(48, shuffle=False, first=1200), verbose=False)
        trainer.fit(module, **data)
        return {"digests": digests(trainer, module) | {"tested": repr(tested)}, "first": first}
    path = f"{OUT}/resume.ckpt"
    trainer.save_checkpoint(path)
    trainer.fit(module, **data, ckpt_path=path)
    last = digests(trainer, module)
    trainer.strategy.barrier()
    return {"digests": last | files(), "first": first}


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="strategy", choices=["strategy", "callback", "env"])
    parser.add_argument("--what", default="fit", choices=["fit", "calls", "files"])
    parser.add_argument("--replicas", type=int, default=1, help="of each shard; more than one is HSDP")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="checkpoints are one file, with all shards")
    parser.add_argument("--no-shards", action="store_true", help="leave fully_shard() out")
    args = parser.parse_args()
    report = Report()
    pl.seed_everything(7, verbose=False)
    module = Sharded(args.replicas, not args.no_shards)
    strategy: Any = ModelParallelStrategy(
        data_parallel_size=WORKERS, tensor_parallel_size=1, save_distributed_checkpoint=not args.whole
    )
    callbacks: list[pl.Callback] = []
    if not os.environ.get(BASELINE):
        import lightning_swift

        if args.whole:
            strategy = lightning_swift.SwiftFSDPStrategy(save_distributed_checkpoint=False)
        elif args.how == "strategy":
            strategy = "swift_fsdp"
        elif args.how == "callback":
            callbacks = [lightning_swift.SwiftCallback()]
    if args.what == "files":
        callbacks.append(ModelCheckpoint(f"{OUT}/saved", every_n_train_steps=4, save_top_k=-1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=strategy,
        max_epochs=2,
        val_check_interval=0.5,
        gradient_clip_val=0.5,
        accumulate_grad_batches=args.accumulate,
        log_every_n_steps=2,
        logger=CSVLogger(OUT, "csv"),
        enable_checkpointing=args.what == "files",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Counting(report)],
        default_root_dir=OUT,
    )
    data = {
        "train_dataloaders": loader(48 * WORKERS, augment=True),
        "val_dataloaders": loader(48, shuffle=False, first=1000),
    }
    done = train(trainer, module, data, args.what)
    report.finish(done.pop("digests"), **done)
    return end_group()


if __name__ == "__main__":
    group = main()  # let go of after the model: see plain_ddp.py
