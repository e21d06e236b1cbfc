"""A byte-level GPT-2 as a list of layers, for pipelines, and the text that it is trained on."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

#: Bytes that are predicted in a window.
CONTEXT = 64


class Tokens(nn.Embedding):
    """Embeddings of bytes, which are also the weights of the last layer."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config.vocab_size, config.n_embd)
        nn.init.normal_(self.weight, std=config.initializer_range)


class Positions(nn.Module):
    """Adds the embeddings of positions: ``[rows, CONTEXT, width]`` in and out."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(config.initializer_range * torch.randn(config.n_positions, config.n_embd))
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x + self.weight[: x.shape[1]])


def logits(tokens: Tokens, x: torch.Tensor) -> torch.Tensor:
    """``[rows, CONTEXT, width]`` in, ``[rows, CONTEXT, 256]`` out."""
    return x @ tokens.weight.T


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats a byte; ``outputs`` are logits, ``targets`` ``[rows, CONTEXT]`` bytes."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def gpt2_layers(blocks: int = 4, width: int = 64) -> list[Any]:
    """Layers of a GPT-2 with tied embeddings and dropout."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec  # which chooses a device when it is imported

    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=blocks,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",  # which masks the future by itself
    )
    return [
        TiedLayerSpec("tokens", Tokens, config),
        LayerSpec(Positions, config),
        *(LayerSpec(GPT2Block, config, layer_idx=i) for i in range(blocks)),
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("tokens", Tokens, config, forward_fn=logits),
    ]


def windows(count: int, skip: int = 0) -> TensorDataset:
    """``count`` windows of the standard library's modules, in the order of their names, after ``skip`` others.

    An item is a pair of ``CONTEXT`` bytes and the bytes that follow each of them.
    """
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > (skip + count) * CONTEXT:
            break
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[skip * CONTEXT :]
    inputs, targets = (numbers[first : first + count * CONTEXT].view(count, CONTEXT) for first in (0, 1))
    return TensorDataset(inputs, targets)


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over every bit of the parameters that this rank holds."""
    hasher = hashlib.sha256()
    for parameter in module.parameters():
        hasher.update(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
