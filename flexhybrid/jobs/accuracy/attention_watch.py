"""Wraps verbs of an executor to compare a run's attention with that of a run with the full cache.

The run with the full cache records its keys and queries, from which its attention weights at any step are computed. All
texts have the same length, and so have their prompts.

Shapes: N texts, L layers, S decode steps, B requests of a mini-batch, H query heads, G key/value heads, r = H/G, d head
size, T attention columns, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.task import Task
from flexhybrid.core.verbs import VERBS
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.selections.heavy_hitters import HeavyHitters
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.step_tensors import column_positions, position_tables

#: Verbs that load context onto the device.
LOADS = tuple(verb.name for verb in VERBS.values() if verb.resource == "h2d" and verb.blocks)


@dataclass(frozen=True)
class FullCache:
    """Keys [N, L, G, P, d] and queries [N, L, S, G, r, d] of the run with the full cache."""

    keys: torch.Tensor
    queries: torch.Tensor

    @staticmethod
    def empty(shape: ModelShape, num_texts: int, length: int, num_forced: int, device: torch.device) -> FullCache:
        """Return tensors for texts of ``length`` tokens; the last token of a text is never an input."""
        grid, groups, d = (num_texts, shape.num_layers), shape.num_kv_heads, shape.head_dim
        return FullCache(
            torch.zeros(*grid, groups, length - 1, d, device=device, dtype=torch.float32),
            torch.zeros(*grid, num_forced - 1, groups, shape.queries_per_key, d, device=device, dtype=torch.float32),
        )

    def record(self, executor: Executor, members: np.ndarray) -> None:
        """Record the executor's keys and queries. ``members``: numbers of the texts in its wave."""
        project, shape = executor.verbs["project"], executor.shape

        def projected(executor: Executor, task: Task) -> None:
            project(executor, task)
            step = task.payload.step
            texts = executor.to_device(members[step.requests])
            rows = executor.kvq[task.payload.slot].view(len(texts), step.width, -1).float()
            start = int(step.context[0])
            keys = rows[..., : shape.kv_width // 2].unflatten(-1, (shape.num_kv_heads, -1))
            self.keys[texts, task.layer, :, start : start + step.width] = keys.transpose(1, 2)
            if task.iteration:
                queries = rows[:, 0, shape.kv_width :].view(len(texts), *self.queries.shape[3:])
                self.queries[texts, task.layer, task.iteration - 1] = queries

        executor.verbs["project"] = projected

    def weights(self, texts: torch.Tensor, layer: int, step: int) -> torch.Tensor:
        """Return the attention weights [B, G, r, P] of the texts' queries at a decode step over all tokens so far."""
        query = self.queries[texts, layer, step]
        num_tokens = self.keys.shape[3] - self.queries.shape[2] + step + 1
        keys = self.keys[texts, layer, :, :num_tokens]
        return torch.softmax(torch.matmul(query * query.shape[-1] ** -0.5, keys.transpose(-1, -2)), dim=-1)


@dataclass(frozen=True)
class Seen:
    """Measurements of a run's attention: means over heads, tensors [N, S, L] on the device."""

    cosine: torch.Tensor  #: similarity of attention weights to the full cache's; tokens that are left out have weight 0
    looked_at: torch.Tensor  #: attended share of the tokens so far
    moved_bytes: np.ndarray  #: [1], bytes of context loaded onto the device in all decode steps

    @staticmethod
    def empty(full: FullCache) -> Seen:
        num_texts, num_layers, num_steps = full.queries.shape[:3]
        size = (num_texts, num_steps, num_layers)
        cosine, looked_at = full.keys.new_zeros((2, *size), dtype=torch.float32)
        return Seen(cosine, looked_at, np.zeros(1))

    def watch(self, executor: Executor, members: np.ndarray, full: FullCache) -> None:
        """Record the tokens that the executor attends to, and the bytes loaded for that."""
        attend, positions_of = executor.verbs["attend"], watch_positions(executor)

        def attended(executor: Executor, task: Task) -> None:
            if task.iteration:
                weights, positions = attention_weights(executor, task), positions_of(task)
                texts = executor.to_device(members[task.payload.step.requests])
                other = full.weights(texts, task.layer, task.iteration - 1)
                at = (texts, task.iteration - 1, task.layer)
                self.cosine[at] = _cosine(weights, positions, other).mean((1, 2))
                self.looked_at[at] = (positions >= 0).sum(-1).float().mean(1) / other.shape[-1]
            attend(executor, task)

        def add(num_bytes: float) -> None:
            self.moved_bytes[0] += num_bytes

        executor.verbs["attend"] = attended
        watch_loads(executor, add)


def watch_loads(executor: Executor, on_bytes: Callable[[float], None]) -> None:
    """Make the executor call ``on_bytes`` with the actual bytes of each load of context during decode."""

    def counted(load):
        def loaded(executor: Executor, task: Task) -> None:
            load(executor, task)
            if task.iteration:
                on_bytes((executor.resolved or {}).get(task.key, task.work).link_bytes)

        return loaded

    for verb in LOADS:
        executor.verbs[verb] = counted(executor.verbs[verb])


def attention_weights(executor: Executor, task: Task) -> torch.Tensor:
    """Return the attention weights [B, G, r, T] (float32) of a decode step's new token over the attention buffer."""
    step, shape = task.payload.step, executor.shape
    keys, _, mask, _ = executor.context
    rows = executor.kvq[task.payload.slot][:, shape.kv_width :].view(len(step.requests), -1, shape.query_width)
    query = rows[:, -1].view(len(rows), shape.num_kv_heads, -1, shape.head_dim).float()
    scores = torch.matmul(query * shape.head_dim**-0.5, keys.float().transpose(-1, -2))
    return torch.softmax(scores if mask is None else scores + mask, dim=-1)


def watch_positions(executor: Executor) -> Callable[[Task], torch.Tensor]:
    """Return a function from an ``attend`` task of the decode to the token in each column of the attention buffer.
    The result has shape [B, G or 1, T], with -1 for padding. Call the function on the compute lane, just before the
    task."""
    project, speculate, assemble = (executor.verbs[verb] for verb in ("project", "speculate", "assemble"))
    tables = position_tables(executor.wave.entries, int(executor.wave.workload.cached_tokens.max()) + 1)
    selection = executor.selection
    chosen: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # (mini-batch, layer) -> representation -> tokens
    all_tokens: dict[int, torch.Tensor] = {}  # mini-batch -> tokens of a layer that attends to all
    columns: dict[str, int] = {}  # representation -> columns of the current context, without prefetched tokens

    def projected(executor: Executor, task: Task) -> None:
        if task.iteration and isinstance(selection, Speculation) and not selection.chooses(task):
            step = task.payload.step  # before the new tokens are stored
            places = executor.to_device(column_positions(step, tables))[:, None, :-1]
            all_tokens[task.mini_batch] = selection.positions_of(task.layer, step, places)
        project(executor, task)

    def speculated(executor: Executor, task: Task) -> None:
        speculate(executor, task)
        if task.iteration and isinstance(selection, Speculation):
            layer = task.layer + 1
            chosen[task.mini_batch, layer] = selection.chosen_positions(layer, task.payload.step)

    def assembled(executor: Executor, task: Task) -> None:
        if task.iteration and isinstance(selection, Speculation) and selection.chooses(task):
            slot = task.payload.slot
            columns.update({r: selection.fetched[r, slot].most for r in chosen[task.mini_batch, task.layer]})
        assemble(executor, task)

    def positions_of(task: Task) -> torch.Tensor:
        step = task.payload.step
        if isinstance(selection, HeavyHitters) and not step.whole:
            return selection.column_positions(task.layer, step)
        if not isinstance(selection, Speculation):
            return executor.to_device(column_positions(step, tables))[:, None]
        if selection.chooses(task):  # columns come by representation, each as wide as its longest request
            pieces = [
                positions[..., : columns[representation]]
                for representation, positions in chosen[task.mini_batch, task.layer].items()
            ]
            cached = torch.cat([positions.expand(-1, executor.shape.num_kv_heads, -1) for positions in pieces], dim=-1)
        else:
            cached = all_tokens[task.mini_batch]
        new = executor.to_device(step.context)[:, None, None].expand(-1, cached.shape[1], 1)
        return torch.cat([cached, new], dim=-1)

    executor.verbs |= {"project": projected, "speculate": speculated, "assemble": assembled}
    return positions_of


def _cosine(weights_BGrT: torch.Tensor, positions_BGT: torch.Tensor, other_BGrP: torch.Tensor) -> torch.Tensor:
    """Return the cosine similarity [B, G, r] of weights at some positions to weights at all positions."""
    shape = (*weights_BGrT.shape[:3], -1)
    index = positions_BGT.clamp(min=0)[:, :, None].expand(*shape)
    present = (positions_BGT >= 0)[:, :, None]
    weights = weights_BGrT * present
    products = (weights * other_BGrP.gather(-1, index.expand(weights.shape))).sum(-1)
    return products / (weights.norm(dim=-1) * other_BGrP.norm(dim=-1))
