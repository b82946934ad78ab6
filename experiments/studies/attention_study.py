"""What the attention of a small model looks like on each of several texts (InfiniGen, Table 1, Figs. 4, 5, 7, 13, 20).

Every figure is a list with a number for each text, so that ``flexhybrid.jobs.accuracy.bootstrap`` can say how far it
would move with other texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from experiments.reproduce.infinigen import accuracy_policies as studied
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.runtime.selections.skew import forward
from flexhybrid.runtime.storage.loader import Checkpoint

LARGEST = 4  #: channels of a block's input
EVERY = 16  #: queries looked at; sorting the weights of all takes minutes a text
SHOWN = (500, 998, 999, 1000, 1001, 1002, 1500, 2000)  #: queries whose key tokens Fig. 5 and its text count
CHUNK = 256

OfTexts = list[float]  #: a number for each text


@torch.inference_mode()
def block_inputs(model: Path, texts: Sequence[list[int]]) -> dict[str, list[OfTexts]]:
    """Return, for each layer from 1 on and each text, mean cosines over tokens.

    Of the block's input with the preceding block's input, attention output and FFN output (Table 1); with the preceding
    block's input without the LARGEST channels, which outliers may be; and of the normed attention inputs, from which
    queries are guessed.
    """
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    is_opt = network.config.model_type == "opt"
    layers = network.model.decoder.layers if is_opt else network.model.layers
    kept: dict[str, list[torch.Tensor]] = {}

    def keep(name: str):
        def hook(_module, _arguments, output):
            kept[name].append((output[0] if isinstance(output, tuple) else output).flatten(end_dim=-2))

        return hook

    for layer in layers:
        layer.register_forward_pre_hook(lambda module, arguments: kept["input"].append(arguments[0][0]))
        layer.self_attn.register_forward_hook(keep("attention"))
        (layer.fc2 if is_opt else layer.mlp).register_forward_hook(keep("ffn"))
        (layer.self_attn_layer_norm if is_opt else layer.input_layernorm).register_forward_hook(keep("normed"))

    def cosines(of: str, other: str) -> list[float]:
        pairs = zip(kept[of][1:], kept[other][:-1], strict=True)
        return [float(torch.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairs]

    pairs = {
        "block input": ("input", "input"),
        "block input, other channels": ("others", "others"),
        "attention output": ("input", "attention"),
        "FFN output": ("input", "ffn"),
        "normed input": ("normed", "normed"),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in pairs}
    for text in texts:
        kept.update({name: [] for name in ("input", "attention", "ffn", "normed")})
        network(torch.tensor([text]), use_cache=False)
        largest = kept["input"][-1].square().mean(0).topk(LARGEST).indices
        kept["others"] = [states.index_fill(-1, largest, 0.0) for states in kept["input"]]
        for name, pair in pairs.items():
            found[name].append(cosines(*pair))
    return {name: [list(of_layer) for of_layer in zip(*of_texts, strict=True)] for name, of_texts in found.items()}


def looked_at_queries(length: int, every: int) -> np.ndarray:
    """Return the positions of the queries that are looked at: every so many, and those that are shown."""
    shown = [query - 1 for query in SHOWN if query <= length]
    return np.unique([*range(every - 1, length, every), *shown])


def attention_needs(checkpoint: Checkpoint, texts: Sequence[list[int]], every: int = EVERY) -> dict:
    """Measure the full attention of texts of one length, by layer.

    The number of key tokens that hold WEIGHT of a query's attention: its histogram over queries and heads, and means by
    position. The entropy of the weights over that of equal weights. The cosine of each query's best KEPT tokens with
    all tokens, by chunk of CHUNK positions. Each of these has a number for each text but for the histogram, of all.
    """
    by_text = [_of_text(checkpoint, text, every) for text in texts]
    layers = []
    for of_layer in zip(*by_text, strict=True):
        loudest = max((row["revival"] for row in of_layer), key=lambda one: max(one["weights"]))
        layers.append(
            {
                "histogram": np.sum([_padded(row["histogram"], len(texts[0])) for row in of_layer], axis=0).tolist(),
                "needed_at": {n: [row["needed_at"][n] for row in of_layer] for n in of_layer[0]["needed_at"]},
                **{
                    name: [[row[name][chunk] for row in of_layer] for chunk in range(len(of_layer[0][name]))]
                    for name in ("needed_by_chunk", "below_a_percent_by_chunk", "best_cosine_by_chunk")
                },
                "relative_entropy": [row["relative_entropy"] for row in of_layer],
                "revival": loudest | {"of_loud": [row["revival"]["of_loud"] for row in of_layer]},
            }
        )
    return {"kept": studied.KEPT, "weight": studied.WEIGHT, "bin": studied.BIN, "chunk": CHUNK, "layers": layers}


def _padded(histogram: list[int], length: int) -> np.ndarray:
    return np.pad(histogram, (0, length // studied.BIN + 1 - len(histogram)))


def _of_text(checkpoint: Checkpoint, text: list[int], every: int) -> list[dict]:
    """Return what ``attention_needs`` says of one text: a row for each layer."""
    shape, layers, length = checkpoint.shape, [], len(text)
    queries = looked_at_queries(length, every)
    chunk = queries // CHUNK

    def look(_layer: int, q: torch.Tensor, k: torch.Tensor):
        weights = causal_weights(shape, q[torch.from_numpy(queries)], k, torch.from_numpy(queries))
        ordered = weights.sort(dim=-1, descending=True).values
        needed = ((ordered.cumsum(-1) < studied.WEIGHT).sum(-1) + 1).float()  # [H, Q]
        best = (ordered[..., : studied.KEPT].square().sum(-1) / ordered.square().sum(-1)).sqrt().mean(0).numpy()
        seen = torch.from_numpy(queries + 1).float()
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)[:, seen > 1] / seen[seen > 1].log()
        mean = needed.mean(0).numpy()
        few = (needed < 0.01 * seen).float().mean(0).numpy()
        place = {int(query) + 1: i for i, query in enumerate(queries)}
        last = torch.arange(length - length // 4, length)
        layers.append(
            {
                "histogram": np.bincount((needed.numpy().astype(int) // studied.BIN).ravel()).tolist(),
                "needed_at": {n: float(mean[place[n]]) for n in SHOWN if n <= length},
                "needed_by_chunk": [float(mean[chunk == c].mean()) for c in np.unique(chunk)],
                "below_a_percent_by_chunk": [float(few[chunk == c].mean()) for c in np.unique(chunk)],
                "best_cosine_by_chunk": [float(best[chunk == c].mean()) for c in np.unique(chunk)],
                "relative_entropy": float(entropy.mean()),
                "revival": revival(causal_weights(shape, q[last], k, last)),
            }
        )
        return q, k

    forward(checkpoint, text, look)
    return layers


def causal_weights(shape: ModelShape, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the attention weights [H, Q, N] of queries [Q, H, d] at these positions on keys [N, G, d]."""
    repeated = k.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, repeated) * shape.head_dim**-0.5
    behind = torch.arange(len(k)) > positions[:, None]
    return torch.softmax(scores.masked_fill_(behind, -torch.inf), dim=-1)


def revival(weights: torch.Tensor) -> dict:
    """Find keys that regain weight (Fig. 20b) in a layer's weights [H, W, N]: of the last W of N queries.

    The keys are those before these queries. Of the keys and heads with a weight of at least LOUD for a query of the
    second half of the W, the share below QUIET for all of the first half; and the weights of the loudest of these.
    """
    window = weights.shape[1]
    seen = weights[:, :, : weights.shape[-1] - window]
    quiet = seen[:, : window // 2].amax(1) < studied.QUIET
    later = seen[:, window // 2 :].amax(1)
    loud = later >= studied.LOUD
    head, key = divmod(int((later * quiet).argmax()), later.shape[-1])
    series = [round(float(weight), 6) for weight in seen[head, :, key]]
    of_loud = float((loud & quiet).sum() / loud.sum().clamp_min(1))
    return {"of_loud": of_loud, "head": head, "key": key, "weights": series}


def columns_held(
    checkpoint: Checkpoint, texts: Sequence[list[int]], matrices: list[torch.Tensor]
) -> list[dict[str, OfTexts]]:
    """Return, by layer and text, shares of the squares of a head's queries and keys, before and after skewing.

    In the columns with the largest sums of |Q| + |K|, as many as each ratio of RATIOS_OF_COLUMNS takes; in the largest
    single column; and, of the squares of the queries' and keys' differences from their means over tokens, which alone
    tell one key from another, in those same columns.
    """
    shape = checkpoint.shape
    layers: list[dict[str, OfTexts]] = [{} for _ in range(shape.num_layers)]

    def look(layer: int, q: torch.Tensor, k: torch.Tensor):
        same = torch.eye(shape.head_dim).expand_as(matrices[layer])
        for name, turn in (("plain", same), ("skewed", matrices[layer].float())):
            keys = torch.einsum("ngd,gde->nge", k, turn)[:, :, None]
            queries = torch.einsum("ngrd,gde->ngre", q.unflatten(1, (shape.num_kv_heads, -1)), turn)
            sums = queries.abs().mean(2).sum(0) + keys.abs().mean(2).sum(0)
            for part, values in (("query", queries), ("key", keys)):
                of_all = values.square().mean(2).sum(0)
                varying = (values - values.mean(0)).square().mean(2).sum(0)
                found = {f"{name} {part}, largest column": of_all.amax(-1) / of_all.sum(-1)}
                for ratio in studied.RATIOS_OF_COLUMNS:
                    columns = sums.topk(math.ceil(ratio * shape.head_dim - 1e-9), dim=-1).indices
                    for what, squares in (("", of_all), (", varying", varying)):
                        share = squares.gather(-1, columns).sum(-1) / squares.sum(-1)
                        found[f"{name} {part}{what}, {ratio:g}"] = share
                for what, share in found.items():
                    layers[layer].setdefault(what, []).append(float(share.mean()))
        return q, k

    for text in texts:
        forward(checkpoint, text, look)
    return layers
