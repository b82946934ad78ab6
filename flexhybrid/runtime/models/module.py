"""Any decoder that transformers knows, on the executor: its own layers, with memory, order and attention of ours.

``ModulePath`` runs the verbs embed, project, kv_gen, finish and head of models that no hand-written file
(``flexhybrid.runtime.models.llama``, ``opt``) has. What a layer is, transformers says; where its bytes lie, the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.model import generation_config
from flexhybrid.core.model.attention import AttentionKind
from flexhybrid.core.model.generation_config import end_tokens
from flexhybrid.core.model.layers import LayerTensor, ModuleLayers
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape
from flexhybrid.runtime.models.latent import ActRows
from flexhybrid.runtime.models.probe import Argument, AttentionFacts, LayerFacts, look
from flexhybrid.runtime.models.states import Group, RecurrentLayers, groups_of
from flexhybrid.runtime.models.transformer import (
    LayerCall,
    Layers,
    Pending,
    Refused,
    build,
    call_directly,
    check_libraries,
    decoder_layers,
    one_line,
)

FAMILY = "module"  #: of shapes whose models run here
UNLIMITED_POSITIONS = 1 << 20  #: of a model whose configuration names no limit
#: Kinds of rotary positions whose angles change once a text is longer than the model was trained with.
CHANGING_ROTATIONS = ("dynamic", "longrope")


Held = Sequence[torch.Tensor] | None  #: states of a step's requests in a layer, [B, …] each


class Slot(NamedTuple):
    """A place of a module's parameter."""

    module: torch.nn.Module
    key: str


class EmptyModel(NamedTuple):
    """A model that runs through transformers' layers, without weights, and what its layers were seen to need and do."""

    shape: ModelShape
    model: Any
    facts: list[LayerFacts]

    def copy(self) -> tuple[Any, list[LayerFacts]]:
        """Return a model to put weights into, and its facts."""
        return deepcopy((self.model, self.facts))

    @property
    def outer_sizes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of the tensors outside the layers' parameters."""
        own = self.model.state_dict()
        return {name: tuple(own[name].shape) for name in TensorNames.of(self.model).outside}


def empty_model(folder: Path) -> EmptyModel:
    """Return a checkpoint's model, built and looked at once as long as its configuration stays as it is.

    Raise InputError, with the reason, for a model that would not be exact.
    """
    check_libraries()
    folder = folder.absolute()
    files = [folder / name for name in ("config.json", generation_config.FILE)]
    return _empty_model(folder, *(file.read_text(encoding="utf-8") if file.is_file() else "" for file in files))


@lru_cache(maxsize=2)
def _empty_model(folder: Path, configuration: str, generation: str) -> EmptyModel:
    """``empty_model`` of a folder with these texts in its files."""
    config = json.loads(configuration)
    try:
        if "auto_map" in config:
            raise Refused("its code is remote, in the checkpoint; such code is never run")
        model = build(folder)
        with Layers(model) as layers:
            facts = look(layers, _positions(model.config.get_text_config()))
            return EmptyModel(_shape(folder, model, layers, facts, "text_config" in config), model, facts)
    except Exception as error:  # Refused; or whatever a model raises whose modules are built in a way of their own
        reason = error if isinstance(error, Refused) else f"its modules are not as expected ({one_line(error)})"
        raise InputError(
            f"{folder}: models of type {config.get('model_type')!r} cannot be run exactly: {reason}"
        ) from None


def _shape(folder: Path, model, layers: Layers, facts: list[LayerFacts], is_part: bool) -> ModelShape:
    text = model.config.get_text_config()
    attention = [fact.attention for fact in facts if fact.attention]
    windows = [fact.attention and fact.attention.window for fact in facts]
    _check_cache(text, windows, _positions(text))
    widths = {(fact.heads, fact.groups) for fact in attention}
    if len(widths) > 1:
        raise Refused("its layers have different numbers of heads")
    ((heads, groups),) = widths or {(1, 1)}
    behind = {name for fact in facts if fact.attention for name in fact.late}
    kinds: list[tuple[LayerTensor, ...]] = []
    kind_of, inside = [], set()
    for layer, fact in zip(layers.layers, facts, strict=True):
        named = dict(layer.named_parameters())
        if any(id(parameter) in inside for parameter in named.values()):
            raise Refused("its layers share parameters")
        inside |= set(map(id, named.values()))
        # Where no attention parts a layer, what other layers do not have behind theirs lies where they have theirs.
        early = fact.early if fact.attention else named.keys() - behind if behind else ()
        kind = tuple(LayerTensor(name, tuple(named[name].shape), name in early, name in fact.kv_gen) for name in named)
        kinds += [] if kind in kinds else [kind]
        kind_of.append(kinds.index(kind))
    states = tuple(fact.state for fact in facts) if any(fact.state for fact in facts) else ()
    outer = [tensor for tensor in [*model.parameters(), *model.buffers()] if id(tensor) not in inside]
    latent = attention[0].kv_gen.width if attention and attention[0].kv_gen.source else None
    modules = ModuleLayers(
        folder=str(folder.resolve()),
        kinds=tuple(kinds),
        kind_of=tuple(kind_of),
        outer_elements=_elements(outer),
        experts_share=_share(text),
        latent=latent,
        text_part=is_part,
    )
    dtype = str(model.config.dtype or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise Refused(f"dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}")
    return ModelShape(
        name=folder.name,
        family=FAMILY,
        num_layers=len(facts),
        hidden=layers.hidden_size,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=max((max(fact.key_dim, fact.value_dim) for fact in attention), default=1),
        ffn=modules.widest,
        vocab=text.vocab_size,
        max_positions=_positions(text),
        gated_mlp=True,
        tied_head=bool(text.tie_word_embeddings),
        bias=False,
        dtype=dtype,
        eos_token_ids=end_tokens(folder, model.config.eos_token_id, text.eos_token_id),
        attention=tuple(_attention_kind(fact.attention) for fact in facts),
        states=states,
        modules=modules,
    )


def _attention_kind(fact: AttentionFacts | None) -> AttentionKind:
    return AttentionKind(fact.window, None, fact.softcap, fact.sinks) if fact else AttentionKind()


def _check_cache(text, windows: Sequence[int | None], longest: int) -> None:
    """Raise Refused where transformers' own cache forgets tokens of a layer that its mask lets see: what the model's
    tokens are would depend on the cache."""
    from transformers import DynamicCache

    layers: Any = DynamicCache(config=text).layers
    for cached, window in zip(layers, windows, strict=False):
        # No defaults where keys and values are kept: another name must not pass.
        kept = cached.sliding_window if hasattr(cached, "keys") and cached.is_sliding else None
        if kept is not None and (window or longest) > kept:
            raise Refused(f"its cache keeps {kept} tokens of a layer, and its mask lets see more")


def _elements(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _positions(text) -> int:
    """Return the most positions up to which transformers' angles do not depend on the longest text of a batch, and no
    layer that attends chunk by chunk has more than one chunk: Llama 4's are full attention there."""
    positions = getattr(text, "max_position_embeddings", None) or UNLIMITED_POSITIONS
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        positions = min(positions, text.attention_chunk_size or positions)
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if kind.get("rope_type") in CHANGING_ROTATIONS:
            first = kind.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", 0)
            positions = min(positions, first or positions)
    return int(positions)


def _share(text) -> float:
    """Return which share of the experts a token takes, by the configuration; 1 where it does not say."""

    def count(*names: str):
        return next((n for n in (getattr(text, name, None) for name in names) if isinstance(n, int) and n), None)

    taken = count("num_experts_per_tok", "moe_topk", "moe_k")
    there = count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return min(1.0, taken / there) if taken and there else 1.0


class ModulePath:
    """A model's layers, run one at a time. Verbs of the compute lane alone call it."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device):
        if shape.modules is None:
            raise ValueError(f"{shape.name} does not run through transformers' layers")
        self.shape, self.dtype, self.device = shape, dtype, device
        self.model, self.facts = empty_model(Path(shape.modules.folder)).copy()
        self.layers = Layers(self.model)
        self.slots = [_slots(layer) for layer in self.layers.layers]
        self.sizes = [{t.name: t.size for t in shape.modules.kinds[kind]} for kind in shape.modules.kind_of]
        self.act = [  # by layer
            ActRows(fact.module, fact.kv_gen, self.layers.hidden_size) if fact else None
            for fact in (fact.attention for fact in self.facts)
        ]
        self.recurrent = RecurrentLayers(self.layers, [fact.state for fact in self.facts])
        self._groups: dict[Any, list[Group]] = {}  # by step: requests that recurrent layers take together
        self._in_place: dict[int, Any] = {}  # by layer: the views that its parameters are
        self.calls: dict[Any, list[LayerCall]] = {}  #: by step: how the model calls its layers
        self._rest: dict[Any, tuple[int, Any]] = {}  # by step: the rows of a forward that waits for its end, and it
        self._calls_at: dict[Any, tuple[torch.Tensor, list[LayerCall]]] = {}
        self._pending: dict[int, Pending] = {}  # by slot

    # ---- weights

    def stays_float32(self, name: str) -> bool:
        """Return whether a tensor outside the layers' parameters is float32 whatever the model computes in, as
        transformers has it: biases by which experts are chosen."""
        kept = self.model._keep_in_fp32_modules_strict or ()
        return any(part in name for part in kept)

    def place_outer(self, outer: Mapping[str, torch.Tensor]) -> None:
        """Put tensors outside the layers into their modules; make the buffers that no checkpoint holds."""
        own = self.model.state_dict(keep_vars=True)
        by_id = {id(own[name]): tensor for name, tensor in outer.items()}
        made: set[str] = set()  # modules with such buffers, and those around them, which may fill them
        for path, module in self.model.named_modules():
            unknown = [k for k, b in module._buffers.items() if b is not None and b.is_meta and id(b) not in by_id]
            for key in unknown:
                module._buffers[key] = torch.empty_like(module._buffers[key], device=self.device)
            if unknown:
                made |= {path[:end] for end, character in enumerate(path) if character == "."} | {"", path}
        for path, module in self.model.named_modules():
            if path in made:  # its parameters are on the meta device still
                self.model._init_weights(module)
        for module in self.model.modules():
            for places in (module._parameters, module._buffers):
                for key, tensor in places.items():
                    if tensor is not None and id(tensor) in by_id:
                        places[key] = by_id[id(tensor)]
        call_directly(self.model)

    def _place(self, layer: int, views: Mapping[str, tuple[torch.Tensor, ...]]) -> None:
        """Let a layer's parameters be these views of weights."""
        if self._in_place.get(layer) is views:
            return
        for name, (module, key) in self.slots[layer].items():
            (part,) = views[name]
            parameters: dict[str, Any] = module._parameters  # a plain tensor serves as well
            parameters[key] = vars(module)[key] = part.view(self.sizes[layer][name])
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
        """Return the first hidden states [R, h] of a step; note how the model calls its layers in it.

        ``waits``: the step's ``head`` gets all its rows, and goes on with this forward. ``new_tokens`` [B]: of each
        request, in a grid as wide as the longest; recurrent layers need it.
        """
        hidden, self.calls[step], rest = self.layers.embed(ids, positions)
        self._rest.pop(step, None)
        if waits:
            self._rest[step] = len(ids), rest
        if new_tokens is not None and self.shape.states:
            self._groups[step] = groups_of(new_tokens, self.device)
        return hidden[0]

    def project(
        self, step: Any, slot: int, layer: int, hidden_Rh: torch.Tensor, views, held: Held = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer up to its attention: the rows [R, keys | values | queries], and what ACT blocks hold.

        ``held``: of a layer that keeps a state, too, those of the step's requests; None where they have none yet.
        """
        self._place(layer, views)
        (fact, rows_of), call = self._attention(layer), self.calls[step][layer]
        if self.facts[layer].state is None:
            pending = self.layers.begin(layer, hidden_Rh[None], call)
            act = rows_of.take()[0]
        else:
            made, act = self.recurrent.begin(slot, layer, hidden_Rh, call, self._groups[step], held, rows_of.take)
            pending = Pending(None, made)
        self._pending[slot] = pending
        shape, rows = self.shape, len(hidden_Rh)
        filled = fact.key_dim == fact.value_dim == shape.head_dim
        make = hidden_Rh.new_empty if filled else hidden_Rh.new_zeros
        kvq = make(rows, shape.kv_width + shape.query_width)
        keys, values, queries = self._heads(kvq, shape.num_heads)
        keys[..., : fact.key_dim].copy_(pending.call.key)
        values[..., : fact.value_dim].copy_(pending.call.value)
        scaling = fact.key_dim**-0.5 if fact.scaling is None else fact.scaling
        torch.mul(pending.call.query, scaling * shape.head_dim**0.5, out=queries[..., : fact.key_dim])
        return kvq, act

    def _attention(self, layer: int) -> tuple[AttentionFacts, ActRows]:
        """Return the attention of a layer, and what ACT blocks hold of it. Raise ValueError where it has none."""
        fact, rows_of = self.facts[layer].attention, self.act[layer]
        if fact is None or rows_of is None:
            raise ValueError(f"layer {layer} does not attend")
        return fact, rows_of

    def run(self, step: Any, slot: int, layer: int, hidden_Rh: torch.Tensor, views, held: Held = None) -> torch.Tensor:
        """Run a layer that does not attend: the next layer's hidden states [R, h]. ``held`` as in ``project``."""
        self._place(layer, views)
        self.recurrent.run(slot, layer, hidden_Rh, self.calls[step][layer], self._groups[step], held)
        return self.recurrent.finish(slot, None)

    def left(self, slot: int, layer: int) -> list[tuple[Group, list[torch.Tensor]]]:
        """Return the states [batch, …] that a finished layer has left, by groups of the step's requests."""
        return self.recurrent.left(slot, layer)

    def sinks(self, slot: int) -> torch.Tensor:
        """Return the score of each head's sink [H], of the layer that waits in a slot for its attention."""
        return self._pending[slot].call.options["s_aux"]

    def _heads(self, rows: torch.Tensor, num_queries: int = 0) -> tuple[torch.Tensor, ...]:
        """Return views of rows [R, (2·G + H)·d] head by head: keys and values [1, G, R, d], queries [1, H, R, d]."""
        heads = rows.view(1, len(rows), -1, self.shape.head_dim).transpose(1, 2)
        groups = self.shape.num_kv_heads
        return heads.split((groups, groups, num_queries), 1)

    def calls_at(self, step: Any, positions: torch.Tensor, least: int) -> list[LayerCall]:
        """Return how the model calls its layers for tokens at these positions, of a step, and for padding up to
        ``least`` of them."""
        known, calls = self._calls_at.get(step, (None, []))
        if known is not positions:
            padded = torch.cat([positions, positions.new_zeros(max(0, least - len(positions)))])
            calls = self.layers.embed(torch.zeros_like(padded), padded).calls
            self._calls_at[step] = positions, calls
        return calls

    def generate(self, layer: int, act_rows: torch.Tensor, calls: list[LayerCall], views, out: torch.Tensor) -> None:
        """Recompute keys and values [n, 2·G·d] of ACT rows [n, width]: the attention module, up to its attention."""
        self._place(layer, views)
        fact, rows_of = self._attention(layer)
        args = tuple(_resolved(argument, calls[layer]) for argument in fact.args)
        kwargs = {name: _resolved(argument, calls[layer]) for name, argument in fact.kwargs.items()}
        call = rows_of.keys_and_values(act_rows, args, kwargs)
        keys, values, _ = self._heads(out)  # columns behind a shorter head are zeros
        keys[..., : fact.key_dim].copy_(call.key)
        values[..., : fact.value_dim].copy_(call.value)

    def finish(self, slot: int, layer: int, attended: torch.Tensor) -> torch.Tensor:
        """Run the rest of a layer: [R, H·d] -> the next layer's hidden states [R, h]."""
        pending, (fact, _) = self._pending.pop(slot), self._attention(layer)
        heads = attended.view(1, len(attended), self.shape.num_heads, self.shape.head_dim)[..., : fact.value_dim]
        if self.facts[layer].state:
            return self.recurrent.finish(slot, heads[0])
        return self.layers.finish(pending, heads)[0]

    def head(self, hidden_Bh: torch.Tensor, step: Any = None) -> torch.Tensor:
        """Return logits [B, vocab]. ``step``: of which these are the last hidden states."""
        rows, rest = self._rest.pop(step, (0, None))
        return self.layers.head(hidden_Bh, rest if rows == len(hidden_Bh) else None)


class TensorNames(NamedTuple):
    """Where a model's tensors belong."""

    inside: dict[str, tuple[int, str]]  #: name in the model -> layer, name in the layout
    outside: dict[str, tuple[str, ...]]  #: name in the model -> all names of that tensor, of which it is the first

    @classmethod
    def of(cls, model) -> TensorNames:
        layers = decoder_layers(model)
        ids = {id(p): (i, name) for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
        inside, outside = {}, {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in ids:
                inside[name] = ids[id(tensor)]
            else:
                outside.setdefault(id(tensor), []).append(name)
        return cls(inside, {names[0]: tuple(names) for names in outside.values()})


def _slots(layer: torch.nn.Module) -> dict[str, Slot]:
    """Return the places of a layer's parameters."""
    return {
        f"{path}.{key}" if path else key: Slot(module, key)
        for path, module in layer.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }


def _resolved(argument: Argument, call: LayerCall):
    """Return an argument's value in a call of the layer."""
    if argument.path is None:
        return argument.value
    kind, *path = argument.path
    value: Any = call.args if kind == "args" else call.kwargs
    for key in path:
        value = value[key]
    return value
