"""A replacement is given its replicated state: by a donor, and where that is large by others that have the same,
at once.

The donor says what there is; the replacement divides it, asks the others for their shares, and tells the donor what is
left for it. Whoever cannot give exactly that state at once declines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from shared_core.errors import RecoveryFailed
from shared_core.faults import inject
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.plan import Plan
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.transfer import layout, receive, receive_spans, room, send, send_spans
from shared_core.worker.spans import Span, divided
from shared_core.worker.state.checksums import checksum
from shared_core.worker.state.replicated import pack

#: So many give at most, and only where the state has at least so many bytes.
_GIVERS, _SEVERAL = 3, 64 << 20
#: Tensors are divided at multiples of so many bytes.
_UNIT = 64 << 10
#: Gloo normally lets go of receive buffers at once. Where it does not, a replacement cannot use its parameters again.
_STUCK_S = 2.0


def helpers(donor: int, replicas: Collection[int], replacements: Collection[int]) -> list[int]:
    """Ranks among ``replicas`` that may give state together with ``donor``: the next ones after it, at most ``_GIVERS``
    with it. ``replacements`` have nothing to give.
    """
    able = sorted(set(replicas).difference(replacements, [donor]))
    later = [rank for rank in able if rank > donor]
    return (later + able)[: min(_GIVERS - 1, len(able))]


class Giving:
    """Gives state, and takes it, by :mod:`shared_core.worker.recovery.transfer`, and raises what that raises. Ranks are
    global; the groups' indices are looked up here.
    """

    def __init__(self, rank: int, donor: Donor, copies: StateCopies) -> None:
        self._rank, self._donor, self._copies = rank, donor, copies

    def others(self, plan: Plan, replacement: int, boundary: StepBoundary, members: Collection[int]) -> list[int]:
        """Which of ``members`` may give ``replacement`` its state, beside its donor."""
        replicas = set(boundary.replicas or members).intersection(members)
        return helpers(plan.donors[replacement], replicas, plan.boundaries)

    def give(self, inner: InnerGroup, replacement: int, boundary: StepBoundary) -> int:
        """As donor. Returns the bytes that were sent; no update is made meanwhile. Raises RecoveryFailed if the state
        cannot be had.
        """
        place = inner.members.index(replacement)
        with self._donor.frozen(boundary.version, boundary.index) as (description, tensors):
            copied = self._copies.close(replacement, boundary, description)
            head = {"description": description, "layout": layout(tensors), "copied": copied}
            send(inner, place, head, [])
            wanted, _ = receive(inner, place, "to say what it is to be sent")
            return _send(inner, place, tensors, wanted)

    def help(self, inner: InnerGroup, replacement: int, boundary: StepBoundary) -> int:
        """As one of the others. Returns the bytes that were sent; no update is made meanwhile. Raises RecoveryFailed if
        the state was changed meanwhile.
        """
        place = inner.members.index(replacement)
        wanted, _ = receive(inner, place, "to say what it is to be sent")
        if not wanted["spans"]:
            return 0
        with ExitStack() as stack:
            try:
                description, tensors = stack.enter_context(
                    self._donor.frozen(boundary.version, boundary.index, wait=False)
                )
                gives = _digest(description, layout(tensors)) == wanted["digest"]
            except RecoveryFailed:
                gives = False
            send(inner, place, {"gives": gives}, [])
            return _send(inner, place, tensors, wanted) if gives else 0

    def take(self, inner: InnerGroup, donor: int, others: Sequence[int]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """As replacement. Returns the description of the state and its tensors, on the CPU. The first of them are this
        worker's parameters, written in place, where shape and dtype are the same. There are none, and the description
        says ``here``, where the state has come while the others trained. Raises StillWriting if the group was cut, and
        something may still be written into the parameters.
        """
        at = inner.members.index
        head, _ = receive(inner, at(donor))
        description, described = head["description"], head["layout"]
        here = self._donor.stays_with(description["version"])
        if here or self._copies.in_place(head["copied"], description["states"]):
            for rank in (*others, donor):
                send(inner, at(rank), {"digest": 0, "spans": []}, [])
            return description | {"here": True}, []
        tensors = room(described, self._donor.places(description["parameters"]))
        sizes = [each.nbytes for each in tensors]
        several = sum(sizes) >= _SEVERAL
        mine, *shares = divided(sizes, 1 + len(others) if several else 1, _UNIT)
        digest, spans = _digest(description, described), {donor: mine}
        asked = dict(zip(others, shares or [[] for _ in others], strict=True))
        for rank, share in asked.items():
            send(inner, at(rank), {"digest": digest, "spans": _rows(share)}, [])
        for rank, share in asked.items():
            if share:
                answer, _ = receive(inner, at(rank), "to say whether it gives its share of the state")
                spans[rank if answer["gives"] else donor] = share if answer["gives"] else spans[donor] + share
        send(inner, at(donor), {"spans": _rows(spans[donor])}, [])
        receive_spans(inner, tensors, {at(rank): each for rank, each in spans.items()}, _STUCK_S)
        return description, tensors


def _send(inner: InnerGroup, place: int, tensors: Sequence[torch.Tensor], wanted: dict[str, Any]) -> int:
    spans = [Span(*row) for row in wanted["spans"]]
    inject.point("recovery.giving")
    send_spans(inner, place, tensors, spans)
    return sum(span.size for span in spans)


def _rows(spans: Sequence[Span]) -> list[list[int]]:
    return [[span.tensor, span.start, span.stop] for span in spans]


def _digest(description: dict[str, Any], described: list[list[Any]]) -> int:
    return checksum(pack([description, described]))
