"""DDP's agreement on its gradient buckets, which it makes once, after the first backward.

A replacement learns the order by running that backward, or, later, from the record of what was agreed; in between there
is no recovery point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared_core.errors import ConfigError
from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.listener import RecordKey
from shared_core.worker.comm.op import Op
from shared_core.worker.state.bucket_inputs import BucketInput, BucketInputs
from shared_core.worker.state.ddp_graph import FirstIteration, repeat
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.records import Records
from shared_core.worker.state.support import refuse_ddp, refuse_hooks

#: Kinds of records.
BUCKETS = "ddp buckets"
GRAPH = "ddp graph"
#: Boundaries in which DDP may settle its buckets without a recovery point.
_BOUNDARIES = 3


class Buckets:
    """The DDP modules of this worker, and which of them have settled their buckets.

    Args:
        unattached: called when a module is trained and nothing is attached.

    Attributes:
        eligible: step boundaries since :meth:`attach` that could have been recovery points.
    """

    def __init__(
        self,
        runtime: Runtime,
        publisher: SharedMemoryPublisher,
        position: BoundaryPosition,
        unattached: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime, self._publisher, self._position, self._unattached = runtime, publisher, position, unattached
        self._attached = False
        self.modules: list[DistributedDataParallel] = []
        self.eligible = 0
        self._settled: set[int] = set()
        self._agreed: dict[int, int] = {}
        self._inputs = BucketInputs()
        self._awaiting: set[int] = set()
        self._counted = False
        self._broadcasts: dict[int, list[torch.Tensor]] = {}
        self._first: dict[int, FirstIteration] = {}

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Look for DDP modules in ``modules``. Raises Unsupported for one that cannot be recovered."""
        self._attached = True
        self.modules = [m for module in modules for m in module.modules() if isinstance(m, DistributedDataParallel)]
        for ddp in self.modules:
            refuse_ddp(ddp, self._runtime.world_size)
        self._settled.clear()
        self._agreed.clear()
        self._inputs.clear()
        self._awaiting.clear()
        self.eligible = 0
        known = {id(each.ddp): each for each in self._first.values()}
        static = [(number, ddp) for number, ddp in enumerate(self.modules) if ddp.static_graph]
        self._first = {number: known.get(id(ddp)) or FirstIteration(ddp) for number, ddp in static}

    @property
    def may_be_unused(self) -> bool:
        """Whether some parameter may have no gradient: then buckets hold leftovers that mean nothing."""
        return any(ddp.find_unused_parameters or ddp.static_graph for ddp in self.modules)

    def flags(self) -> list[int]:
        """Of each module, 1 if its last forward had gradients: DDP broadcasts buffers before the next only then. 2 is
        added if no backward has come since, as after a forward for a metric: DDP then reduces gradients in the next
        one, even in one inside ``no_sync``.
        """
        return [int(ddp.require_forward_param_sync) + 2 * self._awaits(ddp) for ddp in self.modules]

    def set_flags(self, flags: list[int]) -> None:
        for ddp, flag in zip(self.modules, flags, strict=False):
            ddp.require_forward_param_sync = bool(flag & 1)
            if flag & 2:
                ddp.reducer.prepare_for_backward([])
                self._inputs.forward(ddp)
                self._awaiting.add(id(ddp))

    def _awaits(self, ddp: DistributedDataParallel) -> bool:
        return id(ddp) in self._awaiting and not ddp.static_graph and self._inputs.awaits(ddp)

    def unsettled(self) -> bool:
        """Whether this step boundary, which could be a recovery point, is none. Counts it: call it once a boundary."""
        # Until a static graph is known, a replacement runs the iteration itself in which DDP learns it.
        if any(first.begun and not first.ended for first in self._first.values()):
            return True
        asked = [i for i, ddp in enumerate(self.modules) if not (ddp.find_unused_parameters or ddp.static_graph)]
        waiting = [i for i in asked if i not in self._settled]
        if not waiting:
            return False
        self.eligible += 1
        return 1 < self.eligible <= _BOUNDARIES

    def handed_over(self) -> None:
        if not self._attached:
            self._unattached()
        if not self._counted:  # a bucket of some module
            self._awaiting.clear()
        self._counted = False

    def note(self, ddp: DistributedDataParallel, op: Op) -> None:
        """DDP agrees on the order of the buckets of ``ddp`` by the operation ``op``; its result is recorded when it is
        there, on the thread that completes it. Raises ConfigError if other modules are attached, and ``ddp`` is not.
        """
        number = next((i for i, known in enumerate(self.modules) if known is ddp), None)
        if number is None and not self._attached:
            return
        if number is None:
            raise ConfigError(
                f"rank {self._runtime.rank}: a DistributedDataParallel module is trained that is not attached: call "
                "shared_core.attach(model, optimizer) before training, with the wrapper and not the module inside"
            )
        self._settled.add(number)
        first = self._first.get(number)
        if first is not None and number not in self._agreed:
            first.end()
            self._publisher.records.add(
                RecordKey(self._position.entry, GRAPH, str(number), self._position.boundaries), first.seen()
            )
        ordinal = self._agreed[number] = self._agreed.get(number, -1) + 1
        key = RecordKey(self._position.entry, BUCKETS, f"{number}.{ordinal}", self._position.boundaries)
        op.future.add_done_callback(lambda _: self._publisher.records.add(key, op.results))
        self._broadcasts.setdefault(number, []).append(op.results[0])
        if ordinal % 2:
            op.future.add_done_callback(lambda _: self._know(ddp, self._broadcasts.pop(number)))

    def _know(self, ddp: DistributedDataParallel, agreed: Sequence[torch.Tensor]) -> None:
        """DDP broadcasts the places of its parameters, bucket by bucket, and how many buckets there are; then how many
        parameters each has.
        """
        places, sizes = (tensor.tolist() for tensor in agreed)
        self._inputs.agreed(ddp, places[:-1], sizes)

    def forward_done(self, ddp: DistributedDataParallel) -> None:
        """A backward follows, which overwrites the buckets of ``ddp``, and in which it may learn a static graph. Raises
        Unsupported if the module was given what cannot be recovered since it was attached.
        """
        refuse_hooks(ddp)
        for first in self._first.values():
            first.forward(ddp)
        self._inputs.forward(ddp)
        self._awaiting.add(id(ddp))
        self._runtime.results.release()

    def input_of(self, bucket: torch.Tensor) -> BucketInput | None:
        """What recomputes a bucket that DDP hands over; None if that is not known."""
        found = self._inputs.of(bucket)
        self._counted = found is not None
        return found

    def layout(self) -> Sequence[BucketInput]:
        """The buckets of the one DDP module in the order in which it hands them over; empty before that is known."""
        return self._inputs.layout(self.modules[0]) if len(self.modules) == 1 else ()

    def settle(self, records: Records, boundary: StepBoundary) -> None:
        """Give DDP the buckets that were agreed on before ``boundary``, without a backward: the broadcasts of that
        agreement are served from the record. So is what it learned of a static graph.
        """
        graphs = {
            key.name: results
            for key, results in records
            if (key.entry, key.kind) == (boundary.entry, GRAPH) and key.number < boundary.index
        }
        for number, ddp in enumerate(self.modules):
            agreed = {
                key.name: results
                for key, results in records
                if (key.entry, key.kind) == (boundary.entry, BUCKETS)
                and key.name.startswith(f"{number}.")
                and key.number < boundary.index
            }
            if not agreed:
                continue
            if number in self._first:
                self._first[number].end()
                counts, used = graphs[str(number)]
                repeat(ddp, counts, used, self._runtime.operations.answered)
            with self._runtime.operations.scripted(agreed[f"{number}.{ordinal}"] for ordinal in range(len(agreed))):
                ddp.reducer._push_all_rebuilt_params()
                ddp.reducer._rebuild_buckets()
            self._know(ddp, [agreed[f"{number}.{ordinal}"][0] for ordinal in (len(agreed) - 2, len(agreed) - 1)])
            self._settled.add(number)
