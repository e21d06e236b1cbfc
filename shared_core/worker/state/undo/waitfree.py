"""The update overlapped with backward (Swift's wait-free update) for DistributedDataParallel."""

# Annotations are evaluated here: DistributedDataParallel compares those of a hook with types, not with text.

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shared_core.errors import Unsupported, UnsupportedOptimizer
from shared_core.worker.state.undo.partial import step_parameters
from shared_core.worker.state.undo.stepping import Arguments, begin_after_closure
from shared_core.worker.state.undo.undo import Undo, is_of_torch


class WaitFreeUpdate:
    """Steps the parameters of a bucket as soon as its all-reduce is done, while backward goes on with other layers.

    The program stays as it is: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``. ``optimizer.step()``
    then updates what has had no update yet (parameters that the module does not have), mostly nothing. The result
    is bit for bit that of the module without a hook. What it cannot have:

    - gradients changed between backward and step (clipping by norm, unscaling): the update is made by then;
    - hyper-parameters changed between backward and step, which cannot be noticed: set them before backward;
    - two backward passes with communication before one step;
    - parameters used in backward other than by autograd (``weight.data`` in a custom function's backward).

    Args:
        module: replicated module, without a hook of its own, before its first forward pass.
        optimizer: one of torch.optim, or one of which the caller knows that it treats each parameter by itself
            (``separable``).
        separable: the optimizer's step for some parameters does not depend on the others.

    Attributes:
        undo: not armed; arm it to be able to call :meth:`take_back`. ``undo.commit()`` once the step is final.

    Raises:
        UnsupportedOptimizer: the update could not be undone, or not be split.
        Unsupported: the module finds unused parameters, has a static graph or is in mixed precision.
    """

    def __init__(self, module: DistributedDataParallel, optimizer: Optimizer, *, separable: bool = False) -> None:
        for option in ("find_unused_parameters", "static_graph", "mixed_precision"):
            if getattr(module, option):
                raise Unsupported(
                    f"an update overlapped with backward does not work with DistributedDataParallel({option}=...): "
                    "which gradients are final is known only after backward. Leave the option or the overlap off."
                )
        self.undo = Undo([optimizer])
        if not separable and not is_of_torch(optimizer):
            raise UnsupportedOptimizer(
                f"{type(optimizer).__name__} is not one of torch.optim, so it is not known whether it treats each "
                "parameter by itself; if it does, say so with separable=True"
            )
        self.optimizer = optimizer
        self._group = module.process_group
        self._lay_at: dict[int, int | None] = {}
        if module.gradient_as_bucket_view:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    self._remember_place(parameter)
        self._mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._lock = threading.Lock()  # all-reduces finish on several threads
        self._in_bucket = False
        self._taken_back = 0
        self._stepped: dict[int, torch.Tensor] = {}
        self._seen: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        module.register_comm_hook(None, self._reduce)

    def take_back(self) -> int:
        """Undo what has been updated since the last commit, also amid a backward pass that has failed; the number of
        parameters put back. Waits for an update of a bucket that is running.
        """
        with self._lock:
            self._taken_back += 1  # all-reduces that are still under way update nothing any more
            self._show()
            self._stepped.clear()
            self._seen.clear()
            return self.undo.undo()

    # -- backward ----------------------------------------------------------------------------------

    def _reduce(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch does not list it for type checkers
    ) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        parameters, gradients = bucket.parameters(), bucket.gradients()
        again = [p for p in parameters if id(p) in self._stepped]
        if again:
            raise Unsupported(
                f"a second backward pass before optimizer.step(), but the parameter of shape {tuple(again[0].shape)} "
                "has had its update: accumulate under no_sync(), or leave the overlap off"
            )
        self._scale(buffer, parameters, gradients)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        if bucket.is_last():
            # Once for this pass; the module queues its own, which writes the gradients, after this one.
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._note_gradients))

        pass_ = self._taken_back

        def arrived(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises what made the all-reduce fail
            with self._lock:
                if pass_ == self._taken_back:
                    self._step(parameters, gradients)
            return buffer

        result: torch.futures.Future[torch.Tensor] = work.get_future().then(arrived)
        return result

    def _scale(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Scale as the module does without a hook, before the sum: a gradient that was accumulated in the bucket is
        divided, one that was copied there is multiplied with the inverse, and these differ in bits unless the number of
        ranks is a power of two.
        """
        world = dist.get_world_size(self._group)
        inside = [g for p, g in zip(parameters, gradients, strict=True) if self._lay_at.get(id(p)) == g.data_ptr()]
        if not inside:
            buffer.mul_(1.0 / world)
        elif len(inside) == len(gradients):
            buffer.div_(world)
        else:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if self._lay_at.get(id(parameter)) == gradient.data_ptr():
                    gradient.div_(world)
                else:
                    gradient.mul_(1.0 / world)

    def _remember_place(self, parameter: torch.Tensor) -> None:
        """Have the place of the gradient noted whenever one is about to be added to it."""

        def note(_: torch.Tensor) -> None:
            self._lay_at[id(parameter)] = None if parameter.grad is None else parameter.grad.data_ptr()

        parameter.register_hook(note)

    def _step(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Update the parameters of a bucket with these gradients (which the module has not written yet)."""
        own = [(p, g) for p, g in zip(parameters, gradients, strict=True) if id(p) in self._mine]
        before = [p.grad for p, _ in own]
        self._in_bucket = True
        try:
            for parameter, gradient in own:
                parameter.grad = gradient
            step_parameters(self.optimizer, [p for p, _ in own])
            self._stepped.update((id(p), p) for p, _ in own)
        finally:
            self._in_bucket = False
            for (parameter, _), gradient_before in zip(own, before, strict=True):
                parameter.grad = gradient_before

    def _note_gradients(self) -> None:
        """Backward is over and the gradients are written: from here on nobody may change them."""
        self._seen = {key: (p.grad, -1 if p.grad is None else p.grad._version) for key, p in self._stepped.items()}

    # -- optimizer.step() --------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if self._in_bucket:
            return None
        return begin_after_closure(args, kwargs, self._hide)

    def _hide(self) -> None:
        """Without a gradient, torch's optimizers leave a parameter alone."""
        if getattr(self.optimizer, "grad_scale", None) is not None:
            raise Unsupported("a gradient scaler cannot be used with an update overlapped with backward: use bfloat16")
        for key, parameter in self._stepped.items():
            if parameter.grad is None:
                continue
            gradient, version = self._seen.get(key, (None, -1))
            if parameter.grad is not gradient or gradient._version != version:
                raise Unsupported(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed after backward "
                    "(clipped, unscaled?), but the update overlapped with backward has been made by then; do without "
                    "that, or leave the overlap off"
                )
        for parameter in self._stepped.values():
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._in_bucket:
            self._show()
            self._stepped.clear()
            self._seen.clear()

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
