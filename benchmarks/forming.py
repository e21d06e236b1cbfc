"""A new gloo group after a failure: by this product's own connections, and by torch's ``reconfigure`` (2.15 and later).

Each round all workers leave their group and make the next one, up to its first all-reduce. In the last round one worker
is killed when it has said where it can be reached, and 50 ms later the others are told so: how long are they held up?
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import QUICK, Row, arguments, begin, finish, say
from shared_core.errors import SwiftError
from shared_core.system import process
from shared_core.worker.comm.gloo import InnerGroup

SIZES = (2, 4, 8, 32)
ROUNDS = 10
#: Seconds from the kill until the others are told.
TOLD_S = 0.05
#: torch's names, which its stubs and older releases lack.
_DIST: Any = dist


def limit_s(size: int) -> float:
    """How long sockets may take to connect: 0.5 s as in a job's first attempt, more where many share two cores."""
    return max(0.5, size / 8)


class _Last(dist.PrefixStore):
    """What its worker has said is there; it reads nothing, and waits to be killed."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return True


class Own:
    """As a generation of a job is formed."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._group: InnerGroup | None = None

    def form(self, number: int, abandoned: Callable[[], bool], kind: type[dist.PrefixStore] = dist.PrefixStore) -> None:
        """Make the group of this number, unless it is ``abandoned``; ``kind``: where it meets the others."""
        if self._group is not None:
            self._group.discard()
        self._group = group = InnerGroup.connect(
            kind(f"own/{number}", self._store),
            self._rank,
            range(self._size),
            operation_timeout=timedelta(seconds=60),
            connect_timeout_s=limit_s(self._size),
            wait_timeout_s=60.0,
            abandoned=abandoned,
            what="the group",
        )
        group.pg.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()


class Reconfigured:
    """By torch: there is no way to give up, but the time-out."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        _DIST.init_process_group(
            "gloo", store=dist.PrefixStore("torch/", store), rank=rank, world_size=size, enable_reconfigure=True
        )

    def form(self, number: int, abandoned: Callable[[], bool], kind: type[dist.PrefixStore] = dist.PrefixStore) -> None:
        """As :meth:`Own.form`."""
        store = kind(f"handles/{number}", self._store)
        store.set(str(self._rank), _DIST._get_reconfigure_handle())
        keys = [str(rank) for rank in range(self._size)]
        while not store.check(keys):
            if abandoned():
                raise TimeoutError("a member is gone")
            time.sleep(0.001)
        handles = [store.get(key).decode() for key in keys]
        _DIST._reconfigure(uuid=number, handles=handles, timeout=timedelta(seconds=limit_s(self._size))).wait()
        dist.all_reduce(torch.ones(1))


WAYS = {"own connections": Own, "reconfigure": Reconfigured}


def _worker(way: str, port: int, rank: int, size: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    group = WAYS[way](store, rank, size)
    for number in range(1, ROUNDS + 1):
        _together(store, f"begin/{number}", size)
        began = time.monotonic()
        group.form(number, lambda: False)
        store.set(f"took/{number}/{rank}", repr(time.monotonic() - began))
    _together(store, "last", size)
    if rank == size - 1:
        group.form(ROUNDS + 1, lambda: False, _Last)
    told = threading.Event()
    threading.Thread(target=lambda: (store.wait(["told"]), told.set()), daemon=True).start()
    began, how = time.monotonic(), "formed"
    try:
        group.form(ROUNDS + 1, told.is_set)
    except (SwiftError, RuntimeError, TimeoutError) as error:
        how = type(error).__name__
    store.set(f"held/{rank}", f"{time.monotonic() - began!r} {how}")
    store.wait(["end"])


def _together(store: dist.Store, name: str, size: int) -> None:
    if store.add(f"{name}/came", 1) == size:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def measure(way: str, size: int) -> list[Row]:
    """Rows of one way with so many workers."""
    ports, tell = os.pipe()
    pids = []  # made before the store: it has threads
    for rank in range(size):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                process.die_with_parent(os.getppid())
                torch.set_num_threads(1)
                _worker(way, int(os.read(ports, 5)), rank, size)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    os.write(tell, f"{store.port:05}".encode() * size)
    try:
        rounds = []
        for number in range(1, ROUNDS + 1):
            rounds.append(max(float(store.get(f"took/{number}/{rank}")) for rank in range(size)))
        store.wait(
            [
                "last/all",
                f"own/{ROUNDS + 1}/at/{size - 1}" if way == "own connections" else f"handles/{ROUNDS + 1}/{size - 1}",
            ]
        )
        os.kill(pids[-1], signal.SIGKILL)
        threading.Event().wait(TOLD_S)
        store.set("told", "")
        held = [store.get(f"held/{rank}").decode().split() for rank in range(size - 1)]
        store.set("end", "")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ports)
        os.close(tell)
    say(f"{way}, {size} workers: {sorted({how for _, how in held})} where one was killed")
    case = f"{way}, {size} workers"
    return [
        Row(case, "the next group, slowest worker, median", statistics.median(rounds), "s"),
        Row(case, "held up by a member that dies meanwhile", max(float(each) for each, _ in held), "s"),
    ]


def main() -> int:
    parser = arguments("forming", __doc__.splitlines()[0])
    options = begin(parser)
    ways = [way for way in WAYS if way == "own connections" or hasattr(dist, "_reconfigure")]
    rows = [row for size in SIZES[: 2 if options.size == QUICK else None] for way in ways for row in measure(way, size)]
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
