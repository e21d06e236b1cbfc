"""The process group of backend ``swift``: every operation that DDP, Lightning, Accelerate and DeepSpeed use.

Each method describes its operation as an :class:`~shared_core.worker.comm.op.Op` (how to start it on gloo, where its
result lies, what the log keeps) and hands it to the runtime; nothing here knows about failures.
``docs/design/operations.md`` has a table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shared_core.devices import check as check_device
from shared_core.devices import room_on_host, to_host
from shared_core.errors import CollectiveTimeout, Unsupported, WaitTimeout
from shared_core.worker.comm.compat import (
    AllgatherOptions,
    agreeing_on_buckets,
    called_by_reducer,
    in_backward,
    methods_out_of_graphs,
)
from shared_core.worker.comm.op import KeptResults, Op, RunAgain, SwiftWork, input_checksum, signature
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.comm.staged import StagedReceive, staged, staged_in_place
from shared_core.worker.comm.state import KeptBucketInput

#: Untyped, because torch's stubs leave out most of it.
_Base: Any = torch.distributed.ProcessGroup


Tensors = list[torch.Tensor]

#: Operations whose inputs gloo leaves as they are.
_ONLY_READ = frozenset({"reduce_scatter_single"})
#: Untyped, because torch's stubs leave out options and declare overloads that C++ resolves.
dist: Any = torch.distributed
_SUM = int(dist.ReduceOp.SUM.value)


def _root_detail(opts: Any) -> int:
    return int(opts.rootRank)


def _room_of(tensors: Tensors) -> Callable[[], Tensors]:
    """A function that allocates CPU tensors of these sizes, and holds no reference to the tensors."""
    described = [(tensor.size(), tensor.dtype) for tensor in tensors]
    return lambda: [torch.empty(size, dtype=dtype) for size, dtype in described]


def _reduce_detail(opts: Any) -> int:
    """Number of the reduce operation; 0 (SUM) where ``opts`` name none."""
    return int(getattr(opts.reduceOp, "op", opts.reduceOp).value) if hasattr(opts, "reduceOp") else 0


class SwiftProcessGroup(_Base):  # type: ignore[misc]
    """A process group whose communicator is replaced when a rank fails, while every user keeps this object. ``rank`` is
    that in the group; ``ranks`` are global, in group order.

    Arguments mean what they mean to torch's ``ProcessGroup``; gloo checks shapes and dtypes. ``opts`` None stands for
    torch's defaults. Ranks (``rootRank``, ``dst``, ``src``) are ranks in this group. Any thread may call; calls of one
    group must come in the same order at every member.

    A collective returns at once with a :class:`~shared_core.worker.comm.op.SwiftWork`, on which ``wait()`` or the
    future tells the end. Until then outputs are undefined and inputs must not change: a retry after a failure reads
    them again, except where the method says that they are copied. Tensors of a device, where allowed, are copied to
    host memory in the call, which blocks for it, and outputs are copied back when the operation is complete.

    Raises:
        Unsupported: by each operation, for a tensor of a device that nobody has allowed.
        ReplayDivergence: by each collective of a replacement that is not the one the failed worker ran.
        PlaceMismatch: by a collective that is served with what others called from another place of the program.
        RuntimeError: where gloo refuses the arguments.
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
        return self._runtime.generations.backend(self._state)

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

    # -- helpers -----------------------------------------------------------------------------------

    def _run(self, op: Op, tensors: Sequence[torch.Tensor] = (), *, bucket: bool = False) -> SwiftWork:
        """Issue ``op``. ``tensors`` are its inputs, from which a start-up answers where no peer does."""
        self._runtime.operations.submit(self._state, op, tensors)
        if bucket:
            self._runtime.listener.bucket_handed_over(op)
        return SwiftWork(op, self._runtime.compute_lock)

    def check(self, device: torch.device, operation: str) -> None:
        """Refuse tensors of a device, unless ``device.experimental`` or ``on_failure="restart"`` is set. Raises
        Unsupported.
        """
        allowed = self._runtime.stages or self._runtime.restarts
        check_device(device, f"a tensor of {operation}", allowed=allowed)

    def _inputs_checksum(self, inputs: Sequence[torch.Tensor]) -> int:
        """0 where checksums are off, and for uint8 inputs."""
        # Bytes are pickled objects (all_gather_object), whose pickles may differ though the objects are equal.
        if not self._runtime.checksums or all(t.dtype == torch.uint8 for t in inputs):
            return 0
        return input_checksum(inputs)

    # -- operations with a replicated result -------------------------------------------------------

    @staged_in_place
    def allreduce(self, tensors: Any, opts: Any = None) -> SwiftWork:
        """Reduce ``tensors``, one tensor or a list, in place. Members pass the same shapes and dtypes.

        The reduction runs in pooled buffers, which are the log; the result is copied to ``tensors`` when it is there. A
        call from DDP's reducer (one flat gradient bucket) is different: either the bucket itself is reduced and is the
        log until DDP overwrites it, or the future's value is the pooled buffer, which aliases the log, and only
        ``wait()`` writes the bucket. Sparse tensors are gathered, and the call blocks until the sum is in ``tensors``.

        Raises:
            Unsupported: sparse tensors, where they are several or the operation is not SUM.
        """
        opts = opts or dist.AllreduceOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(tensor.is_sparse for tensor in tensors):
            return self._sparse(tensors, opts)
        # DDP's reducer calls from inside the autograd engine and takes the future's value.
        bucket = called_by_reducer()
        if bucket or in_backward():  # a communication hook of DDP's calls from there, too
            self._runtime.listener.before_bucket()
        if bucket:
            source = self._runtime.listener.bucket_input(tensors[0]) if self._runtime.results.borrows(tensors) else None
            if source is not None:
                return self._in_place(tensors, opts, source)
        return self._pooled("all_reduce", tensors, opts, lambda inner, into: inner.allreduce(into, opts), bucket=bucket)

    def _sparse(self, tensors: Tensors, opts: Any) -> SwiftWork:
        """Sum a sparse COO tensor as gloo does: all ranks gather the parts of all, padded to the longest, and add
        them in the order of the ranks. The log keeps what was gathered. Blocks; ``tensor`` is written before
        this returns.
        """
        if _reduce_detail(opts) != _SUM or len(tensors) != 1:
            raise Unsupported("all_reduce of sparse tensors takes one tensor and SUM, as in gloo")
        [tensor] = tensors
        mine = tensor.detach().coalesce()
        indices, values = mine.indices(), mine.values()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self._state.size)]
        self.allgather([counts], [torch.tensor([mine._nnz()])]).wait()
        most = max(int(count) for count in counts)
        places = [indices.new_zeros(indices.shape[0], most) for _ in counts]
        parts = [values.new_zeros(most, *values.shape[1:]) for _ in counts]
        places[self._state.rank][:, : indices.shape[1]] = indices
        parts[self._state.rank][: len(values)] = values
        own_places, own_parts = places[self._state.rank].clone(), parts[self._state.rank].clone()
        self.allgather([places], [own_places]).wait()
        last = self.allgather([parts], [own_parts])
        last.wait()
        total = None
        for count, place, part in zip(map(int, counts), places, parts, strict=True):
            one = torch.sparse_coo_tensor(place[:, :count], part[:count], mine.shape, check_invariants=False)
            total = one if total is None else total + one
        assert total is not None
        with torch.no_grad():
            tensor.copy_(total.coalesce())
        return _Together([last], [tensor])

    def _pooled(
        self, name: str, tensors: Tensors, opts: Any, call: Callable[[Any, Tensors], Any], *, bucket: bool = False
    ) -> SwiftWork:
        """Reduce into pooled buffers: the caller's tensors stay as the input of a retry, the buffers become the log.

        With ``bucket`` the future's value is the buffers themselves, and the caller's tensors are written in
        ``wait()`` only.
        """
        buffers = [self._runtime.results.buffer(t) for t in tensors]

        def start(inner: Any) -> Any:
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor.detach())
            return call(inner, buffers)

        op = Op(
            signature(name, tensors, _reduce_detail(opts)),
            start,
            buffers,
            install=partial(_copy, tensors),
            value=buffers if bucket else tensors,  # DDP gets the buffer itself
            keeps=KeptResults.POOLED,
            lazy=bucket,
            checksum=self._inputs_checksum(tensors) if not bucket or self._runtime.bucket_checksums else 0,
            again=start if bucket else None,
        )
        return self._run(op, tensors, bucket=bucket)

    def _in_place(self, tensors: Tensors, opts: Any, source: KeptBucketInput) -> SwiftWork:
        """Reduce one bucket of DDP where it is. It is the log until DDP's next backward. A retry has ``source`` write
        the input again, which is compared with its checksum.
        """
        checksum = input_checksum(tensors)
        started = False

        def again(inner: Any) -> Any:
            source.write(tensors[0], checksum)
            return inner.allreduce(tensors, opts)

        def start(inner: Any) -> Any:
            nonlocal started
            if started:
                return again(inner)
            started = True
            return inner.allreduce(tensors, opts)

        op = Op(
            signature("all_reduce", tensors, _reduce_detail(opts)),
            start,
            tensors,
            value=tensors,
            keeps=KeptResults.BUCKET,
            checksum=checksum if self._runtime.bucket_checksums else 0,
            again=again,
        )
        return self._run(op, tensors, bucket=True)

    def reduce_again(self, bucket: Op) -> SwiftWork:
        """Reduce a bucket of DDP, whose reduction has ended, from the same input into the same memory."""
        assert bucket.again is not None
        return self._run(Op(bucket.signature, bucket.again, bucket.results))

    @staged_in_place
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SwiftWork:
        """Reduce a list of dense tensors in place, as one operation. The log keeps the pooled buffers that were reduced
        into. Raises Unsupported for a sparse tensor.
        """
        coalesced = dist.AllreduceCoalescedOptions()
        if opts is not None:
            coalesced.reduceOp = opts.reduceOp
        tensors = list(tensors)
        _dense("all_reduce_coalesced", tensors)
        return self._pooled(
            "all_reduce_coalesced", tensors, coalesced, lambda inner, into: inner.allreduce_coalesced(into, coalesced)
        )

    @staged_in_place
    def broadcast(self, tensors: Any, opts: Any = None) -> SwiftWork:
        """Write the root's ``tensors``, one tensor or a list, to those of all others, in place. The log keeps a copy
        of the result. Only the root's inputs have a checksum. The end at one member does not tell that the others
        have called.
        """
        opts = opts or dist.BroadcastOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        root = self._state.rank == opts.rootRank
        op = Op(
            signature("broadcast", tensors, _root_detail(opts)),
            lambda inner: inner.broadcast(tensors, opts),
            tensors,
            value=tensors,
            full=False,
            checksum=self._inputs_checksum(tensors) if root else 0,
        )
        ddp = agreeing_on_buckets()
        if ddp is not None:
            # DDP agrees on the order of its buckets once, after the first backward. A replacement needs it at any time.
            self._runtime.listener.bucket_order(ddp, op)
        return self._run(op, tensors if root else ())

    @staged
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *, coalesced: bool = False) -> SwiftWork:
        """Write ``inputs[0]`` of member r to ``outputs[0][r]``: one list of ``size`` tensors, each of the input's shape
        and dtype. The log keeps a copy of all outputs.
        """
        opts = opts or AllgatherOptions()
        outputs, inputs = [list(o) for o in outputs], list(inputs)
        op = Op(
            signature("all_gather_coalesced" if coalesced else "all_gather", inputs),
            lambda inner: (inner.allgather_coalesced if coalesced else inner.allgather)(outputs, inputs, opts),
            [t for out in outputs for t in out],
            value=outputs,
            checksum=self._inputs_checksum(inputs),
        )
        return self._run(op, inputs)

    @staged
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SwiftWork:
        """As :meth:`allgather` of several tensors: input i of member r goes to ``outputs[r][i]``."""
        return self.allgather(outputs, inputs, opts, coalesced=True)

    @staged
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SwiftWork:  # noqa: A002
        """Write the inputs of all members, in rank order, to ``output``, which has ``size`` times the elements of
        ``input`` and its dtype.

        The log keeps a copy of ``output``. Of a sharded model it keeps a copy of ``input`` instead, and after a failure
        all members run the operation again into scratch memory.
        """
        opts = opts or AllgatherOptions()
        results = self._runtime.results
        again = results.sharded and self._state.size > 1
        kept, new = results.inputs.keep(input) if again else (input, False)
        room = _room_of([output])

        def redo(inner: Any) -> Any:
            return inner._allgather_base(*room(), kept, opts)

        op = Op(
            signature("all_gather_single", [input]),
            lambda inner: inner._allgather_base(output, input, opts),
            [output],
            value=[output],
            keeps=RunAgain(redo, [kept] if new else []) if again else KeptResults.COPY,
            checksum=self._inputs_checksum([input]),
        )
        return self._run(op, [input])

    _allgather_base = all_gather_single

    @staged
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SwiftWork:
        """One :meth:`all_gather_single` for each pair, in order, each with its own number and log entry."""
        works = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return works[-1] if len(works) == 1 else _Together(works, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def barrier(self, opts: Any = None) -> SwiftWork:
        """Its work is done when all members have called. The log keeps that it was passed."""
        opts = opts or dist.BarrierOptions()
        return self._run(Op(signature("barrier", []), lambda inner: inner.barrier(opts), [], value=[]))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that blocks. Rank 0 says, in gloo's words, who has not come in time.

        Args:
            timeout: at most this long; that of the group if None. Zero fails at once.
            wait_all_ranks: rank 0 names all that are missing, not only the first.

        Raises:
            CollectiveTimeout: somebody has not come.
            WaitTimeout: at rank 0, if all have come and the barrier has not ended in time.
        """
        group, limit = self._state, timeout or self._state.timeout
        within = f"in {limit.total_seconds() * 1000:.0f} ms"
        if timeout is not None and not timeout:
            raise CollectiveTimeout(f"Rank {group.rank} timed out in monitoredBarrier after 0 ms.")
        store, key = self.get_group_store(), f"monitored/{group.next}"
        store.set(f"{key}/{group.rank}", "1")
        try:
            self.barrier().wait(limit)
        except WaitTimeout as error:
            if group.rank:
                raise CollectiveTimeout(
                    f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0. Please check rank 0 logs for faulty rank."
                ) from error
            missing = [str(rank) for rank in range(1, group.size) if not store.check([f"{key}/{rank}"])]
            if not missing:  # all have come, too late for the barrier itself
                raise
            if wait_all_ranks and len(missing) > 1:
                raise CollectiveTimeout(
                    f"Ranks {', '.join(missing)} failed to pass monitoredBarrier {within}"
                ) from error
            raise CollectiveTimeout(f"Rank {missing[0]} failed to pass monitoredBarrier {within}") from error

    # -- operations whose result differs by rank: inputs are kept, everyone takes part again -------

    def _exclusive(
        self, name: str, inputs: Tensors, outputs: Tensors, value: Any, detail: int, call: Any, *, full: bool = True
    ) -> SwiftWork:
        """Issue an operation whose result differs by rank. ``call(inner, inputs, outputs)`` starts it on gloo.

        Inputs are copied to pooled buffers, so that the caller may overwrite its own; inside :meth:`Results.lending`
        they are kept as they are. After a failure every member runs the operation again, those that had finished into
        scratch memory.
        """
        results = self._runtime.results
        kept = [t.detach() if results.lent else results.copied(t.detach()) for t in inputs]

        room = _room_of(outputs)

        def run(inner: Any, outs: Tensors) -> Any:
            return call(inner, kept if name in _ONLY_READ else [t.clone() for t in kept], outs)

        op = Op(
            signature(name, inputs, detail),
            lambda inner: run(inner, outputs),
            outputs,
            value=value,
            keeps=RunAgain(lambda inner: run(inner, room()), kept, pooled=not results.lent),
            full=full,
            checksum=0 if results.padded and name == "reduce_scatter_single" else self._inputs_checksum(inputs),
        )
        return self._run(op, inputs)

    @staged_in_place
    def reduce(self, tensors: Any, opts: Any = None) -> SwiftWork:
        """Reduce ``tensors``, one tensor or a list, into those of the root, in place. Those of the other members keep
        their values. The log keeps a copy of the input, at every member. Raises Unsupported for a sparse tensor.
        """
        opts = opts or dist.ReduceOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        _dense("reduce", tensors)
        outputs = tensors if self._state.rank == opts.rootRank else [torch.empty_like(t) for t in tensors]

        def call(inner: Any, inputs: Tensors, outs: Tensors) -> Any:
            for out, tensor in zip(outs, inputs, strict=True):
                out.data.copy_(tensor.detach())
            return inner.reduce(outs, opts)

        return self._exclusive("reduce", tensors, outputs, tensors, _root_detail(opts), call, full=False)

    @staged
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> SwiftWork:
        """Write ``inputs[0]`` of member r to ``outputs[0][r]`` at the root; elsewhere ``outputs`` is empty. The log
        keeps a copy of the input, at every member.
        """
        opts = opts or dist.GatherOptions()
        outputs, inputs = [list(o) for o in outputs], list(inputs)
        flat = [t for out in outputs for t in out]

        def call(inner: Any, ins: Tensors, outs: Tensors) -> Any:
            return inner.gather([outs] if outs else [], ins, opts)

        return self._exclusive("gather", inputs, flat, outputs, _root_detail(opts), call, full=False)

    @staged
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SwiftWork:
        """Write ``inputs[0][r]`` of the root to ``outputs[0]`` of member r; elsewhere ``inputs`` is empty. The log
        keeps a copy of the list, at the root.
        """
        opts = opts or dist.ScatterOptions()
        outputs, inputs = list(outputs), [list(i) for i in inputs]
        flat = [t for group in inputs for t in group]

        def call(inner: Any, ins: Tensors, outs: Tensors) -> Any:
            return inner.scatter(outs, [ins] if ins else [], opts)

        return self._exclusive("scatter", flat, outputs, outputs, _root_detail(opts), call, full=False)

    @staged
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SwiftWork:
        """Reduce ``inputs[0][r]`` of all members into ``outputs[0]`` of member r: ``size`` inputs of the output's
        shape. The log keeps a copy of all inputs, at every member.
        """
        opts = opts or dist.ReduceScatterOptions()
        outputs, inputs = list(outputs), [list(i) for i in inputs]
        flat = [t for group in inputs for t in group]

        def call(inner: Any, ins: Tensors, outs: Tensors) -> Any:
            return inner.reduce_scatter(outs, [ins], opts)

        return self._exclusive("reduce_scatter", flat, outputs, outputs, _reduce_detail(opts), call)

    @staged
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SwiftWork:  # noqa: A002
        """Reduce part r of every ``input`` into ``output`` of member r. ``input`` has ``size`` times the elements of
        ``output``, parts in rank order, and is not written. The log keeps a copy of it, at every member; inside
        :meth:`Results.lending` the tensor itself.
        """
        opts = opts or dist.ReduceScatterOptions()

        def call(inner: Any, ins: Tensors, outs: Tensors) -> Any:
            return inner._reduce_scatter_base(outs[0], ins[0], opts)

        return self._exclusive("reduce_scatter_single", [input], [output], [output], _reduce_detail(opts), call)

    _reduce_scatter_base = reduce_scatter_single

    @staged
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SwiftWork:
        """One :meth:`reduce_scatter_single` for each pair, in order, each with its own number and log entry."""
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return works[-1] if len(works) == 1 else _Together(works, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @staged
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,  # noqa: A002
    ) -> SwiftWork:
        """Send part r of ``input`` to member r, and write what member r sends to part r of ``output``. Splits are
        the sizes of the parts along dimension 0; empty for equal parts. The log keeps a copy of ``input``, at
        every member.
        """
        opts = opts or dist.AllToAllOptions()

        def call(inner: Any, ins: Tensors, outs: Tensors) -> Any:
            return inner.alltoall_base(outs[0], ins[0], output_splits, input_splits, opts)

        return self._exclusive("all_to_all_single", [input], [output], [output], 0, call)

    alltoall_base = all_to_all_single

    @staged
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SwiftWork:
        """Write ``inputs[r]`` of this member to the place in ``outputs`` of member r that has this member's rank.
        Shapes may differ by pair of members. The log keeps a copy of all inputs, at every member.
        """
        opts = opts or dist.AllToAllOptions()

        def call(inner: Any, ins: Tensors, outs: Tensors) -> Any:
            return inner.alltoall(outs, ins, opts)

        return self._exclusive("all_to_all", list(inputs), list(outputs), list(outputs), 0, call)

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send one tensor. It is copied in the call and may change at once; the copy is the log. The work returned is
        done: a send does not wait for its receiver. Raises Unsupported for a list of several tensors.
        """
        tensor = _single(tensors)
        self.check(tensor.device, "send")
        return self._state.channels.send(to_host(tensor), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive into one tensor, of the sent shape and dtype, in place; ``wait()`` blocks until the message is there.
        The work has no future.

        Raises:
            Unsupported: for a list of several tensors; in a replacement's start-up, if the failed worker's message was
                too large to be kept.
        """
        tensor = _single(tensors)
        self.check(tensor.device, "recv")
        host = room_on_host(tensor)
        work = self._state.channels.recv(host, src, tag)
        return work if host is tensor else StagedReceive(work, tensor, host)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """As :meth:`recv`, from whoever sends first with this tag; the work's ``source_rank()`` says who,
        after ``wait()``.

        Raises:
            Unsupported: for a tensor of a device, with messages logged to disk, in a replacement's start-up, and for a
                list of several tensors.
        """
        tensor = _single(tensors)
        self.check(tensor.device, "recv")
        if not tensor.is_cpu:
            raise Unsupported("recv from any source into a tensor of a device: name the source rank")
        return self._state.channels.recv_any(tensor, tag)


#: Dynamo would compile them where a compiled function calls DDP, and fail.
methods_out_of_graphs(SwiftProcessGroup)


class _Together(SwiftWork):
    """Several works as one. Its future's value is the outputs of all."""

    def __init__(self, works: list[SwiftWork], value: Any) -> None:
        super().__init__(works[-1]._op, works[-1]._compute_lock)
        self._works, self._value = works, value

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        joined = torch.futures.collect_all([work.get_future() for work in self._works])
        return joined.then(lambda _: self._value)

    def result(self) -> Any:
        self.wait()
        return self._value

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _copy(tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
    for tensor, result in zip(tensors, results, strict=True):
        tensor.data.copy_(result)


def _dense(name: str, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.is_sparse:
            raise Unsupported(f"{name} of a sparse tensor: use dense gradients (sparse=False in the embedding)")


def _single(tensors: Any) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise Unsupported(f"send and recv take one tensor, got {len(tensors)}")
    return tensors[0]  # type: ignore[no-any-return]
