"""The model of the demo, without Lightning, so that the benchmarks can use the same one."""

from __future__ import annotations

from transformers import GPT2Config, GPT2LMHeadModel

#: Bytes in a training window.
CONTEXT = 128


def byte_gpt2(width: int = 128, layers: int = 6, heads: int = 4) -> GPT2LMHeadModel:
    """GPT-2 over single bytes, dropout on; of 1.2 million parameters unless told otherwise."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
