"""A simulated accelerator, device type ``sim``, for tests without a GPU; see sim.cpp.

Who imports this has the device ``sim``: ``torch.accelerator`` and ``torch.sim`` are its.
``SIMDEV_BYTES`` is the size of its memory, ``SIMDEV_COUNT`` the number of devices; with ``SIMDEV_WHY`` it says which
operators could not be queued.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ExtensionFileLoader
from typing import Any

import torch
import torch._meta_registrations  # noqa: F401 (shapes of results: without it more operators run at once)
from simdev_build import library
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

__all__ = ["counts", "delay", "held", "kernel_view", "launch", "ran_at_once"]


def _loaded() -> Any:
    path = str(library())
    spec = importlib.util.spec_from_loader("_C", ExtensionFileLoader("_C", path), origin=path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_C = _loaded()


def _index(device: Any) -> int:
    """Number of a device that is given by number or by name; the current one where that says none."""
    if isinstance(device, int):
        return device
    number = None if device is None else torch.device(device).index
    return int(_C.current_device()) if number is None else number


class _Device:
    """``with torch.sim.device(0):``; a negative number changes nothing, as with CUDA."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _C.exchange_device(self.index)

    def __exit__(self, *_: object) -> None:
        _C.set_device(self.before)


def _stream(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


def _manual_seed_all(seed: int) -> None:
    for number in range(_C.device_count()):
        _C.default_generator(number).manual_seed(seed)


def _device_module() -> types.ModuleType:
    """What ``torch.sim`` is: as ``torch.cuda``, as far as the frameworks ask."""
    module = types.ModuleType("torch.sim")
    offered: dict[str, Any] = {
        "device": _Device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": _C.device_count,
        "current_device": _C.current_device,
        "set_device": lambda device: _C.set_device(_index(device)),
        "manual_seed": lambda seed: _C.default_generator(_C.current_device()).manual_seed(seed),
        "manual_seed_all": _manual_seed_all,
        "initial_seed": lambda: _C.default_generator(_C.current_device()).initial_seed(),
        "get_rng_state": lambda device=None: _C.default_generator(_index(device)).get_state(),
        "set_rng_state": lambda state, device=None: _C.default_generator(_index(device)).set_state(state),
        "current_stream": lambda device=None: torch.accelerator.current_stream(device),
        "synchronize": lambda device=None: torch.accelerator.synchronize(device),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": _stream,
    }
    vars(module).update(offered)
    return module


rename_privateuse1_backend("sim")
torch._register_device_module("sim", _device_module())
generate_methods_for_privateuse1_backend(for_storage=True)
# Module.to() keeps parameters, and so ties between them, for CUDA; for other devices only with this.
torch.__future__.set_swap_module_params_on_conversion(True)

#: Queue a Python function on the current stream.
launch: Callable[[Callable[[], None]], None] = _C.launch
#: A tensor of the device as its kernels see it: what is in it is only true once the stream has got there.
kernel_view: Callable[[torch.Tensor], torch.Tensor] = _C.kernel_view
#: Microseconds that each kernel takes at least.
delay: Callable[[int], None] = _C.delay
#: How many operators were queued, and how many ran at once.
counts: Callable[[], tuple[int, int]] = _C.counts
#: Operators that ran at once, and how often.
ran_at_once: Callable[[], dict[str, int]] = _C.ran_at_once


@contextmanager
def held() -> Iterator[None]:
    """In here the device does nothing: what is queued waits."""
    _C.hold(True)
    try:
        yield
    finally:
        _C.hold(False)
