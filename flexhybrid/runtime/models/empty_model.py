"""Examine a checkpoint's transformers model without its weights: whether it runs exactly, its shape, its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexhybrid.core.errors import InputError, shown
from flexhybrid.core.files import load_json
from flexhybrid.core.model import generation_config
from flexhybrid.core.model.attention import AttentionKind
from flexhybrid.core.model.generation_config import end_tokens
from flexhybrid.core.model.layers import LayerTensor, ModuleLayers
from flexhybrid.core.model.rope import scaled_positions
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape, check_plain, stored_dtype
from flexhybrid.core.model.stored import PackedFormat, packed_format
from flexhybrid.runtime.models.coroutines import hosted
from flexhybrid.runtime.models.latent import tensors_in
from flexhybrid.runtime.models.probe import ROWS, LayerFacts, calls_experts, look, measure
from flexhybrid.runtime.models.transformer import Layers, Unsupported, build, check_libraries, decoder_layers, one_line

FAMILY = "module"  #: family of shapes that run through transformers' layers
UNLIMITED_POSITIONS = 1 << 20  #: positions of a model without a configured limit
#: Kinds of rotary positions whose angles change for texts that are longer than in training.
CHANGING_ROTATIONS = ("dynamic", "longrope")
ROUTERS = {"gate", "router", "shared_expert_gate"}  #: names of modules that choose experts


class EmptyModel(NamedTuple):
    """A model that runs through transformers' layers, without weights, and the facts of its layers."""

    shape: ModelShape
    model: Any
    facts: list[LayerFacts]

    def copy(self) -> tuple[Any, list[LayerFacts]]:
        """Return copies of the model, to put weights into, and of its facts."""
        return deepcopy((self.model, self.facts))

    @property
    def outer_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of the tensors that are not parameters of layers."""
        own = self.model.state_dict()
        return {name: tuple(own[name].shape) for name in TensorNames.of(self).outside}


def empty_model(folder: Path, untied: frozenset[str] = frozenset()) -> EmptyModel:
    """Return a checkpoint's model. It is built and examined once per configuration. ``untied`` as in ``ModuleLayers``.

    Raise InputError if the model would not be exact, or if its weights are packed.
    """
    check_libraries()
    folder = folder.absolute()
    files = [folder / name for name in ("config.json", generation_config.FILE)]
    packed = packed_format(load_json(files[0]), files[0])
    texts = (file.read_text(encoding="utf-8") if file.is_file() else "" for file in files)
    found = _empty_model(folder, untied, packed, *texts)
    check_plain(found.shape, packed, folder)
    modules = found.shape.modules
    if packed and modules:
        runs = modules.with_runs(lambda layer, t: packed.runs(f"model.layers.{layer}.{t.name}", t.size))
        found = found._replace(shape=replace(found.shape, modules=runs))
    return found


@lru_cache(maxsize=4)
def _empty_model(
    folder: Path, untied: frozenset[str], packed: PackedFormat | None, configuration: str, generation: str
) -> EmptyModel:
    """Build and examine the model of a folder. The texts of its files are arguments, so that a change is noticed."""
    from transformers import CONFIG_MAPPING

    config = json.loads(configuration)
    try:
        if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
            raise Unsupported("its code is remote, in the checkpoint; such code is never run")
        model = build(folder)
        model.config.dtype = stored_dtype({"dtype": model.config.dtype}, packed)
        for name in untied:
            own = torch.nn.Parameter(torch.empty_like(model.get_parameter(name)), requires_grad=False)
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], own)
        return hosted(lambda: _examined(folder, model, "text_config" in config, untied))
    except Exception as error:  # Unsupported, or any error of an unusual model
        reason = error if isinstance(error, Unsupported) else f"its modules are not as expected ({one_line(error)})"
        raise InputError(
            f"{folder}: models of type {shown(config.get('model_type'))} cannot be run exactly: {reason}"
        ) from None


def _examined(folder: Path, model, is_part: bool, untied: frozenset[str]) -> EmptyModel:
    with Layers(model) as layers:
        facts = look(layers, _positions(model))
        shape = _shape(folder, model, layers, facts)
    modules = shape.modules and replace(shape.modules, text_part=is_part, untied=untied)
    return EmptyModel(replace(shape, modules=modules, tied_head=shape.tied_head and not untied), model, facts)


def _shape(folder: Path, model, layers: Layers, facts: list[LayerFacts]) -> ModelShape:
    text = model.config.get_text_config()
    attention = [fact.attention for fact in facts if fact.attention]
    keeping = {index: fact.attention for index, fact in enumerate(facts) if fact.attention and fact.source is None}
    _check_cache(text, {index: of.window for index, of in keeping.items()}, _positions(model))
    widths = {(fact.heads, fact.groups) for fact in attention}
    if len(widths) > 1:
        raise Unsupported("its layers have different numbers of heads")
    ((heads, groups),) = widths or {(1, 1)}
    behind = {name for fact in facts if fact.attention for name in fact.late}
    kinds: list[tuple[LayerTensor, ...]] = []
    kind_of, inside, known = [], set(), set()
    for layer, fact in zip(layers.layers, facts, strict=True):
        named = dict(layer.named_parameters())
        if any(id(parameter) in known for parameter in named.values()):
            raise Unsupported("its layers share parameters")
        known |= set(map(id, named.values()))
        inside |= {id(parameter) for name, parameter in named.items() if name not in fact.lent}
        # A layer without attention has no early and late parameters. The names that follow attention in other layers
        # count as late, all others as early.
        early = fact.early if fact.attention else named.keys() - behind if behind else ()
        experts = {name for name, of in named.items() if of.dim() == 3 and len(of) > 1 and "experts" in name}
        routers = {name for name in named if experts and not ROUTERS.isdisjoint(name.split("."))}
        plain = fact.everywhere | routers | {name for name in named if name.endswith("bias")}
        kind = tuple(
            LayerTensor(
                name,
                tuple(of.shape),
                early=name in early,
                kv_gen=name in fact.kv_gen,
                outside=name in fact.lent,
                everywhere=name in plain,
                experts=name in experts,
            )
            for name, of in named.items()
        )
        if fact.source is not None:
            kind += _borrowed(layers.layers[fact.source], facts[fact.source])
        kinds += [] if kind in kinds else [kind]
        kind_of.append(kinds.index(kind))
    sources = tuple(index if fact.source is None else fact.source for index, fact in enumerate(facts))
    states = tuple(fact.state for fact in facts) if any(fact.state for fact in facts) else ()
    outer = [tensor for tensor in [*model.parameters(), *model.buffers()] if id(tensor) not in inside]
    latent = attention[0].kv_gen.width if attention and attention[0].kv_gen.source else None
    head_dim = max((max(fact.key_dim, fact.value_dim) for fact in attention), default=1)
    first = [kind_of.index(kind) for kind in range(len(kinds))]
    work, share = measure(layers, facts, first)
    having = [any(len(tensor.size) > 2 and "experts" in tensor.name for tensor in kind) for kind in kinds]
    calling = [has and calls_experts(layers, at, facts[at]) for has, at in zip(having, first, strict=True)]
    modules = ModuleLayers(
        folder=str(folder.resolve()),
        kinds=tuple(kinds),
        kind_of=tuple(kind_of),
        outer_elements=sum(tensor.numel() for tensor in outer),
        experts_share=share,
        work=work,
        latent=latent,
        streams=layers.streams,
        call_elements=max(0, _call_elements(layers) - 2 * head_dim),
    )
    dtype = str(model.config.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise Unsupported(f"dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}")
    return ModelShape(
        name=folder.name,
        family=FAMILY,
        num_layers=len(facts),
        hidden=layers.hidden_size,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        ffn=modules.widest,
        vocab=text.vocab_size,
        max_positions=_positions(model),
        gated_mlp=True,
        tied_head=bool(text.tie_word_embeddings),
        bias=False,
        dtype=dtype,
        eos_token_ids=end_tokens(folder, model.config.eos_token_id, text.eos_token_id),
        attention=tuple(
            AttentionKind(of.window, None, of.softcap, of.sinks) if of else AttentionKind()
            for of in (fact.attention for fact in facts)
        ),
        states=states,
        sources=sources if any(fact.source is not None for fact in facts) else (),
        routed=tuple(calling[kind] for kind in kind_of) if any(calling) else (),
        modules=modules,
    )


def _call_elements(layers: Layers) -> int:
    """Return the number of elements per token in the layers' arguments, without hidden states."""
    rows = torch.zeros(ROWS, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        calls = layers.embed(rows, rows).calls
    of_rows = [t for t in tensors_in(list(map(tuple, calls))) if t.is_floating_point() and ROWS in t.shape[:3]]
    memories = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() // t.element_size() for t in of_rows}
    return sum(memories.values()) // ROWS


def _borrowed(layer: torch.nn.Module, fact: LayerFacts) -> tuple[LayerTensor, ...]:
    """Return the tensors that recompute a layer's keys and values, as tensors of a layer that borrows them."""
    named = {name: tuple(of.shape) for name, of in layer.named_parameters() if name in fact.kv_gen}
    return tuple(
        LayerTensor(f"borrowed {name}", size, False, kv_gen=True, outside=True) for name, size in named.items()
    )


def _check_cache(text, windows: Mapping[int, int | None], longest: int) -> None:
    """Raise Unsupported if transformers' own cache drops tokens that a layer's mask shows.

    The model's tokens would depend on its cache. ``windows``: layer -> window, for layers that keep keys and values.
    """
    from transformers import DynamicCache

    layers: Any = DynamicCache(config=text).layers
    for layer, window in windows.items():
        if layer >= len(layers):
            break
        cached = layers[layer]
        # Read the fields without defaults, so that a renamed field raises an error.
        kept = cached.sliding_window if hasattr(cached, "keys") and cached.is_sliding else None
        if kept is not None and (window or longest) > kept:
            raise Unsupported(f"its cache keeps {kept} tokens of a layer, and its mask lets see more")


def _positions(model) -> int:
    """Return the maximum number of positions at which the model is exact.

    Up to it, transformers' rotary angles do not depend on the longest text of a batch, and layers with chunked
    attention have only one chunk, which is full attention (Llama 4).
    """
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or UNLIMITED_POSITIONS
    given = getattr(text, "rope_parameters", None) or {}
    rotations = [given] if "rope_type" in given else [kind for kind in given.values() if isinstance(kind, dict)]
    # Gemma 3's configuration has the extended number (an exception in vLLM, too). Models with tables of positions, like
    # GPT-J, have no more positions than configured.
    rotates = any(hasattr(module, "rope_type") for module in model.modules())
    if rotations and rotates and "gemma3" not in text.model_type:
        keys = "rope_type", "factor", "original_max_position_embeddings"
        positions = max(scaled_positions(positions, *map(kind.get, keys)) for kind in rotations)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        positions = min(positions, text.attention_chunk_size or positions)
    for kind in rotations:
        if kind.get("rope_type") in CHANGING_ROTATIONS:
            first = kind.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", 0)
            positions = min(positions, first or positions)
    return int(positions)


class TensorNames(NamedTuple):
    """The names of a model's tensors, inside and outside of its layers."""

    inside: dict[str, tuple[int, str]]  #: name in the model -> (layer, name in the layout); without lent parameters
    outside: dict[str, tuple[str, ...]]  #: first name in the model -> all names of the same tensor

    @classmethod
    def of(cls, empty: EmptyModel) -> TensorNames:
        ids = {
            id(parameter): (index, name)
            for index, (layer, fact) in enumerate(zip(decoder_layers(empty.model), empty.facts, strict=True))
            for name, parameter in layer.named_parameters()
            if name not in fact.lent
        }
        inside, outside = {}, {}
        for name, tensor in empty.model.state_dict(keep_vars=True).items():
            if id(tensor) in ids:
                inside[name] = ids[id(tensor)]
            else:
                outside.setdefault(id(tensor), []).append(name)
        return cls(inside, {names[0]: tuple(names) for names in outside.values()})
