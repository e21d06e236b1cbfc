"""Replicated state of every dense optimizer of torch moves bit for bit; updates that a state contains do nothing."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from shared_core.errors import RecoveryFailed, ReplicaMismatch, UnsupportedOptimizer
from shared_core.worker.recovery.replicas import minority
from shared_core.worker.state.checksums import checksum, combined
from shared_core.worker.state.replicated import Replicated, pack, unpack
from shared_core.worker.state.updates import Updates
from tests.support.digest import training_digest

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False},
    ],
    "Adam": [{}, {"amsgrad": True}, {"fused": True}, {"foreach": False}, {"weight_decay": 0.1, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True, "fused": True}, {"foreach": False}],
    "Rprop": [{}, {"foreach": False}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "Adagrad": [{}, {"fused": True}],
    "ASGD": [{}, {"foreach": False}],
    "Muon": [{}],
}
#: Not dense, not updated by gradients alone, or no optimizers.
LEFT_OUT = {"Optimizer", "SparseAdam", "LBFGS"}


def checksums(replicated: Replicated) -> list[int]:
    """Of each parameter together with its optimizer state, as replicas compare them."""
    found = replicated.summed()
    places, sums = [place for place, _, _ in found], [checksum(data) for _, _, data in found]
    return combined(len(replicated.parameters), places, sums)


def every_dense_optimizer() -> list[tuple[str, dict[str, Any]]]:
    names = sorted(
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in LEFT_OUT
    )
    return [(name, options) for name in names for options in OPTIONS.get(name, [{}])]


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "Muon":  # takes matrices only
        return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    return nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 3))


def made(name: str, options: dict[str, Any]) -> tuple[nn.Module, Optimizer]:
    net = model(name)
    return net, getattr(torch.optim, name)(net.parameters(), **options)


def gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def steps(net: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        gradients(net, seed)
        optimizer.step()


def moved(description: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """As it arrives at a replacement."""
    return unpack(pack(json.loads(json.dumps(description)))), [t.clone() for t in tensors]


@pytest.fixture
def updates() -> Iterator[Updates]:
    made = Updates("auto")
    yield made
    for handle in made._handles:
        handle.remove()


@pytest.mark.parametrize(("name", "options"), every_dense_optimizer())
def test_state_moves_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    donor, donor_optimizer = made(name, options)
    steps(donor, donor_optimizer, range(3))
    replicated = Replicated([donor], [donor_optimizer])
    for other in (made(name, options), made(name, options)):
        net, optimizer = other
        steps(net, optimizer, range(10, 12))  # whatever was there before is replaced
        there = Replicated([net], [optimizer])
        there.load(*moved(*replicated.export()))
        assert training_digest(net, [optimizer]) == training_digest(donor, [donor_optimizer])
        assert checksums(there) == checksums(replicated)
        steps(net, optimizer, range(20, 23))
        steps(twin := copy.deepcopy(donor), own := _same_state(twin, donor_optimizer), range(20, 23))
        assert training_digest(net, [optimizer]) == training_digest(twin, [own])


def _same_state(net: nn.Module, optimizer: Optimizer) -> Optimizer:
    twin = type(optimizer)(net.parameters())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin


def test_lbfgs_and_state_that_cannot_be_moved_are_refused() -> None:
    net = model("SGD")
    with pytest.raises(UnsupportedOptimizer, match="LBFGS evaluates its closure several times"):
        Replicated([net], [torch.optim.LBFGS(net.parameters())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[next(net.parameters())]["history"] = [torch.zeros(1)]
    with pytest.raises(UnsupportedOptimizer, match="SGD keeps 'history' as list"):
        Replicated([net], [optimizer]).export()


def test_models_that_differ_are_refused_by_name() -> None:
    donor, optimizer = made("SGD", {"lr": 0.1})
    description, tensors = Replicated([donor], [optimizer]).export()
    small = nn.Linear(4, 8)
    with pytest.raises(ReplicaMismatch, match="the donor has 5 parameters, this rank 2"):
        Replicated([small], [torch.optim.SGD(small.parameters())]).load(description, tensors)
    net = nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 5))
    differs = (
        r"parameter 2.weight has shape \(5, 8\) and torch.float32 here, and \(3, 8\) and torch.float32 at the donor"
    )
    with pytest.raises(ReplicaMismatch, match=differs):
        Replicated([net], [torch.optim.SGD(net.parameters())]).load(description, tensors)
    halved, _ = made("SGD", {"lr": 0.1})
    halved.bfloat16()
    with pytest.raises(ReplicaMismatch, match="torch.bfloat16 here, and .* torch.float32 at the donor"):
        Replicated([halved], [torch.optim.SGD(halved.parameters())]).load(description, tensors)


def test_every_bit_of_parameters_and_state_is_in_the_checksums() -> None:
    net, optimizer = made("Adam", {})
    steps(net, optimizer, range(2))
    replicated = Replicated([net], [optimizer])
    before = checksums(replicated)
    places = [(place, p.data) for place, p in enumerate(replicated.parameters)]
    places += [(place, v) for place, p in enumerate(replicated.parameters) for v in optimizer.state[p].values()]
    for place, tensor in places:
        data = tensor.view(-1).view(torch.uint8)
        for byte in (0, data.numel() - 1):
            data[byte] ^= 1
            assert [i for i, (a, b) in enumerate(zip(before, checksums(replicated), strict=True)) if a != b] == [place]
            data[byte] ^= 1
    assert checksums(replicated) == before


def test_the_minority_and_the_first_place_that_differs() -> None:
    good, bad = [1, 2, 3], [1, 9, 3]
    assert minority([good, good, good]) is None
    assert minority([good, bad, good]) == ([1], 1)
    assert minority([bad, good, good, good]) == ([0], 1)
    assert minority([good, bad]) == ([], 1)
    assert minority([good, bad, good, bad]) == ([], 1)
    assert minority([[1, 2, 3], [1, 2, 4], [1, 5, 3]]) == ([], 2)


@pytest.mark.parametrize(("name", "options"), every_dense_optimizer())
def test_an_update_that_the_state_contains_changes_nothing(
    name: str, options: dict[str, Any], updates: Updates
) -> None:
    donor, donor_optimizer = made(name, options)
    steps(donor, donor_optimizer, range(3))
    description, tensors = Replicated([donor], [donor_optimizer]).export()
    net, optimizer = made(name, options)
    updates.attach(Replicated([net], [optimizer]))
    updates.load(2, {**description, "version": 3, "images": []}, [t.clone() for t in tensors])
    assert (updates.version, updates.state_version, updates.exact) == (2, 3, False)
    gradients(net, 99)
    kept = [p.grad for p in net.parameters()]
    optimizer.step()
    assert training_digest(net, [optimizer]) == training_digest(donor, [donor_optimizer]), "nothing was changed"
    assert all(p.grad is g for p, g in zip(net.parameters(), kept, strict=True)), "gradients are back"
    assert (updates.version, updates.state_version, updates.exact) == (3, 3, True)
    # The next one is the replacement's own.
    gradients(net, 4)
    optimizer.step()
    steps(twin := copy.deepcopy(donor), own := _same_state(twin, donor_optimizer), range(4, 5))
    assert training_digest(net, [optimizer]) == training_digest(twin, [own])


def test_a_closure_is_run_although_its_update_is_left_out(updates: Updates) -> None:
    donor, donor_optimizer = made("Adam", {})
    steps(donor, donor_optimizer, range(1))
    net, optimizer = made("Adam", {})
    updates.attach(Replicated([net], [optimizer]))
    description, tensors = Replicated([donor], [donor_optimizer]).export()
    updates.load(0, {**description, "version": 1, "images": []}, tensors)
    calls = []

    def closure() -> float:
        calls.append(1)
        gradients(net, 7)
        return 0.25

    assert optimizer.step(closure) == 0.25
    assert calls == [1]
    assert training_digest(net, [optimizer]) == training_digest(donor, [donor_optimizer])


def test_a_donor_waits_for_an_update_and_an_update_for_a_copy(updates: Updates) -> None:
    net, optimizer = made("SGD", {"lr": 0.1})
    updates.attach(Replicated([net], [optimizer]))
    with (
        pytest.raises(RecoveryFailed, match="did not get to update 1 within 0 s .it is at update 0."),
        updates.frozen(1, 0.01),
    ):
        pass
    entered, leave = threading.Event(), threading.Event()
    copies: list[torch.Tensor] = []

    def copy_state() -> None:
        with updates.frozen(1, 30.0) as (_, tensors):
            entered.set()
            leave.wait(30.0)
            copies.extend(t.clone() for t in tensors)

    copier = threading.Thread(target=copy_state)
    copier.start()
    steps(net, optimizer, range(1))  # the copier was waiting for this one
    assert entered.wait(30.0)
    after_one = [p.detach().clone() for p in net.parameters()]
    stepper = threading.Thread(target=steps, args=(net, optimizer, range(1, 2)))
    stepper.start()
    stepper.join(0.05)
    assert stepper.is_alive(), "an update waits for the end of a copy"
    leave.set()
    stepper.join(30.0)
    copier.join(30.0)
    assert all(torch.equal(a, b) for a, b in zip(copies, after_one, strict=True))
    assert updates.version == 2
