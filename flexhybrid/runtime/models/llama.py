"""Llama and similar models (Mistral, Qwen2, Qwen3, Phi-3) as functions on tensors, and the names of their weights.

Shapes: R rows (new tokens), h hidden. ``w`` maps a layout name (flexhybrid.core.model.layout) to its row parts, because
a matrix may be partly resident and partly streamed. All functions compute the same as transformers' LlamaForCausalLM.
Between projection and attention, the executor norms the queries and keys of each head (``ModelShape.qk_norm``) and
rotates them (flexhybrid.runtime.kernels: norms, rotary).
"""

import torch
import torch.nn.functional as F

from flexhybrid.core.model.shape import MATRICES, ModelShape
from flexhybrid.runtime.kernels.norms import add_and_norm_, gate_, rms_norm
from flexhybrid.runtime.storage.parts import Parts, add_linear_, linear

#: Possible prefixes of "layers." and "embed_tokens" in a checkpoint.
PREFIXES = ("model.", "")


def layer_tensors(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Return {layout name: checkpoint tensors, stacked by rows in this order}."""
    tensors: dict[str, tuple[str, ...]] = {
        "norm1.weight": ("input_layernorm.weight",),
        "norm2.weight": ("post_attention_layernorm.weight",),
        **MATRICES["llama"],
    }
    if shape.qkv_bias:
        tensors["kvq.bias"] = tuple(name.replace(".weight", ".bias") for name in tensors["kvq.weight"])
    if shape.qk_norm:
        tensors |= {"k_norm.weight": ("self_attn.k_norm.weight",), "q_norm.weight": ("self_attn.q_norm.weight",)}
    return tensors


def packed_tensors(shape: ModelShape) -> dict[str, dict[str, int]]:
    """Return {joined tensor in a layer of Phi-3's checkpoints: {its parts, as in ``layer_tensors``: their rows}}."""
    qkv = {"q": shape.query_width, "k": shape.kv_width // 2, "v": shape.kv_width // 2}
    return {
        "self_attn.qkv_proj.weight": {f"self_attn.{name}_proj.weight": rows for name, rows in qkv.items()},
        "mlp.gate_up_proj.weight": {f"mlp.{name}_proj.weight": shape.ffn for name in ("gate", "up")},
    }


def outer_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {name without prefix: shape} of the tensors outside the layers. ``lm_head.weight`` has no prefix."""
    tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (shape.vocab, shape.hidden),
        "norm.weight": (shape.hidden,),
    }
    if not shape.tied_head:
        tensors["lm_head.weight"] = (shape.vocab, shape.hidden)
    return tensors


def embed(shape: ModelShape, outer: dict[str, torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor):
    """Return the hidden states [R, h] of token ids [R]. Positions are used later, for rotation."""
    return F.embedding(tokens, outer["embed_tokens.weight"])


def attention_input(shape: ModelShape, w: dict[str, Parts], hidden_Rh: torch.Tensor) -> torch.Tensor:
    """Return the input of the query, key and value projections, which ACT blocks store: [R, h]."""
    return rms_norm(hidden_Rh, w["norm1.weight"][0], shape.norm_eps)


def finish(shape: ModelShape, w: dict[str, Parts], hidden_Rh: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Apply output projection and gated feed-forward to hidden states [R, h] in place; return them.

    ``attended``: attention's output [R, H·d].
    """
    projected = linear(attended, w["o.weight"], None)
    inner = add_and_norm_(hidden_Rh, projected, w["norm2.weight"][0], shape.norm_eps)
    gated = gate_(linear(inner, w["gate.weight"], None), linear(inner, w["up.weight"], None))
    return add_linear_(hidden_Rh, gated, w["down.weight"])


def head(shape: ModelShape, outer: dict[str, torch.Tensor], hidden_Bh: torch.Tensor) -> torch.Tensor:
    """Apply the final norm and the output head to [B, h]; return logits [B, vocab]."""
    hidden_Bh = rms_norm(hidden_Bh, outer["norm.weight"], shape.norm_eps)
    return F.linear(hidden_Bh, outer.get("lm_head.weight", outer["embed_tokens.weight"]))
