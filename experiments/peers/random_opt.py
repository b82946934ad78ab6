"""OPT models of any shape with random weights, in transformers' classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flexhybrid.core.model.shape import ModelShape

if TYPE_CHECKING:
    from transformers import OPTConfig


def opt_config(shape: ModelShape, **fields) -> OPTConfig:
    """Return the transformers config of an OPT shape, without dropout; ``fields`` replace others."""
    from transformers import OPTConfig

    config = OPTConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        word_embed_proj_dim=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        ffn_dim=shape.ffn,
        max_position_embeddings=shape.max_positions,
        dropout=0.0,
    )
    config.update(fields)
    return config


def make_checkpoint(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """Write a random OPT checkpoint in Hugging Face layout to a folder, unless it holds one; return the folder."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import OPTForCausalLM

    torch.manual_seed(0)
    model = OPTForCausalLM(opt_config(shape, dtype=dtype)).to(getattr(torch, dtype))
    unfinished = folder.with_name(folder.name + ".partial")  # renamed when it is complete
    model.save_pretrained(unfinished, max_shard_size="1GB")
    unfinished.rename(folder)
    return folder
