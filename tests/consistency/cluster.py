"""A job without processes: workers in their phases, a launcher with its ledger, and failures at any moment.

What decides is the product's own: the ledger, :func:`heard` and :func:`transition`, :func:`decide`, :func:`admit` and
:func:`choose_cut`. Threads are generators: each yields a condition that it waits for, or the name of a place where
it may be interrupted, or its worker failed. A seed chooses who continues, so a seed repeats a run.
"""

from __future__ import annotations

import random

from cluster_worker import Failure, Gathered, Store, Stuck, Worker

from shared_core.launcher.ledger import Ledger
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.generation import Cause, CauseKind, Entry, EntryKind, generation_key
from shared_core.protocol.members import members_text
from shared_core.protocol.plan import Plan
from shared_core.protocol.worker_phase import WorkerEvent, WorkerPhase


class Job:
    """A simulated job.

    Args:
        rng: chooses who continues; None: all in turn.
        world: number of ranks.
        steps: that the program makes.
        on_failure: of the job.
        failures: at named places.
        chance: of a failure at every move.
        most: random failures.
        replicas: of each pipeline stage; 0: all ranks train the same.
    """

    def __init__(
        self,
        rng: random.Random | None,
        world: int,
        steps: int,
        on_failure: str = "replace",
        failures: list[Failure] | None = None,
        chance: float = 0.0,
        most: int = 0,
        replicas: int = 0,
    ) -> None:
        self.rng, self.ranks, self.steps, self.on_failure = rng, range(world), steps, on_failure
        self.survivor_groups = on_failure == "reroute"
        self.pending, self.chance, self.most, self.replicas = list(failures or ()), chance, most, replicas
        self.store, self.lines = Store(), list[str]()
        self.ledger = Ledger(self.store, "", world)
        self.publishers: list[list[StepBoundary]] = [[] for _ in self.ranks]
        self.plans: dict[str, Plan] = {}
        self.issued: dict[int, dict[int, int]] = {}
        self.meetings: dict[tuple[int, int, frozenset[int]], Gathered] = {}
        self.live = [Worker(self, rank, 0, 0) for rank in self.ranks]
        self.doomed: list[Worker] = []
        #: What has happened in which phase.
        self.rows: set[tuple[WorkerPhase, WorkerEvent]] = set()
        self.count = 0

    # -- the launcher ------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        self.lines.append(line)

    def entry(self, generation: int) -> Entry:
        return Entry.from_json(self.store.get(generation_key(generation)), generation, len(self.ranks))

    def append(self, entry: Entry) -> Entry | None:
        written = self.ledger.append(lambda: entry)
        if written is not None:
            what = "".join(f", rank {c.who} {c.kind.value}" for c in written.causes)
            what += f", absent {sorted(written.absent)}" if written.absent else ""
            what += f", stay {list(written.stay)}" if written.kind is EntryKind.DRAIN else ""
            what += f", {written.reason}" if written.reason else ""
            self.say(f"launcher: entry {written.generation}: {written.kind.value}{what}")
        return written

    def lose(self, failed: list[Worker], how: str = "killed") -> None:
        """The launcher notices that workers fail, and acts as the product's does."""
        if self.ledger.over is not None:
            return
        kinds = {"killed": CauseKind.DIED, "divergent": CauseKind.DIVERGENT, "taken": CauseKind.MACHINE}
        entry = Entry(causes=tuple(Cause(kinds[how], how, worker.rank) for worker in failed), detected=1.0)
        for worker in failed:
            self.store.values.pop(f"done/{worker.rank}", None)
        ranks = {worker.rank for worker in failed}
        stay = sorted(self.workers.keys() - ranks) if self.on_failure == "shrink" else []
        entry = entry.while_changing(stay, self.ledger.change)
        if how != "taken":
            self.live = [worker for worker in self.live if worker not in failed]
        written = self.append(entry)
        assert written is not None
        if (
            not self.workers.keys() - ranks
            or (written.kind is EntryKind.DRAIN and not written.stay)
            or len(written.absent or ()) == len(self.ranks)
        ):
            self.restart("all workers failed")
        elif written.kind is not EntryKind.DRAIN:
            for worker in failed:
                self.replacement(worker.rank)

    def replacement(self, rank: int) -> None:
        self.live.append(Worker(self, rank, self.ledger.incarnations[rank], self.ledger.generation))

    def exit(self, worker: Worker) -> None:
        """A worker ends itself."""
        if worker in self.live:
            self.live.remove(worker)
            if worker.incarnation == self.ledger.incarnations[worker.rank]:
                self.lose([worker])

    def restart(self, reason: str) -> None:
        self.append(Entry(kind=EntryKind.RESTART, reason=reason))

    def handed(self, generation: int, boundary: int) -> None:
        if self.ledger.generation == generation and self.ledger.change is not None:
            self.append(
                Entry(
                    kind=EntryKind.RESIZE, workers=len(self.ledger.change.stay), reason=f"from step boundary {boundary}"
                )
            )

    def change(self) -> None:
        """The number of workers is to change: a further machine has come, or a replacement is late."""
        assert self.rng is not None
        replacements = [worker for worker in self.workers.values() if worker.incarnation]
        late = self.rng.choice(replacements) if self.on_failure == "replace" and replacements else None
        self.doomed = [late] if late is not None else []
        stay = [rank for rank in self.workers if late is None or rank != late.rank]
        self.append(Entry(detected=1.0).while_changing(sorted(stay), None))

    def declined(self, generation: int, reason: str) -> None:
        """The number of workers cannot change: failed ones are replaced after all."""
        if self.ledger.generation == generation and self.ledger.change is not None:
            self.end_late()
            self.append(Entry(detected=1.0, reason=reason))
            for rank in sorted(set(self.ranks) - set(self.workers)):
                self.replacement(rank)

    # -- what the ranks share ----------------------------------------------------------------------

    @property
    def workers(self) -> dict[int, Worker]:
        return {w.rank: w for w in self.live if w.incarnation == self.ledger.incarnations[w.rank]}

    def agree(self, what: str, plan: Plan) -> None:
        """All that install a generation, or a round of one, do it by one plan."""
        if self.plans.setdefault(what, plan) != plan:
            raise Stuck(f"{what} is installed by two plans")

    def publish(self, worker: Worker) -> None:
        groups = {"world": worker.issued}
        alike = [r for r in self.ranks if self.replicas and r // self.replicas == worker.rank // self.replicas]
        members = {"world": members_text(self.ranks)}
        boundary = StepBoundary(worker.version + 1, worker.version, 0, "batch", groups, members=members, replicas=alike)
        worker.publisher = [*(each for each in worker.publisher if each.index < boundary.index), boundary][-2:]
        if worker.incarnation == self.ledger.incarnations[worker.rank]:
            self.publishers[worker.rank] = worker.publisher

    def complete(self, worker: Worker, step: int) -> bool:
        """Whether the step's collective is finished: all that are connected with the worker have issued it."""
        if worker.connected is None:
            return False
        here = self.issued[worker.connected]
        return all(here.get(rank, 0) > step for rank in self.ranks)

    def survivor_group(self, worker: Worker, generation: int, absent: frozenset[int]) -> Gathered:
        present = frozenset(self.ranks) - absent
        meeting = self.meetings.setdefault((generation, worker.version, absent), Gathered(present))
        meeting.here[worker.rank] = worker
        if meeting.here.keys() == present and all(each in self.live for each in meeting.here.values()):
            incarnations = self.entry(generation).incarnations if generation else ()
            asks_to_join = (rank for rank in absent if self.store.check([f"join_request/{rank}.{incarnations[rank]}"]))
            meeting.admits = frozenset(asks_to_join)
            meeting.over = True
            for each in meeting.here.values():
                each.version += 1
        return meeting

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until all have made their steps, or the attempt is over.

        Raises:
            Stuck: if nobody can continue.
            IllegalWorkerEvent: from ``transition``.
        """
        self.say(f"{len(self.ranks)} ranks, on_failure={self.on_failure!r}, {self.steps} steps")
        while self.ledger.over is None:
            if self.store.check([f"done/{rank}" for rank in self.ledger.present()]):
                self.append(Entry(kind=EntryKind.RELEASE))
                break
            self.count += 1
            if self.count > 20_000:
                raise Stuck("it does not end")
            ready = [
                (worker, place)
                for worker in self.live
                for place, (_, pause) in enumerate(worker.threads)
                if isinstance(pause, str) or pause()
            ]
            if not ready:
                where = {str(worker): worker.phase.value for worker in self.live}
                raise Stuck(f"nobody can continue: {where}, newest entry {self.ledger.generation}")
            worker, place = self.rng.choice(ready) if self.rng is not None else ready[self.count % len(ready)]
            self.move(worker, place)
            self.perhaps_lose()

    def move(self, worker: Worker, place: int) -> None:
        thread, _ = worker.threads[place]
        try:
            pause = next(thread)
        except StopIteration:
            worker.threads = [each for each in worker.threads if each[0] is not thread]
            return
        if worker not in self.live:
            return
        place = next(i for i, each in enumerate(worker.threads) if each[0] is thread)
        worker.threads[place] = thread, pause
        for failure in self.pending:
            if (failure.rank, failure.incarnation, failure.point) == (worker.rank, worker.incarnation, pause):
                self.pending.remove(failure)
                self.say(f"{worker}: at {failure.point!r}: {failure.how}")
                if failure.how == "changed":
                    self.append(Entry(detected=1.0).while_changing(self.ranks, None))
                    self.declined(self.ledger.generation, "the state cannot be written")
                else:
                    self.lose([worker, *(self.workers[rank] for rank in failure.also)], failure.how)
                return

    def end_late(self) -> None:
        self.live = [worker for worker in self.live if worker not in self.doomed]

    def perhaps_lose(self) -> None:
        if self.rng is not None and self.doomed and self.rng.random() < 0.1:
            self.end_late()
        if self.rng is None or self.most == 0 or self.rng.random() >= self.chance:
            return
        self.most -= 1
        if self.rng.random() < 0.2 and self.ledger.change is None and self.ledger.over is None:
            self.change()
            return
        present = list(self.workers.values())
        failed = self.rng.sample(present, min(len(present), self.rng.choice((1, 1, 1, 2))))
        self.lose(failed, self.rng.choice(("killed", "killed", "divergent", "taken")))
