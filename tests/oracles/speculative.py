"""A plain model of InfiniGen's selection: each key of each head has its place, one request and token at a time."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from oracles.quantized import group_of_heads, round_trip

from flexhybrid.core.context.blocks import BlockEntries
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.kernels.rotary import rotary_tables, rotate_
from flexhybrid.runtime.models import architecture
from flexhybrid.runtime.selections.pool import COUNTER_FULL
from flexhybrid.runtime.storage.parts import linear
from flexhybrid.runtime.storage.weights import Weights


class Cache:
    """The tokens of a request that a head of a layer keeps, each in a place; the first ``size`` places are taken."""

    def __init__(self, room: int, head_dim: int):
        self.size, self.replaced = 0, None  # the place that the newest token took from another
        self.keys, self.stored_keys, self.values = torch.zeros(3, room, head_dim)
        self.positions, self.uses, self.used_at = np.zeros((3, room), int)

    def keep(self, key, stored_key, value, position: int, victim: str) -> None:
        """Add a token, replacing another if there is no room; it counts as used once more than that one."""
        place, uses, self.replaced = self.size, 1, None
        if place == len(self.uses):
            rank = {"fifo": self.positions, "lru": self.used_at, "counter": self.uses}[victim]
            place = self.replaced = np.lexsort((self.positions, rank))[0]
            uses = self.uses[place] + 1
        else:
            self.size += 1
        self.keys[place], self.stored_keys[place], self.values[place] = key, stored_key, value
        self.positions[place], self.uses[place], self.used_at[place] = position, uses, position

    def use(self, places, position: int) -> None:
        self.uses[places] += 1
        self.used_at[places] = position
        if self.uses.max() >= COUNTER_FULL:
            self.uses //= 2


def places(shape, selection, cached: list[int]) -> list[int]:
    """Return the places of each request: the largest share of its tokens, in whole blocks, within a limit in bytes."""

    def of_share(share):
        return [min(tokens, max(1, math.ceil(round(share * tokens / 16, 9))) * 16) for tokens in cached]

    if selection.pool is not None:
        return of_share(selection.pool)
    most = selection.pool_bytes // (shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 4 * 16)
    shares = sorted({16 * blocks / tokens for tokens in cached for blocks in range(1, tokens // 16 + 2)})
    fitting = [s for s in shares if sum(math.ceil(room / 16) for room in of_share(min(s, 1))) <= most]
    return of_share(min(1, fitting[-1]))


class PlainInfiniGen:
    """The requests of one mini-batch, computed token by token and head by head."""

    def __init__(self, checkpoint, policy: Policy, last: int, cached: list[int]):
        self.shape, self.selection = checkpoint.shape, (selection := policy.selection)
        self.whole = selection.whole_layers or 2  # layers that look at all tokens
        self.entries, self.bits = BlockEntries(policy.cache), policy.bits
        self.limited = selection.pool != 1
        self.room = places(self.shape, selection, cached) if self.limited else cached  # of each request
        self.model = architecture(self.shape)
        self.weights = Weights(
            self.shape, checkpoint, "float32", torch.device("cpu"), Policy(weights=Placement(device=1.0))
        )
        self.views = [self.weights.views(layer, None) for layer in range(self.shape.num_layers)]
        self.rotary = rotary_tables(self.shape, last, torch.float32, "cpu") if self.shape.rotary else None
        self.skew = [checkpoint.skew(layer) for layer in range(self.shape.num_layers)]
        self.columns = {}  # (request, layer, kv head) -> columns
        self.fetched = []  # (tokens fetched, context) of each choice
        self.caches = {}  # (request, layer, kv head) -> Cache
        self.looks = []  # of the heads so far of a layer that looks at every token

    def heads_of(self, group: int):
        per_group = self.shape.num_heads // self.shape.num_kv_heads
        return range(group * per_group, (group + 1) * per_group)

    def project(self, layer, act, positions):
        """Return keys, values and queries [n, heads, d]."""
        w, d = self.views[layer], self.shape.head_dim
        kvq = linear(act, w["kvq.weight"], w["kvq.bias"][0] if "kvq.bias" in w else None)
        half = self.shape.kv_width // 2
        k, v, q = (x.unflatten(-1, (-1, d)) for x in kvq.split([half, half, self.shape.query_width], dim=-1))
        if self.rotary:
            k, q = (rotate_(x.contiguous(), self.rotary[0][positions], self.rotary[1][positions]) for x in (k, q))
        return k, v, q

    def act(self, layer, hidden):
        return self.model.attention_input(self.shape, self.views[layer], hidden)

    def turned(self, layer, group, x):
        return x if self.skew[layer] is None else x @ self.skew[layer][group]

    def prefill(self, prompts):
        """Compute first tokens. All requests pass a layer before its columns are chosen."""
        hidden = [
            self.model.embed(self.shape, self.weights.outer, torch.tensor(p), torch.arange(len(p))) for p in prompts
        ]
        for layer in range(self.shape.num_layers):
            sums = torch.zeros(len(prompts), self.shape.num_kv_heads, self.shape.head_dim)
            for i, prompt in enumerate(prompts):
                positions = torch.arange(len(prompt))
                act = self.act(layer, hidden[i])
                k, v, q = self.project(layer, act, positions)
                out = torch.zeros_like(q)
                stored = [self.stored(*rows, layer, position) for position, rows in enumerate(zip(k, v, act))]
                for g in range(self.shape.num_kv_heads):
                    self.caches[i, layer, g] = Cache(self.room[i], self.shape.head_dim)
                for position, back in enumerate(stored):
                    for g in range(self.shape.num_kv_heads):
                        cache = self.caches[i, layer, g]
                        before = cache.stored_keys[: cache.size].clone()
                        cache.keep(k[position, g], *(part[g] for part in back), position, self.selection.victim)
                        if self.limited and position:
                            self.note(before, cache, [q[position, head] for head in self.heads_of(g)], position)
                for g in range(self.shape.num_kv_heads):
                    sums[i, g] += self.turned(layer, g, k[:, g]).abs().sum(0)
                    for head in self.heads_of(g):
                        sums[i, g] += self.turned(layer, g, q[:, head]).abs().sum(0) / len(self.heads_of(g))
                        scores = q[:, head] @ k[:, g].T / self.shape.head_dim**0.5
                        scores.masked_fill_(positions > positions[:, None], -torch.inf)
                        out[:, head] = torch.softmax(scores, -1) @ v[:, g]
                hidden[i] = self.model.finish(self.shape, self.views[layer], hidden[i], out.flatten(1))
            count = max(1, math.ceil(round(self.selection.partial_ratio * self.shape.head_dim, 9)))
            for i, g in product(range(len(prompts)), range(self.shape.num_kv_heads)):
                shown = sums[i, g] if self.selection.columns == "request" else sums[:, g].sum(0)
                self.columns[i, layer, g] = shown.argsort(descending=True)[:count]
        return [self.next_token(one) for one in hidden]

    def members(self, cache) -> dict[str, np.ndarray]:
        """Return cache entry of the policy -> places in the cache of its tokens."""
        of_token = self.entries.entry_of(cache.positions[: cache.size])
        return {name: np.flatnonzero(of_token == i) for i, name in enumerate(self.entries.names) if i in of_token}

    def stored(self, k, v, act, layer, position):
        """Return a token's keys and values as read back from the cache: [G, d] each."""
        representation = self.entries.names[int(self.entries.entry_of(position))].partition("@")[0]
        bits = {"kv": self.bits.kv, "act": self.bits.act}.get(representation, "native")
        if bits == "native":
            return k, v

        def rounded(values, group):
            return torch.from_numpy(round_trip(values.numpy(), bits, group))

        if representation == "kv":
            group = group_of_heads(self.shape.head_dim)
            return rounded(k, group), rounded(v, group)
        k, v, _ = self.project(layer, rounded(act, 64)[None], torch.tensor([position]))
        return k[0], v[0]

    def next_token(self, hidden):
        return int(self.model.head(self.shape, self.weights.outer, hidden[-1:]).argmax())

    def decode(self, request, token, position):
        """Compute the next token of one request."""
        where = torch.tensor([position])
        hidden = self.model.embed(self.shape, self.weights.outer, torch.tensor([token]), where)
        chosen = None  # of all kv heads; None: every token
        for layer in range(self.shape.num_layers):
            act = self.act(layer, hidden)
            k, v, q = self.project(layer, act, where)
            out = torch.zeros_like(q)
            stored = self.stored(k[0], v[0], act[0], layer, position)
            for g in range(self.shape.num_kv_heads):
                cache = self.caches[request, layer, g]
                kept = chosen[g] if chosen else slice(cache.size)
                seen = cache.stored_keys[kept].clone()
                keys = torch.cat([seen, k[0, g, None]])
                values = torch.cat([cache.values[kept], v[0, g, None]])
                cache.keep(k[0, g], *(part[g] for part in stored), position, self.selection.victim)
                for head in self.heads_of(g):
                    scores = keys @ q[0, head] / self.shape.head_dim**0.5
                    out[0, head] = torch.softmax(scores, -1) @ values
                if self.limited and chosen is None and len(seen):
                    self.note(seen, cache, [q[0, head] for head in self.heads_of(g)], position)
            guesses = self.whole <= layer + 1 < self.shape.num_layers
            chosen = self.choose(request, layer + 1, act, position) if guesses else None
            hidden = self.model.finish(self.shape, self.views[layer], hidden, out.flatten(1))
        return self.next_token(hidden)

    def behind(self, scores) -> np.ndarray:
        """Return how far each token is behind the best one of [query heads, tokens], in the head where it is least."""
        return (scores - scores.max(dim=-1, keepdim=True).values).max(dim=0).values.numpy()

    def note(self, keys, cache, queries, position):
        """Count uses in a layer that attends to all tokens: those it would have fetched; their number depends on all
        heads."""
        scores = torch.stack([keys @ query / self.shape.head_dim**0.5 for query in queries])
        self.looks.append((self.behind(scores), cache))
        if len(self.looks) < self.shape.num_kv_heads:
            return
        most = math.ceil(round(self.selection.max_fraction * len(keys), 9))
        within = sum((worth > -self.selection.alpha).sum() for worth, _ in self.looks)
        count = min(max(1, math.ceil(within / len(self.looks))), most)
        for worth, kept in self.looks:
            best = np.argsort(-worth, kind="stable")[:count]
            kept.use(best[best != kept.replaced], position)
        self.looks.clear()

    def choose(self, request, layer, act, context):
        """Return what each kv head of a layer fetches."""
        _, _, q = self.project(layer, act, torch.tensor([context]))
        behind = []
        for g in range(self.shape.num_kv_heads):
            columns, cache = self.columns[request, layer, g], self.caches[request, layer, g]
            keys = self.turned(layer, g, cache.keys[: cache.size])[:, columns]
            scores = torch.stack([
                keys @ self.turned(layer, g, q[0, head])[columns] / self.shape.head_dim**0.5
                for head in self.heads_of(g)
            ])  # fmt: skip
            behind.append(self.behind(scores))
        chosen, counts = [[] for _ in behind], 0
        for kind, members in self.members(self.caches[request, layer, 0]).items():
            within = [(of_head[members] > -self.selection.alpha).sum() for of_head in behind]
            count = max(1, math.ceil(sum(within) / len(within)))
            count = min(count, math.ceil(round(self.selection.max_fraction * len(members), 9)))
            counts += count
            for g, of_head in enumerate(behind):
                if kind == "kv@host" and self.bits.kv == "native":
                    worth = of_head
                else:  # a row serves all heads
                    worth = sum(np.exp(other.astype(float)) for other in behind)
                chosen[g].append(members[np.argsort(-worth[members], kind="stable")[:count]])
        chosen = [np.concatenate(of_head) for of_head in chosen]
        self.fetched.append((counts, context))
        if self.limited:  # else nobody asks what was used
            for g, of_head in enumerate(chosen):
                self.caches[request, layer, g].use(of_head, context)
        return chosen

    @torch.inference_mode()
    def answers(self, prompts, max_tokens: list[int]) -> list[list[int]]:
        answers = []
        for request, (prompt, first) in enumerate(zip(prompts, self.prefill(prompts), strict=True)):
            answers.append([first])
            for position in range(len(prompt), len(prompt) + max_tokens[request] - 1):
                answers[-1].append(self.decode(request, answers[-1][-1], position))
        return answers


def plain_tokens(checkpoint, policy, prompts, max_tokens):
    """Return each request's tokens, and the share of the context fetched in layers that select."""
    workload = Workload(np.array([len(p) for p in prompts]), np.broadcast_to(max_tokens, len(prompts)))
    answers, fetched = [None] * len(prompts), []
    for group in admit(Problem(shape=checkpoint.shape, dtype="float32"), policy, workload).mini_batches:
        cached = workload.cached_tokens[group].tolist()
        plain = PlainInfiniGen(checkpoint, policy, max(cached) + 1, cached)
        if policy.selection.pool_bytes:  # which all requests of the wave share
            rooms = places(checkpoint.shape, policy.selection, workload.cached_tokens.tolist())
            plain.room = [rooms[i] for i in group]
        of_group = plain.answers([prompts[i] for i in group], workload.max_tokens[group].tolist())
        for i, answer in zip(group, of_group, strict=True):
            answers[i] = answer
        fetched += plain.fetched
    return answers, sum(count for count, _ in fetched) / max(1, sum(context for _, context in fetched))


def filled_plainly(shape, selection, queries, keys, room: int) -> list[Cache]:
    """Return what each kv head keeps of a prompt with queries [tokens, heads, d] and keys [tokens, kv heads, d]."""
    plain = PlainInfiniGen.__new__(PlainInfiniGen)
    plain.shape, plain.selection, plain.looks = shape, selection, []
    heads = [Cache(room, shape.head_dim) for _ in range(shape.num_kv_heads)]
    for position, (query, key) in enumerate(zip(queries, keys, strict=True)):
        for g, head in enumerate(heads):
            before = head.keys[: head.size].clone()
            head.keep(key[g], key[g], key[g], position, selection.victim)
            if position:
                plain.note(before, head, [query[i] for i in plain.heads_of(g)], position)
    return heads
