"""Tensors that do not live in host memory. Only this module knows kinds of devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shared_core.errors import Unsupported

#: The end of a message about a device.
REFUSED = (
    "and a failed worker is replaced on the CPU only; on NVIDIA GPUs that is experimental (docs/devices.md). On the "
    "CPU, call init_process_group(\"gloo\"). On GPUs, choose on_failure='restart' with checkpoints, or set "
    "device.experimental=true"
)
_HOST = "cpu"
_NOWHERE = "meta"


def check(device: torch.device, what: str, *, allowed: bool) -> None:
    """Raise Unsupported for what is not in host memory, unless it is ``allowed``. ``what`` is there, for people."""
    if device.type not in (_HOST, _NOWHERE) and not allowed:
        raise Unsupported(f"{what} is on {device}, {REFUSED}")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in host memory, detached; a tensor of the CPU itself. Blocks until they are computed."""
    return tensor if tensor.is_cpu else tensor.detach().cpu()


def room_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for the values of a tensor, uninitialized; a tensor of the CPU itself."""
    return tensor if tensor.is_cpu else torch.empty_like(tensor, device=_HOST, requires_grad=False)


def apart(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices, other than the host and meta, of these tensors, each once."""
    return list({tensor.device: None for tensor in tensors if not (tensor.is_cpu or tensor.is_meta)})


def has_streams_of_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def runs_on_devices(backend: str) -> bool:
    """Whether groups of this backend work on tensors of an accelerator, or "undefined" would choose one that does."""
    if backend == "undefined":
        return torch.cuda.is_available()
    return "nccl" in backend


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until what the calling thread has enqueued on its current streams is done."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def await_all(devices: Iterable[torch.device]) -> None:
    """Wait until all that was enqueued on the devices is done, on whatever stream.

    The program may have streams of its own, and what another thread reads or writes is in order with none of them.
    """
    for device in devices:
        torch.accelerator.synchronize(device)


# -- random numbers ---------------------------------------------------------------------------------------------------


def _generators() -> Any:
    """The module of the accelerator that this process uses; None where it uses none, or has not begun to."""
    device = torch.accelerator.current_accelerator()
    module = torch.get_device_module(device) if device is not None else None
    return module if module is not None and module.is_initialized() else None


def random_states() -> list[bytes]:
    """The states of the accelerator's generators, one for each device; none before it is used."""
    module = _generators()
    if module is None:
        return []
    return [module.get_rng_state(number).numpy().tobytes() for number in range(module.device_count())]


def set_random_states(states: list[bytes]) -> None:
    if not states:
        return
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    for number, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), number)
