"""Parameters as they were before each update, for replacements that compute what lies between two updates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shared_core.errors import RecoveryFailed
from shared_core.worker.state.external_mutation import ExternalMutation
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.shared_images import SharedImage, SharedImages
from shared_core.worker.state.update_count import Count

#: (version before the update, parameters before it by place, or where the ranks of this machine have them together)
PreImage = tuple[int, dict[int, torch.Tensor] | SharedImage]


class UpdateImages:
    """What is kept before updates, and until when.

    Args:
        policy: ``always``, ``never``, or ``auto``: where a caller asks for it, and once a batch has had
            several updates.
        stable: gives the newest step boundary that every rank has published.
        outside: whether the script changes the state outside updates, too: then the state at step boundaries is kept.
        shared: what the ranks of this machine keep together; None where there are several machines.
    """

    def __init__(
        self,
        policy: str,
        count: Count,
        stable: Callable[[], int],
        outside: ExternalMutation,
        shared: SharedImages | None = None,
    ) -> None:
        self._policy, self._count, self._stable, self._outside = policy, count, stable, outside
        self._shared = shared
        self._several = False
        self._wanted = False
        self._sharded = self._own = False
        self._images: list[PreImage] = []
        self._newest: dict[int, torch.Tensor] = {}
        self._spare: dict[int, list[torch.Tensor]] = {}
        #: Number of the newest step boundary, and version, of the last two versions that step boundaries had.
        self._boundaries: list[tuple[int, int]] = []

    # -- whether -----------------------------------------------------------------------------------

    def attach(
        self, optimizers: int, sharded: bool, own: bool = False, *, same: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Begin with a state that so many ``optimizers`` update. ``sharded``: optimizer state is divided over the
        replicas; ``own``: all of it is divided over the ranks and given to nobody, so nothing is kept. ``same``: what
        they update, by place, where each update follows a backward in which all ranks take part.
        """
        self._sharded, self._own = sharded, own
        if self._shared is not None:
            self._shared.attach(same or {})
        self._several = self._several or optimizers > 1

    @property
    def kept(self) -> bool:
        if self._own:
            return False
        # Of a sharded stage a replica has nothing else to give: see Updates.attach().
        return self._policy == "always" or (self._several and (self._policy == "auto" or self._sharded))

    @property
    def needed(self) -> bool:
        """Whether they are, and replacements begin with them; not where these are given no newer state."""
        return not self._outside.active and self.kept

    def want(self, *, at_once: bool = False) -> None:
        """Keep from the next step boundary on, or at once (where the policy is ``auto``)."""
        self._wanted = True
        self._several = self._several or at_once

    def resume(self, several: bool) -> None:
        self._several = several

    # -- keeping -----------------------------------------------------------------------------------

    @torch.no_grad()
    def keep(self, replicated: Replicated, places: Iterable[int]) -> None:
        """An update of the parameters at these places begins: copy them. Nobody is being given images meanwhile, so the
        memory of those that were dropped is used again: memory that is new to the process costs more than the copy.
        """
        self._drop()
        version, places = self._count.applied, list(places)
        if self._shared is not None and (image := self._shared.complete(version, places)) is not None:
            self._images.append((version, image))
            self._spare = {}
            return
        kept: dict[int, torch.Tensor] = {}
        for place in places:
            parameter = replicated.parameters[place].detach()
            spare = self._spare.get(place)
            room = spare.pop() if spare else None
            fits = room is not None and (room.shape, room.dtype) == (parameter.shape, parameter.dtype)
            kept[place] = room if room is not None and fits else torch.empty_like(parameter)
        if kept:
            torch._foreach_copy_(list(kept.values()), [replicated.parameters[place] for place in kept])
        self._images.append((version, kept))

    def share(self, replicated: Replicated) -> None:
        """A backward has gradients for all ranks: copy this rank's part of the parameters before it gives them away."""
        # A replacement overwrites nothing before its next step boundary: another may start before its own.
        begun = bool(self._boundaries) and self._boundaries[-1][0] == sys.maxsize
        if self._shared is not None and self.needed and not self._count.ahead and not begun:
            self._shared.put(self._count.applied, self._oldest(), replicated.parameters)

    def at_boundary(self, index: int) -> None:
        self._several = self._several or self._wanted
        version = self._count.applied
        self._boundaries = [*(boundary for boundary in self._boundaries if boundary[1] != version), (index, version)][
            -2:
        ]
        self._drop()

    def _drop(self) -> None:
        """Drop what no replacement asks for. All ranks have made the gradients of the newest update, so each has
        published the step boundary before it; and none begins before one that every rank has published. (Step
        boundaries alone say nothing: where no collective lies between, such as at the end of a pass, one rank can be
        several ahead.)
        """
        oldest = self._oldest()
        dropped = [params for version, params in self._images if version < oldest and isinstance(params, dict)]
        self._images = [image for image in self._images if image[0] >= oldest]
        if dropped:
            places = {place for params in dropped for place in params}
            self._spare = {place: [params[place] for params in dropped if place in params] for place in places}

    def _oldest(self) -> int:
        """The oldest version that a replacement may begin with."""
        stable = self._stable()
        self._boundaries = [(boundary, version) for boundary, version in self._boundaries if boundary >= stable]
        return min((version for _, version in self._boundaries), default=self._count.applied)

    # -- for a replacement ----------------------------------------------------------------------------

    def has(self, version: int) -> bool:
        """Whether the parameters before the update that follows ``version`` are kept."""
        return any(kept == version for kept, _ in self._images)

    def _image(self, version: int) -> dict[int, torch.Tensor] | None:
        return next((_read(params) for kept, params in self._images if kept == version), None)

    def parameters_at(self, version: int, newest: list[torch.Tensor]) -> list[torch.Tensor]:
        """All parameters with ``version`` updates in them, not copied: images, or ``newest``, the parameters now.
        Raises RecoveryFailed if they are no longer kept.
        """
        image = self._image(version)
        if image is not None:
            return list(image.values())
        if self._count.applied != version:
            raise RecoveryFailed(
                f"the parameters before update {version + 1} are no longer kept: there have been "
                f"{self._count.applied} updates"
            )
        return newest

    def add_to(self, description: dict[str, Any], tensors: list[torch.Tensor], version: int) -> None:
        """Add the images since ``version`` to an exported state, in place: ``[version, places, index of the first
        tensor]`` each. Raises RecoveryFailed if a part of one is gone.
        """
        description["images"] = []
        for kept, image in self._images:
            if kept >= version:
                params = _read(image)
                description["images"].append([kept, list(params), len(tensors)])
                tensors += params.values()
        for place, value in self._newest.items():  # a replacement that is itself still behind has older parameters
            tensors[place] = value

    # -- in a replacement -----------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether parameters are older than the optimizer's state, as they were at this place of the program."""
        return bool(self._newest)

    def begin(self, version: int) -> None:
        """The program is at a step boundary of ``version``."""
        self._boundaries = [(sys.maxsize, version)]

    def load(
        self, replicated: Replicated, description: dict[str, Any], tensors: Sequence[torch.Tensor], owned: bool
    ) -> None:
        """Take over the images in a donor's state, and copy to the parameters, which are the donor's newest, what they
        were at the step boundary. With ``owned`` nobody else uses ``tensors``, so they are not copied.
        """
        self._images = [
            (v, {p: t if owned else t.clone() for p, t in zip(places, tensors[at : at + len(places)], strict=True)})
            for v, places, at in description["images"]
        ]
        if self._count.ahead and self._images:
            images = [_read(image) for _, image in self._images]
            self._newest = {
                place: replicated.parameters[place].detach().clone() for params in images for place in params
            }
            for params in reversed(images):
                _put(replicated, params)

    def forward(self, replicated: Replicated) -> None:
        """The update before the present version was left out: put its parameters where they were after it."""
        if not self._newest:
            return
        version = self._count.applied
        later_images = [_read(image) for kept, image in self._images if kept > version]
        for place in self._image(version) or {}:
            later = next((params[place] for params in later_images if place in params), None)
            _put(replicated, {place: later if later is not None else self._newest[place]})
        if self._count.ahead == 0:
            self._newest = {}


def _read(image: dict[int, torch.Tensor] | SharedImage) -> dict[int, torch.Tensor]:
    return image.read() if isinstance(image, SharedImage) else image


def _put(replicated: Replicated, params: dict[int, torch.Tensor]) -> None:
    for place, value in params.items():
        replicated.parameters[place].data.copy_(value)
