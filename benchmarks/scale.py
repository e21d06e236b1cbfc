"""How the agreement on a generation grows with the number of workers: from a failure to the moment when all may
connect.

The store, the ledger and its entries are the launcher's. Each worker follows the ledger, says where it stands, decides
and hears the plan with the product's own code. What is left out is torch: workers are threads of some processes, train
nothing and connect to nobody. The frontiers are those of a data-parallel job with groups of eight beside the default
one.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.common import QUICK, ROOT, Row, arguments, at_most, begin, finish, say
from shared_core.config import SwiftConfig
from shared_core.launcher.attempt import LOOPBACK, Attempt
from shared_core.launcher.control_socket import ControlSocket
from shared_core.protocol.failure_policy import Death
from shared_core.protocol.frontier import Frontier, GroupFrontier, StepBoundary
from shared_core.protocol.generation import Entry, generation_key, plan_key
from shared_core.protocol.members import members_text
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system.jobdir import AGENT
from shared_core.waiting import FOREVER_S
from shared_core.worker.link import connect_store
from shared_core.worker.recovery.agreement import Agreement
from shared_core.worker.recovery.context import Lifecycle

SIZES = (8, 32, 128, 512, 1000)
#: Processes among which the workers are divided.
PROCESSES = 8
#: Size of the smaller groups, and collectives that each group has in its log.
GROUP, LOGGED = 8, 20
#: At most so long, in seconds, at 1,000 workers on two cores.
TARGET_S = 1.0
AGREED = "from the failure until all may connect"


class SimulatedFrontiers:
    """Where a simulated rank stands: in the middle of a batch. As in
    :mod:`shared_core.worker.recovery.agreement`.
    """

    def __init__(self, env: WorkerEnv) -> None:
        self._env = env
        first = env.rank // GROUP * GROUP
        near = range(first, min(first + GROUP, env.world_size))
        self._members = {"0": members_text(range(env.world_size)), f"near{first}": members_text(near)}

    def front(self, boundaries: Sequence[StepBoundary] | None = None) -> Frontier:
        """Of a survivor, or of a replacement whose failed worker has passed two step boundaries."""
        env = self._env
        if env.incarnation:
            passed = tuple(
                StepBoundary(
                    100 + at,
                    99 + at,
                    0,
                    "batch",
                    dict.fromkeys(self._members, 1000 + at * LOGGED),
                    {},
                    {},
                    self._members,
                )
                for at in range(2)
            )
            return Frontier(env.rank, env.incarnation, True, 0, passed)
        next_, log = 1000 + LOGGED + 5, list(range(1000, 1000 + LOGGED + 5))
        groups = {name: GroupFrontier(ranks, next_, [next_], log, []) for name, ranks in self._members.items()}
        return Frontier(env.rank, 0, False, 100, (), groups)

    def wait_limit(self, generation: int) -> tuple[float, str]:
        """For ever, nearly."""
        return 100.0, "a fixed limit"


def worker(rank: int, incarnation: int, world_size: int, folder: Path, heard: Any) -> None:
    """One thread: follow the ledger to generation 1, and say when this rank may connect."""
    env = WorkerEnv(rank, world_size, incarnation, incarnation, 0, folder, str(folder / AGENT), None, SwiftConfig())
    lock = threading.RLock()
    groups: Any = SimpleNamespace(
        lock=lock,
        changed=threading.Condition(lock),
        generation=incarnation - 1,
        latest=0,
        absent=frozenset(),
        starting=False,
    )
    life = Lifecycle(env, groups)
    frontiers: Any = SimulatedFrontiers(env)
    context: Any = SimpleNamespace(env=env, runtime=groups, lifecycle=life)
    agreement = Agreement(context, frontiers)
    blocks = connect_store(FOREVER_S, env).below(env.prefix)
    store = connect_store(FOREVER_S, env).below(env.prefix) if incarnation else blocks
    if not incarnation:
        agreement.hear(store, 0)
        heard.put((0.0, os.getpid(), time.process_time()))
    life.hear(Entry.from_json(blocks.get(generation_key(1)), 1, world_size))
    if not incarnation:
        agreement.post(store, 1)
        agreement.hear(blocks, 1)
    else:
        threading.Thread(target=agreement.hear, args=(blocks, 1), daemon=True).start()
        agreement.post(store, 1)
    plan = agreement.plan(store, 1)
    if incarnation:
        agreement.say_ready(store, 1, plan.replacements)
    agreement.go(store, 1, plan.replacements)
    heard.put((time.time(), os.getpid(), time.process_time()))


def process(ranks: Sequence[int], world_size: int, folders: Any, heard: Any, over: Any) -> None:
    """Simulated workers of some ranks. The replacement is a thread of the failed worker's process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = folders.get()
    threads = [
        threading.Thread(target=worker, args=(rank, 0, world_size, folder, heard), daemon=True)
        for rank in ranks
        if rank != world_size - 1
    ]
    if world_size - 1 in ranks:
        threads.append(
            threading.Thread(target=worker, args=(world_size - 1, 1, world_size, folder, heard), daemon=True)
        )
    threading.stack_size(256 << 10)
    for thread in threads:
        thread.start()
    over.wait()
    os._exit(0)


def one(world_size: int) -> dict[str, float]:
    """One failure of the last rank among so many."""
    context = mp.get_context("fork")
    folders, heard, over = context.Queue(), context.Queue(), context.Event()
    count = min(PROCESSES, world_size)
    shares = [range(at, world_size, count) for at in range(count)]
    running = [context.Process(target=process, args=(share, world_size, folders, heard, over)) for share in shares]
    for each in running:
        each.start()
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    control = ControlSocket(folder, lambda: None)
    client = control.new_store()
    attempt = Attempt(0, (LOOPBACK, 0), lambda: client, range(world_size), world_size, lambda: None)
    try:
        for key in (plan_key(0), "gen/0/go"):  # the first generation is formed
            client.set(attempt.key(key), '{"failed":"over","plan":null}')
        for _ in running:
            folders.put(folder)
        before, after = dict[int, float](), dict[int, float]()
        for _ in range(world_size - 1):
            _, pid, cpu = heard.get(timeout=120)
            before[pid] = max(before.get(pid, 0.0), cpu)
        begun, used = time.time(), time.process_time()
        attempt.next_generation([Death(world_size - 1, 0, -9, "killed", 0, None, "", begun)], begun)
        times = []
        for _ in range(world_size):
            agreed, pid, cpu = heard.get(timeout=120)
            times.append(agreed - begun)
            after[pid] = max(after.get(pid, 0.0), cpu)
        used = time.process_time() - used
        front, plan = (len(client.get(attempt.key(key))) for key in ("gen/1/front/0", plan_key(1)))
        spent = sum(after[pid] - cpu for pid, cpu in before.items())
        return {
            "last": max(times),
            "workers_cpu": spent / world_size * 1e3,
            "store_cpu": used,
            "front": front,
            "plan": plan,
        }
    finally:
        over.set()
        for each in running:
            each.join(10)
        attempt.close()
        control.close()
        shutil.rmtree(folder)


def simulated(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Rows of all sizes. Each job runs in a new process, which starts no thread before it forks its workers."""
    rows = []
    for size in sizes:
        results = []
        for _ in range(rounds):
            command = [sys.executable, "-m", "benchmarks.scale", "--one", str(size)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
        found = {name: statistics.median(each[name] for each in results) for name in results[0]}
        case = f"{size} simulated workers"
        say(f"{case}: {found['last']:.3f} s")
        rows += [
            at_most(case, AGREED, found["last"], "s", TARGET_S),
            Row(case, "processor time of a worker", found["workers_cpu"], "ms"),
            Row(case, "processor time of store and ledger", found["store_cpu"], "s"),
            Row(case, "what a worker says", found["front"], "bytes"),
            Row(case, "the plan", found["plan"], "bytes"),
        ]
    return rows


def main() -> int:
    parser = arguments("scale", __doc__.splitlines()[0])
    parser.add_argument("--one", type=int, metavar="N", help="one simulated job, its result as JSON")
    options = begin(parser)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.one is not None:
        print(json.dumps(one(options.one)), flush=True)
        return 0
    quick = options.size == QUICK
    return finish(simulated(SIZES[: 2 if quick else None], 1 if quick else 3), options)


if __name__ == "__main__":
    sys.exit(main())
