"""OPT and Llama models of any shape with random weights, in transformers' classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexhybrid.core.model.shape import ModelShape


def config_of(shape: ModelShape, **fields) -> Any:
    """Return the transformers config of a shape of OPT's family, without dropout, or of Llama's; ``fields`` replace
    others."""
    from transformers import LlamaConfig, OPTConfig

    sizes: dict[str, Any] = dict(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
    )
    if shape.family == "opt":
        config = OPTConfig(**sizes, word_embed_proj_dim=shape.hidden, ffn_dim=shape.ffn, dropout=0.0)
    else:
        config = LlamaConfig(**sizes, intermediate_size=shape.ffn, num_key_value_heads=shape.num_kv_heads)
    config.update(fields)
    return config


def make_checkpoint(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """Write a random OPT checkpoint in Hugging Face layout to a folder, unless it holds one; return the folder."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import OPTForCausalLM

    torch.manual_seed(0)
    model = OPTForCausalLM(config_of(shape, dtype=dtype)).to(getattr(torch, dtype))
    unfinished = folder.with_name(folder.name + ".partial")  # renamed when it is complete
    model.save_pretrained(unfinished, max_shard_size="1GB")
    unfinished.rename(folder)
    return folder
