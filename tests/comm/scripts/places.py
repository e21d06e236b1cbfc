"""Ranks that call the same operation from different places of the program: by mistake, or because they mean to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.report import Report, end_group

INCARNATION = int(os.environ.get("SWIFT_RECOVERY_INCARNATION", "0"))


def blind() -> None:
    """Nobody compares places."""
    from shared_core.worker.comm.places import GroupPlaces

    blinded: Any = GroupPlaces
    blinded.elsewhere = blinded.sent_elsewhere = lambda *args, **named: None


class Batches:
    """Does not show how many there are: a replacement would notice before any collective that they are others."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((3, 4), 1.0 + number) for number in range(self._count))


class Program:
    """The ways in which ranks divide a job; each gives what it has seen."""

    def __init__(self, *, alike: bool) -> None:
        self.rank = dist.get_rank()
        self.net = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.job = shared_core.attach(*((self.net, self.optimizer) if alike else ()))
        if not alike:  # ranks train apart for a while
            self.job.register(self.net, self.optimizer)
        self.seen = self.job.register(sum=0.0)

    def batches(self, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        yield from self.job.steps(Batches(count))

    def step(self, batch: torch.Tensor, *, average: bool = True) -> None:
        """One update of all ranks, or one of this rank alone."""
        self.optimizer.zero_grad()
        self.net(batch * (1 + 0.1 * self.rank)).square().mean().backward()
        if average:
            self.average([each.grad for each in self.net.parameters() if each.grad is not None])
        self.optimizer.step()
        self.seen.sum += self.net.bias.item()
        with open(f"steps{self.rank}.txt", "a") as file:
            print(INCARNATION, file=file)

    def average(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()

    # -- mistakes: as many batches in all, in other epochs ----------------------------------------------

    def counts(self, other: bool) -> None:
        for epoch in self.job.epochs(2):
            limit = (4, 4)[epoch] if other else (3, 5)[epoch]
            for number, batch in self.batches(9):
                self.step(batch)
                if number == limit - 1:
                    break

    def by_rank(self) -> None:
        self.counts(self.rank == 1)

    def by_replacement(self) -> None:
        self.counts(INCARNATION > 0)

    def skips(self) -> None:
        """A replacement leaves out a batch, and makes another one."""
        for _ in self.job.epochs(2):
            for number, batch in self.batches(5 + (INCARNATION > 0)):
                if not (INCARNATION and number == 3):
                    self.step(batch)

    def receives(self) -> None:
        """A replacement of rank 1 leaves out the message of a batch."""
        for _ in self.job.epochs(2):
            for number, batch in self.batches(5 + (INCARNATION > 0)):
                if self.rank == 0:
                    dist.send(batch, 1)
                elif not (INCARNATION and number == 3):
                    dist.recv(batch, 0)
                    self.seen.sum += float(batch.sum())

    def plain_counter(self) -> None:
        """A counter in a plain variable, which a break depends on."""
        for _ in self.job.epochs(5):
            count = 0
            for _, batch in self.batches(12):
                self.step(batch)
                count += 1
                if count == 9:
                    break

    # -- no mistakes ----------------------------------------------------------------------------------------

    def local(self) -> None:
        """Each makes as many batches as it likes; all average after the pass, or in its last batch."""
        for epoch in self.job.epochs(4):
            count = 3 + 2 * self.rank
            for number, batch in self.batches(count):
                self.step(batch, average=False)
                if epoch % 2 and number == count - 1:
                    self.average([each.data for each in self.net.parameters()])
            if epoch % 2 == 0:
                self.average([each.data for each in self.net.parameters()])

    def cycles(self) -> None:
        """Each begins its own data again when it has come to their end."""
        for _ in self.job.epochs(2):
            made = 0
            while made < 8:
                for _, batch in self.batches(3 + self.rank):
                    self.step(batch)
                    made += 1
                    if made == 8:
                        break

    def main_alone(self) -> None:
        """Rank 0 makes passes of its own."""
        for _ in self.job.epochs(3):
            for _, batch in self.batches(4):
                self.step(batch)
            if self.rank == 0:
                for _, batch in self.batches(3):
                    self.seen.sum += float(batch.sum())
            dist.barrier()

    def late(self) -> None:
        """Rank 1 gets each message one batch later than rank 0 has sent it."""
        for _ in self.job.epochs(3):
            sent = []  # gloo gives up a message whose work nobody holds
            for number, batch in self.batches(5):
                if self.rank == 0:
                    sent.append(dist.isend(batch, 1))
                elif number:
                    dist.recv(batch, 0)
                self.step(batch)
            if self.rank == 1:
                dist.recv(torch.empty(3, 4), 0)
            for work in sent:
                work.wait()


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("way")
    parser.add_argument("--blind", action="store_true")
    args = parser.parse_args()
    if args.blind:
        blind()
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    program = Program(alike=args.way != "local")
    getattr(program, args.way)()
    values = [*program.net.parameters(), torch.tensor(program.seen.sum)]
    report.finish({"state": " ".join(f"{value.double().sum().item():.17g}" for value in values)})
    return end_group()


if __name__ == "__main__":
    group = main()
