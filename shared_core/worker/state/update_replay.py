"""A copy of the replicated state that others continue changing, as the worker sees it that makes the same updates;
see :mod:`shared_core.worker.state.incremental_copy`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from shared_core.errors import RecoveryFailed
from shared_core.worker.state.incremental_copy import CopyPiece, CopySums, LoggedUpdate, sums
from shared_core.worker.state.replicated import VALUE, Replicated, beside


@torch.no_grad()
def put(replicated: Replicated, piece: CopyPiece) -> None:
    """Copy a piece of another worker's state to the parameters; its other tensors become optimizer state. Raises
    RecoveryFailed if shape or dtype of a parameter differ.
    """
    for place, tensor in zip(piece.places, piece.tensors, strict=False):
        own = replicated.parameters[place]
        if own.shape != tensor.shape or own.dtype != tensor.dtype:
            raise RecoveryFailed(f"parameter {replicated.names[place]} differs in shape or type between ranks")
        own.data.copy_(tensor)
        for optimizer in replicated.optimizers:
            optimizer.state.pop(own, None)
    for number, place, entries in piece.description:
        parameter = replicated.parameters[place]
        state = replicated.optimizers[number].state[parameter]
        for key, kind, value in entries:
            state[key] = value if kind == VALUE else beside(parameter, piece.tensors[value], kind)


@torch.no_grad()
def repeat(replicated: Replicated, update: LoggedUpdate) -> None:
    """Make an update that another worker has made. Neither hooks nor schedulers see it; gradients and hyper-parameters
    are afterwards what they were. Raises ValueError if the optimizer has other groups here.
    """
    optimizer = replicated.optimizers[update.optimizer]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    gradients = [p.grad for p in parameters]
    try:
        for group, values in zip(optimizer.param_groups, update.groups, strict=True):
            group.update(values)
        for parameter in parameters:
            parameter.grad = None
        for place, gradient in zip(update.places, update.gradients, strict=True):
            parameter = replicated.parameters[place]
            parameter.grad = gradient.to(parameter.device)
        inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = own


def compare(replicated: Replicated, expected: CopySums) -> None:
    """Compare the sums of another worker. Raises RecoveryFailed if parameters or optimizer state are not what they
    are there.
    """
    if sums(replicated, expected.places) != expected.sums:
        names = ", ".join(replicated.names[place] for place in expected.places[:3])
        raise RecoveryFailed(
            f"updates made again give other values in one of the parameters {names}, ...: the script changes them "
            "outside an optimizer's step"
        )


def in_order(replicated: Replicated, states: Sequence[Sequence[Any]]) -> None:
    """Bring optimizer state into the order of ``states``, of the other worker's description, so that checkpoints have
    the same bytes. Raises RecoveryFailed if there is other state here.
    """
    for number, optimizer in enumerate(replicated.optimizers):
        theirs = [replicated.parameters[place] for each, place, _ in states if each == number]
        keys = [[key for key, _, _ in entries] for each, _, entries in states if each == number]
        if {id(p) for p in theirs} != {id(p) for p in optimizer.state}:
            raise RecoveryFailed(
                "the optimizer has state of other parameters than at the worker that it was copied from"
            )
        for parameter, names in zip(theirs, keys, strict=True):
            state = optimizer.state.pop(parameter)
            optimizer.state[parameter] = {key: state[key] for key in names}
