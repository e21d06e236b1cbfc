"""Names, ranks and time-outs of a process group: what torch and frameworks ask of one besides operations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shared_core.worker.comm.runtime import Runtime

#: Untyped, because torch's stubs leave out most of it.
_Base: Any = torch.distributed.ProcessGroup


class GroupIdentity(_Base):  # type: ignore[misc]
    """A process group without its operations. It has no communicator of its own: the runtime's is replaced when a rank
    fails. ``rank`` is that in the group; ``ranks`` are global, in group order.
    """

    def __init__(
        self, runtime: Runtime, name: str, rank: int, size: int, ranks: Sequence[int], timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self._runtime = runtime
        self._state = runtime.new_group(name, rank, size, ranks, timeout)
        self._name = name
        self._desc = ""

    def getBackendName(self) -> str:  # noqa: N802 (name given by torch)
        """DDP, in C++, would look for torch's own backend behind a group with the name of one."""
        return "swift"

    def name(self) -> str:
        return "swift"

    def _get_backend_name(self) -> str:
        """By it torch's Python chooses between calls that give the same values."""
        return "gloo"

    def size(self) -> int:
        return self._state.size

    def rank(self) -> int:
        return self._state.rank

    getSize, getRank = size, rank  # noqa: N815

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    setGroupName, group_name = _set_group_name, property(getGroupName)  # noqa: N815

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    setGroupDesc, group_desc = _set_group_desc, property(getGroupDesc)  # noqa: N815

    @property
    def bound_device_id(self) -> torch.device | None:
        return None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """The inner gloo backend, for questions about its capabilities. Blocks while a recovery runs."""
        return self._runtime.connections.backend(self._state)

    def _set_default_backend(self, backend: Any) -> None:
        pass

    def _register_backend(self, *args: Any) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._state.next

    def set_timeout(self, timeout: timedelta) -> None:
        """Holds for receives at once, for collectives from the next generation on."""
        self._state.timeout = timeout

    def get_group_store(self) -> Any:
        # The script's, not the job's: torch's own code asks for it, and what it keeps there is nothing of ours.
        return PrefixStore(f"group/{self._name}", torch.distributed.distributed_c10d._get_default_store())

    def abort(self) -> None:
        """Nothing to do: the runtime owns the communicators, and peers may still need this rank's log."""

    def shutdown(self) -> None:
        """The program destroys the group. It goes when no peer can need this rank's log any more."""
        self._runtime.destroyed(self._state)
