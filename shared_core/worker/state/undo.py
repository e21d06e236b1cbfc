"""Exact undo of optimizer updates (Swift's update-undo) by pre-images, copies of parameters and optimizer state taken
right before each is updated; and the step made in parts (Swift's wait-free update), in which it is needed.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from shared_core.errors import Unsupported, UnsupportedOptimizer

#: What a step pre-hook is given and may return in its place.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def begin_after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], begin: Callable[[], None], *, after_hooks: bool = False
) -> Arguments | None:
    """For a step pre-hook with these arguments: have ``begin`` called now, or when the closure has returned. Returns
    what the hook is to return. With ``after_hooks`` it is called, also without a closure, when all pre-hooks have
    been called.
    """
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None and not after_hooks:
        begin()
        return None

    def then_begin() -> Any:
        result = closure() if closure is not None else None
        begin()
        return result

    return (args[0],), {**kwargs, "closure": then_begin}


class HiddenGradients:
    """Hides gradients from the rest of the present step: without one, torch's optimizers leave a parameter alone. The
    program's own post-hooks see them again. ``stepped`` is called after each step, before these hooks.
    """

    def __init__(self, optimizer: Optimizer, stepped: Callable[[], None]) -> None:
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stepped = stepped
        self._handle = optimizer.register_step_post_hook(self._show)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._handle.id, last=False)

    def hide(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hide the gradients of these parameters, those that have one, until the step has ended."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        self._stepped()

    def close(self) -> None:
        self._handle.remove()


#: Puts a value back and returns it: the same object where it can be changed in place.
Restore = Callable[[], Any]

#: What a value is, for messages: text, or (what it lies in, its key there).
Name = str | tuple[Any, Any]

_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


def _text(what: Name) -> str:
    return what if isinstance(what, str) else f"{_text(what[0])}[{what[1]!r}]"


def _same(value: Any) -> Any:
    return value


class Buffers:
    """Memory for copies of tensors, one buffer a tensor, on its device, kept from one step to the next."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._used: set[int] = set()
        self._more: list[torch.Tensor] = []

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A buffer with the tensor's shape and dtype, contents undefined."""
        key = id(tensor)
        if key in self._used:  # several parameters share it, and it is copied before the update of each
            self._more.append(torch.empty_like(tensor))
            return self._more[-1]
        known = self._of.get(key)
        if known is None or known[0] is not tensor or known[1].shape != tensor.shape or known[1].dtype != tensor.dtype:
            known = self._of[key] = (tensor, torch.empty_like(tensor))
        self._used.add(key)
        return known[1]

    def release(self, keep: bool) -> None:
        """No copy is needed any more. Free what had no use this time, or all if not ``keep``."""
        if not keep:
            self._of.clear()
        elif self._used and len(self._used) != len(self._of):
            self._of = {key: self._of[key] for key in self._used}
        self._used.clear()
        self._more.clear()

    @property
    def nbytes(self) -> int:
        buffers = [*self._more, *(buffer for _, buffer in self._of.values())]
        return sum(buffer.nbytes for buffer in buffers)


class Images:
    """Values as they are now. Tensors are copied by :meth:`copy`, all in one call, to ``buffers``."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def add(self, value: Any, what: Name) -> Restore:
        """Note a value: a tensor, a constant, or lists, tuples and dictionaries of these. Returns what puts it back
        into the same objects, valid after :meth:`copy`. Raises UnsupportedOptimizer if the value is something else,
        or a sparse tensor; ``what`` names it.
        """
        if isinstance(value, torch.Tensor):
            return self._add_tensor(value, what)
        if isinstance(value, _CONSTANT):
            return partial(_same, value)
        if isinstance(value, dict):
            parts = [(key, self.add(entry, (what, key))) for key, entry in value.items()]

            def restore_mapping() -> Any:
                entries = {key: restore() for key, restore in parts}
                value.clear()
                value.update(entries)
                return value

            return restore_mapping
        if isinstance(value, list):
            items = [self.add(entry, (what, i)) for i, entry in enumerate(value)]

            def restore_list() -> Any:
                value[:] = [restore() for restore in items]
                return value

            return restore_list
        if type(value) is tuple:
            members = [self.add(entry, (what, i)) for i, entry in enumerate(value)]
            return lambda: tuple(restore() for restore in members)
        raise UnsupportedOptimizer(
            f"{_text(what)} is a {type(value).__name__}: what an update changes in it cannot be seen, so the "
            "update could not be undone. Use an optimizer that keeps tensors and plain data only, or leave undo off."
        )

    def _add_tensor(self, tensor: torch.Tensor, what: Name) -> Restore:
        if tensor.layout is not torch.strided:
            raise UnsupportedOptimizer(
                f"{_text(what)} is a sparse tensor ({tensor.layout}); only dense ones can be undone. "
                "Use dense gradients (nn.Embedding(sparse=False)), or leave undo off."
            )
        place = len(self._tensors)
        self._tensors.append(tensor)

        def restore_tensor() -> torch.Tensor:
            tensor.detach().copy_(self._copies[place])
            return tensor

        return restore_tensor

    @torch.no_grad()
    def copy(self) -> None:
        self._copies = [self._buffers.take(tensor) for tensor in self._tensors]
        if self._copies:
            torch._foreach_copy_(self._copies, self._tensors)


#: Their native code keeps nothing between steps (read in their source); all else that they keep is seen.
_STATELESS_NATIVE = {"deepspeed.ops.lamb.fused_lamb.FusedLamb"}
_DENSE = frozenset(
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)
) - {Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
#: Entries of a group that no step changes.
_PARAMS = ("params", "param_names")
#: Attributes that every optimizer has.
_COMMON = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


class _Kept:
    """What undoes the updates that one optimizer has made since the last commit."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.of_torch = is_of_torch(optimizer)
        self.whole: Restore | None = None
        self.groups: dict[int, Restore] = {}
        self.parameters: set[torch.Tensor] = set()
        self.stepping: list[torch.Tensor] = []
        #: parameter: (gradient, what puts its bits back, its version when the step had ended)
        self.gradients: dict[torch.Tensor, tuple[torch.Tensor, Restore, int | None]] = {}
        self.buffers = Buffers()

    def forget(self) -> None:
        self.whole = None
        self.groups.clear()
        self.parameters.clear()
        self.stepping.clear()
        self.gradients.clear()
        self.buffers.release(keep=True)


class Undo:
    """Puts parameters and optimizer state back, bit for bit, to where they were at the last :meth:`commit`.

    While armed, a copy of each parameter and of its state is taken before its first update after a commit. So undo is
    exact for any arithmetic, for a step of which only some parameters had their update, and for one that was
    interrupted inside a parameter's own update. State that an update made is removed. Hyper-parameters of the groups
    are put back too, and gradients that a step has changed, unless the program has changed them since. Learning rate
    schedulers and a gradient scaler are not touched: their owner puts them back.

    State that is loaded into an optimizer is final at once.

    Not thread-safe: no update may run during :meth:`undo` or :meth:`commit`. ``optimizers``: real torch optimizers (not
    wrappers of them).

    Raises:
        UnsupportedOptimizer: an update of one of them could not be undone; the message says why.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            check(optimizer)
        self._kept = {id(optimizer): _Kept(optimizer) for optimizer in optimizers}
        self._order: list[tuple[_Kept, torch.Tensor, Restore]] = []
        self._handles: list[Any] = []

    # -- arming ------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Keep what each update overwrites, from now on. A second call does nothing."""
        if not self._handles:
            for kept in self._kept.values():
                self._handles.append(kept.optimizer.register_step_pre_hook(self._before))
                self._handles.append(kept.optimizer.register_step_post_hook(lambda optimizer, *_: self.end(optimizer)))
                self._handles.append(kept.optimizer.register_load_state_dict_post_hook(self._loaded))

    def disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.commit()
        for kept in self._kept.values():
            kept.buffers.release(keep=False)

    @property
    def nbytes(self) -> int:
        """Bytes held in copies, in use or for reuse."""
        return sum(kept.buffers.nbytes for kept in self._kept.values())

    def commit(self) -> None:
        """The updates are final: everybody has them, or can get them."""
        self._order.clear()
        for kept in self._kept.values():
            kept.forget()

    @torch.no_grad()
    def undo(self) -> int:
        """Put everything back, in place, to where it was at the last commit. May be called again if it was interrupted.
        Returns the number of parameters that were put back.
        """
        for _, _, restore in reversed(self._order):
            restore()
        for kept in self._kept.values():
            for parameter, (gradient, restore, version) in kept.gradients.items():
                # Not if the program has set it to zero or written the next one since.
                if parameter.grad is gradient and version in (None, gradient._version):
                    restore()
            for restore in kept.groups.values():
                restore()
            if kept.whole is not None:
                kept.whole()
        undone = len({id(parameter) for _, parameter, _ in self._order})
        self.commit()
        return undone

    # -- hooks -------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if len(args) > 2 or any(value is not None for key, value in kwargs.items() if key != "closure"):
            raise UnsupportedOptimizer(
                f"{type(optimizer).__name__}.step was given more than a closure; what it then changes besides its own "
                "parameters could not be undone. Call step() alone, or leave undo off."
            )
        return begin_after_closure(args, kwargs, lambda: self.begin(optimizer))

    def begin(self, optimizer: Optimizer) -> None:
        """An update begins: copy what it may change and has not been copied since the last commit. While armed, a hook
        of the optimizer calls this. Raises UnsupportedOptimizer if a gradient is sparse, or state holds something
        that cannot be kept. Nothing has been changed then.
        """
        kept = self._kept[id(optimizer)]
        kept.stepping = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _check_gradient(optimizer, parameter)
                # torch's own leave a parameter without a gradient alone; of others that is not known.
                if parameter.grad is not None or not kept.of_torch:
                    kept.stepping.append(parameter)
        images = Images(kept.buffers)
        whole = kept.whole if kept.whole is not None else _whole(optimizer, kept.of_torch, images)
        groups = {id(g): _group(optimizer, g, images) for g in optimizer.param_groups if id(g) not in kept.groups}
        fresh = [(p, _one(optimizer, p, images)) for p in kept.stepping if p not in kept.parameters]
        gradients = {}
        if getattr(optimizer, "grad_scale", None) is not None or not kept.of_torch:
            touched = kept.stepping  # unscaled in place; or not known
        else:
            touched = [p for g in optimizer.param_groups if _changes_gradients(optimizer, g) for p in g["params"]]
        for p in touched:
            if p.grad is not None and p not in kept.gradients:
                gradients[p] = (p.grad, images.add(p.grad, "a gradient"), None)
        images.copy()
        # From here on there is something to put back: the update begins.
        kept.whole = whole
        kept.groups.update(groups)
        kept.gradients.update(gradients)
        self._order += [(kept, parameter, restore) for parameter, restore in fresh]
        kept.parameters.update(parameter for parameter, _ in fresh)

    def end(self, optimizer: Optimizer) -> None:
        kept = self._kept[id(optimizer)]
        for parameter in kept.stepping:
            if parameter in kept.gradients:
                gradient, restore, _ = kept.gradients[parameter]
                kept.gradients[parameter] = (gradient, restore, gradient._version)
        kept.stepping = []

    def _loaded(self, optimizer: Optimizer) -> None:
        """State was loaded, into new objects: its updates of before are no longer there to be undone."""
        kept = self._kept[id(optimizer)]
        self._order = [entry for entry in self._order if entry[0] is not kept]
        kept.forget()


def check(optimizer: Optimizer) -> None:
    """Raises UnsupportedOptimizer, saying why, if updates of an optimizer could not be undone."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedOptimizer(f"{name} is not a torch.optim.Optimizer; if it wraps one, give that one")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizer(
            "LBFGS evaluates its closure several times in a step and moves the parameters in between, so its update "
            "cannot be undone; use another optimizer, or leave undo off"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedOptimizer("SparseAdam takes sparse gradients only, and those cannot be undone; use Adam")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedOptimizer(f"{name}(differentiable=True) is part of a graph, which undo would break")
    images = Images(Buffers())
    _whole(optimizer, is_of_torch(optimizer), images)
    for group in optimizer.param_groups:
        _group(optimizer, group, images)
        for parameter in group["params"]:
            _one(optimizer, parameter, images)
            if parameter.grad is not None:
                _check_gradient(optimizer, parameter)


def _check_gradient(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise UnsupportedOptimizer(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient; {type(optimizer).__name__} cannot "
            "be undone then. Use dense gradients (nn.Embedding(sparse=False)), or leave undo off."
        )


def _changes_gradients(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a step changes gradients: SGD with Nesterov momentum adds the momentum to them on its foreach path, where
    neither weight decay nor ``maximize`` makes it copy them (torch 2.13).
    """
    nesterov = type(optimizer) is torch.optim.SGD and group["nesterov"] and not group["fused"]
    return nesterov and group["foreach"] is not False and not group["weight_decay"] and not group["maximize"]


def _one(optimizer: Optimizer, parameter: torch.Tensor, images: Images) -> Restore:
    """Note a parameter and its state. Returns what puts both back."""
    value = images.add(parameter, "a parameter")
    state = optimizer.state
    if parameter not in state:

        def without_state() -> None:
            value()
            state.pop(parameter, None)

        return without_state
    entries = images.add(state[parameter], f"{type(optimizer).__name__}.state")

    def with_state() -> None:
        value()
        state[parameter] = entries()

    return with_state


def _group(optimizer: Optimizer, group: dict[str, Any], images: Images) -> Restore:
    """Note the hyper-parameters of a group. Returns what puts them back."""
    what = f"{type(optimizer).__name__}.param_groups"
    entries = {key: images.add(group[key], (what, key)) for key in group if key not in _PARAMS}

    def restore() -> None:
        for key in [key for key in group if key not in entries and key not in _PARAMS]:
            del group[key]
        for key, put in entries.items():
            group[key] = put()

    return restore


def _whole(optimizer: Optimizer, of_torch: bool, images: Images) -> Restore:
    """Note what belongs to no parameter or group: state under other keys and, of an optimizer that is not torch's own,
    its attributes. Returns what puts it back.
    """
    name = type(optimizer).__name__
    others = {
        key: images.add(value, (f"{name}.state", key))
        for key, value in optimizer.state.items()
        if not isinstance(key, torch.Tensor)
    }
    attributes: dict[str, Restore] = {}
    if not of_torch:
        for key in _attributes(optimizer):
            attributes[key] = images.add(vars(optimizer)[key], f"{name}.{key}")

    def restore() -> None:
        for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor) and key not in others]:
            del optimizer.state[key]
        for key, put in others.items():
            optimizer.state[key] = put()
        if not of_torch:
            for attribute in [attribute for attribute in _attributes(optimizer) if attribute not in attributes]:
                delattr(optimizer, attribute)
        for attribute, put in attributes.items():
            setattr(optimizer, attribute, put())

    return restore


def _attributes(optimizer: Optimizer) -> list[str]:
    """Attributes that a step may change: not those of the base class, and no functions (others put them there)."""
    native = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _STATELESS_NATIVE
    return [
        key
        for key, value in vars(optimizer).items()
        if key not in _COMMON
        and not isinstance(value, types.FunctionType | types.MethodType)
        and not (native and isinstance(value, types.ModuleType))
    ]


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether it is a dense optimizer of torch.optim itself: these treat each parameter by itself, leave one without a
    gradient alone, and keep all they know in ``state``.
    """
    return type(optimizer) in _DENSE


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADVICE = "make it before backward, or set state.overlapped_update=False"


@dataclass(frozen=True)
class _Done:
    """A parameter that was updated, the reduced gradient that was used, and its version then."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int


class Parts:
    """Parts of the next step of one optimizer.

    Not thread-safe: the caller keeps :meth:`take_back` and :meth:`step` apart. ``also``: keeps what is overwritten for
    longer, and is told of each part, too.

    Raises:
        UnsupportedOptimizer: a step of it cannot be divided, or not be undone.
    """

    def __init__(self, optimizer: Optimizer, also: Undo | None = None) -> None:
        if not is_of_torch(optimizer):
            raise UnsupportedOptimizer(
                f"state.overlapped_update: {type(optimizer).__name__} is not one of torch.optim, so it is not known "
                "whether it treats each parameter by itself; use one of torch.optim, or leave the option off"
            )
        if any(group.get("nesterov") and group.get("foreach") for group in optimizer.param_groups):
            raise UnsupportedOptimizer(
                f"state.overlapped_update: {type(optimizer).__name__}(nesterov=True, foreach=True) changes gradients; "
                "pass foreach=False or fused=True, or leave the option off"
            )
        self._optimizer = optimizer
        self._undo = Undo([optimizer])
        self._undos = [self._undo] if also is None else [self._undo, also]
        self._done: dict[torch.Tensor, _Done] = {}
        self._settings: list[dict[str, Any]] = []

    @property
    def torn(self) -> bool:
        return bool(self._done)

    def step(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Update those of these parameters that the optimizer has, in place, and call no hook. Their ``.grad`` is
        afterwards what it was.

        Args:
            parameters: each at most once in a step.
            gradients: reduced ones, of the same shapes; they must not change before the step is complete.

        Raises:
            UnsupportedOptimizer: a gradient is sparse, or state holds something that cannot be kept.
        """
        own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if id(p) in own]
        if not self._done:
            self._settings = _settings(self._optimizer)
        before = [p.grad for p, _ in pairs]
        try:
            for parameter, gradient in pairs:
                parameter.grad = gradient
            with only(self._optimizer, [p for p, _ in pairs]):
                for undo in self._undos:
                    undo.begin(self._optimizer)
                _bare_step(self._optimizer)
                for undo in self._undos:
                    undo.end(self._optimizer)
        finally:
            for (parameter, _), gradient_before in zip(pairs, before, strict=True):
                parameter.grad = gradient_before
        self._done.update((p, _Done(p, g, p._version)) for p, g in pairs)

    def take_back(self) -> None:
        """Undo all parts: parameters and the optimizer's state are as before the first, bit for bit."""
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._done)):
            self._undo.undo()
        self._done.clear()

    def check(self) -> Collection[torch.Tensor]:
        """``optimizer.step()`` begins. Returns the parameters that have had their update. Raises Unsupported if the
        step that the program asks for is not the one of which parts were made.
        """
        if not self._done:
            return ()
        if _differ(self._settings, _settings(self._optimizer)):
            raise Unsupported(_changed("a hyper-parameter of the optimizer (a learning rate?) was changed"))
        for done in self._done.values():
            shape = tuple(done.parameter.shape)
            gradient = done.parameter.grad
            if gradient is None or not _same_bits(gradient, done.gradient):
                raise Unsupported(
                    _changed(f"the gradient of a parameter of shape {shape} was changed (clipped, unscaled, removed?)")
                )
            if done.parameter._version != done.version:
                raise Unsupported(_changed(f"a parameter of shape {shape} was changed"))
        return self._done.keys()

    def commit(self) -> None:
        self._done.clear()
        self._undo.commit()


def _changed(what: str) -> str:
    return (
        f"{what} between backward and optimizer.step(), but with state.overlapped_update the update has been made "
        f"by then: {_ADVICE}"
    )


def _bare_step(optimizer: Optimizer) -> None:
    """The step without its hooks, which see whole steps only, and without what schedulers put around it."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k not in ("params",)}
        for group in optimizer.param_groups
    ]


def _differ(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    if len(before) != len(now) or any(a.keys() != b.keys() for a, b in zip(before, now, strict=True)):
        return True
    return any(
        not (torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key])
        for a, b in zip(before, now, strict=True)
        for key in a
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.element_size() not in _BITS:
        return False
    as_bits = _BITS[one.element_size()]
    return torch.equal(one.detach().view(as_bits), other.detach().view(as_bits))


@contextmanager
def only(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it, the optimizer has only these of its parameters, in its own groups and order.

    Steps of parts add up to one whole step for every optimizer that treats each parameter by itself, as all of
    torch.optim do.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    chosen = []
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
        if group["params"]:
            chosen.append(group)
    optimizer.param_groups = chosen
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, everything, strict=True):
            group["params"] = params
