"""The replicated state as a worker gives it to others: at a version that they can begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shared_core.errors import RecoveryFailed
from shared_core.worker.state.external_mutation import ExternalMutation
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.undo import Parts, Undo
from shared_core.worker.state.update_count import Count
from shared_core.worker.state.update_gate import UpdateGate
from shared_core.worker.state.update_images import UpdateImages


class GivenState:
    """Waits until the state can be given, and keeps updates away meanwhile. Recovery threads call. ``images`` are the
    parameters before each update; ``fence`` blocks until what is being copied may be changed.
    """

    def __init__(
        self, gate: UpdateGate, count: Count, images: UpdateImages, outside: ExternalMutation, fence: Callable[[], None]
    ) -> None:
        self._gate, self._count, self._images, self._outside, self._fence = gate, count, images, outside, fence
        self._replicated: Replicated | None = None
        self._sharded = False
        self._undo: Undo | None = None
        self._parts: Parts | None = None

    def attach(self, replicated: Replicated | None, sharded: bool, undo: Undo | None, parts: Parts | None) -> None:
        """This state is given from now on; nothing where ``replicated`` is None. ``sharded``: its optimizer's state is
        divided over the replicas. ``undo`` and ``parts`` are those of the updates since the last step boundary and
        of the next one.
        """
        self._replicated, self._sharded, self._undo, self._parts = replicated, sharded, undo, parts

    @contextmanager
    def frozen(
        self, min_version: int, timeout_s: float, boundary: int | None = None
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """State with at least ``min_version`` updates in it, and no update running; see :meth:`Replicated.export`. The
        tensors are live, or images, not to be written.

        Args:
            min_version: updates at the step boundary for which it is wanted.
            boundary: number of that step boundary; where it is kept, the state is the one at it.

        Raises:
            RecoveryFailed: if the state does not get there in time, or cannot be had because the script has changed it
                outside updates, also when the context ends.
        """
        with self._gate.condition:
            ready = self._gate.condition.wait_for(lambda: self._has(min_version, boundary), timeout=timeout_s)
            if not ready:
                raise RecoveryFailed(
                    f"the state did not get to update {min_version} within {timeout_s:.0f} s (it is at update "
                    f"{self._count.state}), so no replacement can be given it. A step hangs, or is slow: then raise "
                    "detection.wait_timeout_s"
                )
            kept = self._outside.given(boundary)
            if kept is None and boundary is not None:
                self._outside.refuse()
            self._gate.hold()
        try:
            if kept is not None:
                yield kept
                return
            self._whole()
            description, tensors = self._export()
            if self._sharded:
                yield (
                    description | {"version": min_version, "images": []},
                    self._images.parameters_at(min_version, tensors),
                )
                return
            description["version"] = self._count.state
            self._images.add_to(description, tensors, min_version)
            yield description, tensors
            if boundary is not None:
                self._outside.refuse()  # it may have been changed meanwhile
        finally:
            self._gate.release()

    def _whole(self) -> None:
        """Take back the parts of an update that cannot be completed without the replacement. The program makes them
        again when it has the others, or in ``optimizer.step()``.
        """
        if self._parts is not None and self._parts.torn:
            self._fence()
            with self._gate.condition:
                self._parts.take_back()
                self._outside.part_updated()

    def _has(self, version: int, boundary: int | None = None) -> bool:
        """Whether a replacement that starts at ``version`` can be given the state now. Callers hold the lock of
        the updates.
        """
        if self._gate.installing:
            return False
        if self._outside.decided(boundary):
            return True  # also in the middle of an update
        if self._outside.waits(boundary):
            return False
        if self._sharded and self._images.has(version):
            return True  # also in the middle of an update, whose end may need the replacement
        return not self._gate.updating and self._count.state >= version

    def _export(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        nothing: dict[str, Any] = {"parameters": 0, "states": [], "tensors": [], "here": True}
        return self._replicated.export() if self._replicated is not None else (nothing, [])

    @contextmanager
    def at_version(
        self, version: int, boundary: int | None = None
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """State with ``version`` updates in it, as it was at step boundary ``boundary``, the last one; updates since
        then are undone, in place. Call while the gate is held. Raises RecoveryFailed if that state cannot be had.
        """
        kept = self._outside.given(boundary)
        if kept is not None:
            yield kept
            return
        if boundary is not None:
            self._outside.refuse()
        has = self._count.state
        if has < version or (has > version and self._undo is None):
            raise RecoveryFailed(f"the state contains {has} updates, but {version} were requested")
        self._whole()
        if has > version:
            assert self._undo is not None and self._replicated is not None
            self._fence()
            # A backward may be under way; it continues with what it has, and what it gives is not used.
            with _unsafe_preserve_version_counter(tuple(self._replicated.parameters)):
                self._undo.undo()
            self._count.begin(version)
        description, tensors = self._export()
        yield description | {"version": version, "images": []}, tensors
