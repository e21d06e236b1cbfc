"""Exact undo of updates by pre-images: copies of parameters and optimizer state, taken right before each is updated."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shared_core.errors import UnsupportedOptimizer
from shared_core.worker.state.undo.images import Buffers, Images, Restore
from shared_core.worker.state.undo.stepping import Arguments, begin_after_closure

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
                self._handles.append(kept.optimizer.register_step_post_hook(self._after))
                self._handles.append(kept.optimizer.register_load_state_dict_post_hook(self._loaded))

    def disarm(self) -> None:
        """Commit, stop keeping, and free all memory."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.commit()
        for kept in self._kept.values():
            kept.buffers.release(keep=False)

    # -- facts -------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes held in copies, in use or for reuse."""
        return sum(kept.buffers.nbytes for kept in self._kept.values())

    # -- the end of a step -------------------------------------------------------------------------

    def commit(self) -> None:
        """The updates are final: everybody has them, or can get them."""
        self._forget()

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
        self._forget()
        return undone

    def _forget(self) -> None:
        self._order.clear()
        for kept in self._kept.values():
            kept.forget()

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

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.end(optimizer)

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
