"""The model of the demo, without Lightning, so that the benchmarks can use the same one."""

from __future__ import annotations

from transformers import GPT2Config, GPT2LMHeadModel

#: Bytes in a training window.
CONTEXT = 128


def byte_gpt2() -> GPT2LMHeadModel:
    """GPT-2 of 1.2 million parameters over single bytes, dropout on."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=128,
            n_layer=6,
            n_head=4,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
