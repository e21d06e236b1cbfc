"""All private names of DeepSpeed that this package uses, and all places where it is patched.

Nothing else uses them, except that :class:`~shared_core.pipeline.engine.SwiftPipelineEngine` overrides some.
:data:`NAMES` says why each is needed; a test looks each up. Functions import DeepSpeed: ``swiftctl`` plans without it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shared_core.errors import ConfigError, MissingExtra
from shared_core.versions import Tested, check_version

TESTED = Tested("deepspeed", "0.19", "0.19")

_ENGINE, _MODULE = "deepspeed.runtime.pipe.engine:PipelineEngine", "deepspeed.runtime.pipe.module:PipelineModule"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_DEEPSPEED = "deepspeed.runtime.engine:DeepSpeedEngine"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
_TRACE_MODE, _MODULE_ORDER, _PARAMETER_ORDER, _FETCHED_AT, _USE, _REUSE_DISTANCE, _LETS_GO = (
    f"_PartitionedParameterCoordinator__{name}"
    for name in (
        "trace_mode",
        "submodule_order",
        "param_order",
        "step_id_module_fetched_for",
        "ParamInTrace",
        "max_reuse_dist_in_numel",
        "params_to_release",
    )
)

_PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
#: Where ZeRO-3 adds attributes to the modules of a script, and which.
_ADDED = {
    f"{_PARAMETERS}:_init_external_params": ("_external_params", "ds_external_parameters", "all_parameters"),
    f"{_OFFLOAD}:_inject_parameters": ("_original_parameters",),
    f"{_OFFLOAD}:DeepSpeedZeRoOffload": (
        "ds_inflight_param_registry",
        "ds_id",
        "ds_recompute_parameters",
        "ds_grads_remaining",
        "applied_pre_backward_ref_cnt",
        "pre_bwd_fn",
        "post_bwd_fn",
        "ds_model_granularity",
    ),
}
#: Attributes of modules that do not belong to the script.
OF_MODULES = frozenset(name for names in _ADDED.values() for name in names)

#: ``module:name``, with its parameters where it is overridden or called, and why it is needed.
NAMES: tuple[tuple[str, str], ...] = (
    ("deepspeed.ops:__compatible_ops__", "patched: an operation that training does not use is compiled under a lock"),
    ("deepspeed:PipelineEngine", "patched: initialize() makes the engine by this name, and offers no hook"),
    (f"{_ENGINE}._INSTRUCTION_MAP", "instructions are looked up in it by class; each gets a point for faults"),
    (f"{_ENGINE}._exec_forward_pass(self, buffer_id)", "overridden: random numbers of each layer, and time"),
    (f"{_ENGINE}._exec_backward_pass(self, buffer_id)", "overridden: time"),
    (f"{_ENGINE}._exec_send_activations(self, buffer_id)", "overridden: the log says what a message is; replayed"),
    (f"{_ENGINE}._exec_send_grads(self, buffer_id)", "the same"),
    (f"{_ENGINE}._exec_recv_activations(self, buffer_id)", "replayed"),
    (f"{_ENGINE}._exec_recv_grads(self, buffer_id)", "replayed"),
    (f"{_ENGINE}._exec_load_micro_batch(self, buffer_id)", "replayed"),
    (f"{_ENGINE}._exec_optimizer_step(self, lr_kwargs)", "the end of a step whose schedule is not DeepSpeed's"),
    (f"{_ENGINE}._exec_schedule(self, pipe_schedule)", "overridden: plans and parallel replay run instead of it"),
    (f"{_ENGINE}._reserve_pipe_buffers(self, num_buffers)", "parallel replay uses one buffer"),
    (f"{_ENGINE}._aggregate_total_loss(self)", "overridden: the loss of a re-routed step is known"),
    (f"{_ENGINE}._next_batch(self)", "overridden: batches that were drawn are counted"),
    (f"{_ENGINE}._take_model_step", "overridden: hooks before the step"),
    (f"{_ENGINE}._global_grad_norm", "set for a step that is not run here"),
    (f"{_ENGINE}._reentrant_activation_checkpointing(self)", "then inputs must require gradients"),
    ("deepspeed.runtime.pipe.topology:PipelineParallelGrid._topo", "the stage of another rank"),
    (f"{_MODULE}._layer_specs", "layers of other stages are built"),
    (f"{_MODULE}._recursive_getattr(module, attr_name)", "parameters of tied layers"),
    (f"{_BF16}._hp_optimizer_states_linked", "moments are linked again"),
    (f"{_BF16}._lazy_init_hp_params_optimizer_state(self)", "the same"),
    (f"{_ZERO}._hp_optimizer_states_linked", "the same"),
    (f"{_BF16}._grad_acc_hooks", "removed: re-routing adds gradients up itself"),
    (f"{_ZERO}._grad_acc_hooks", "the same"),
    (f"{_BF16}._global_grad_norm", "set by re-routing's own step"),
    (f"{_ZERO}._global_grad_norm", "the same"),
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state(self)",
        "the same",
    ),
    ("deepspeed:DeepSpeedEngine", "patched: the same as with PipelineEngine"),
    (f"{_DEEPSPEED}._backward_epilogue(self)", "overridden: gradients are pending from here on"),
    (f"{_DEEPSPEED}._take_model_step(self, lr_kwargs)", "overridden: an update; no gradients are pending after it"),
    (f"{_DEEPSPEED}._step_applied", "published: was_step_applied() says it"),
    (f"{_DEEPSPEED}._global_grad_norm", "published: get_global_grad_norm() says it"),
    (f"{_DEEPSPEED}._is_gradient_accumulation_boundary", "published: what the script has set"),
    (f"{_DEEPSPEED}._unmanaged_backward_count", "published: samples are counted with it"),
    (f"{_COORDINATOR}.{_TRACE_MODE}", "published: what DeepSpeed knows of the order in which modules gather"),
    (f"{_COORDINATOR}.{_MODULE_ORDER}", "the same"),
    (f"{_COORDINATOR}.{_PARAMETER_ORDER}", "the same"),
    (f"{_COORDINATOR}.{_FETCHED_AT}", "the same"),
    (f"{_COORDINATOR}.{_USE}", "the same"),
    (f"{_COORDINATOR}.{_REUSE_DISTANCE}", "how far DeepSpeed looks for the next use of a parameter"),
    (f"{_COORDINATOR}.{_LETS_GO}", "what modules let go of is remembered; forgotten when the order changes"),
    *((f"{where}.{name}", "no state of the script") for where, names in _ADDED.items() for name in names),
)


def import_deepspeed() -> Any:
    """The module ``deepspeed``, set up as recovery needs it. Call it before the process group is created.

    DeepSpeed trains on the CPU, also where there is a GPU, and leaves out its all-reduce through shared memory, which
    training does not use: that is compiled at start-up under a lock that a killed worker leaves behind, for which all
    later ones on the machine would wait for ever.

    Raises:
        ConfigError: DeepSpeed was imported already and has chosen another device.
        MissingExtra: it is not installed.
        Unsupported: its version cannot be used.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        raise MissingExtra("pipelines need DeepSpeed: pip install 'swift-recovery[deepspeed]'") from error
    check_version(TESTED, NAMES)
    chosen = get_accelerator().device_name()
    if chosen != "cpu":
        raise ConfigError(
            f"DeepSpeed chose the accelerator {chosen!r} when it was imported, but this version trains on CPUs only: "
            "set DS_ACCELERATOR=cpu in the environment, or import DeepSpeed after shared_core"
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


# -- which engine deepspeed.initialize makes --------------------------------------------------------------------------


@contextmanager
def engines(kind: type) -> Iterator[None]:
    """Patch ``deepspeed.initialize`` inside the block: it makes engines of class ``kind``. There is no hook for it."""
    import deepspeed

    name = "PipelineEngine" if issubclass(kind, deepspeed.PipelineEngine) else "DeepSpeedEngine"
    stock = getattr(deepspeed, name)
    setattr(deepspeed, name, kind)
    try:
        yield
    finally:
        setattr(deepspeed, name, stock)


def choose_engines(name: str, choose: Callable[[Mapping[str, Any]], type]) -> None:
    """Patch: ``deepspeed.PipelineEngine(...)``, or another name, makes what ``choose`` says of the arguments.

    The name stays that of a class: ``isinstance``, ``issubclass`` and subclasses mean what they did.
    """
    import deepspeed

    setattr(deepspeed, name, choosing(getattr(deepspeed, name), choose))


def choosing(stock: type, choose: Callable[[Mapping[str, Any]], type]) -> type:
    """A class that stands for ``stock``, except that its objects are of the class that ``choose`` says."""

    class Choosing(type(stock)):  # type: ignore[misc]  # a metaclass of that of ``stock``
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            kind = choose(kwargs) if cls is stand_in else cls
            return kind(*args, **kwargs) if kind is not cls else super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, stock) if cls is stand_in else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, stock) if cls is stand_in else super().__subclasscheck__(subclass)

    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    stand_in: type = Choosing(stock.__name__, (stock,), names)
    return stand_in


# -- an engine --------------------------------------------------------------------------------------------------------


def instructions_of(engine: Any) -> Mapping[type, Callable[..., None]]:
    """The function for each kind of instruction, to be called with the engine; of an engine, or of its class."""
    found: Mapping[type, Callable[..., None]] = engine._INSTRUCTION_MAP
    return found


def load_micro_batch(engine: Any) -> None:
    """Read the next micro-batch into the first buffer."""
    engine._exec_load_micro_batch(0)


def receive_activations(engine: Any) -> None:
    """Receive the inputs of a micro-batch into the first buffer."""
    engine._exec_recv_activations(0)


def receive_gradients(engine: Any) -> None:
    """Receive the gradients of the outputs in the first buffer."""
    engine._exec_recv_grads(0)


def send_activations(engine: Any) -> None:
    """Send the outputs in the first buffer."""
    engine._exec_send_activations(0)


def send_gradients(engine: Any) -> None:
    """Send the gradients of the inputs in the first buffer."""
    engine._exec_send_grads(0)


def step(engine: Any) -> None:
    """Clip, update, and step the scheduler."""
    engine._exec_optimizer_step()


def use_one_buffer(engine: Any) -> None:
    engine._reserve_pipe_buffers(1)


def next_batch(engine: Any) -> Any:
    return engine._next_batch()


#: What an engine without a pipeline remembers from step to step.
_REMEMBERED = (
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "_step_applied",
    "_global_grad_norm",
    "_is_gradient_accumulation_boundary",
    "_unmanaged_backward_count",
)


def remembered(engine: Any) -> dict[str, Any]:
    """What an engine without a pipeline remembers from step to step, by name."""
    return {name: getattr(engine, name) for name in _REMEMBERED}


def in_micro_batches(engine: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The remembered values for an engine with another number of micro-batches in a step; valid between two steps."""
    return {**values, "micro_steps": values["global_steps"] * engine.gradient_accumulation_steps()}


def set_micro_batches(engine: Any, number: int) -> None:
    if number != engine.gradient_accumulation_steps():
        engine.set_train_batch_size(number * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)


def remember(engine: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(engine, name, value)


def gathering_order(optimizer: Any, module: Any) -> dict[str, Any]:
    """ZeRO-3: the order in which modules gather their parameters, as DeepSpeed has learned it; plain data.

    By that it gathers ahead, and keeps what it will need again. ``module`` must be the whole model.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    modules = {id(each): place for place, each in enumerate(module.modules())}
    parameters = {id(each): place for place, each in enumerate(module.parameters())}
    return {
        "mode": getattr(coordinator, _TRACE_MODE).name,
        "modules": [modules[id(each)] for each in getattr(coordinator, _MODULE_ORDER)],
        "parameters": [
            (parameters[id(each.param)], each.step_id_last_used_at) for each in getattr(coordinator, _PARAMETER_ORDER)
        ],
    }


def set_gathering_order(optimizer: Any, module: Any, order: Mapping[str, Any]) -> None:
    """Inverse of :func:`gathering_order`. DeepSpeed derives the rest when the next forward begins."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    modules, parameters = list(module.modules()), list(module.parameters())
    mode = type(getattr(coordinator, _TRACE_MODE))[order["mode"]]
    learned: Any = tuple if mode.name == "COMPLETE" else list  # to which more is added
    used = getattr(type(coordinator), _USE)
    setattr(coordinator, _TRACE_MODE, mode)
    setattr(coordinator, _MODULE_ORDER, learned(modules[place] for place in order["modules"]))
    setattr(
        coordinator,
        _PARAMETER_ORDER,
        learned(used(param=parameters[place], step_id_last_used_at=step) for place, step in order["parameters"]),
    )
    if mode.name == "RECORD":
        for step, place in enumerate(order["modules"]):
            getattr(coordinator, _FETCHED_AT)[modules[place].ds_id].append(step)


def forget_releases(optimizer: Any, known: Any) -> Any:
    """ZeRO-3: make DeepSpeed forget which parameters each module releases, unless it would find the same again.

    DeepSpeed computes that once for each module and place in the order, and keeps it when the order has changed. A
    replacement has nothing of it, so it would keep and gather other parameters than its peers. ``known`` is the result
    of the last call; returns the present order.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    order = getattr(coordinator, _PARAMETER_ORDER)  # another object whenever it has changed
    # Where DeepSpeed looks to the end of the order, what it finds depends on nothing else.
    looks_to_the_end = sum(each.param.ds_numel for each in order) <= getattr(coordinator, _REUSE_DISTANCE)
    if order is not known or not looks_to_the_end:
        function = getattr(type(coordinator), _LETS_GO)
        inspect.getclosurevars(function).nonlocals["func"].cache_clear()  # inside a wrapper that does not name it
    return order


def let_go(optimizer: Any) -> None:
    """ZeRO-3: release gathered parameters, except those that persist: small ones, whole from the first step on."""
    kept = whole_parameters(optimizer)
    absent, present = _statuses()
    for parameter in kept:
        parameter.ds_status = absent  # else it is let go of, and counted
    optimizer.empty_partition_cache()
    for parameter in kept:
        parameter.ds_status = present


def whole_parameters(optimizer: Any) -> list[Any]:
    """ZeRO-3: the parameters that persist, where they are whole now."""
    _, present = _statuses()
    return [each for each in optimizer.persistent_parameters if each.ds_status == present]


def put_whole(parameter: Any, whole: Any) -> None:
    """ZeRO-3: give a released parameter its whole content; ``whole`` is not copied."""
    _, present = _statuses()
    parameter.data, parameter.ds_status = whole, present


def _statuses() -> tuple[Any, Any]:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE


def gradient_norm(engine: Any) -> Any:
    return engine._global_grad_norm


def set_gradient_norm(engine: Any, norm: Any) -> None:
    engine._global_grad_norm = norm


def checkpoints_reentrantly(engine: Any) -> bool:
    """Whether activations are checkpointed in a way that needs inputs with gradients."""
    return bool(engine._reentrant_activation_checkpointing())


def stage_of(engine: Any, rank: int) -> int:
    return int(engine.grid._topo.get_coord(rank).pipe)


def layers_of(module: Any) -> Sequence[Any]:
    """The layers of all stages, as the user gave them."""
    found: Sequence[Any] = module._layer_specs
    return found


def tied_parameter(module: Any, key: str, name: str) -> Any:
    return module._recursive_getattr(module.tied_modules[key], name)


@dataclass(frozen=True)
class FlatGroup:
    """A parameter group of one of DeepSpeed's optimizers that shard.

    Attributes:
        parameters: which are views of ``flat``.
        flat: all of them, padded.
        partitions: of ``flat``, of equal size, one for each replica.
    """

    parameters: Sequence[Any]
    flat: Any
    partitions: Sequence[Any]


def flat_groups(optimizer: Any) -> list[FlatGroup]:
    if hasattr(optimizer, "bf16_groups"):
        found = zip(optimizer.bf16_groups, optimizer.bf16_groups_flat, optimizer.bf16_partitioned_groups, strict=True)
    else:
        partitions = optimizer.parallel_partitioned_bit16_groups
        found = zip(optimizer.bit16_groups, optimizer.bit16_groups_flat, partitions, strict=True)
    return [FlatGroup(*group) for group in found]


def drop_gradient_hooks(optimizer: Any) -> None:
    """Make one of DeepSpeed's optimizers that shard ignore gradients when they are computed."""
    for hook in optimizer._grad_acc_hooks:
        hook.remove()


def replace_step(optimizer: Any, step: Callable[[], None]) -> None:
    """Patch: have the engine call ``step`` in place of the optimizer's own, which talks to all replicas and stages."""
    optimizer.step = step


def set_step_facts(optimizer: Any, *, overflow: bool, norm: Any) -> None:
    optimizer.overflow, optimizer._global_grad_norm = overflow, norm


def is_replicated(parameter: Any) -> bool:
    """Whether another stage has this parameter, too, and counts it in norms."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def link_moments(optimizer: Any, *, there: bool) -> None:
    """Link parameters to their slices of the present moments; not ``there``: DeepSpeed does it at an update."""
    optimizer._hp_optimizer_states_linked = False
    if there:
        optimizer._lazy_init_hp_params_optimizer_state()
