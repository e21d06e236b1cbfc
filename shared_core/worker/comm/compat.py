"""What the backend needs of ``torch`` that is not public, and the one place where torch is changed.

:data:`NAMES` says why each is needed, also those that other packages use in place. A test looks each up, so that a
version that has changed one is noticed before a job meets it.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch.autograd.graph
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.serialization
from torch._C import _distributed_c10d
from torch._C._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel

from shared_core.versions import Tested

TESTED = Tested("torch", "2.11", "2.15")

_C10D, _GROUP = "torch.distributed.distributed_c10d", "torch._C._distributed_c10d:ProcessGroup"
#: What it takes; from torch 2.14 on also ``enable_reconfigure``.
_HELPER = (
    "group_size, group_rank, global_ranks_in_group, backend, store, group_name, backend_options, timeout, pg_tag, "
    "device_id, group_desc"
)
_GLOO, _DDP = "torch._C._distributed_c10d:ProcessGroupGloo", "torch.nn.parallel:DistributedDataParallel"

#: ``module:name``, with its parameters where it is called by name; why it is needed.
NAMES: tuple[tuple[str, str], ...] = (
    # -- groups
    (
        f"{_C10D}:_new_process_group_helper({_HELPER}) or {_C10D}:_new_process_group_helper({_HELPER}, "
        "enable_reconfigure)",
        "patched: frameworks branch on the backend's name, so a swift group is recorded as gloo",
    ),
    (f"{_C10D}:_FR_SELF_RECORDING_BACKENDS or {_C10D}:_world", "patched, where torch 2.15 has it"),
    (f"{_C10D}:_world", "where the name of a group's backend is recorded, and groups are found by name"),
    (f"{_C10D}:_World.pg_map", "the same"),
    (f"{_C10D}:_World.pg_backend_config", "the same"),
    (f"{_C10D}:_World.pg_group_ranks", "the same, for groups that a replacement makes at its step boundary"),
    (f"{_C10D}:_World.group_count", "a group's name is its number, the same at all its members"),
    (f"{_C10D}:_get_process_group_name(pg)", "a group's name is published in its place"),
    (f"{_C10D}:_get_default_store()", "processes of a script without a launcher meet there"),
    (f"{_C10D}:Backend._plugins", "whether the backend is registered"),
    ("torch._C._distributed_c10d:Store", "a store of one's own is a subclass"),
    ("torch._C._distributed_c10d:PrefixStore", "torch's stubs know it by this place only"),
    (f"{_GROUP}._get_backend_name", "overridden"),
    (f"{_GROUP}._set_group_name", "overridden"),
    (f"{_GROUP}._set_group_desc", "overridden"),
    (f"{_GROUP}._device_types", "overridden"),
    (f"{_GROUP}._get_backend", "overridden: the inner gloo backend"),
    (f"{_GROUP}._set_default_backend", "overridden"),
    (f"{_GROUP}._register_backend", "overridden"),
    (f"{_GROUP}._set_sequence_number_for_group or {_GROUP}._get_sequence_number_for_group", "overridden; gone in 2.14"),
    (f"{_GROUP}._get_sequence_number_for_group", "overridden"),
    # -- gloo
    (f"{_GLOO}._Options", "a group is made on a device of its own, whose sockets can be shut"),
    ("torch._C._distributed_c10d:ProcessGroupGloo._Options._timeout", "the same"),
    ("torch._C._distributed_c10d:ProcessGroupGloo._Options._threads", "the same"),
    ("torch._C._distributed_c10d:ProcessGroupGloo._Options._devices", "the same"),
    (f"{_GLOO}._set_default_timeout", "of operations, apart from that of connecting"),
    (f"{_GLOO}._allgather_base", "all_gather_single of the inner group"),
    (f"{_GLOO}._reduce_scatter_base", "reduce_scatter_single of the inner group"),
    ("torch._tensor_str:PRINT_OPTS", "how tensors are printed is put back; the functions for it are no faster"),
    # -- who calls a collective
    (
        "torch.autograd.graph:_engine_run_backward",
        "DDP's reducer calls from inside backward, and takes the future's value",
    ),
    (f"{_DDP}._get_ddp_logging_data(self)", "patched: it names the backend"),
    (f"{_DDP}._comm_hooks", "with their states, some of which cannot be recovered"),
    (f"{_DDP}._join_config", "whether inputs may be uneven, which cannot be recovered"),
    (f"{_DDP}._pre_forward(self, *inputs, **kwargs)", "in it DDP broadcasts the order of its buckets"),
    ("torch.nn.parallel.distributed:DistributedDataParallel.reducer", "a replacement's buckets are rebuilt"),
    ("torch._C._distributed_c10d:Reducer._push_all_rebuilt_params", "the same"),
    ("torch._C._distributed_c10d:Reducer._rebuild_buckets", "the same"),
    ("torch._C._distributed_c10d:Reducer._get_local_used_map", "what a replacement's DDP knows of a static graph"),
    ("torch._C._distributed_c10d:Reducer._delay_all_reduce", "the same"),
    ("torch._C._distributed_c10d:Reducer._autograd_hook", "the same"),
    (f"{_DDP}._static_graph_delay_allreduce_enqueued", "the same"),
    # -- torch.compile
    ("torch._C._dynamo.eval_frame:set_code_exec_strategy", "Dynamo does not look into a function"),
    ("torch._C._dynamo.eval_frame:_FrameExecStrategy", "the same, and what the function calls"),
    ("torch._C._dynamo.eval_frame:_FrameAction", "the same"),
    ("torch._dynamo.utils:get_compilation_metrics()", "whether code depends on what was compiled before"),
    ("torch._dynamo.utils:CompilationMetrics.cache_size", "the same"),
    ("torch._dynamo.pgo:_CODE_STATE", "for which sizes functions were compiled"),
    ("torch._dynamo.pgo:CodeState", "the same: automatic_dynamic"),
    ("torch._dynamo.config:recompile_limit", "after so many compilations a function is run as it is"),
    # -- tensors, modules and autograd
    ("torch:Tensor._version", "whether somebody has written to a tensor"),
    ("torch:_foreach_copy_", "copies of many tensors in one call"),
    ("torch.autograd.grad_mode:_unsafe_preserve_version_counter", "what is put back counts as no change"),
    ("torch.autograd:Variable._execution_engine", "a callback at the end of backward"),
    ("torch.autograd:_profiler_enabled", "whether gloo writes the ends of its works into a profiler's records"),
    ("torch._C:_current_graph_task_id", "whether a backward pass is running"),
    ("torch.nn:Module._buffers", "buffers are put in place under their names"),
    ("torch:Tensor._backward_hooks", "hooks of parameters, which see a whole gradient only"),
    ("torch:Tensor._post_accumulate_grad_hooks", "the same"),
    ("torch.nn:Module._forward_hooks", "whether a stage that is built elsewhere lacks some"),
    ("torch.nn:Module._forward_pre_hooks", "the same"),
    ("torch.nn:Module._backward_hooks", "the same"),
    ("torch.nn:Module._backward_pre_hooks", "the same"),
    ("torch.nn.modules.module:_global_forward_hooks", "hooks of all modules, and what only they hold"),
    ("torch.optim.optimizer:_global_optimizer_pre_hooks", "the same of optimizers"),
    ("torch.nn.modules.batchnorm:_NormBase", "statistics of one worker"),
    ("torch.nn.modules.batchnorm:_BatchNorm", "the same"),
    ("torch.optim:Optimizer.profile_hook_step(func)", "the step without its hooks is what it wraps"),
    (
        "torch.optim:Optimizer._optimizer_step_post_hooks",
        "hidden gradients are back before the program's hooks see them; whether the program has any",
    ),
    ("torch.optim:Optimizer._optimizer_step_pre_hooks", "whether the program has any"),
    ("torch.utils._pytree:tree_flatten", "nested batches"),
    ("torch.utils._pytree:tree_unflatten", "the same"),
    ("torch.utils._pytree:tree_map", "the same"),
    ("torch.utils._pytree:tree_leaves", "the same"),
    ("torch.serialization:_open_zipfile_writer(name_or_buffer)", "patched: torch.save opens its file there, in C++"),
    ("torch.utils._python_dispatch:TorchDispatchMode", "faults between tensor operations"),
)

#: How tensors are printed, as ``torch.set_printoptions`` sets it.
PRINTED: dict[str, Any] = vars(torch._tensor_str.PRINT_OPTS)
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_DDP_FORWARD = DistributedDataParallel._pre_forward.__code__
ProcessGroupGloo: Any = _distributed_c10d.ProcessGroupGloo
#: Up to torch 2.11 ``torch.distributed`` offers those of all operations but this.
AllgatherOptions: Any = _distributed_c10d.AllgatherOptions
#: Public; up to torch 2.12 it has only its older name, with the same parameters.
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# -- who calls a collective -------------------------------------------------------------------------------------------


def called_by_reducer() -> bool:
    """Whether DDP's reducer called the operation that asks: C++, right inside the autograd engine. Counts frames, so
    only methods of the group that are wrapped by ``staged_in_place`` may ask.
    """
    frame = _caller_of_operation()
    return frame is None or frame.f_code is _ENGINE


def _caller_of_operation() -> FrameType | None:
    """The frame that called the operation whose method asks a function that asks here."""
    frame = sys._getframe(2)
    return frame.f_back.f_back if frame.f_back is not None else None  # the first stages tensors of devices


def in_backward() -> bool:
    """Whether the autograd engine runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def agreeing_on_buckets() -> Any:
    """The ``DistributedDataParallel`` whose forward called the operation that asks, to agree on the order of its
    buckets; None if another did. Counts frames as :func:`called_by_reducer`.
    """
    frame = _caller_of_operation()
    return frame.f_locals["self"] if frame is not None and _is_ddp_forward(frame.f_code) else None


def graph_is_known(ddp: DistributedDataParallel) -> None:
    ddp._static_graph_delay_allreduce_enqueued = True


def _is_ddp_forward(code: CodeType) -> bool:
    """Whether this is DDP's ``_pre_forward``, or a part of it that Dynamo has made: those are named after it."""
    part = code.co_filename == _DDP_FORWARD.co_filename and _DDP_FORWARD.co_name in code.co_name
    return code is _DDP_FORWARD or part


# -- torch.compile -----------------------------------------------------------------------------------------------------

_Out = TypeVar("_Out", bound=Callable[..., Any])


def out_of_graphs(function: _Out) -> _Out:
    """Have Dynamo neither trace a function nor what it calls. Returns the same function.

    ``torch.compiler.disable`` would wrap it, which costs time in each call, and adds frames between an operation and
    its caller.
    """
    code = getattr(function, "__code__")  # noqa: B009 (a method has none of its own in mypy's eyes)
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010 (a graph ends where it is called)
    return function


def methods_out_of_graphs(cls: type) -> None:
    """:func:`out_of_graphs` for the methods of a class, but for those of its bases."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            out_of_graphs(method)


def profiling() -> bool:
    """Whether torch's profiler records this thread."""
    autograd: Any = torch.autograd
    return bool(autograd._profiler_enabled())


#: In a text of sizes: any.
ANY_SIZE = "?"


def compilations() -> list[Any]:
    """Dynamo's metrics of its newest compilations, the newest last; it keeps 64."""
    utils = sys.modules.get("torch._dynamo.utils")  # what is not imported has compiled nothing
    return utils.get_compilation_metrics() if utils is not None else []


def compiled_too_often(compilation: Any) -> str:
    """The function that Dynamo no longer compiles for other inputs, with its file and line; empty if it still does."""
    limit = sys.modules["torch._dynamo.config"].recompile_limit
    if (compilation.cache_size or 0) < limit:
        return ""
    return f"{compilation.co_name} ({compilation.co_filename}:{compilation.co_firstlineno})"


def sizes_compiled_for() -> dict[str, str]:
    """For which sizes of its inputs Dynamo has compiled each function, by function and input, as ``8 x ?``; parameters
    are left out. After a size has changed, also for which sizes older code is kept.
    """
    pgo = sys.modules.get("torch._dynamo.pgo")
    found: dict[str, str] = {}
    for code, state in (getattr(pgo, "_CODE_STATE", None) or {}).items():
        for source, entry in state.automatic_dynamic.items():
            if "._parameters[" not in source:
                is_tensor = isinstance(entry.size, tuple)
                sizes = entry.size if is_tensor else (entry.scalar,)
                kept = getattr(entry, "excluded_sizes" if is_tensor else "excluded_scalar", None)
                known = " x ".join(str(each) if isinstance(each, int) else ANY_SIZE for each in sizes)
                where = f"{source} in {code.name} ({code.filename}:{code.firstlineno})"
                found[where] = known if kept is None else f"{known} but {kept}"
    return found


# -- groups -----------------------------------------------------------------------------------------------------------


def is_registered(backend: str) -> bool:
    return backend.upper() in dist.Backend._plugins


def replace_group_creation(make: Callable[[Callable[..., Any], Mapping[str, Any]], Any]) -> None:
    """Patch: have every group be made by ``make(torch's function, its arguments by name)``.

    Frameworks branch on the name of the backend in dozens of places (Lightning replaces AVG by SUM and a division only
    for "gloo"), so the recorded name must stay "gloo" for the same bits; but new_group() inherits the recorded name,
    and would make plain gloo groups. torch has no hook between the two, so the function in which both meet is replaced.
    """
    helper = c10d._new_process_group_helper
    if hasattr(c10d, "_FR_SELF_RECORDING_BACKENDS"):  # torch 2.15 hooks a recorder to groups that do not record
        c10d._FR_SELF_RECORDING_BACKENDS = {*c10d._FR_SELF_RECORDING_BACKENDS, "swift"}
    names = helper.__code__.co_varnames[: helper.__code__.co_argcount]

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return make(helper, {**dict(zip(names, args, strict=False)), **kwargs})

    c10d._new_process_group_helper = new_group


def record_as_gloo(group: Any, store: Any) -> None:
    gloo = dist.Backend("gloo")
    c10d._world.pg_map[group] = (gloo, store)
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(gloo))


#: What torch's own gloo group has.
_GLOO_THREADS = 2
_GLOO_SETTINGS = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")


def log_as_gloo() -> None:
    """Patch: have DDP's logging data be those of the backend that ``get_backend`` names. C++ takes the name of the
    group, which cannot be "gloo" there: DDP would look for torch's own backend behind it.
    """
    module: Any = DistributedDataParallel
    stock = module._get_ddp_logging_data

    def data(ddp: DistributedDataParallel) -> dict[str, Any]:
        backend = dist.get_backend(ddp.process_group)
        found = {**stock(ddp), "backend_name": backend}
        if backend == "gloo":
            found |= {name.lower(): os.environ.get(name, "N/A") for name in _GLOO_SETTINGS}
            found["gloo_num_threads"] = _GLOO_THREADS
        return found

    module._get_ddp_logging_data = data


def group_name(group: Any) -> str:
    """The name of a group, the same at all its members."""
    return str(c10d._get_process_group_name(group))


def group_named(name: str) -> Any:
    """The group of this name; that of all ranks where there is none."""
    return next((each for each in list(c10d._world.pg_map) if group_name(each) == name), dist.group.WORLD)


def groups_made() -> int:
    """How many groups this process has made: the name of the next one."""
    return int(c10d._world.group_count)


def groups_there() -> list[Any]:
    """Groups that the program has made and not destroyed, oldest first."""
    return list(c10d._world.pg_map)


def make_group(name: str, ranks: Sequence[int], timeout: timedelta, description: str) -> None:
    """Make a group as ``new_group`` does, under a given name. ``ranks`` are global, this one among them."""
    world: Any = c10d._world
    make: Any = c10d._new_process_group_helper
    backend, store = world.pg_map[dist.group.WORLD]
    own = list(ranks).index(dist.get_rank())
    group, _ = make(
        len(ranks),
        own,
        list(ranks),
        dist.Backend(backend),
        store,
        name,
        timeout=timeout,
        group_desc=description,
    )
    world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}


def name_groups_from(made: int) -> None:
    """Name the next group as a process does that has made exactly so many."""
    c10d._world.group_count = made


def skip_groups(made: int) -> None:
    """Name the next group as a process does that has made at least so many."""
    c10d._world.group_count = max(c10d._world.group_count, made)


# -- files ------------------------------------------------------------------------------------------------------------


class _Nowhere(io.RawIOBase):
    """Takes what is written, and forgets it."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def hook_saving(skips: Callable[[Any], bool]) -> Callable[[], None]:
    """Patch: before ``torch.save`` opens a file, or ``safetensors`` writes one, ask ``skips`` about it, a path or an
    object with ``write``; True has nothing written there. Returns what undoes it.
    """
    serialization: Any = torch.serialization
    opens = serialization._open_zipfile_writer
    serialization._open_zipfile_writer = lambda file: opens(_Nowhere() if skips(file) else file)
    safetensors: Any = None
    with suppress(ImportError):  # the script may import it later
        safetensors = importlib.import_module("safetensors.torch")
    writes: Any = getattr(safetensors, "serialize_file", None)

    def serialize_file(tensors: Any, filename: Any, *args: Any, **options: Any) -> None:
        if not skips(filename):
            writes(tensors, filename, *args, **options)

    if writes is not None:
        safetensors.serialize_file = serialize_file

    def undo() -> None:
        serialization._open_zipfile_writer = opens
        if writes is not None:
            safetensors.serialize_file = writes

    return undo


# -- gloo -------------------------------------------------------------------------------------------------------------


def gloo_options(device: Any, timeout: timedelta) -> Any:
    """Options of a gloo group that uses this device; ``timeout`` is for connecting."""
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = _GLOO_THREADS
    options._devices = [device]
    return options


def set_operation_timeout(group: Any, timeout: timedelta) -> None:
    group._set_default_timeout(timeout)


def keep_for_ever(each: object) -> None:
    """Never run the destructor of an object, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
