"""Run any transformers decoder on the executor: transformers' layers, with our memory, schedule and attention.

``ModulePath`` does the verbs embed, project, kv_gen, finish and head for models without functions of their own
(``flexhybrid.runtime.models.llama``, ``opt``). transformers defines the layers (``empty_model``); the plan places their
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flexhybrid.core.model.shape import ModelShape
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.models.experts import RoutedRows
from flexhybrid.runtime.models.latent import ActRows
from flexhybrid.runtime.models.probe import Argument, AttentionFacts
from flexhybrid.runtime.models.states import LayerRun, RecurrentLayers, RowGroup, Running, groups_of, rows_of
from flexhybrid.runtime.models.transformer import (
    DTYPE,
    AttentionCall,
    LayerCall,
    Layers,
    Pending,
    call_directly,
)
from flexhybrid.runtime.process_settings import float32_default

Held = Sequence[torch.Tensor] | None  #: tensors [B, …] of the states of a step's requests in a layer


class Slot(NamedTuple):
    """Where a module stores a parameter."""

    module: torch.nn.Module
    key: str


class ModulePath:
    """Runs a model's layers one at a time. Only verbs of the compute lane use it."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device):
        if shape.modules is None:
            raise ValueError(f"{shape.name} does not run through transformers' layers")
        self.shape, self.dtype, self.device = shape, dtype, device
        self.model, self.facts = empty_model(Path(shape.modules.folder), shape.modules.untied).copy()
        self.layers = Layers(self.model)
        self.slots = [_slots(layer, fact.lent) for layer, fact in zip(self.layers.layers, self.facts, strict=True)]
        kinds = [shape.modules.kinds[kind] for kind in shape.modules.kind_of]
        self.sizes = [{t.name: t.size for t in kind} for kind in kinds]
        self.turned = [{t.name for t in kind if t.turned} for kind in kinds]
        self.act = [  # by layer; None if the layer makes no keys and values
            ActRows(fact.attention.module, fact.attention.kv_gen, shape.hidden)
            if fact.attention and fact.source is None
            else None
            for fact in self.facts
        ]
        self.recurrent = RecurrentLayers(self.layers, [fact.state for fact in self.facts])
        self._groups: dict[Any, list[RowGroup]] = {}  # step -> requests that run together in recurrent layers
        self._in_place: dict[int, Any] = {}  # layer -> the views that its parameters are set to
        self.calls: dict[Any, list[LayerCall]] = {}  #: step -> calls of the model's layers
        self._rest: dict[Any, tuple[int, Any]] = {}  # step -> number of rows, and rest, of its interrupted forward
        self._calls_at: dict[Any, tuple[torch.Tensor, list[LayerCall]]] = {}
        self._pending: dict[int, tuple[Pending | None, AttentionCall]] = {}  # by slot; None: in ``recurrent``
        self.routed = RoutedRows(self.rows_of)

    # ---- weights

    def stays_float32(self, name: str) -> bool:
        """Return whether a tensor outside the layers is float32 at any compute dtype (biases that choose experts)."""
        kept = self.model._keep_in_fp32_modules_strict or ()
        return any(part in name for part in kept)

    def place_outer(self, outer: Mapping[str, torch.Tensor]) -> None:
        """Put the tensors outside the layers into their modules, and make the buffers that no checkpoint has."""
        own = self.model.state_dict(keep_vars=True)
        by_id = {id(own[name]): tensor for name, tensor in outer.items()}
        made: set[str] = set()  # modules with such buffers, and their parents, which may fill these
        for path, module in self.model.named_modules():
            for key in [key for key, value in vars(module).items() if getattr(value, "is_meta", False)]:
                delattr(module, key)  # tensors stored by a forward on the meta device (angles of longrope)
            unknown = [k for k, b in module._buffers.items() if b is not None and b.is_meta and id(b) not in by_id]
            for key in unknown:
                buffer: Any = module._buffers[key]
                dtype = self.dtype if buffer.dtype == DTYPE else buffer.dtype
                module._buffers[key] = torch.empty_like(buffer, device=self.device, dtype=dtype)
            if unknown:
                made |= {path[:end] for end, character in enumerate(path) if character == "."} | {"", path}
        filled = {module for path, module in self.model.named_modules() if path in made}
        with float32_default():
            for module, owner in _modules_with_owner(self.model, self.model):
                if module in filled:  # its parameters are still on the meta device
                    owner._init_weights(module)
        for module in self.model.modules():
            for places in (module._parameters, module._buffers):
                for key, tensor in places.items():
                    if tensor is not None and id(tensor) in by_id:
                        places[key] = by_id[id(tensor)]
        call_directly(self.model)

    def _place(self, layer: int, views: Mapping[str, tuple[torch.Tensor, ...]]) -> None:
        """Set a layer's parameters to these views of weights."""
        if self._in_place.get(layer) is views:
            return
        for name, (module, key) in self.slots[layer].items():
            (part,) = views[name]
            parameters: dict[str, Any] = module._parameters  # tensors need not be torch Parameters
            size = self.sizes[layer][name]
            if name in self.turned[layer]:
                view = part.view(*size[:-2], size[-1], size[-2]).transpose(-2, -1)
            else:
                view = part.view(size)
            parameters[key] = vars(module)[key] = view
        self._in_place[layer] = views

    # ---- verbs

    def embed(
        self,
        step: Any,
        ids: torch.Tensor,
        positions: torch.Tensor,
        waits: bool = False,
        new_tokens: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Return the first hidden states [R, h] of a step, and store the calls of its layers.

        ``waits``: the step's ``head`` gets all its rows, and resumes this forward. ``new_tokens`` [B]: number of each
        request's new tokens, for recurrent layers; the maximum is the grid's width.
        """
        hidden, self.calls[step], rest = self.layers.embed(ids, positions)
        self._rest.pop(step, None)
        if waits:
            self._rest[step] = len(ids), rest
        if new_tokens is not None and self.shape.states:
            self._groups[step] = groups_of(new_tokens, self.device)
        return self.layers.rows_of(hidden)

    def project(
        self, step: Any, slot: int, layer: int, hidden_Rh: torch.Tensor, views, held: Held = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer up to its attention; return the rows [R, keys | values | queries] and the rows for ACT blocks.

        The latter are empty if the layer borrows keys and values. ``held``: states of the step's requests; None: no
        states yet, or a layer without one.
        """
        self._place(layer, views)
        fact, rows_of, call = self._attention(layer), self.act[layer], self.calls[step][layer]
        if self.shape.lending and layer == self.shape.num_layers - 1:
            del self.calls[step]  # they hold lent keys and values
        if rows_of is None or self.facts[layer].state is None:
            pending = self.layers.begin(layer, self.layers.states_of(hidden_Rh), call)
            made = pending.call
            act = rows_of.take()[0] if rows_of else hidden_Rh[:0]
        else:
            pending = None
            made, act = self.recurrent.begin(
                LayerRun(slot, layer, hidden_Rh, call, self._groups[step], held), rows_of.take
            )
        self._pending[slot] = pending, made
        shape, rows = self.shape, len(hidden_Rh)
        filled = fact.key_dim == fact.value_dim == shape.head_dim
        make = hidden_Rh.new_empty if filled else hidden_Rh.new_zeros
        kvq = make(rows, shape.kv_width + shape.query_width)
        keys, values, queries = self._heads(kvq, shape.num_heads)
        keys[..., : fact.key_dim].copy_(made.key)
        values[..., : fact.value_dim].copy_(made.value)
        scaling = fact.key_dim**-0.5 if fact.scaling is None else fact.scaling
        torch.mul(made.query, scaling * shape.head_dim**0.5, out=queries[..., : fact.key_dim])
        return kvq, act

    def _attention(self, layer: int) -> AttentionFacts:
        """Return the attention of a layer. Raise ValueError if it has none."""
        fact = self.facts[layer].attention
        if fact is None:
            raise ValueError(f"layer {layer} does not attend")
        return fact

    def start(self, step: Any, slot: int, layer: int, hidden_Rh: torch.Tensor, views, held: Held) -> list[Running]:
        """Run a layer that does not attend, to its end or its experts. ``held``: see ``project``."""
        self._place(layer, views)
        call = self.calls[step][layer]
        return self.recurrent.run(LayerRun(slot, layer, hidden_Rh, call, self._groups[step], held))

    def left(self, slot: int, layer: int) -> list[tuple[RowGroup, list[torch.Tensor]]]:
        """Return the states [batch, …] that a finished layer wrote, by group of the step's requests."""
        return self.recurrent.left(slot, layer)

    def sinks(self, slot: int) -> torch.Tensor:
        """Return the score of each head's sink [H], for the layer whose attention runs in a slot."""
        return self._pending[slot][1].options["s_aux"]

    def _heads(self, rows: torch.Tensor, num_queries: int = 0) -> tuple[torch.Tensor, ...]:
        """Return views of rows [R, (2·G + H)·d]: keys and values [1, G, R, d], queries [1, H, R, d]."""
        heads = rows.view(1, len(rows), -1, self.shape.head_dim).transpose(1, 2)
        groups = self.shape.num_kv_heads
        return heads.split((groups, groups, num_queries), 1)

    def calls_at(self, step: Any, positions: torch.Tensor, least: int) -> list[LayerCall]:
        """Return the calls of a step's layers for tokens at these positions, padded to at least ``least`` tokens."""
        known, calls = self._calls_at.get(step, (None, []))
        if known is not positions:
            padded = torch.cat([positions, positions.new_zeros(max(0, least - len(positions)))])
            calls = self.layers.embed(torch.zeros_like(padded), padded).calls
            self._calls_at[step] = positions, calls
        return calls

    def generate(self, layer: int, act_rows: torch.Tensor, calls: list[LayerCall], views, out: torch.Tensor) -> None:
        """Recompute keys and values, ``out`` [n, 2·G·d], from ACT rows [n, width], by the attention module.

        Borrowed ones are recomputed by the lender's module; its parameters are on the device (``LayerFacts.lent``).
        """
        self._place(layer, views)
        layer = self.shape.source_of(layer)
        fact, rows_of = self._attention(layer), self.act[layer]
        if rows_of is None:
            raise ValueError(f"layer {layer} makes no keys and values")
        args = tuple(_resolved(argument, calls[layer]) for argument in fact.args)
        kwargs = {name: _resolved(argument, calls[layer]) for name, argument in fact.kwargs.items()}
        call = rows_of.keys_and_values(act_rows, args, kwargs)
        keys, values, _ = self._heads(out)  # columns after a shorter head are zeros
        keys[..., : fact.key_dim].copy_(call.key)
        values[..., : fact.value_dim].copy_(call.value)

    def resume(self, slot: int, layer: int, attended: torch.Tensor) -> list[Running]:
        """Run a layer after its attention [R, H·d], to its end or its experts."""
        (pending, _), fact = self._pending.pop(slot), self._attention(layer)
        heads = attended.view(1, len(attended), self.shape.num_heads, self.shape.head_dim)[..., : fact.value_dim]
        if pending is None:
            return self.recurrent.finish(slot, heads[0])
        every = RowGroup(None, None, 1, len(attended))
        return [Running(every, None, pending.run, self.layers.finish(pending, heads))]

    def rows_of(self, rows: int, running: list[Running]) -> torch.Tensor:
        """Return the hidden states [R, h] of a step after a layer's end."""
        return rows_of(rows, running) if running[0].made else self.layers.rows_of(running[0].result)

    def head(self, hidden_Bh: torch.Tensor, step: Any = None) -> torch.Tensor:
        """Return the logits [B, vocab] of the last hidden states. If the model's own forward of ``step`` is suspended
        until it gets these rows, resume it."""
        rows, rest = self._rest.pop(step, (0, None))
        return self.layers.head(hidden_Bh, rest if rows == len(hidden_Bh) else None)


def _modules_with_owner(module: Any, owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each module, parents first, with the innermost transformers model that it belongs to."""
    owner = module if hasattr(module, "_init_weights") else owner
    yield module, owner
    for part in module.children():
        yield from _modules_with_owner(part, owner)


def _slots(layer: torch.nn.Module, outside: frozenset[str]) -> dict[str, Slot]:
    """Return {name: place} of a layer's parameters, except those with tensors ``outside`` of the layer."""
    slots = {
        f"{path}.{key}" if path else key: Slot(module, key)
        for path, module in layer.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    return {name: slot for name, slot in slots.items() if name not in outside}


def _resolved(argument: Argument, call: LayerCall):
    """Return an argument's value in a call of the layer."""
    if argument.path is None:
        return argument.value
    kind, *path = argument.path
    value: Any = call.args if kind == "args" else call.kwargs
    for key in path:
        value = value[key]
    return copy(value) if isinstance(value, MutableMapping) else value  # the step's call keeps its own entries
