"""What exact undo of an update costs.

Times are on one thread. Ratios are medians over rounds in which the compared ways take turns, so that whatever else the
machine does hits all alike.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim import Optimizer

from benchmarks.common import QUICK, Row, arguments, at_least, begin, finish, median_ratio, say, scratch
from benchmarks.undo_residuals import residual_rows
from shared_core.worker.state.undo import Undo
from tests.support.digest import digest, optimizer_digest_data

PATHS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
#: name: (class, options, paths it has on CPU)
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "SGD": ("SGD", {"lr": 1e-3}, ("single", "foreach", "fused")),
    "SGD momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}, ("single", "foreach", "fused")),
    "Adam": ("Adam", {}, ("single", "foreach", "fused")),
    "AdamW": ("AdamW", {}, ("single", "foreach", "fused")),
    "AdamW amsgrad": ("AdamW", {"amsgrad": True}, ("single", "foreach", "fused")),
    "Adagrad": ("Adagrad", {}, ("single", "foreach", "fused")),
    "NAdam": ("NAdam", {}, ("single", "foreach")),
    "RAdam": ("RAdam", {}, ("single", "foreach")),
    "Adamax": ("Adamax", {}, ("single", "foreach")),
    "Adadelta": ("Adadelta", {}, ("single", "foreach")),
    "RMSprop": ("RMSprop", {}, ("single", "foreach")),
    "Rprop": ("Rprop", {}, ("single", "foreach")),
    "ASGD": ("ASGD", {}, ("single", "foreach")),
    "Adafactor": ("Adafactor", {}, ("single", "foreach")),
    "Muon": ("Muon", {}, ("default",)),
}
#: Measured at every size.
COMMON = ("SGD momentum", "AdamW")
#: parameters: (width, matrices); rounds at that size
SIZES = {1: (256, 16, 6), 10: (1024, 10, 5), 100: (2048, 24, 2)}
#: Bytes that the largest case needs: two optimizers with parameters, gradients, two moments; copies; a deep copy.
LARGEST_BYTES = 100e6 * 4 * (2 * 4 + 3 + 3)


def made(name: str, path: str, million: int) -> tuple[list[nn.Parameter], Optimizer]:
    """Parameters with gradients, and an optimizer that has state."""
    kind, options, _ = OPTIMIZERS[name]
    width, count, _ = SIZES[million]
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(width, width)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn(width, width)
    optimizer: Optimizer = getattr(torch.optim, kind)(params, **options, **PATHS.get(path, {}))
    optimizer.step()
    return params, optimizer


def seconds(run: Callable[[], Any], times: int = 1) -> float:
    """Seconds of one call, over ``times`` calls."""
    begin = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - begin) / times


def tensors(params: Sequence[torch.Tensor], optimizer: Optimizer) -> list[torch.Tensor]:
    """Parameters and all tensors of the state."""
    state = [v for p in params for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [*params, *state]


def measure(name: str, path: str, million: int, rounds: int, refetch_gbs: float) -> list[Row]:
    """Rows of one optimizer, path and size."""
    case = f"{name}, {path}, {million} M"
    _, plain = made(name, path, million)
    params, optimizer = made(name, path, million)
    count = sum(p.numel() for p in params)
    undo = Undo([optimizer])
    undo.arm()
    state = tensors(params, optimizer)
    nbytes = sum(t.numel() * t.element_size() for t in state)
    kept = [torch.empty_like(t) for t in state]

    def armed() -> None:
        optimizer.step()
        undo.commit()

    @torch.no_grad()
    def copied() -> None:
        plain.step()
        torch._foreach_copy_(kept, state)

    def deep_copied() -> None:
        plain.step()
        copy.deepcopy([[p.data for p in params], optimizer.state_dict()])

    ways: dict[str, Callable[[], Any]] = {"step": plain.step, "armed": armed, "copy": copied, "deep": deep_copied}
    times: dict[str, list[float]] = {way: [] for way in [*ways, "undo"]}
    block = max(1, 5 // million)
    exact = True
    for turn in range(rounds + 1):
        for way, run in ways.items():
            if million < 100:
                run()  # caches are those of this way
            spent = seconds(run, block)
            if turn:
                times[way].append(spent)
        before = digest([params, optimizer_digest_data(optimizer)]) if turn == 1 else ""
        optimizer.step()
        spent = seconds(undo.undo)
        if turn:
            times["undo"].append(spent)
        if before:
            exact = digest([params, optimizer_digest_data(optimizer)]) == before

    def ratio(way: str) -> float:
        return median_ratio(times[way], times["step"])

    optimizer.step()
    held = undo.nbytes
    undo.disarm()
    rows = [
        Row(case, "optimizer step", 1e3 * statistics.median(times["step"]), "ms"),
        Row(case, "step with undo armed / step", ratio("armed"), "ratio"),
        Row(case, "step and copy of the state into kept memory (CheckFreq) / step", ratio("copy"), "ratio"),
        Row(case, "step and deep copy of the state (Elastic Horovod) / step", ratio("deep"), "ratio"),
        Row(case, "undo", 1e3 * statistics.median(times["undo"]), "ms"),
        Row(case, "fetching the state from a replica instead (at the measured rate)", nbytes / refetch_gbs / 1e6, "ms"),
        Row(case, "memory of undo", held / count, "B/parameter"),
        at_least(case, "bits as before the step after undo (1 = all)", float(exact), "", 1.0),
    ]
    say(f"{case}: armed {ratio('armed'):.2f}, copy {ratio('copy'):.2f}, deep copy {ratio('deep'):.2f} of a step")
    return rows


# -- two processes: what a replica's state takes to fetch --------------------------------------------------


def worker(rank: int, out: str, quick: bool) -> None:
    """One of two processes; the first writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    flat = torch.ones(2_500_000 if quick else 25_000_000)
    dist.broadcast(flat, 0)
    rates = []
    for _ in range(5):
        dist.barrier()
        rates.append(flat.nbytes / seconds(lambda: (dist.broadcast(flat, 0), dist.barrier())) / 1e9)
    if rank == 0:
        Path(out, "result.json").write_text(json.dumps(statistics.median(rates)))
    dist.barrier()
    dist.destroy_process_group()


def broadcast_gbs(quick: bool) -> float:
    """Rate of a broadcast between two processes, in GB/s."""
    with scratch() as folder:
        mp.spawn(worker, (str(folder), quick), nprocs=2, daemon=True)  # type: ignore[no-untyped-call]
        rate: float = json.loads((folder / "result.json").read_text())
        return rate


def room_for_the_largest() -> bool:
    """Whether 100 million parameters fit, with half as much again to spare."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            free = int(line.split()[1]) * 1024
    return free > 1.5 * LARGEST_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if undo was not exact."""
    parser = arguments("undo", "What exact undo of an update costs.")
    parts = ["1M", "10M", "100M"]
    parser.add_argument("--only", choices=parts, action="append", help="only this part; may be repeated")
    options = begin(parser, argv)
    torch.set_num_threads(1)
    chosen = options.only or parts[: options.size + 1]
    say("two processes: fetching state")
    gbs = broadcast_gbs(options.size == QUICK)
    rows = [Row("gloo broadcast, 2 ranks", "rate", gbs, "GB/s")]
    for million in SIZES:
        if f"{million}M" not in chosen:
            continue
        if million == 100 and not room_for_the_largest():
            say(f"less than {1.5 * LARGEST_BYTES / 1e9:.0f} GB are free: 100 M parameters are left out")
            continue
        rounds = 2 if options.size == QUICK else SIZES[million][2]
        for name, (_, _, paths) in OPTIMIZERS.items():
            if million == 1 or name in COMMON:
                for path in paths if name in COMMON or options.size > QUICK else paths[:1]:
                    rows += measure(name, path, million, rounds, gbs)
        if million < 100:
            rows += residual_rows(*SIZES[million])
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
