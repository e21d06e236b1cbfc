"""Operations on tensors of an accelerator over gloo: their values go through host memory.

The operation itself runs on host memory, so its log, its repetition and its checksums are those of a CPU tensor. The
result reaches the device only once the operation is complete: nothing of one that was cut off is ever there. So the
host need not wait for the device before an update, as it must where the device itself runs collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from shared_core.devices import apart, room_on_host, synchronize, to_host
from shared_core.worker.comm.op import BaseWork

_Method = TypeVar("_Method", bound=Callable[..., Any])


class StagedWork(BaseWork):
    """The work of an operation whose results go to a device when it is done: copied on the thread that completes it,
    which waits for the device. ``outputs`` are the caller's tensors, nested as the caller has given them.
    """

    def __init__(self, work: Any, outputs: Any) -> None:
        super().__init__()
        self._work, self._outputs = work, [outputs] if isinstance(outputs, torch.Tensor) else outputs
        self._devices = apart(_tensors(outputs))
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=[*self._devices])
        work.get_future().add_done_callback(self._deliver)

    def _deliver(self, done: torch.futures.Future[Any]) -> None:
        try:
            results = done.value()
            with torch.no_grad():
                for own, result in zip(_tensors(self._outputs), _tensors(results), strict=True):
                    if own is not result:
                        own.data.copy_(result)
            synchronize(self._devices)  # the log may hand the host's memory to the next operation
        except Exception as error:  # of the operation, for whoever waits
            self._future.set_exception(error)
        else:
            self._future.set_result(self._outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in the caller's tensors; raises what the operation's own ``wait()`` raises."""
        self._work.wait(timeout)
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Its value is the caller's tensors."""
        return self._future

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def result(self) -> Any:
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        return int(self._work.source_rank())


class StagedReceive(BaseWork):
    """A receive into ``output``, a tensor of a device. Who waits for it first copies the message there from ``host``;
    it has no future.
    """

    def __init__(self, work: Any, output: torch.Tensor, host: torch.Tensor) -> None:
        super().__init__()
        self._work, self._host = work, host
        self._output: torch.Tensor | None = output

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is enqueued to the device; raises what the message's own ``wait()`` raises."""
        self._work.wait(timeout)
        output, self._output = self._output, None
        if output is not None:
            output.data.copy_(self._host)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def source_rank(self) -> int:
        return int(self._work.source_rank())


def staged(method: _Method) -> _Method:
    """Make a method of a process group that takes host tensors also take those of devices: what its first argument
    holds is written, what the others hold is read. With host tensors alone it calls the method and copies nothing.
    The group's ``check`` may refuse a device.
    """
    return _staged(method, reads=False)


def staged_in_place(method: _Method) -> _Method:
    """As :func:`staged`, where the first argument is also read."""
    return _staged(method, reads=True)


def _staged(method: _Method, *, reads: bool) -> _Method:
    @wraps(method)
    def call(group: Any, outputs: Any, *others: Any, **options: Any) -> Any:
        if not _away(outputs) and not any(map(_away, others)):
            return method(group, outputs, *others, **options)
        for device in apart(_tensors([outputs, *others])):
            group.check(device, method.__name__)
        twins: dict[int, torch.Tensor] = {}
        read = [_on_host(each, twins, to_host) for each in others]
        written = _on_host(outputs, twins, to_host if reads else room_on_host)
        return StagedWork(method(group, written, *read, **options), outputs)

    return cast(_Method, call)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _tensors(each)


def _away(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return not given.is_cpu
    return isinstance(given, (list, tuple)) and any(map(_away, given))


def _on_host(given: Any, twins: dict[int, torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with host memory for each tensor of a device, however often it occurs."""
    if isinstance(given, torch.Tensor):
        if id(given) not in twins:
            twins[id(given)] = make(given)
        return twins[id(given)]
    return [_on_host(each, twins, make) for each in given] if isinstance(given, (list, tuple)) else given
