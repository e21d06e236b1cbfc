"""What workers may hold, and plans that keep to it."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.lab.check import check
from shared_core.reroute.history import PlanHistory, StepProgress, text_of
from shared_core.reroute.planning import Plans
from shared_core.reroute.times import MemoryUse, bytes_held, room_of
from shared_core.schedule.problem import Memory, Variant
from shared_core.schedule.schedule import PlannedWorker, Topology

WIDE = Topology(3, 4, 12)


def test_room_is_what_fits_and_never_less_than_without_a_failure() -> None:
    topology = Topology(2, 3, 4)
    assert room_of(topology, 0) == (3, 2, 1), "nothing is known yet"
    assert room_of(topology, 2) == (3, 2, 2) and room_of(topology, 99) == (8, 8, 8)
    found = [(0, MemoryUse(100, 450)), (0, MemoryUse(100, 10_000)), (1, MemoryUse(100, 199)), (2, MemoryUse(7, 10_000))]
    assert room_of(topology, 0, found) == (4, 2, 8), "the least of a stage counts"
    assert room_of(topology, 0, [*found, (2, MemoryUse(None, 10_000))]) == (4, 2, 1), "one has not measured"
    assert room_of(topology, 5, found) == (5, 5, 5), "who gives a number is believed"


def test_what_a_forward_holds() -> None:
    """As many bytes as autograd's own hooks see."""
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 32), torch.nn.ReLU())
    inputs = torch.randn(16, 64, requires_grad=True)
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = layers(inputs)
    parameters = {one.untyped_storage().data_ptr() for one in layers.parameters()}
    wanted = sum(size for place, size in seen.items() if place not in parameters)
    assert bytes_held([inputs], [kept], layers.parameters()) == wanted
    plain = layers(inputs)
    assert bytes_held([inputs], [plain], layers.parameters()) == wanted == 4 * 16 * (64 + 128 + 32)


def test_a_job_plans_within_its_room(tmp_path: Path) -> None:
    """Before anything is measured, for steps to come and for the one under way."""
    past = PlanHistory(Plans(WIDE, Variant.STAGGERED, False, tmp_path, 0))
    room = Memory(workers={worker: 4.0 - worker.stage for worker in WIDE.workers()})
    places = {text_of(worker): StepProgress(0, 8, {}).to_plain() for worker in WIDE.workers()}
    start = dict.fromkeys(places, StepProgress(0, 0, {}).to_plain())
    usual = {"ready": [], "until": None, "summed": []}
    past.change(usual | {"number": 0, "failed": [], "at": start})
    past.change(usual | {"number": 1, "failed": [[1, 2]], "at": {w: p for w, p in places.items() if w != "1:2"}})
    running, following = past.steps[0], past.begin(1)
    assert max(map(len, running.done.values())) == 8
    check(running.plan.schedule, WIDE, memory=room, done=running.done)
    check(following.plan.schedule, WIDE, memory=room)
    assert following.plan.failed == (PlannedWorker(1, 2),)
