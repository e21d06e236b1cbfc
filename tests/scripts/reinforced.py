"""Reinforcement learning: what is read depends on what training changes.

``dqn``: a stream draws from a replay buffer, all at the start of a pass or one by one, and each step of training plays
on and appends to it. ``ppo``: a generator plays with the network that is trained, and its items are what is trained on.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.support.digest import training_digest
from tests.support.report import Report, end_group, generators_digest

BASELINE = bool(os.environ.get("SWIFT_BASELINE"))
STEPS, BATCH = 12, 4


class Experience(NamedTuple):
    state: np.ndarray
    action: int
    reward: float


class Environment:
    """A point that is pushed about."""

    def __init__(self, seed: int) -> None:
        self.state, self.time = np.full(3, 0.1 * seed, np.float32), 0

    def step(self, action: int) -> tuple[np.ndarray, float]:
        self.time += 1
        push = np.asarray([action - 1, 1, -action], np.float32)
        self.state = np.tanh(self.state + 0.3 * push).astype(np.float32)
        return self.state, float(-np.square(self.state).sum())


class Buffer:
    """A replay buffer in a class of its own, as most examples have it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rows: Any = [] if kind == "list" else deque(maxlen=60)

    def append(self, row: Experience) -> None:
        self.rows.append(row if self.kind == "named" else tuple(row))

    def sample(self, count: int) -> list[Any]:
        return [self.rows[place] for place in np.random.choice(len(self.rows), count)]


class Replays(IterableDataset[Any]):
    def __init__(self, buffer: Buffer, late: bool) -> None:
        self.buffer, self.late = buffer, late

    def __iter__(self) -> Iterator[Any]:
        if self.late:
            for _ in range(STEPS * BATCH):
                yield tuple(self.buffer.sample(1)[0])
        else:
            yield from map(tuple, self.buffer.sample(STEPS * BATCH))


class Played(IterableDataset[Any]):
    def __init__(self, play: Any) -> None:
        self.play = play

    def __iter__(self) -> Iterator[Any]:
        return self.play()


class Agent(pl.LightningModule):
    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.args, self.report = args, report
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))
        self.environment: Any = None
        self.buffer = Buffer(args.buffer)

    def setup(self, stage: str) -> None:
        self.environment = Environment(self.global_rank)
        np.random.seed(7 + self.global_rank)
        random.seed(7)
        for _ in range(20):
            self.play(int(np.random.randint(3)))

    def play(self, action: int | None = None) -> Experience:
        state = self.environment.state
        if action is None:
            with torch.no_grad():
                chances = self.net(torch.from_numpy(state)).softmax(-1).double().numpy()
            action = int(np.random.choice(3, p=chances / chances.sum()))
        _, reward = self.environment.step(action)
        row = Experience(state, action, reward)
        self.buffer.append(row)
        return row

    def games(self) -> Iterator[Any]:
        for _ in range(STEPS):
            for row in [self.play() for _ in range(BATCH)]:
                yield tuple(row)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.report.count(f"batch {self.global_step}")
        if self.args.what == "dqn":
            self.play()
        state, action, reward = batch
        values = self.net(state).gather(1, action[:, None]).squeeze(1)
        return F.mse_loss(values, reward.float())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        data = Replays(self.buffer, self.args.late) if self.args.what == "dqn" else Played(self.games)
        return DataLoader(data, batch_size=BATCH)


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["dqn", "ppo"])
    parser.add_argument("--buffer", choices=["list", "deque", "named"], default="named")
    parser.add_argument("--late", action="store_true", help="draw items one by one, while training continues")
    args = parser.parse_args()
    report = Report()
    agent = Agent(args, report)
    strategy: Any = "ddp"
    if not BASELINE:
        from lightning_swift import SwiftDDPStrategy

        strategy = SwiftDDPStrategy()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(agent)
    digests = training_digest(agent, trainer.optimizers, [], {"played": agent.environment.time})
    report.finish(digests | {"generators": generators_digest()})
    return end_group() if torch.distributed.is_initialized() else None


if __name__ == "__main__":
    group = main()  # let go of after the model
