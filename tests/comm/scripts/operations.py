"""Every operation of ``torch.distributed`` that the backend supports, in a loop of batches; digests of all results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from tests.support.digest import digest
from tests.support.report import Report

Operation = Callable[[], Any]
OPERATIONS: dict[str, Operation] = {}
rank = world = 0
pair: Any = None  # ranks 0 and 1
odd: Any = None  # ranks 0 and 2, made with backend="gloo"


def operation(fn: Operation) -> Operation:
    OPERATIONS[fn.__name__] = fn
    return fn


def data(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random, different on each rank; part of the rank-local state, as a user's batch is."""
    return torch.randn(*shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 9, shape).to(dtype)


def empty(n: int, *shape: int) -> list[torch.Tensor]:
    return [torch.zeros(*shape) for _ in range(n)]


# -- replicated results ----------------------------------------------------------------------------


@operation
def all_reduce() -> Any:
    out = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.int64):
            dist.all_reduce(x := data(7, dtype=dtype), op=op)
            out.append(x)
    dist.all_reduce(strided := data(6, 4).t(), op=dist.ReduceOp.SUM)
    dist.all_reduce(nothing := data(0))
    return [*out, strided, nothing]


@operation
def all_reduce_async() -> Any:
    tensors = [data(300) for _ in range(5)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    values = [work.get_future().then(lambda f: f.value()[0] / world) for work in works]
    for work in reversed(works):
        work.wait()
        assert work.is_completed() and work.is_success()
    return tensors, [value.wait() for value in values]


@operation
def all_reduce_large() -> Any:
    dist.all_reduce(x := data(200_000))
    return x


@operation
def all_reduce_coalesced() -> Any:
    first, second = data(5), data(3)
    with dist._coalescing_manager():
        dist.all_reduce(first)
        dist.all_reduce(second)
    dist.all_reduce_coalesced(third := [data(2), data(4)], op=dist.ReduceOp.MAX)
    return first, second, third


@operation
def broadcast() -> Any:
    out = []
    for root in range(world):
        dist.broadcast(x := data(9), root)
        work = dist.broadcast(y := data(2), root, async_op=True)
        work.wait()
        out += [x, y, work.result()[0]]
    return out


@operation
def all_gather() -> Any:
    parts = empty(world, 5)
    dist.all_gather(parts, data(5))
    flat = torch.zeros(world * 4)
    dist.all_gather_into_tensor(flat, data(4))
    stacked = torch.zeros(world, 4)
    work = dist.all_gather_into_tensor(stacked, data(1, 4), async_op=True)
    work.get_future().wait()
    work.wait()
    return parts, flat, stacked


@operation
def all_gather_coalesced() -> Any:
    first, second = torch.zeros(2 * world), torch.zeros(3 * world)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(first, data(2))
        dist.all_gather_into_tensor(second, data(3))
    manager.wait()
    lists = [empty(2, 2) for _ in range(world)]
    dist.all_gather_coalesced(lists, [data(2), data(2)])
    return first, second, lists


@operation
def barriers() -> Any:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return None


@operation
def objects() -> Any:
    mine = {"rank": rank, "numbers": data(rank + 2).tolist(), "text": "ü" * (rank + 1)}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    received = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(received, 1)
    at_root: list[Any] | None = [None] * world if rank == 2 else None
    dist.gather_object(mine, at_root, 2)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, gathered if rank == 0 else None, 0)
    return [repr(gathered), repr(received), repr(at_root), repr(scattered)]


@operation
def sub_groups() -> Any:
    out = []
    if rank < 2:
        dist.all_reduce(x := data(11), group=pair)
        dist.broadcast(y := data(3), 1, group=pair)
        parts = empty(2, 6) if rank == 0 else None
        dist.gather(data(6), parts, 0, group=pair)
        out += [x, y, parts]
    if rank != 1:
        dist.all_reduce(x := data(4), group=odd)
        z = torch.zeros(2)
        dist.reduce_scatter_tensor(z, data(4), group=odd)
        if rank == 2:
            dist.send(data(3), group=odd, group_dst=0)
        else:
            dist.recv(w := torch.zeros(3), group=odd, group_src=1)
            out.append(w)
        out += [x, z]
    return out


# -- results that differ by rank -------------------------------------------------------------------


@operation
def reduce() -> Any:
    out = []
    for root in range(world):
        dist.reduce(x := data(8), root)
        if rank == root:  # elsewhere the contents are undefined
            out.append(x)
    return out


@operation
def gather() -> Any:
    out = []
    for root in range(world):
        parts = empty(world, 4) if rank == root else None
        dist.gather(data(4), parts, root)
        out.append(parts)
    return out


@operation
def scatter() -> Any:
    out = []
    for root in range(world):
        dist.scatter(x := torch.zeros(4), [data(4) for _ in range(world)] if rank == root else None, root)
        out.append(x)
    return out


@operation
def reduce_scatter() -> Any:
    x, y, z = torch.zeros(5), torch.zeros(3), torch.zeros(4)
    dist.reduce_scatter(x, [data(5) for _ in range(world)])
    dist.reduce_scatter_tensor(y, data(3 * world))
    dist.reduce_scatter_tensor(z, data(4 * world), async_op=True).wait()
    first, second = torch.zeros(2), torch.zeros(3)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(first, data(2 * world))
        dist.reduce_scatter_tensor(second, data(3 * world))
    return x, y, z, first, second


@operation
def all_to_all() -> Any:
    even = torch.zeros(2 * world)
    dist.all_to_all_single(even, data(2 * world))
    takes = [source + rank for source in range(world)]  # uneven, and some are empty
    gives = [rank + target for target in range(world)]
    uneven = torch.zeros(sum(takes))
    dist.all_to_all_single(uneven, data(sum(gives)), takes, gives)
    parts = empty(world, 3)
    try:
        dist.all_to_all(parts, [data(3) for _ in range(world)])
    except RuntimeError as error:  # gloo of torch 2.11 has none of lists
        if "does not support alltoall" not in str(error):
            raise
    return even, uneven, parts


@operation
def functional() -> Any:
    group = dist.group.WORLD
    works = [
        funcol.all_reduce(data(5), "sum", group),
        funcol.all_gather_tensor(data(2, 3), 0, group),
        funcol.reduce_scatter_tensor(data(world * 2), "sum", 0, group),
        funcol.broadcast(data(4), 1, group),
        funcol.all_to_all_single(data(world), None, None, group),
        *funcol.all_reduce_coalesced([data(2), data(3)], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([data(2), data(3)], group),
    ]
    return [funcol.wait_tensor(work) for work in works]


# -- point to point --------------------------------------------------------------------------------


@operation
def messages() -> Any:
    following, previous = (rank + 1) % world, (rank - 1) % world
    sent = dist.isend(data(50), following)
    dist.recv(x := torch.zeros(50), previous)
    sent.wait()
    # Two tags, received in the other order, and waited for in the other order again.
    sends = [dist.isend(data(tag), following, tag=tag) for tag in (1, 2)]
    posted = [(dist.irecv(t := torch.zeros(tag), previous, tag=tag), t) for tag in (2, 1)]
    for work in [*(work for work, _ in reversed(posted)), *sends]:
        work.wait()
    both = [data(4), torch.zeros(4)]
    batch = [dist.P2POp(dist.isend, both[0], following), dist.P2POp(dist.irecv, both[1], previous)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    out = [x, both[1], *(t for _, t in posted)]
    if rank == 0:
        dist.send_object_list([{"a": float(data(1))}], 2)
    elif rank == 2:
        dist.recv_object_list(got := [None], 0)
        out.append(repr(got))
    return out


def main() -> None:
    global rank, world, pair, odd
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    report = Report()
    job = None
    if not os.environ.get("SWIFT_BASELINE"):
        import shared_core

        shared_core.install()
        job = shared_core.current_job()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pair, odd = dist.new_group([0, 1]), dist.new_group([0, 2], backend="gloo")
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(rank)
    results: dict[str, list[str]] = {name: [] for name in OPERATIONS if not args.only or name in args.only.split(",")}
    if job is not None:
        job.attach([net], [optimizer])
        job.register("results", lambda: results, results.update)
    while len(results[next(reversed(results))]) < args.steps:
        if job is not None:
            job.step_boundary()
        report.count(f"batch {len(results[next(reversed(results))])}")
        for name, fn in OPERATIONS.items():
            if name in results:
                results[name].append(digest(fn()))
    runtime = {}
    if job is not None:
        dist.barrier()
        inner = job.runtime
        runtime = {
            "spilled": inner.results.spilled_bytes,
            "served": inner.operations.served,
            "log": inner.groups.log_bytes(),
        }
    report.finish({name: digest(values) for name, values in results.items()}, **runtime)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
