"""A DeepSpeed pipeline that knows nothing of this product: all is in the configuration file named by an argument."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from tests.support.digest import training_digest
from tests.support.report import Report, generators_digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--add", nargs="?", const=0, type=int, help="add the section at run time, with this seed")
    args = parser.parse_args()
    report = Report()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if os.environ.get("SWIFT_BASELINE"):  # for inference only, and compiled for half a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    layers = [
        LayerSpec(nn.Linear, 16, 16),
        LayerSpec(nn.Dropout, 0.1),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, 16, 16),
    ]
    net = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = args.deepspeed_config
    if args.add is not None and not os.environ.get("SWIFT_BASELINE"):
        name = "_".join(("swift", "recovery"))  # nowhere in the source
        config = json.loads(open(config).read()) | {name: {"seed": args.add} if args.add else {}}
    engine, optimizer, _, _ = deepspeed.initialize(model=net, config=config)
    torch.manual_seed(dist.get_rank())
    random.seed(0)
    np.random.seed(0)
    data = iter(lambda: (torch.randn(4, 16), torch.ones(4, 16)), None)
    losses = []
    for step in range(8):
        report.count(f"batch {step}")
        losses.append(float(engine.train_batch(data)))
    named = json.loads(open(args.deepspeed_config).read())
    digests = training_digest(net, [optimizer], [], {"losses": losses})
    report.finish(
        {**digests, "generators": generators_digest()},
        engine=type(engine).__name__,
        section=named.get("swift_recovery"),
    )


if __name__ == "__main__":
    main()
