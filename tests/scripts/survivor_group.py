"""A model that all ranks hold. Gradients of the share of each logical rank are summed in the order of ranks, over a
survivor group: while a rank is absent, the next one that is there computes its share too.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from beginning import begin
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shared_core.errors import SurvivorGroupBroken
from shared_core.job import Job
from shared_core.worker.recovery.survivor_groups import SurvivorGroup, WaitFor
from tests.support.copies import hold
from tests.support.digest import training_digest
from tests.support.report import Report

_AGAIN = 1000


class Trainer:
    """The model and what a step does.

    Attributes:
        last: what was summed in the last update: gradients and loss, for whoever did not get it.
    """

    def __init__(self, report: Report, admitted_at: int, last_at: int, waits: WaitFor) -> None:
        torch.manual_seed(0)
        self.report, self.waits = report, waits
        self.admitted_at, self.last_at = admitted_at, max(admitted_at, last_at)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.loop = {"step": 0, "loss_sum": 0.0}
        self.last = torch.zeros(0)

    def share(self, rank: int) -> torch.Tensor:
        """Gradients and loss of the share of a logical rank."""
        with torch.random.fork_rng():
            torch.manual_seed(1000 * int(self.loop["step"]) + rank)
            x = torch.randn(8, 16)
            loss = (self.net(x) - x[:, :4].sin()).pow(2).mean()
            gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        return torch.cat([parameters_to_vector(gradients), loss.detach().reshape(1)])

    def update(self, shares: list[torch.Tensor]) -> None:
        """Sum the shares in their order, and step."""
        total = shares[0].clone()
        for each in shares[1:]:
            total += each
        self.last = total
        gradients = [torch.empty_like(p) for p in self.net.parameters()]
        vector_to_parameters(total[:-1], gradients)
        for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loop["loss_sum"] += total[-1].item()
        self.loop["step"] += 1

    def plain_step(self) -> None:
        """Over a plain group."""
        mine = self.share(dist.get_rank())
        shares = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, mine)
        self.update(shares)

    def settle(self, job: Job, survivor_group: SurvivorGroup) -> bool:
        """Whether all have done the same updates and nobody asks to join; if not, what there is to do is done."""
        admitted_at = self.last_at if len(job.survivor_groups.absent) == 1 else self.admitted_at
        asks = (
            job.rank == survivor_group.ranks[0]
            and bool(job.survivor_groups.absent)
            and self.loop["step"] >= admitted_at
        )
        joining_ranks = job.survivor_groups.joining_ranks(wait=self.waits) if asks else ()
        seen = survivor_group.exchange({"step": self.loop["step"], "joining": list(joining_ranks)})
        steps = {rank: each["step"] for rank, each in seen.items()}
        newest = max(steps.values())
        behind = [rank for rank in survivor_group.ranks if steps[rank] < newest]
        if behind:
            source = next(rank for rank in survivor_group.ranks if steps[rank] == newest)
            if job.rank == source:
                for rank in behind:
                    survivor_group.send(self.last, rank, _AGAIN)
            elif job.rank in behind:
                total = torch.empty(sum(p.numel() for p in self.net.parameters()) + 1)
                survivor_group.recv(total, source, _AGAIN).wait()
                self.update([total])
            return False
        if ready := seen[survivor_group.ranks[0]]["joining"]:
            job.survivor_groups.admit(ready)
            return False
        return True

    def step(self, job: Job) -> None:
        """Over survivor groups, of whoever is there."""
        step = self.loop["step"]
        while self.loop["step"] == step:
            try:
                survivor_group = job.survivor_groups.survivor_group()
                if self.settle(job, survivor_group):
                    self.shared_step(job, survivor_group)
            except SurvivorGroupBroken:
                continue

    def shared_step(self, job: Job, survivor_group: SurvivorGroup) -> None:
        """One attempt at a step."""
        world = range(job.world_size)
        hosts = {d: next(r for r in (*world[d:], *world) if r in survivor_group.ranks) for d in world}
        shares: dict[int, torch.Tensor] = {}
        works = []
        for d, host in hosts.items():
            if host != job.rank:
                shares[d] = torch.empty(sum(p.numel() for p in self.net.parameters()) + 1)
                works.append(survivor_group.recv(shares[d], host, d))
        for d, host in hosts.items():
            if host == job.rank:
                shares[d] = self.share(d)
                for other in survivor_group.ranks:
                    if other != job.rank:
                        survivor_group.send(shares[d], other, d)
        while works:
            arrived = [work for work in works if work.done()] or works[:1]
            for work in arrived:
                work.wait()
                works.remove(work)
        self.update([shares[d] for d in world])

    def end(self, job: Job) -> None:
        """Return when all have done all updates."""
        while True:
            try:
                survivor_group = job.survivor_groups.survivor_group()
                if survivor_group.finished or self.settle(job, survivor_group):
                    return
            except SurvivorGroupBroken:
                continue


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--admitted-at", type=int, default=8, help="from this step on others wait for replacements")
    parser.add_argument("--last-at", type=int, default=0, help="the same, where only one is absent")
    parser.add_argument(
        "--hold", type=int, default=-1, help="a rank: its replacements wait for another one to be admitted"
    )
    parser.add_argument("--wait-for", default="all", help="all that are absent, or one")
    parser.add_argument("--collective-at", type=int, default=-1, help="a step with a collective of all ranks")
    parser.add_argument("--damage", action="store_true", help="memory of the first replacement is faulty")
    args = parser.parse_args()
    report = Report()
    job = begin()
    trainer = Trainer(report, args.admitted_at, args.last_at, WaitFor(args.wait_for))
    if job is not None:
        job.attach([trainer.net], [trainer.optimizer], replicas=range(job.world_size))
        job.register("loop", lambda: dict(trainer.loop), trainer.loop.update)
        dist.barrier()  # a replacement's is answered
        if not job.joining:
            job.notes.keep("plan", "who", job.rank)
    hold(args.hold)
    while trainer.loop["step"] < args.steps:
        if job is None:
            trainer.plain_step()
            continue
        if job.step_boundary() and args.damage and job.env.incarnation == 1:
            next(trainer.net.parameters()).data[0] += 1
        if trainer.loop["step"] == args.collective_at:
            dist.barrier()
        trainer.step(job)
    extra = {}
    if job is not None:
        trainer.end(job)
        extra = {
            "rejoined": job.position.rejoined,
            "plan": job.notes.kept("plan"),
            "absent": sorted(job.survivor_groups.absent),
        }
    digests = training_digest(trainer.net, [trainer.optimizer], [], {"loss": trainer.loop["loss_sum"]})
    report.finish(digests, **extra)
    group = dist.group.WORLD
    dist.destroy_process_group()
    del group


if __name__ == "__main__":
    main()
