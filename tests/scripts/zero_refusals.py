"""Says for each DeepSpeed engine without a pipeline that cannot be recovered why it is refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import shared_core
from shared_core.errors import Unsupported
from tests.support.report import Report

PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
    "steps_per_print": None,
}
SECTION: dict[str, Any] = {"swift_recovery": {}}
#: What is changed in the configuration.
CONFIGS: dict[str, dict[str, Any]] = {
    "offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "offload_parameters": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "evaluates": {"zero_optimization": {"stage": 0}, "optimizer": None},
    # Last: DeepSpeed remembers it for all engines of the process.
    "autocast_fp16_0": {
        "zero_optimization": {"stage": 0},
        "torch_autocast": {"enabled": True, "dtype": "float16"},
    },
    "autocast_fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}


class Own(torch.optim.SGD):
    """An optimizer of the script's own."""


def make(changed: dict[str, Any], **more: Any) -> Any:
    config = copy.deepcopy(PLAIN) | SECTION | changed
    if config["optimizer"] is None:
        del config["optimizer"]
    return deepspeed.initialize(model=nn.Linear(4, 2), config=config, **more)[0]


def not_torchs() -> Any:
    model = nn.Linear(4, 2)
    config = PLAIN | SECTION | {"zero_allow_untested_optimizer": True}
    del config["optimizer"]
    return deepspeed.initialize(model=model, config=config, optimizer=Own(model.parameters(), 0.1))[0]


def plus_plus() -> Any:
    """Its kernels need a GPU: an engine that is told so later."""
    engine = make({})
    engine._config.zero_config.zero_hpz_partition_size = 2
    return engine


def without_section() -> Any:
    return deepspeed.initialize(model=nn.Linear(4, 2), config=copy.deepcopy(PLAIN))[0]


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Unsupported as error:
        return str(error)
    return "not refused"


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()


def main() -> None:
    report = Report()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    fine = make({})
    refused = {"not_attached": said(lambda: step(fine))}
    refused["another_model"] = said(lambda: shared_core.attach(fine, nn.Linear(2, 2)))
    refused["nothing"] = said(lambda: shared_core.attach(fine, fine.optimizer, fine.module))
    for each in (not_torchs, plus_plus, without_section):
        refused[each.__name__] = said(lambda make=each: shared_core.attach(make()))  # type: ignore[misc]
    for name, changed in CONFIGS.items():
        refused[name] = said(lambda c=changed: shared_core.attach(make(c)))  # type: ignore[misc]
    report.finish({}, refused=refused)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
