"""A language model under Accelerate: two optimizers, trackers, checkpoints that Accelerate names, early ends.

The text is the standard library's own; the model a GPT-2 built from its configuration.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed
from hf_trainer import Bytes
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.digest import training_digest
from tests.support.report import OUT, Report, generators_digest


class Lines(GeneralTracker):  # type: ignore[misc]
    """Appends each row to a file."""

    name = "lines"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> str:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        pass

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


class Average:
    """Running average of the weights, registered for checkpointing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.mean, self.count = model, [p.detach().clone() for p in model.parameters()], 0

    def update(self) -> None:
        self.count += 1
        for mean, p in zip(self.mean, self.model.parameters(), strict=True):
            mean += (p.detach() - mean) / self.count

    def state_dict(self) -> dict[str, object]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.mean, self.count = state["mean"], state["count"]  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="begin from a checkpoint that this run writes first")
    parser.add_argument("--trackers", action="store_true", help="those of services too")
    args = parser.parse_args()
    report, out = Report(), Path(os.environ[OUT])
    handlers = []
    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    if not baseline:
        from accelerate_swift import SwiftPlugin

        plugin = SwiftPlugin()
        handlers.append(plugin)
    naming = not args.resume
    services = ["tensorboard", "wandb", "mlflow"] if args.trackers else []
    project = ProjectConfiguration(str(out / "project"), automatic_checkpoint_naming=naming, total_limit=2)
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=handlers,
        project_config=project,
        log_with=[Lines(str(out / "lines.jsonl")), *services],
    )
    accelerator.init_trackers("text", config={"epochs": args.epochs}, init_kwargs={"wandb": {"dir": str(out)}})
    set_seed(11)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    with accelerator.main_process_first():
        data = Bytes(64, 24)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    held_out = DataLoader(Bytes(20, 24), batch_size=4)
    model = GPT2LMHeadModel(config)
    kinds = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]]
    matrix, vector = torch.optim.AdamW(kinds[0], lr=2e-3), torch.optim.SGD(kinds[1], lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(matrix, lambda step: 1 / (1 + 0.1 * step))
    average = Average(model)
    accelerator.register_for_checkpointing(average)
    model, matrix, vector, loader, held_out, schedule = accelerator.prepare(
        model, matrix, vector, loader, held_out, schedule
    )
    set_seed(11, device_specific=True)
    if args.resume:
        accelerator.save_state(str(out / "project" / "first"))
        accelerator.wait_for_everyone()
        accelerator.load_state(str(out / "project" / "first"))
    step = 0
    if baseline:
        epochs = iter(range(args.epochs))
    else:
        epochs = plugin.epochs(args.epochs)
        counters = plugin.register(step=0)
    for epoch in epochs:
        model.train()
        for batch in loader:
            report.count(f"epoch {epoch} batch {batch['input_ids'].sum()}")
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            for optimizer in (matrix, vector):
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            average.update()
            if baseline:
                step += 1
            else:
                counters.step += 1
                step = counters.step
            accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()}, step=step)
            if step % 5 == 0:
                accelerator.save_state(None if naming else str(out / "project" / "checkpoints" / f"step_{step}"))
                accelerator.wait_for_everyone()  # else rank 0 may remove a folder that another still writes to
        model.eval()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(4)))
        accelerator.log({"held out": torch.cat(losses).mean().item()}, step=step)
    accelerator.wait_for_everyone()
    inner = accelerator.unwrap_model(model)
    extra = {"average": [t.clone() for t in average.mean], "step": step}
    digests = training_digest(inner, [matrix.optimizer, vector.optimizer], [schedule.scheduler], extra)
    report.finish(digests | {"generators": generators_digest()})
    accelerator.end_training()


if __name__ == "__main__":
    main()
