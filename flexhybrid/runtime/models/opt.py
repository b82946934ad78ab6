"""OPT as functions on tensors, and the names of its weights in a checkpoint.

Shapes: R rows (new tokens), h hidden. ``w`` maps a layout name (flexhybrid.core.model.layout) to its row parts, because
a matrix may be partly resident and partly streamed. All functions compute the same as transformers' OPTForCausalLM.
"""

import torch
import torch.nn.functional as F

from flexhybrid.core.model.shape import MATRICES, OPT_POSITION_OFFSET, ModelShape
from flexhybrid.runtime.kernels.norms import add_and_layer_norm_
from flexhybrid.runtime.storage.parts import Parts, add_linear_, linear, linear_relu

#: Possible prefixes of "layers." and "embed_tokens" in a checkpoint.
PREFIXES = ("model.decoder.", "decoder.", "")


def layer_tensors(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Return {layout name: checkpoint tensors, stacked by rows in this order}."""
    return {
        "norm1.weight": ("self_attn_layer_norm.weight",),
        "norm1.bias": ("self_attn_layer_norm.bias",),
        "kvq.bias": ("self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.q_proj.bias"),
        "o.bias": ("self_attn.out_proj.bias",),
        "norm2.weight": ("final_layer_norm.weight",),
        "norm2.bias": ("final_layer_norm.bias",),
        "up.bias": ("fc1.bias",),
        "down.bias": ("fc2.bias",),
        **MATRICES["opt"],
    }


def outer_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {name without prefix: shape} of the tensors outside the layers. ``lm_head.weight`` has no prefix."""
    width = shape.embed_dim or shape.hidden
    tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (shape.vocab, width),
        "embed_positions.weight": (shape.max_positions + OPT_POSITION_OFFSET, shape.hidden),
    }
    if shape.pre_norm:
        tensors |= {"final_layer_norm.weight": (shape.hidden,), "final_layer_norm.bias": (shape.hidden,)}
    if width != shape.hidden:
        tensors |= {"project_in.weight": (shape.hidden, width), "project_out.weight": (width, shape.hidden)}
    if not shape.tied_head:
        tensors["lm_head.weight"] = (shape.vocab, width)
    return tensors


def embed(shape: ModelShape, outer: dict[str, torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor):
    """Return the hidden states [R, h] of token ids and positions, both [R]."""
    hidden_Rh = F.embedding(tokens, outer["embed_tokens.weight"])
    if "project_in.weight" in outer:
        hidden_Rh = F.linear(hidden_Rh, outer["project_in.weight"])
    return hidden_Rh + F.embedding(positions + OPT_POSITION_OFFSET, outer["embed_positions.weight"])


def attention_input(shape: ModelShape, w: dict[str, Parts], hidden_Rh: torch.Tensor) -> torch.Tensor:
    """Return the input of the query, key and value projections, which ACT blocks store: [R, h].

    OPT-350m normalises after attention instead of before it, so its input is the hidden state itself.
    """
    if not shape.pre_norm:
        return hidden_Rh
    return _norm(shape, hidden_Rh, w, "norm1")


def finish(shape: ModelShape, w: dict[str, Parts], hidden_Rh: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Apply output projection and feed-forward to hidden states [R, h]. ``attended``: attention's output [R, H·d]."""
    projected = linear(attended, w["o.weight"], w["o.bias"][0])
    if shape.pre_norm and hidden_Rh.is_cuda:  # three kernels, in place
        norm = w["norm2.weight"][0], w["norm2.bias"][0]
        inner = add_and_layer_norm_(hidden_Rh, projected, norm, shape.norm_eps, w["down.bias"][0])
        return add_linear_(hidden_Rh, linear_relu(inner, w["up.weight"], w["up.bias"][0]), w["down.weight"])
    hidden_Rh = hidden_Rh + projected
    if not shape.pre_norm:
        hidden_Rh = _norm(shape, hidden_Rh, w, "norm1")
    inner = _norm(shape, hidden_Rh, w, "norm2") if shape.pre_norm else hidden_Rh
    inner = linear_relu(inner, w["up.weight"], w["up.bias"][0])
    hidden_Rh = hidden_Rh + linear(inner, w["down.weight"], w["down.bias"][0])
    return hidden_Rh if shape.pre_norm else _norm(shape, hidden_Rh, w, "norm2")


def head(shape: ModelShape, outer: dict[str, torch.Tensor], hidden_Bh: torch.Tensor) -> torch.Tensor:
    """Apply the final norm and the output head to [B, h]; return logits [B, vocab]."""
    if shape.pre_norm:
        hidden_Bh = F.layer_norm(
            hidden_Bh, (shape.hidden,), outer["final_layer_norm.weight"], outer["final_layer_norm.bias"], shape.norm_eps
        )
    if "project_out.weight" in outer:
        hidden_Bh = F.linear(hidden_Bh, outer["project_out.weight"])
    return F.linear(hidden_Bh, outer.get("lm_head.weight", outer["embed_tokens.weight"]))


def _norm(shape: ModelShape, rows: torch.Tensor, w: dict[str, Parts], name: str) -> torch.Tensor:
    return F.layer_norm(rows, rows.shape[-1:], w[f"{name}.weight"][0], w[f"{name}.bias"][0], shape.norm_eps)
