"""A plain model of H2O's cache: weights of each head in a dictionary, one request and one token at a time."""

from __future__ import annotations

import math

import numpy as np
import torch

from flexhybrid.core.context.blocks import BlockEntries
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.runtime.kernels.rotary import rotary_tables, rotate_
from flexhybrid.runtime.models import architecture
from flexhybrid.runtime.storage.parts import linear
from flexhybrid.runtime.storage.weights import Weights


@torch.inference_mode()
def plain_h2o(checkpoint, prompt, max_tokens: int, budget: float, cache=None, whole_layers=0) -> list[int]:
    """Answer a prompt token by token and head by head. Half of the budget is the newest tokens, half those with the
    largest sums; the first ``whole_layers`` drop nothing. Places are in the pools of ``cache`` as in a context; a new
    token replaces a token of its pool."""
    entries = BlockEntries(cache or {"kv@host": 1.0})
    shape, model = checkpoint.shape, architecture(checkpoint.shape)
    weights = Weights(shape, checkpoint, "float32", torch.device("cpu"), Policy(weights=Placement(device=1.0)))
    groups, heads, d = shape.num_kv_heads, shape.num_heads, shape.head_dim
    rotary = rotary_tables(shape, len(prompt) + max_tokens, torch.float32, "cpu") if shape.rotary else None
    most = min(len(prompt) + max_tokens - 1, max(16, math.ceil(round(budget * len(prompt) / 16, 9)) * 16))
    recent = most - most // 2
    views = [weights.views(layer, None) for layer in range(shape.num_layers)]
    entry_of_place = entries.entry_of(np.arange(len(prompt) + max_tokens)).tolist()
    #: position -> [key, value, sum, place]
    caches = [[{} for _ in range(groups)] for _ in range(shape.num_layers)]
    answer: list[int] = []

    def layer_step(layer, hidden, positions):
        w = views[layer]
        kvq = linear(
            model.attention_input(shape, w, hidden), w["kvq.weight"], w["kvq.bias"][0] if "kvq.bias" in w else None
        )
        k, v, q = (x.unflatten(-1, (-1, d)) for x in kvq.split([groups * d, groups * d, heads * d], dim=-1))
        if rotary:
            k, q = (rotate_(x.contiguous(), rotary[0][positions], rotary[1][positions]) for x in (k, q))
        out = torch.zeros(len(positions), heads, d)
        for g in range(groups):
            cache = caches[layer][g]
            for row, position in enumerate(positions.tolist()):
                cache[position] = [k[row, g], v[row, g], 0.0, position]
            held = sorted(cache)
            keys = torch.stack([cache[p][0] for p in held])
            values = torch.stack([cache[p][1] for p in held])
            later = torch.tensor(held)[None] > positions[:, None]
            for head in range(g * heads // groups, (g + 1) * heads // groups):
                scores = q[:, head] @ keys.T / d**0.5
                probabilities = torch.softmax(scores.masked_fill_(later, -torch.inf), dim=-1)
                out[:, head] = probabilities @ values
                for p, looked_at in zip(held, probabilities.sum(0).tolist(), strict=True):
                    cache[p][2] += looked_at
            now = int(positions[-1])
            if len(positions) > 1 and layer >= whole_layers:
                rest = sorted((p for p in held if p <= now - recent), key=lambda p: -cache[p][2])
                for p in rest[max(most - recent, 0) :] if len(held) > most else []:
                    del cache[p]
                for place, p in enumerate(sorted(cache)):
                    cache[p][3] = place
            elif len(cache) > most and layer >= whole_layers:
                pool = entry_of_place[now % most]
                old = (p for p in cache if p <= now - recent and entry_of_place[cache[p][3]] == pool)
                cache[now][3] = cache.pop(min(old, key=lambda p: cache[p][2]))[3]
        return model.finish(shape, w, hidden, out.flatten(1))

    tokens, start = prompt, 0
    for _ in range(max_tokens):
        positions = torch.arange(start, start + len(tokens))
        hidden = model.embed(shape, weights.outer, torch.tensor(tokens), positions)
        for layer in range(shape.num_layers):
            hidden = layer_step(layer, hidden, positions)
        answer.append(int(model.head(shape, weights.outer, hidden[-1:]).argmax()))
        start, tokens = start + len(tokens), answer[-1:]
    return answer
