"""A small Lightning job for each feature: ``lit.py --feature NAME``.

With ``SWIFT_BASELINE`` it uses the stock strategy; otherwise ``--how`` says how the product gets in.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from features import FEATURES, Feature

from tests.support.jobs.common import Counting, final_digests, strategy_and_callbacks
from tests.support.report import Report

warnings.filterwarnings("ignore")
OUT = os.environ["SWIFT_TEST_OUT"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--feature", required=True, choices=sorted(FEATURES))
    parser.add_argument("--how", default="strategy", choices=["strategy", "callback", "env", "seeded"])
    args = parser.parse_args()
    feature: Feature = FEATURES[args.feature]
    report = Report()
    pl.seed_everything(7, verbose=False)
    torch.manual_seed(7)
    module, data = feature.module(), feature.data()
    strategy, callbacks = strategy_and_callbacks(args.how, feature.strategy)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        callbacks=[*feature.callbacks(), *callbacks, Counting(report)],
        default_root_dir=OUT,
        **{"logger": False, "enable_checkpointing": False} | feature.trainer(),
    )
    extra: dict[str, Any] = {}
    digests = feature.run(trainer, module, data, final_digests, extra)
    report.finish(digests, **extra)


if __name__ == "__main__":
    main()
