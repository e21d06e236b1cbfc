"""The parts that follow what a script changes outside updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shared_core.errors import CorruptFile, RecoveryFailed, Unsupported
from shared_core.protocol.frontier import Frontier, GroupFrontier, StepBoundary
from shared_core.protocol.plan import decide
from shared_core.worker.state.attached import Attached
from shared_core.worker.state.external_mutation import ChangeWatch, UnoptimizedParameters
from shared_core.worker.state.publication_file import is_blank
from shared_core.worker.state.publications import UNOPTIMIZED, SharedMemoryPublisher
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.updates import Updates


def made() -> tuple[nn.Sequential, torch.optim.Optimizer, Replicated]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam([*net[0].parameters(), *net[1].parameters()], lr=0.1)
    return net, optimizer, Replicated([net], [optimizer])


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


CHANGES = {
    "in place": lambda net, optimizer: net[0].weight.detach().mul_(2),
    "through data": lambda net, optimizer: net[0].weight.data.mul_(2),
    "data assigned": lambda net, optimizer: setattr(net[0].weight, "data", torch.zeros(4, 3)),
    "of no optimizer": lambda net, optimizer: net[2].bias.data.add_(1),
    "state": lambda net, optimizer: optimizer.state[net[0].weight]["exp_avg"].zero_(),
    "state forgotten": lambda net, optimizer: optimizer.state.clear(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_outside_updates_is_seen(how: str) -> None:
    net, optimizer, replicated = made()
    watch = ChangeWatch(replicated)
    assert watch.changed() is None
    step(net, optimizer)
    watch.note()
    assert watch.changed() is None
    net(torch.ones(2, 3)).sum().backward()
    optimizer.zero_grad()
    assert watch.changed() is None, "forward and backward change no parameter"
    CHANGES[how](net, optimizer)
    assert watch.changed()


def test_later_a_change_through_data_is_seen_in_time() -> None:
    net, optimizer, replicated = made()
    watch = ChangeWatch(replicated)
    for _ in range(5):
        step(net, optimizer)
        watch.note()
    seen = 0
    for _ in range(2 * len(replicated.parameters)):
        for parameter in net[:2].parameters():
            parameter.data.mul_(1.5)
        seen += watch.changed() is not None
        watch.note()
    assert seen >= len(replicated.parameters)


def test_parameters_of_no_optimizer_are_written_when_they_change(tmp_path: Path) -> None:
    net, optimizer, replicated = made()
    publisher, unoptimized = SharedMemoryPublisher(tmp_path / "rank0"), UnoptimizedParameters(replicated, ())
    assert unoptimized.own and [replicated.names[place] for place in unoptimized.places] == ["2.weight", "2.bias"]

    def publish(index: int) -> dict[int, int]:
        refers = unoptimized.publish(publisher, index, unoptimized.capture())
        publisher.publish_boundary(StepBoundary(index, 0, 0, "batch", {}), {UNOPTIMIZED: refers})
        publisher.drop_before(index - 1)
        return refers

    weight, bias = unoptimized.places
    assert publish(1) == {weight: 1, bias: 1}
    assert publish(2) == {weight: 1, bias: 1}
    net[2].bias.data.add_(1)
    assert publish(3) == {weight: 1, bias: 3}
    at_three = net[2].weight.detach().clone()
    with torch.no_grad():
        net[2].weight.add_(1)
    assert publish(4) == {weight: 4, bias: 3}
    for index, expected in ((3, at_three), (4, net[2].weight.detach())):
        values = SharedMemoryPublisher(tmp_path / "rank0").read_boundary(index)[UNOPTIMIZED]
        assert torch.equal(values[weight], expected) and torch.equal(values[bias], net[2].bias.detach())
    publish(5)
    publish(6)
    left = sorted(path.name for path in (tmp_path / "rank0").glob("unoptimized.*") if not is_blank(path))
    assert left == ["unoptimized.3", "unoptimized.5"]
    (tmp_path / "rank0" / "unoptimized.3").write_bytes(b"x" * 40)
    with pytest.raises(CorruptFile):
        publisher.read_boundary(6)
    unoptimized.restore({bias: torch.zeros(2)})
    assert not net[2].bias.any() and publish(7) == {weight: 7, bias: 7}, "all is written again"


def test_groups_modes_and_buffers_are_put_back_as_the_script_left_them() -> None:
    net, optimizer, replicated = made()
    attached = Attached([net], replicated)
    optimizer.add_param_group({"params": [net[2].weight], "lr": 0.5})
    optimizer.param_groups[0]["lr"] = 0.25
    net[2].weight.requires_grad_(False)
    net[1].eval()
    net[1].running_mean = torch.full((4,), 7.0)
    kept = attached.groups(), attached.modes(), {k: v.clone() for k, v in attached.buffers().items()}
    other, theirs, whose = made()
    replacement = Attached([other], whose)
    replacement.restore_groups(kept[0])
    replacement.restore_modes(kept[1])
    replacement.restore_buffers(kept[2])
    assert [group["lr"] for group in theirs.param_groups] == [0.25, 0.5]
    assert theirs.param_groups[1]["params"][0] is other[2].weight and not other[2].weight.requires_grad
    assert not other[1].training and torch.equal(other[1].running_mean, net[1].running_mean)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    with pytest.raises(Unsupported, match="in no attached model"):
        attached.groups()


@pytest.fixture
def updates() -> Updates:
    return Updates()


def test_the_state_at_a_step_boundary_is_given_whatever_was_done_since(updates: Updates) -> None:
    net, optimizer, replicated = made()
    updates.attach(replicated, unoptimized=UnoptimizedParameters(replicated, {id(p) for p in net.parameters()}))
    try:
        updates.at_boundary(1)
        first = [p.detach().clone() for p in net.parameters()]
        step(net, optimizer)
        with updates.frozen(0, 1.0, 1) as (description, tensors):
            assert description["version"] == 0
            assert all(torch.equal(a, b) for a, b in zip(first, tensors, strict=False))
        updates.next_batch()
        assert not updates.outside.boundaries.indices, "nothing was changed: nothing is kept"
        net[0].weight.data.mul_(2)
        with pytest.raises(RecoveryFailed, match="outside an optimizer's update"):
            updates.outside.see()
            with updates.frozen(0, 1.0, 1):
                pass
        for index in (2, 3, 4):
            updates.at_boundary(index, index - 1)
            step(net, optimizer)
        assert updates.outside.boundaries.indices == [3, 4]
        with updates.frozen(2, 1.0, 3) as (description, tensors):
            assert description["version"] == 2
    finally:
        for handle in updates._handles:
            handle.remove()


def _front(
    rank: int, replacement: bool = False, boundaries: tuple[StepBoundary, ...] = (), done: int = 5, **more: object
) -> Frontier:
    group = GroupFrontier("0-2", done, [done], list(range(done)), [])
    groups = {} if replacement else {"w": group}
    return Frontier(rank, int(replacement), replacement, 0 if replacement else 4, boundaries, groups, **more)  # type: ignore[arg-type]


def test_a_donor_has_the_state_at_the_boundary_or_will_have_it() -> None:
    boundary = StepBoundary(7, 4, 0, "batch", {"w": 5})
    failed = _front(2, replacement=True, boundaries=(boundary,))

    def donor(*survivors: Frontier) -> int:
        return decide({front.rank: front for front in (*survivors, failed)}).donors[2]

    ahead = _front(0, outside=True, boundary=8, kept=[8])  # the state at 7 is gone
    assert donor(ahead, _front(1, outside=True, boundary=8, kept=[7, 8])) == 1
    assert donor(ahead, _front(1, outside=True, boundary=6, kept=[6])) == 1, "it passes 7 by itself"
    waiting = _front(1, outside=True, boundary=6, kept=[6], done=4)  # in a collective before 7
    assert decide({0: ahead, 1: waiting, 2: failed}).boundaries[2] is None, "then an earlier start is chosen"
    assert donor(_front(0), _front(1)) == 0
