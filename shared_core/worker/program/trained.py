"""What the program trains: its modules and optimizers, and which ranks train the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shared_core import devices
from shared_core.config import SwiftConfig
from shared_core.errors import Unsupported
from shared_core.events import console_once
from shared_core.faults import inject
from shared_core.protocol.progress_file import ProgressFile
from shared_core.protocol.stragglers import PARTS
from shared_core.worker.checkpoints.recovery_line import Restored
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.compat import out_of_graphs
from shared_core.worker.comm.op import Op
from shared_core.worker.integrity import flip, refuse_comparing
from shared_core.worker.sharded.own import Owner, OwnState, refuse, sharded_modules
from shared_core.worker.sharded.shard import SHARD, TrainedShard
from shared_core.worker.state.attached import LAYERS_OFF, Attached, Layers, LeftoverGradients
from shared_core.worker.state.ddp_buckets import Buckets
from shared_core.worker.state.external_mutation import UnoptimizedParameters
from shared_core.worker.state.forward_pass import ForwardRecorder
from shared_core.worker.state.local_state import StateParts
from shared_core.worker.state.overlapped import Overlapped, check
from shared_core.worker.state.publications import UNOPTIMIZED
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.updates import Updates

DATA, FORWARD, BACKWARD, UPDATE = range(len(PARTS))


class StepClock:
    """Tells the launcher, in ``progress``, the times of each step. The program's thread, or backward's."""

    def __init__(self, runtime: Runtime, progress: ProgressFile) -> None:
        self._compute_lock, self.progress = runtime.compute_lock, progress
        self._part, self._since, self._waited = DATA, time.perf_counter(), 0.0
        self._spent = [0.0] * len(PARTS)
        self._handed_over = False

    def enter(self, part: int) -> None:
        """From now on the program is in this part of a step."""
        now, waited = time.perf_counter(), self._compute_lock.waited_s
        # What follows the last bucket of a backward is a wait for others, inside torch.
        if not (self._handed_over and self._part == BACKWARD):
            self._spent[self._part] += now - self._since - (waited - self._waited)
        self._part, self._since, self._waited, self._handed_over = part, now, waited, False

    def handed_over(self) -> None:
        """DDP has handed over a bucket."""
        self._handed_over = False  # up to here backward has computed
        self.enter(BACKWARD)
        self._handed_over = True

    def boundary(self, number: int) -> None:
        """A step boundary: the step before it is over."""
        self.enter(DATA)
        self.progress.step(number, self._spent)
        self._spent = [0.0] * len(PARTS)


class ForwardHook:
    """Calls a method of this worker. Copied or pickled with its module, the copy does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardHook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


class Trained:
    """What one worker trains.

    Attributes:
        replicas: ranks that train the same parameters, where not all do (pipelines); else empty.
        shard: what this rank has of sharded models; None where there are none.
        unoptimized: parameters that no optimizer steps; from :meth:`attach` on.
    """

    def __init__(
        self,
        config: SwiftConfig,
        runtime: Runtime,
        updates: Updates,
        parts: StateParts,
        buckets: Buckets,
        forward_recorder: ForwardRecorder,
        overlapped: Overlapped,
        refuse: Callable[[str], None],
        clock: StepClock,
    ) -> None:
        self._clock = clock
        self._config, self._runtime, self.updates, self._parts = config, runtime, updates, parts
        self._buckets, self._forward_recorder, self._overlapped = buckets, forward_recorder, overlapped
        self._refuse = refuse
        self._overlaps = False
        self._handles: list[Any] = []
        self._alike = self._keeps_boundaries = self._meets = False
        self.unoptimized: UnoptimizedParameters
        self._leftover = LeftoverGradients()
        self.replicas: list[int] = []
        self.shard: OwnState | None = None

    def attach(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        replicas: Sequence[int] | None = None,
        sharded: bool = False,
    ) -> None:
        self._refuse_devices(modules)
        divided = sharded_modules(modules)
        if divided:
            refuse(modules, divided, self._config, optimizers)
        self._buckets.attach(modules)
        if self._buckets.modules and self._config.reroutes:
            raise Unsupported(
                "on_failure='reroute' needs a loop in which any worker can compute the share of a failed one, and "
                "DistributedDataParallel sums what each has computed itself: attach the model without it and loop over "
                "job.shared_steps(loader, epochs) (with Accelerate: plugin.shared_steps), or choose "
                "on_failure='replace'"
            )
        for handle in self._handles:
            handle.remove()
        hooks = ForwardHook(self._forward_recorder.after_forward), ForwardHook(self._forward_done)
        self._handles = [ddp.register_forward_hook(hook) for hook in hooks for ddp in self._buckets.modules]
        begins = ForwardHook(self._forward_begins)
        self._handles += [ddp.register_forward_pre_hook(begins) for ddp in self._buckets.modules]
        self._overlaps = self._config.state.overlapped_update and bool(optimizers) and self._runtime.world_size > 1
        if self._overlaps:
            check(self._buckets.modules, optimizers)
        for module in divided:
            if not isinstance(module, Owner):
                module.reshard()  # after an evaluation the root's parameters are whole
        replicated = Replicated(modules, optimizers)
        alike = replicas is None and not sharded
        summed = {id(p) for ddp in self._buckets.modules for p in ddp.parameters()}
        if self._config.state.heals_corruption and self._runtime.world_size > 1:
            operates, whole = self._runtime.operates, alike and not divided
            refuse_comparing(self._config, self._buckets.modules, replicated, summed, whole=whole, operates=operates)
        self.unoptimized = UnoptimizedParameters(replicated, summed)
        # What a re-routed step changes outside updates is in a replacement's copy. Pipelines keep images of their own.
        # A shard is published with all that was changed.
        unoptimized = self.unoptimized if alike and not self._config.reroutes and not divided else None
        self.updates.attach(
            replicated,
            undo=self._config.resizes,
            sharded=sharded,
            own=bool(divided),
            unoptimized=unoptimized,
            parts=self._overlaps,
            summed=summed if alike and not divided and not self._overlaps else (),
            refuse=lambda reason: self._refuse(f"rank {self._runtime.rank}: {reason}"),
        )
        self._leftover.attach(replicated if alike and not self._config.reroutes and not divided else None)
        self._attach_shard(divided, replicated)
        if self._keeps_boundaries:
            self.updates.outside.expect()
        if replicas is not None:
            self._attach_stage(sorted(replicas))
        if not self._config.log.spill_bytes:
            # Of two steps: gradients (in fp32 at most) and, of a sharded stage, gathered parameters.
            extra = 4 * sum(p.numel() for p in replicated.parameters) if sharded else 0
            step = self.shard.step_bytes if self.shard is not None else replicated.nbytes + extra
            self._runtime.results.limit(max(2 * step, 4 << 20))
        self._register(Attached(modules, replicated, alike=alike), whole=alike and not divided)
        self._parts.variables.attach(modules, optimizers)
        if (optimizers or sharded or divided) and os.environ.get("SWIFT_FAULTS") and modules:
            inject.flips_by(partial(flip, replicated))
            self._handles.append(modules[0].register_forward_pre_hook(_inject_before))
            self._handles.append(modules[0].register_forward_hook(_inject))

    @out_of_graphs
    def _forward_begins(self, *_: object) -> None:
        self._clock.enter(FORWARD)

    @out_of_graphs
    def _forward_done(self, ddp: DistributedDataParallel, args: Any, output: Any) -> None:
        self._clock.enter(BACKWARD if torch.is_grad_enabled() else DATA)
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._buckets.forward_done(ddp)

    def bucket_handed_over(self, op: Op) -> None:
        if self._overlaps:
            self._overlapped.bucket(op)

    def _refuse_devices(self, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            found = devices.apart(module.parameters())
            if found and self._runtime.stages:
                self._announce(found[0])
            for name, parameter in module.named_parameters():
                what = f"rank {self._runtime.rank}: parameter {name}"
                devices.check(parameter.device, what, allowed=self._config.uses_devices)

    def _announce(self, device: torch.device) -> None:
        """Rank 0 warns that devices are an experiment; raises Unsupported with an option that was not tried there."""
        config = self._config
        untried = "on_failure='reroute'" if config.reroutes else "a number of workers that changes" * config.resizes
        untried = untried or "state.overlapped_update" * config.state.overlapped_update
        if untried:
            raise Unsupported(f"{untried} was not tried with tensors on {device}: use on_failure='replace' alone")
        if self._runtime.rank == 0:
            console_once(
                "device",
                f"device.experimental: the model is on {device}, and collectives go through host memory, over gloo, "
                "which is slow (docs/devices.md)",
            )

    def _attach_stage(self, replicas: list[int]) -> None:
        if self._config.resizes:
            raise Unsupported(
                "the number of workers of a pipeline cannot change: use on_failure='replace' without "
                "resize.replace_timeout_s, or 'restart'"
            )
        self.replicas = replicas
        alone, wanted = len(replicas) == 1, self._config.log.messages
        if not alone:
            self.updates.keep_images(at_once=True)
        if wanted == "always" or (wanted == "auto" and alone):
            self._runtime.results.log_to_disk()

    def _attach_shard(self, divided: Sequence[Any], replicated: Replicated) -> None:
        if self.shard is not None:
            self._parts.unregister(SHARD)
        results, self.shard = self._runtime.results, None
        if divided:
            engine = divided[0]
            self.shard = engine.own_state() if isinstance(engine, Owner) else TrainedShard(divided, replicated, results)
        results.shard(self.shard is not None, padded=self.shard is not None and self.shard.padded)
        self._meets = False
        if self.shard is not None:
            self._parts.register(SHARD, self.shard.capture, self.shard.restore)
            self._meets = self.shard.apart and not results.knows_boundaries

    def _register(self, attached: Attached, *, whole: bool) -> None:
        self._forward_recorder.attach(attached.buffers)
        register = self._parts.register
        register("swift.ddp", self._buckets.flags, self._buckets.set_flags)
        self._runtime.sum_buckets(self._config.state.verify_checksums and not self._buckets.may_be_unused)
        register("swift.buffers", attached.buffers, attached.restore_buffers, forward_mutated=True)
        off = not whole or os.environ.get(LAYERS_OFF)  # frameworks replace sharded parameters by themselves
        layers = Layers({}) if off else attached.layers
        register("swift.layers", layers.changes, lambda theirs: self._compare_layers(theirs, layers.changes()))
        register("swift.attributes", layers.attributes, layers.restore_attributes)
        register("swift.unsaved", layers.unsaved, layers.restore_unsaved)
        register("swift.modes", attached.modes, attached.restore_modes)
        register("swift.with_gradients", attached.with_gradients, attached.restore_gradients)
        register("swift.hyperparameters", attached.groups, attached.restore_groups)
        replicated = self.updates.replicated
        assert replicated is not None
        register("swift.divided", replicated.divided, replicated.restore_divided)
        register(UNOPTIMIZED, self._capture_unoptimized, self.unoptimized.restore)

    def _compare_layers(self, theirs: tuple[str, bool], here: tuple[str, bool]) -> None:
        if theirs != here or theirs[1]:
            changed = f"in the failed worker {theirs[0]}" if theirs[0] else f"in its replacement alone {here[0]}"
            self._refuse(
                f"rank {self._runtime.rank}: the model was changed after attach(): {changed}. A replacement is given "
                "values, and neither layers, parameters nor hooks: change the model before attach(), or end the loop "
                "over epochs, change it, and begin another loop with attach() and the changed model"
            )

    def keep_boundaries(self) -> None:
        self._keeps_boundaries = True
        self.updates.outside.expect()

    def alike(self) -> None:
        """All ranks train the same, without ``DistributedDataParallel``: compare them after recoveries."""
        self._alike = True

    @property
    def compared(self) -> Sequence[int]:
        """Ranks that train the same as this one, which are compared after recoveries; empty if there are none."""
        replicated = self.updates.replicated
        everybody = self.shard is None and replicated is not None and replicated.optimizers
        return self.replicas or range(self._runtime.world_size if everybody or self._alike else 0)

    def kept_alike(self) -> bool:
        """Whether ``DistributedDataParallel``, or the caller, keeps all stepped parameters the same on all ranks."""
        replicated = self.updates.replicated
        summed = {id(p) for ddp in self._buckets.modules for p in ddp.parameters()}
        return bool(self._alike or self.replicas or (replicated is not None and replicated.stepped() <= summed))

    def meet(self) -> None:
        """Make an operation of all ranks where the model has none, so that old results can be dropped. The end of such
        an operation tells each rank that the others have published the last step boundary.
        """
        if self._meets and self._runtime.operates:
            dist.all_reduce(torch.zeros(1))

    def unsettled(self) -> bool:
        return self._buckets.unsettled()

    def capture(self) -> dict[str, Any]:
        """What a replacement must know of updates and buckets before its parts are restored."""
        updates = self.updates
        return {
            "swift.outside": updates.outside.active,
            "swift.eligible": self._buckets.eligible,
            "swift.images": updates.keeps_images,
        }

    def load(self, place: Restored) -> None:
        """Take over the replicated state of ``place``, and what was agreed on before it."""
        self.updates.load(place.boundary.version, place.description, place.tensors, owned=place.owned)
        self._buckets.settle(place.records, place.boundary)

    def restore(self, parts: Mapping[str, Any], boundary: int, *, again: bool) -> None:
        """Put back what :meth:`capture` has returned at step boundary ``boundary``. ``again``: all workers were started
        again, perhaps with another script.
        """
        self._buckets.eligible = parts.get("swift.eligible", 0)
        images, outside = parts.get("swift.images", False), parts.get("swift.outside", False)
        self.updates.resume(boundary, images=images, outside=outside, again=again)
        if outside and not again and self.updates.state_version > self.updates.version:
            self._refuse(
                f"rank {self._runtime.rank}: an optimizer of the script kept on this rank what it kept on no other, so "
                "nobody has its state at the step boundary: let all ranks keep the same in an optimizer, or set "
                "state.preimages='always'"
            )

    def at_boundary(self, index: int, stable: int) -> None:
        """A step boundary was published; every rank has published ``stable``."""
        self.updates.at_boundary(index, stable)
        self._forward_recorder.at_boundary()

    def gradients(self) -> dict[int, Any]:
        """Pending gradients by place; the tensors are live. A shard gives plain data."""
        if self.shard is not None:
            return self.shard.gradients()
        assert self.updates.replicated is not None
        return {i: p.grad for i, p in enumerate(self.updates.replicated.parameters) if p.grad is not None}

    def left_over(self, pending: Collection[int]) -> dict[int, Any] | None:
        """Gradients that a whole update left behind and the next batch may add to, by place; None for nothing.
        ``pending``: optimizers whose gradients have changed since their last update.
        """
        return (self._leftover.left(pending) if self.shard is None else self.shard.left_over()) or None

    def set_gradients(self, gradients: Mapping[int, Any]) -> None:
        """Inverse of :meth:`gradients`: moves each to its parameter's device."""
        if self.shard is not None:
            self.shard.set_gradients(gradients)
            return
        for index, grad in gradients.items():
            assert self.updates.replicated is not None
            parameter = self.updates.replicated.parameters[index]
            parameter.grad = grad.to(parameter.device)

    def _capture_unoptimized(self) -> dict[int, torch.Tensor]:
        return self.unoptimized.capture() if self.updates.outside.active or self._config.reroutes else {}


@out_of_graphs
def _inject_before(_: nn.Module, args: Any) -> None:
    inject.point("forward.before", _tensors(args))


@out_of_graphs
def _inject(_: nn.Module, args: Any, output: Any) -> None:
    inject.point("forward", _tensors(output))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.is_cpu]
