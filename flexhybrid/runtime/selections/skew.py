"""Skewing (InfiniGen, Sec. 4.2): concentrate the queries of each head in few columns by an orthogonal matrix A.

Then few columns suffice to guess attention scores. One forward of a sample text gives the queries of a key/value head
(with GQA, the stacked queries of a group): Q = U S Vᵀ, and A = V. Multiplying queries and keys by A does not change
their scores. In OPT, queries and keys are the projections themselves, so A is folded into W_Q, W_K and their biases. In
rotary models, a rotation comes in between. There A is stored with the weights, and only the rows with which a selection
guesses are multiplied by A, after rotation.

Shapes: N sample tokens, H query heads, G key/value heads, d head size, h hidden.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.runtime.kernels.attention import Assembled, fused, split_heads
from flexhybrid.runtime.kernels.rotary import norm_and_rotate_, rotary_tables
from flexhybrid.runtime.models import architecture
from flexhybrid.runtime.storage.loader import SKEW_FILE, Checkpoint
from flexhybrid.runtime.storage.parts import Parts, linear

#: Function of (layer, queries [N, H, d], keys [N, G, d]) that returns the queries and keys for attention.
Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def unchanged(_layer: int, q_NHd: torch.Tensor, k_NGd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q_NHd, k_NGd


@torch.inference_mode()
def forward(checkpoint: Checkpoint, tokens: list[int], change: Change = unchanged) -> torch.Tensor:
    """Return the logits [N, vocab] of one text in float32, with one layer's weights in memory at a time.

    ``change`` may replace the (rotated) queries and keys of each layer.
    """
    shape = checkpoint.shape
    model = architecture(shape)
    outer = {name: tensor.float() for name, tensor in checkpoint.outer_tensors()}
    positions = torch.arange(len(tokens), dtype=torch.int64)
    hidden = model.embed(shape, outer, torch.tensor(tokens, dtype=torch.int64), positions)
    rotation = rotary_tables(shape, len(tokens), torch.float32, "cpu") if shape.rotary else None
    for layer in range(shape.num_layers):
        w = _layer_weights(checkpoint, layer)
        act = model.attention_input(shape, w, hidden)
        kvq = linear(act, w["kvq.weight"], w["kvq.bias"][0] if "kvq.bias" in w else None)
        k, v, q = (heads.contiguous() for heads in split_heads(shape, kvq))
        if rotation:
            k = norm_and_rotate_(k, w.get("k_norm.weight"), shape.norm_eps, rotation)
            q = norm_and_rotate_(q, w.get("q_norm.weight"), shape.norm_eps, rotation)
        q, k = change(layer, q, k)
        k, v = k.transpose(0, 1), v.transpose(0, 1)  # head-major
        hidden = model.finish(shape, w, hidden, fused(q[None], Assembled(k[None], v[None]))[0])
    return model.head(shape, outer, hidden)


def _layer_weights(checkpoint: Checkpoint, layer: int) -> dict[str, Parts]:
    """Return {layout name: one tensor in float32}."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, _, tensor in checkpoint.layer_tensors(layer):
        parts.setdefault(name, []).append(tensor.float())
    return {name: (torch.cat(tensors),) for name, tensors in parts.items()}


def skewing_matrices(checkpoint: Checkpoint, tokens: list[int]) -> list[torch.Tensor]:
    """Return the matrices A, float64 [G, d, d] for each layer, from one forward of these tokens."""
    matrices = []

    def look(_layer: int, q: torch.Tensor, k: torch.Tensor):
        stacked = q.double().unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 2)  # [G, N · H/G, d]
        d = stacked.shape[-1]
        padded = torch.nn.functional.pad(stacked, (0, 0, 0, max(0, d - stacked.shape[1])))  # so that V has d columns
        triangular = torch.linalg.qr(padded).R
        matrices.append(torch.linalg.svd(triangular).Vh.transpose(-1, -2).contiguous())
        return q, k

    forward(checkpoint, tokens, look)
    return matrices


def folded(shape: ModelShape, tensor: torch.Tensor, matrices_Gdd: torch.Tensor) -> torch.Tensor:
    """Multiply a layer's W_Q or W_K [heads · d, h], or its bias, by A, which mixes the rows of each head.

    The result is float32 for every checkpoint. Rounding to 16 bits would change the shipped model's logits by 7e-4 of
    the largest one.
    """
    heads = tensor.double().view(shape.num_kv_heads, -1, shape.head_dim, *tensor.shape[1:])
    mixed = torch.einsum("grd...,gde->gre...", heads, matrices_Gdd)
    return mixed.reshape(tensor.shape).float()


def save_skewed(checkpoint: Checkpoint, tokens: list[int], folder: str | Path) -> None:
    """Skew a checkpoint by sample tokens, and write it to a new folder that transformers can read.

    Raise InputError if the folder exists or cannot be written.
    """
    folder = Path(folder)
    if folder.exists():
        raise InputError(f"{folder} is there already: name a new folder for the skewed checkpoint")
    matrices = skewing_matrices(checkpoint, tokens)
    with file_errors(f"write {folder}"):
        folder.mkdir(parents=True)
        for file in sorted(checkpoint.path.iterdir()):
            if file.is_file() and (checkpoint.shape.rotary or not _WEIGHTS.fullmatch(file.name)):
                shutil.copy2(file, folder)
        if checkpoint.shape.rotary:
            save_file({f"layers.{layer}": a.float() for layer, a in enumerate(matrices)}, folder / SKEW_FILE)
        else:
            _save_folded(checkpoint, matrices, folder)


#: Matches names of files with weights, and of their index.
_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")


def _save_folded(checkpoint: Checkpoint, matrices: list[torch.Tensor], folder: Path) -> None:
    """Write all tensors, with A folded in, to one file per layer; and an index of the files."""
    files: dict[str, str] = {}

    def save(tensors: dict[str, torch.Tensor], file: str) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
        files.update(dict.fromkeys(tensors, file))

    outer = {checkpoint.outer_name(name): tensor for name, tensor in checkpoint.outer_tensors()}
    save(outer, "model-outer.safetensors")
    for layer, matrices_Gdd in enumerate(matrices):
        tensors, seen = {}, Counter()
        for name, own_name, tensor in checkpoint.layer_tensors(layer):
            place = _KEYS_VALUES_QUERIES[seen[name]] if name.startswith("kvq") else None
            seen[name] += 1
            mixes = place in ("keys", "queries")
            tensors[own_name] = folded(checkpoint.shape, tensor, matrices_Gdd) if mixes else tensor
        save(tensors, f"model-{layer:05d}.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=1)
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


_KEYS_VALUES_QUERIES = ("keys", "values", "queries")
