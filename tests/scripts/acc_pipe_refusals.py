"""What users of the pipeline plugin do wrong: prints what each mistake is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, DummyOptim
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_swift import SwiftDeepSpeedPipelinePlugin, SwiftPlugin
from shared_core.errors import SwiftError
from tests.support.report import Report


def prepared(
    *, accelerator: dict[str, Any] | None = None, module: nn.Module | None = None, batch: int = 4, **plugin: Any
) -> tuple[Accelerator, Any, Any]:
    """A prepared pipeline of one stage."""
    AcceleratorState._reset_state()
    made = SwiftDeepSpeedPipelinePlugin(**{"num_stages": 1, "micro_batches": 2, **plugin})
    accelerate = Accelerator(deepspeed_plugin=made, **(accelerator or {}))
    net = module or made.pipeline_module([nn.Linear(4, 4)], nn.MSELoss())
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=batch)
    stock = "optimizer" in made.deepspeed_config
    optimizer = DummyOptim(net.parameters()) if stock else torch.optim.SGD(net.parameters(), lr=0.1)
    model, _, loader = accelerate.prepare(net, optimizer, loader)
    return accelerate, model, loader


def trained(**plugin: Any) -> None:
    """Evaluation in batches of another size leaves training as it is."""
    accelerate, model, _ = prepared(**plugin)
    losses = []
    for rows in (4, 2, 4):
        model.train(rows == 4)
        accelerate.backward(loss := model((torch.ones(rows, 4), torch.zeros(rows, 4))))
        losses.append(loss.item())
    assert loss.ndim == 0 and losses[0] - losses[1] > 1e-3 > abs(losses[1] - losses[2]), losses


def called(batch: Any, **plugin: Any) -> None:
    _, model, _ = prepared(**plugin)
    model(batch)


def clipped(norm: float, **plugin: Any) -> None:
    accelerate, model, _ = prepared(**plugin)
    model((torch.ones(4, 4), torch.zeros(4, 4)))
    accelerate.clip_grad_norm_(model.parameters(), norm)


ADAM = {"type": "Adam", "params": {"torch_adam": True, "lr": 0.01}}
MISTAKES: dict[str, Callable[[], Any]] = {
    "stages": lambda: prepared(num_stages=2),
    "zero": lambda: prepared(zero_stage=2),
    "precision": lambda: prepared(accelerator={"mixed_precision": "fp16"}),
    "bf16": lambda: prepared(
        accelerator={"mixed_precision": "bf16"}, hf_ds_config={"bf16": {"enabled": False}, "gradient_clipping": 1.0}
    ),
    "bf16 saved": lambda: prepared(accelerator={"mixed_precision": "bf16"})[0].save_state("never"),
    "precision of the configuration": lambda: prepared(hf_ds_config={"fp16": {"enabled": True}}),
    "two plugins": lambda: prepared(accelerator={"kwargs_handlers": [SwiftPlugin()]}),
    "accumulation": lambda: prepared(accelerator={"gradient_accumulation_steps": 2}),
    "dispatch": lambda: prepared(accelerator={"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}),
    "model": lambda: prepared(module=nn.Linear(4, 4)),
    "batch size": lambda: prepared(batch=3),
    "rows": lambda: called((torch.ones(3, 4), torch.ones(3, 4))),
    "a tensor": lambda: called(torch.ones(4, 4)),
    "no rows": lambda: called((torch.ones(4, 4), 1.0)),
    "clipping": lambda: clipped(0.5),
    "nothing but an optimizer": lambda: trained(hf_ds_config={"optimizer": ADAM}),
    "nothing": lambda: clipped(1.0),
    "nothing but a configuration": lambda: clipped(0.5, hf_ds_config={"gradient_clipping": 0.5}),
    "too early": lambda: SwiftDeepSpeedPipelinePlugin(1, 2).pipeline_module([], None),
}


def main() -> None:
    report, told = Report(), {}
    for name, mistake in MISTAKES.items():
        try:
            mistake()
            told[name] = ""
        except SwiftError as error:
            told[name] = f"{type(error).__name__}: {error}"
    report.finish({}, told=told)


if __name__ == "__main__":
    main()
