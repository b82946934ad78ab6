"""Find facts about a transformers model by running its layers on the meta device, without weights or memory.

``look`` returns the facts that plans need (tensors of each layer, heads, windows) and that
``flexhybrid.runtime.models.module`` needs. It refuses models that would not be exact, before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from flexhybrid.core.model.states import LayerState, WorkBytes
from flexhybrid.runtime.models.allocations import peak_bytes
from flexhybrid.runtime.models.latent import KvGen, Marks, kv_gen_of, tensors_in
from flexhybrid.runtime.models.states import (
    MEASURED,
    RowGroup,
    Running,
    cache_of,
    find_states,
    in_each_dtype,
    is_stand_in,
    run_alone,
    run_group,
    stand_in,
    with_cache,
)
from flexhybrid.runtime.models.transformer import (
    OWN_ATTENTION,
    AttentionCall,
    ExpertsCall,
    LayerCall,
    Layers,
    Pending,
    Unsupported,
    masks_made_by,
    one_line,
    same_tensor,
    stopping_at_experts,
)

ROWS = 3  #: number of tokens in the examined calls
#: Options of an attention call that our attention may ignore, or that ``AttentionFacts`` holds.
SILENT = ("dropout", "position_ids", "cache_position", "output_attentions", "use_cache", "scaling", "training",
          "sliding_window", "softcap", "s_aux", "output_router_logits", "deterministic")  # fmt: skip


class Argument(NamedTuple):
    """The source of an attention module's argument: a path into the layer's arguments, or a value."""

    path: tuple[Any, ...] | None
    value: Any = None


@dataclass(frozen=True)
class AttentionFacts:
    """The attention call of a layer."""

    module: torch.nn.Module
    args: tuple[Argument, ...]  #: positional arguments of the attention module after its input
    kwargs: dict[str, Argument]
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: bool
    kv_gen: KvGen


@dataclass(frozen=True)
class LayerFacts:
    """The facts of a layer. Parameters are given by their names."""

    attention: AttentionFacts | None  #: None: the layer does not attend
    state: LayerState | None  #: None: the layer keeps no state
    early: tuple[str, ...]  #: parameters used before the attention call
    late: tuple[str, ...]  #: all other parameters
    kv_gen: frozenset[str]  #: parameters that recompute keys and values
    everywhere: frozenset[str] = frozenset()  #: matrices used both before and after attention
    source: int | None = None  #: the layer whose keys and values this layer attends to; None: its own
    lent: frozenset[str] = frozenset()  #: parameters with which other layers recompute this layer's keys and values


#: Functions that multiply rows with several experts: [rows, in], [experts, in, out] -> [rows, out].
GROUPED = ("grouped_mm", "_grouped_mm")


class _Uses(TorchFunctionMode):
    """Records the tensors that take part in a computation."""

    def __init__(self):
        super().__init__()
        self.seen: set[int] = set()
        self.grouped: set[tuple[int, int]] = set()  #: (rows, experts) of each product with experts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.seen |= set(map(id, tensors_in((args, kwargs))))
        if getattr(func, "__name__", "") in GROUPED:  # on the meta device, torch's function runs only in bfloat16
            self.grouped.add((len(args[0]), len(args[1])))
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1])
        return func(*args, **kwargs)


class _NoPadding(TorchFunctionMode):
    """Replaces counts of padding (one per text, on the meta device) by zeros, so that they have values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = list(args)
        for i, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.is_meta and value.shape == (1,):
                given[i] = value if value.is_floating_point() else torch.zeros_like(value, device="cpu")
        return func(*given, **(kwargs or {}))


class _TaggedMask:
    """Replaces a mask that a model makes and passes to its layers."""

    def __init__(self, mask_function, longest: int):
        self._function, self._longest = mask_function, longest

    def __getitem__(self, part) -> _TaggedMask:
        whole = (slice(None), slice(0, None))
        if isinstance(part, tuple) and all(isinstance(of, slice) and of in whole for of in part):
            return self
        raise TypeError(f"a layer takes an index or slice of a {type(self).__name__}, which cannot be probed")

    @property
    def window(self) -> int | None:
        return window_of(self._function, self._longest)


def window_of(mask_function, longest: int) -> int | None:
    """Return how many tokens a token can see under a transformers mask function, including itself; None: all before it.

    Raise Unsupported if the mask is neither causal nor a window of the latest tokens.
    """
    if mask_function is None:
        return None
    windows = set()
    zero = torch.zeros((), dtype=torch.int64)
    for query in {0, 1, longest // 3, longest // 2, longest - 2, longest - 1}:
        if query < 0:
            continue
        keys = torch.arange(query + 2, dtype=torch.int64)
        with _NoPadding():
            seen = torch.as_tensor(mask_function(zero, zero, keys[query], keys), dtype=torch.bool).expand(len(keys))
        count = int(seen.sum())
        if bool(seen[-1]) or not bool(seen[query + 1 - count : query + 1].all()) or count == 0:
            raise Unsupported("its attention mask is neither causal nor a sliding window")
        windows.add(count if count <= query else None)
    shorter = windows - {None}
    if len(shorter) > 1:
        raise Unsupported("its attention mask is neither causal nor a sliding window of one size")
    return shorter.pop() if shorter else None


def look(layers: Layers, longest: int) -> list[LayerFacts]:
    """Return the facts of each layer. Raise Unsupported, with the reason, if the model would not be exact."""
    asked = []

    def tagged(mask_function) -> _TaggedMask:
        asked.append(mask_function)
        return _TaggedMask(mask_function, longest)

    with torch.inference_mode(), masks_made_by(tagged):
        ids = torch.zeros(ROWS, dtype=torch.int64, device="meta")
        hidden, calls, _ = _checked_run(layers, lambda: layers.embed(ids, ids), "what stands before its layers")
        if hidden.dim() not in (3, 4) or hidden.shape[-3:-1] != (1, ROWS):
            raise Unsupported("its hidden states are not one row a token")

        def embed(tokens: int | None) -> tuple[torch.Tensor, list[LayerCall]]:
            places = ids if tokens is None else torch.zeros(tokens, dtype=torch.int64, device="meta")
            return layers.embed(places, places)[:2]

        states = find_states(layers, embed)
        if hidden.dim() == 4 and any(states):
            raise Unsupported("it keeps states, and several hidden states of each token")
        sources = _sources(layers, hidden, layers.embed(ids, ids).calls, states)

        def look_at_all(latents: bool) -> list[LayerFacts]:
            facts: list[LayerFacts] = []
            for index, (call, state, source) in enumerate(zip(calls, states, sources, strict=True)):
                lender = None if source is None else facts[source].attention
                facts.append(_look_at(layers, index, hidden, call, state, latents=latents, lender=lender))
                facts[index] = replace(facts[index], source=source)
            return facts

        facts = look_at_all(latents=True)
        if len({fact.attention.kv_gen.width for fact in facts if fact.attention}) > 1:  # ACT blocks have one width
            facts = look_at_all(latents=False)
        if not asked and any(fact.attention for fact in facts):
            raise Unsupported("its masks do not come from transformers' AttentionMaskInterface")
    for source in {fact.source for fact in facts if fact.source is not None}:
        facts[source] = replace(facts[source], lent=_lent(layers.layers[source], facts[source]))
    return facts


def _sources(
    layers: Layers, hidden: torch.Tensor, calls: Sequence[LayerCall], states: Sequence[LayerState | None]
) -> list[int | None]:
    """Return, for each layer, the layer whose keys and values it attends to; None for its own.

    Keys and values are marked and followed through the layers in order. ``calls``: calls of a separate forward.
    """
    sources: list[int | None] = []
    made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with Marks() as marks:
        for index, (call, state) in enumerate(zip(calls, states, strict=True)):
            sources.append(None)
            if state and not state.attends:
                continue
            called = with_cache(call, stand_in(layers), index) if state else call
            pending = _checked_begin(layers, index, hidden, called)
            pending.run.leave()
            own = pending.call.key, pending.call.value
            lenders = marks.of(own)
            if not lenders:
                made[str(index)] = own
                marks.mark(own[0], (str(index),))
                marks.mark(own[1], (str(index),))
                continue
            whose = [of for of in lenders if all(map(same_tensor, own, made[of]))]
            if len(lenders) != 1 or not whose or state:
                raise Unsupported(f"layer {index} makes its keys and values from those of other layers")
            sources[index] = int(whose[0])
    return sources


def _lent(layer: torch.nn.Module, fact: LayerFacts) -> frozenset[str]:
    """Return the parameters with which an attention module recomputes keys and values for other layers.

    They include norms of queries, which the module also runs, on zeros.
    """
    inside = {id(part) for part in fact.attention.module.parameters()} if fact.attention else set()
    named = layer.named_parameters()
    return frozenset(
        name
        for name, part in named
        if id(part) in inside and name in fact.early and (name in fact.kv_gen or part.dim() < 2)
    )


def _lacks_values(error: Exception) -> bool:
    """Return whether an operation failed because tensors on the meta device have no values."""
    return isinstance(error, NotImplementedError) or "meta tensors" in str(error) or "Meta tensors" in str(error)


def _checked_run(layers: Layers, function: Callable[[], Any], where: str) -> Any:
    """Call a function that runs a model's layers; raise Unsupported for its errors. ``where``: the running part."""
    try:
        return function()
    except Unsupported:
        raise
    except Exception as error:
        seen = _TaggedMask.__name__ in str(error)  # the model uses our mask object as a tensor
        if not getattr(layers.model, "_supports_attention_backend", True) and (seen or "attention" in where):
            raise Unsupported(OWN_ATTENTION) from error
        if seen:
            raise Unsupported(
                "its own code uses the attention mask, outside transformers' AttentionInterface"
            ) from error
        if _lacks_values(error):
            raise Unsupported(f"{where} computes what depends on the values of tensors ({one_line(error)})") from error
        raise Unsupported(f"{where} cannot be run by itself ({one_line(error)})") from error


def _checked_begin(layers: Layers, index: int, hidden: torch.Tensor, call: LayerCall) -> Pending:
    return _checked_run(layers, lambda: layers.begin(index, hidden, call), f"layer {index}, up to its attention,")


def _look_at(
    layers: Layers,
    index: int,
    hidden: torch.Tensor,
    call: LayerCall,
    state: LayerState | None,
    *,
    latents: bool,
    lender: AttentionFacts | None,
) -> LayerFacts:
    """Return the facts of a layer. ``lender``: the attention of the layer whose keys and values it borrows."""
    layer = layers.layers[index]
    named = dict(layer.named_parameters())
    if state and not state.attends:
        return LayerFacts(None, state, (), tuple(named), frozenset())
    again = call
    if state:  # each run needs an empty state
        call, again = (with_cache(call, stand_in(layers), index) for _ in range(2))
    with _Uses() as uses:
        pending = _checked_begin(layers, index, hidden, call)
    early = {name for name, parameter in named.items() if id(parameter) in uses.seen}
    attention = _attention_facts(layers, index, hidden, again, pending.call, latents=latents, lender=lender)
    if lender and attention.window != lender.window:
        raise Unsupported(f"layer {index} sees other tokens than the layer whose keys and values it attends to")
    attended = pending.call.query.new_empty(1, ROWS, attention.heads, attention.value_dim)
    try:
        with _Uses() as uses:
            result = layers.finish(pending, attended)
    except Unsupported:
        raise
    except Exception as error:
        if not _lacks_values(error):
            raise Unsupported(f"layer {index} cannot be run behind its attention ({one_line(error)})") from error
        result = None  # the sizes of a routing of experts are unknown on the meta device
    late = {name for name, parameter in named.items() if id(parameter) in uses.seen} if result is not None else set()
    if result is not None and result.shape != hidden.shape:
        raise Unsupported(f"layer {index} does not give one row a token")
    read = dict(attention.module.named_parameters())
    reads = set() if lender else {id(read[name]) for name in attention.kv_gen.read}
    return LayerFacts(
        attention,
        state,
        early=tuple(name for name in named if name in early),
        late=tuple(name for name in named if name not in early),
        kv_gen=frozenset(name for name in early if id(named[name]) in reads),
        everywhere=frozenset(name for name in early & late if named[name].dim() > 1),
    )


def measure(layers: Layers, facts: list[LayerFacts], kinds: list[int]) -> tuple[tuple[WorkBytes, ...], float]:
    """Return the largest working memory of these layers for each dtype, and the share of experts that a row uses.

    ``kinds``: indices of the layers, one of each kind. Layers that cannot run alone are left out. The share is 1 if
    experts are not computed by a grouped product.
    """
    work, shares = [], set[float]()
    for dtype in in_each_dtype(layers.model):
        peaks = dict.fromkeys(MEASURED[-2:], 0)
        for rows, index in product(peaks, kinds):
            ids = torch.zeros(rows, dtype=torch.int64, device="meta")
            with torch.inference_mode(), suppress(Exception), _Uses() as uses:
                hidden, calls, _ = layers.embed(ids, ids)
                peak = peak_bytes(partial(_run_whole, layers, index, facts[index], hidden, calls))
                peaks[rows] = max(peaks[rows], peak)
            shares |= {taken / (rows * experts) for taken, experts in uses.grouped}
        (low, least), (high, most) = peaks.items()
        token = -(-(most - least) // (high - low))
        work.append(WorkBytes(dtype.itemsize, max(0, most - token * high), token))
    return tuple(work), min(1.0, max(shares, default=1.0))


def calls_experts(layers: Layers, index: int, fact: LayerFacts) -> bool:
    """Return whether a layer calls its experts through transformers' ExpertsInterface, after its attention."""
    ids = torch.zeros(ROWS, dtype=torch.int64, device="meta")
    with torch.inference_mode(), suppress(Exception), stopping_at_experts():
        hidden, calls, _ = layers.embed(ids, ids)
        if fact.state:
            running = run_group(layers, index, hidden[0], calls[index], RowGroup(None, None, 1, ROWS), stand_in(layers))
        else:
            pending = layers.begin(index, hidden, calls[index])
            running = Running(RowGroup(None, None, 1, ROWS), None, pending.run, pending.call)
        if fact.attention:
            made = fact.attention
            running = running.resumed(hidden.new_empty(1, ROWS, made.heads, made.value_dim))
        if isinstance(running.result, ExpertsCall):
            running.run.leave()
            return True
    return False


def _run_whole(layers: Layers, index: int, fact: LayerFacts, hidden: torch.Tensor, calls: Sequence[LayerCall]) -> None:
    """Run a layer like ``ModulePath``, with the tensors that it makes between the layer's two parts.

    These hold the keys, values and queries, and attention's output.
    """
    attention = fact.attention
    if attention is None or fact.state:
        return run_alone(layers, index, hidden, calls)
    rows, head_dim = hidden.shape[-2], max(attention.key_dim, attention.value_dim)
    held = (
        layers.begin(index, hidden, calls[index]),
        hidden.new_empty(rows, attention.heads + 2 * attention.groups, head_dim),
    )
    layers.finish(held[0], hidden.new_empty(1, rows, attention.heads, head_dim)[..., : attention.value_dim])


def _attention_facts(
    layers: Layers,
    index: int,
    hidden: torch.Tensor,
    call: LayerCall,
    made: AttentionCall,
    *,
    latents: bool,
    lender: AttentionFacts | None,
) -> AttentionFacts:
    """Return the facts of a layer's attention call (``made``). Raise Unsupported if ours would not be exact."""
    taken: list[tuple[tuple, dict]] = []
    own, cache = made.module.forward, cache_of(call)
    changes: list[int] = []

    def forward(*args, **kwargs):
        taken.append((args, kwargs))
        changes.append(cache.own.changes if cache else 0)
        return own(*args, **kwargs)

    made.module.forward = forward
    try:
        layers.begin(index, hidden, call)
    finally:
        made.module.forward = own
    if len(taken) != 1:
        raise Unsupported(f"layer {index} does not call its attention module once")
    if cache and cache.own.changes > changes[0]:
        raise Unsupported(f"the attention module of layer {index} keeps a state of its own")
    args, kwargs = taken[0]
    kwargs = dict(kwargs)
    rows = args[0] if args else kwargs.pop("hidden_states", None)
    if not isinstance(rows, torch.Tensor) or rows.shape != hidden.shape[-3:]:
        raise Unsupported(f"the attention module of layer {index} takes no hidden states")
    where = f"the attention module of layer {index}"
    sources = {"args": call.args, "kwargs": call.kwargs}
    query, key, value, options = made.query, made.key, made.value, made.options
    for name, size in (("queries", query), ("keys", key), ("values", value)):
        if size.dim() != 4 or size.shape[0] != 1 or size.shape[2] != ROWS:
            raise Unsupported(f"the {name} of layer {index} are {list(size.shape)}, not one row a token")
    window = options.get("sliding_window")
    if made.mask is not None and not isinstance(made.mask, _TaggedMask):
        raise Unsupported(f"{where} gets a mask that the model makes itself")
    of_mask = None if made.mask is None else made.mask.window
    window = window if of_mask is None else of_mask if window is None else min(window, of_mask)
    if options.get("is_causal") is False:
        raise Unsupported(f"{where} looks at tokens that come later")
    for name, option in options.items():
        if name not in (*SILENT, "is_causal") and (isinstance(option, torch.Tensor) or option):
            raise Unsupported(f"its attention has {name}")
    return AttentionFacts(
        module=made.module,
        args=tuple(_argument(value, sources, where) for value in args[1:]),
        kwargs={name: _argument(value, sources, where) for name, value in kwargs.items()},
        heads=query.shape[1],
        groups=key.shape[1],
        key_dim=query.shape[3],
        value_dim=value.shape[3],
        scaling=options.get("scaling"),
        window=window,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux") is not None,
        kv_gen=lender.kv_gen if lender else kv_gen_of(made.module, rows, args[1:], kwargs, latents),
    )


def _argument(value, sources: dict[str, Any], where: str) -> Argument:
    """Return the source of an attention module's argument. Raise Unsupported if a tensor is none of the layer's."""
    if next(tensors_in(value), None) is None and not isinstance(value, MutableMapping):
        return Argument(None, None if isinstance(value, _TaggedMask) or is_stand_in(value) else value)
    for kind, source in sources.items():
        for key, other in source.items() if isinstance(source, dict) else enumerate(source):
            if other is value:
                return Argument((kind, key))
            if isinstance(other, (tuple, list)):
                for place, inner in enumerate(other):
                    if inner is value:
                        return Argument((kind, key, place))
    raise Unsupported(f"{where} takes a tensor that is not of its layer's arguments")
