"""Two ends of a gloo group in one process: one blocks in an operation, the other is silent; the first is cut off."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shared_core.worker.comm.gloo import InnerGroup


def connect(store: dist.Store, rank: int, out: dict[int, InnerGroup]) -> None:
    out[rank] = InnerGroup.connect(
        store,
        rank,
        range(2),
        operation_timeout=timedelta(seconds=300),
        connect_timeout_s=10.0,
        wait_timeout_s=10.0,
        abandoned=lambda: False,
        what="a test",
    )


def pair() -> dict[int, InnerGroup]:
    """Both ends."""
    store = dist.HashStore()
    ends: dict[int, InnerGroup] = {}
    threads = [threading.Thread(target=connect, args=(store, rank, ends)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def main() -> None:
    ends = pair()
    blocked = {
        "all_reduce": ends[0].pg.allreduce([torch.zeros(100_000)], dist.AllreduceOptions()),
        "recv": ends[0].pg.recv([torch.zeros(5)], 1, 7),
    }
    begin = time.monotonic()
    cut = ends[0].sever()
    for name, work in blocked.items():
        try:
            work.wait()
        except RuntimeError:
            print(f"{name} ended")
        else:
            print(f"{name} succeeded")
    print(f"cut {cut > 0} seconds {time.monotonic() - begin:.3f}")


if __name__ == "__main__":
    main()
