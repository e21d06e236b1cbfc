"""``transformers.Trainer`` on the text of the standard library: a GPT-2 built from its configuration."""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from standstill import stand_still
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from tests.support.digest import training_digest
from tests.support.report import OUT, Report, generators_digest


class Bytes(Dataset):  # type: ignore[type-arg]
    """Windows of a source file."""

    def __init__(self, count: int, width: int = 24) -> None:
        raw = Path(argparse.__file__).read_bytes()[: width * count]
        self.windows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long().view(count, width)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same windows, one after the other, of a number that nobody knows."""

    def __init__(self, windows: Bytes) -> None:
        self.windows = windows

    def __iter__(self) -> Any:
        return (self.windows[index] for index in range(len(self.windows)))


class Own:
    """A Trainer of the user's own: it counts, and its loader is not prepared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokens, self.losses = 0, {"train": [], "eval": []}

    def get_train_dataloader(self: Any) -> Any:
        sampler = DistributedSampler(self.train_dataset, self.args.world_size, self.args.process_index, shuffle=True)
        return DataLoader(self.train_dataset, batch_size=4, sampler=sampler, collate_fn=self.data_collator)

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        self.tokens += inputs["input_ids"].numel()
        self.losses["train" if model.training else "eval"].append(loss.item())
        return (loss, outputs) if return_outputs else loss

    def log(self: Any, logs: Any, *args: Any) -> None:
        for values in self.losses.values():
            logs["own"] = sum(values) + self.tokens
            values.clear()
        super().log(logs, *args)  # type: ignore[misc]


class Counting(TrainerCallback):  # type: ignore[misc]
    """Counts steps, and how often the loss that was logged fell; from the fourth step on gradients are clipped more."""

    def __init__(self, report: Report) -> None:
        self.report, self.falls, self.last = report, 0, float("inf")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stand_still(state.global_step)
        self.report.count(f"step {state.global_step}")
        if state.global_step == 4:
            args.max_grad_norm = 0.1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.falls += float(logs["loss"]) < self.last
            self.last = float(logs["loss"])


class Average(TrainerCallback):  # type: ignore[misc]
    """Keeps an average of the weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.model.update_parameters(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--average", action="store_true")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--another", action="store_true", help="a second Trainer after the first")
    parser.add_argument("--eval-steps", type=int, help="evaluate in the middle of an epoch")
    parser.add_argument("--stream", choices=("dealt", "divided"))
    parser.add_argument("--own", action="store_true", help="a Trainer of the user's own")
    parser.add_argument("--workers", type=int, default=0, help="of loaders, which persist")
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--resume")
    parser.add_argument("--best", action="store_true", help="load the best model in the end, and evaluate it")
    parser.add_argument("--evaluate-first", action="store_true")
    parser.add_argument("--compile", help="a backend of torch.compile")
    parser.add_argument("--checkpoints")
    parser.add_argument("--files")
    parser.add_argument("--trackers", action="store_true", help="report to services")
    args = parser.parse_args()
    report, out = Report(), Path(os.environ[OUT])
    os.environ["WANDB_DIR"] = str(out)
    kind: Any = Trainer
    if not os.environ.get("SWIFT_BASELINE"):
        from accelerate_swift import SwiftPlugin
        from accelerate_swift.trainer import SwiftTrainer

        kind = SwiftTrainer
        if args.checkpoints:
            ours = {"checkpoint.dir": args.checkpoints, "checkpoint.every_steps": 5, "checkpoint.resume": "always"}
            kind = partial(SwiftTrainer, swift=SwiftPlugin(**ours))  # before TrainingArguments
    if args.own:
        kind = type("OwnTrainer", (Own, kind), {})
    arguments = TrainingArguments(
        output_dir=args.files or str(out / "checkpoints"),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=5e-2 if args.best else 2e-3,
        lr_scheduler_type="cosine",
        max_steps=args.steps,
        eval_strategy="steps" if args.eval_steps else "epoch",
        eval_steps=args.eval_steps,
        accelerator_config={"dispatch_batches": False} if args.stream == "divided" else None,
        dataloader_num_workers=args.workers,
        dataloader_persistent_workers=args.workers > 0,
        ignore_data_skip=args.own,
        logging_steps=3,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=1,
        load_best_model_at_end=args.best,
        torch_compile=args.compile is not None,
        torch_compile_backend=args.compile,
        report_to=["tensorboard", "wandb", "mlflow"] if args.trackers else "none",
        disable_tqdm=True,
        seed=5,
        full_determinism=False,
    )
    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    counting = Counting(report)
    average = Average(model)
    callbacks = [counting, average] if args.average else [counting]
    data = Stream(Bytes(72)) if args.stream else Bytes(72)
    drawn: list[int] = []

    def collate(items: list[Any]) -> Any:
        drawn.append(int(items[0]["input_ids"].sum()))
        return default_data_collator(items)

    more = {"data_collator": collate} if args.own else {}
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=Bytes(20), callbacks=callbacks, **more)
    if args.average:
        trainer.accelerator.register_for_checkpointing(average.model)
    if args.evaluate_first:
        trainer.evaluate()
    speed = trainer.train(resume_from_checkpoint=args.resume).metrics
    ended = time.time()
    if args.best:
        trainer.evaluate()
    if args.twice:
        trainer.evaluate()
        trainer.train()
    if args.another:
        trainer = kind(model, arguments, train_dataset=Bytes(48), eval_dataset=Bytes(20), callbacks=[counting])
        trainer.train()
    history = [
        {k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in trainer.state.log_history
    ]
    extra = {"history": history, "falls": counting.falls, "step": trainer.state.global_step, "drawn": drawn}
    inner = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    digests = training_digest([inner, average.model], [trainer.optimizer.optimizer], [trainer.lr_scheduler], extra)
    began = ended - speed["train_runtime"]
    report.finish(digests | {"generators": generators_digest()}, history=history, began=began, speed=speed)


if __name__ == "__main__":
    main()
