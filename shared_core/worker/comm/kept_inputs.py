"""Inputs that are kept so that an operation can run again, each once: FSDP gathers the same parameters in forward and
again in backward.
"""

from __future__ import annotations

import ctypes
from weakref import WeakValueDictionary

import torch

from shared_core.worker.comm.op import input_checksum

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class KeptInputs:
    """Contiguous copies of inputs, which live as long as somebody holds them."""

    def __init__(self) -> None:
        self._kept: WeakValueDictionary[tuple[int, torch.dtype, int], torch.Tensor] = WeakValueDictionary()

    def keep(self, tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """A copy of a tensor on the CPU, and whether it is new: one that is still held serves where all bits are
        the same.
        """
        dense = tensor.detach().contiguous()
        key = (dense.numel(), dense.dtype, input_checksum([dense]))
        kept = self._kept.get(key)
        if kept is not None and not _memcmp(kept.data_ptr(), dense.data_ptr(), dense.nbytes):
            return kept, False
        self._kept[key] = kept = dense.clone()
        return kept, True
