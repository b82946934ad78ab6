"""Run transformers' recurrent layers, which keep a state of fixed size instead of the keys and values of all tokens.

A layer reads and writes its state in transformers' ``Cache``. Here it gets a stand-in for the cache with the states of
one mini-batch, which are stored afterwards. Prompts of different lengths run separately (``groups_of``): padding after
a prompt would change its state, and padding before it would change how transformers divides the prompt into chunks.

Shapes: R rows of a grid [B, width], each request's rows first; h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from flexhybrid.core.model.states import LayerState, StateTensor, WorkBytes
from flexhybrid.runtime.models.allocations import peak_bytes
from flexhybrid.runtime.models.coroutines import Coroutine, started
from flexhybrid.runtime.models.transformer import (
    DTYPE,
    PLAIN,
    RECURRENT,
    AttentionCall,
    LayerCall,
    Layers,
    Unsupported,
    hidden_states,
    one_line,
)
from flexhybrid.runtime.step_tensors import to_device

#: Names of the cache argument in layers of different models.
CACHES = ("past_key_values", "cache_params")
KINDS = ("conv", "recurrent")  #: kinds of states in transformers' cache


class RowGroup(NamedTuple):
    """Requests of a step with equal numbers of new tokens."""

    rows: torch.Tensor | None  #: rows of the grid [batch · tokens]; None: all rows in order
    members: np.ndarray | None  #: indices of the step's requests [batch]; None: all requests
    batch: int
    tokens: int


def groups_of(new_tokens: np.ndarray, device: torch.device) -> list[RowGroup]:
    """Return the groups of a step's requests. ``new_tokens`` [B]: number of each; the maximum is the grid's width."""
    width, groups = int(new_tokens.max()), []
    lengths = np.unique(new_tokens)
    if len(lengths) == 1:
        return [RowGroup(None, None, len(new_tokens), width)]
    for length in lengths.tolist():
        members = np.flatnonzero(new_tokens == length)
        rows = (members[:, None] * width + np.arange(length)).reshape(-1)
        groups.append(RowGroup(to_device(rows, device), members, len(members), length))
    return groups


@cache
def _classes() -> tuple[type, type]:
    """Return two classes: one layer's part of the cache, and the cache. Imports transformers."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    class StateLayer(LinearAttentionLayer):
        """The states of one layer. It stores no keys and values, because the executor does."""

        changes = 0  #: number of writes to a state

        def lazy_initialization(
            self, conv_states=None, recurrent_states=None, state_idx=0, conv_kernel_size=None
        ) -> None:
            """Do as transformers, without marking tensors for torch's compiler, whose import takes seconds."""
            if conv_states is not None:
                size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
                self.dtype, self.device = conv_states.dtype, conv_states.device
                self.conv_kernel_size[state_idx] = size
                self.conv_states[state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], size)
                self.is_conv_states_initialized[state_idx] = True
            if recurrent_states is not None:
                self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
                self.is_recurrent_states_initialized[state_idx] = True

        def update_conv_state(self, *args, **kwargs):
            self.changes += 1
            return super().update_conv_state(*args, **kwargs)

        def update_recurrent_state(self, *args, **kwargs):
            self.changes += 1
            return super().update_recurrent_state(*args, **kwargs)

        def update(self, key_states, value_states, *_, **__):
            return key_states, value_states

    class StandIn(Cache):
        """A cache in which every layer is the running one."""

        def __init__(self, num_layers: int, num_states: int):
            self.own = StateLayer(num_states)
            layers: list[Any] = [self.own] * num_layers
            super().__init__(layers=layers)

        def get_linear_cache(self, _layer: int):
            """Return the recurrent state, under the name of MiniMax's own cache."""
            return self.own.recurrent_states[0]

        def set_linear_cache(self, _layer: int, states: torch.Tensor) -> None:
            self.own.update_recurrent_state(states)

    return StateLayer, StandIn


def stand_in(layers: Layers, state: LayerState | None = None, held: Sequence[torch.Tensor] | None = None) -> Any:
    """Return a cache for one call of a layer. ``held``: tensors [batch, …] of ``state``; None: no state yet."""
    config = layers.model.config.get_text_config()
    made = _classes()[1](len(layers.layers), getattr(config, "number_of_conv_states", 1))
    for tensor, own in zip(state.tensors if state and held is not None else (), held or (), strict=True):
        getattr(made.own, f"{tensor.kind}_states")[tensor.index] = own
        getattr(made.own, f"is_{tensor.kind}_states_initialized")[tensor.index] = True
        if tensor.kind == "conv":
            made.own.conv_kernel_size[tensor.index] = tensor.size[-1]
            made.own.dtype, made.own.device = own.dtype, own.device
        made.own.has_previous_state[tensor.index] = True
    return made


def with_cache(call: LayerCall, made: Any, index: int) -> LayerCall:
    """Return a layer's call with a cache. Raise Unsupported if the layer has no such argument."""
    names = [name for name in CACHES if name in call.kwargs]
    if not names:
        raise Unsupported(f"layer {index} keeps a state elsewhere than in transformers' cache")
    return LayerCall(call.args, call.kwargs | dict.fromkeys(names, made))


def cache_of(call: LayerCall) -> Any:
    """Return the stand-in among a layer's arguments; None if there is none."""
    return next(filter(is_stand_in, call.kwargs.values()), None)


def is_stand_in(value: Any) -> bool:
    """Return whether a value was made by ``stand_in``."""
    return type(value).__name__ == "StandIn" and isinstance(value, _classes()[1])


def of_group(value: Any, group: RowGroup, rows: int) -> Any:
    """Return the group's part of an argument: tensors [1, R, …] become [batch, tokens, …], others stay."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (1, rows):
        chosen = value[0] if group.rows is None else value[0][group.rows]
        return chosen.unflatten(0, (group.batch, group.tokens))
    if isinstance(value, (tuple, list)):
        return tuple(of_group(inner, group, rows) for inner in value)
    return value


class Running(NamedTuple):
    """A group in a layer: at its attention call, at the call of its experts, or at the layer's end."""

    group: RowGroup
    made: Any  #: the stand-in for its cache
    run: Coroutine
    result: Any  #: ``AttentionCall``, ``ExpertsCall``, or the layer's hidden states [batch, tokens, h]

    def tensors(self, state: LayerState) -> list[torch.Tensor]:
        """Return the states [batch, …] that the layer wrote."""
        return [getattr(self.made.own, f"{tensor.kind}_states")[tensor.index] for tensor in state.tensors]

    def resumed(self, attended: torch.Tensor) -> Running:
        """Run the rest of the layer after its attention (output [batch, tokens, H, d])."""
        return self._replace(result=hidden_states(self.run.resume((attended, None))))

    def with_experts(self, output: torch.Tensor) -> Running:
        """Run the rest of the layer after its experts (output [batch · tokens, h])."""
        return self._replace(result=hidden_states(self.run.resume(output)))


def run_group(layers: Layers, index: int, hidden_Rh: torch.Tensor, call: LayerCall, group: RowGroup, made) -> Running:
    """Run a layer on the rows of a group, to its end or up to its attention."""
    rows = len(hidden_Rh)
    args = tuple(of_group(value, group, rows) for value in call.args)
    kwargs = {name: of_group(value, group, rows) for name, value in call.kwargs.items()}
    called = with_cache(LayerCall(args, kwargs), made, index)
    hidden = of_group(hidden_Rh[None], group, rows)
    layer = layers.layers[index]
    run, result = started(lambda: layer(hidden, *called.args, **called.kwargs))
    return Running(group, made, run, result if isinstance(result, AttentionCall) else hidden_states(result))


class LayerRun(NamedTuple):
    """A recurrent layer's input, in a slot."""

    slot: int
    index: int  #: the layer
    hidden_Rh: torch.Tensor
    call: LayerCall
    groups: list[RowGroup]
    held: Sequence[torch.Tensor] | None  #: states of the step's requests, one group; None: no states yet


class RecurrentLayers:
    """Runs layers that keep a state or do not attend, one per slot. Only the compute lane uses it."""

    def __init__(self, layers: Layers, states: Sequence[LayerState | None]):
        self.layers, self.states = layers, states
        self._running: dict[int, list[Running]] = {}

    def begin(self, layer: LayerRun, take: Callable[[], torch.Tensor]) -> tuple[AttentionCall, torch.Tensor]:
        """Run a layer up to its attention; return the attention call over the whole grid, and the ACT rows [R, width].

        ``take`` returns the ACT rows of the latest run.
        """
        inputs, rows = [take() for _ in self._runs(layer)], len(layer.hidden_Rh)
        running = self._running[layer.slot]
        first = running[0].result
        parts = {
            name: _grid(rows, [(run.group, getattr(run.result, name).transpose(1, 2)) for run in running])
            for name in ("query", "key", "value")
        }
        whole = first._replace(**{name: part.transpose(0, 1)[None] for name, part in parts.items()})
        return whole, _grid(rows, [(run.group, part) for run, part in zip(running, inputs, strict=True)])

    def run(self, layer: LayerRun) -> list[Running]:
        """Run a layer that does not attend."""
        return list(self._runs(layer))

    def _runs(self, layer: LayerRun) -> Iterator[Running]:
        running = self._running[layer.slot] = []
        for group in layer.groups:
            made = stand_in(self.layers, self.states[layer.index], layer.held)
            running.append(run_group(self.layers, layer.index, layer.hidden_Rh, layer.call, group, made))
            yield running[-1]

    def finish(self, slot: int, attended_RHd: torch.Tensor) -> list[Running]:
        """Run the rest of a layer after its attention."""
        running, rows = self._running[slot], len(attended_RHd)
        running[:] = [run.resumed(of_group(attended_RHd[None], run.group, rows)) for run in running]
        return list(running)

    def left(self, slot: int, index: int) -> list[tuple[RowGroup, list[torch.Tensor]]]:
        """Return the states [batch, …] that the layer in a slot wrote, by group."""
        state = self.states[index]
        return [(run.group, run.tensors(state)) for run in self._running.pop(slot)] if state and state.tensors else []


def rows_of(rows: int, running: list[Running]) -> torch.Tensor:
    """Return the hidden states [R, h] of all groups of a step, after the layer's end."""
    return _grid(rows, [(run.group, run.result) for run in running])


def _grid(rows: int, parts: list[tuple[RowGroup, torch.Tensor]]) -> torch.Tensor:
    """Combine the groups' tensors [batch, tokens, …] to one [R, …]; rows of no group are zeros."""
    group, first = parts[0]
    if group.rows is None:
        return first.flatten(0, 1)
    grid = first.new_zeros(rows, *first.shape[2:])
    for group, part in parts:
        grid[group.rows] = part.flatten(0, 1)
    return grid


# ---- examining a model on the meta device


def layer_kinds(config: Any) -> list[str | None]:
    """Return the kind of each layer in a configuration; None for each if it has no kinds."""
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return [*kinds] if kinds and len(kinds) == count else [None] * count


def find_states(layers: Layers, embed: Any) -> list[LayerState | None]:
    """Return each layer's state, or None for a layer that only attends. The model is on the meta device.

    ``embed(tokens)`` returns the first hidden states [1, R, h] of a number of tokens (None: a few), and the layers'
    calls. float32 states stay float32 at any compute dtype. Raise Unsupported if a state has no fixed size.
    """
    kinds = layer_kinds(layers.model.config.get_text_config())
    if not any(kind in (*RECURRENT, *PLAIN) for kind in kinds):
        return [None] * len(kinds)
    hidden, calls = embed(None)
    found = [_find(layers, index, hidden[0], calls[index], kind) for index, kind in enumerate(kinds)]
    return _with_work(layers, found, embed)


#: Lengths of the measured prompts, in tokens. The longer ones are whole chunks of layers that work in chunks.
MEASURED = (1, 256, 512)


def _with_work(layers: Layers, states: list[LayerState | None], embed: Any) -> list[LayerState | None]:
    """Return the states with the working memory of their layers. Layers of one kind are measured once."""
    kinds = {}  # kind of a layer with a state -> indices of its layers
    for index, (layer, state) in enumerate(zip(layers.layers, states, strict=True)):
        if state and state.tensors:
            sizes = tuple(tuple(parameter.shape) for parameter in layer.parameters())
            kinds.setdefault((type(layer), state, sizes), []).append(index)
    work: dict[int, list[WorkBytes]] = {index: [] for alike in kinds.values() for index in alike}
    for dtype in in_each_dtype(layers.model):
        calls = {tokens: embed(tokens) for tokens in MEASURED}
        for (_, state, _), alike in kinds.items():
            peaks = {tokens: peak_bytes(partial(run_alone, layers, alike[0], *calls[tokens])) for tokens in MEASURED}
            low, high = MEASURED[-2:]
            token = -(-(peaks[high] - peaks[low]) // (high - low))
            request = max(peak - token * tokens for tokens, peak in peaks.items())
            measured = WorkBytes(dtype.itemsize, max(0, request) + state.num_bytes(dtype.itemsize), token)
            for index in alike:
                work[index].append(measured)
    return [replace(state, work=tuple(work[i])) if state and i in work else state for i, state in enumerate(states)]


def in_each_dtype(model) -> Iterator[torch.dtype]:
    """Convert an empty model to float32, then back to DTYPE, and yield each dtype after its conversion."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype == DTYPE]
    for dtype in (torch.float32, DTYPE):
        with torch.inference_mode(False):
            for tensor in tensors:
                tensor.data = tensor.data.to(dtype)
        yield dtype


def run_alone(layers: Layers, index: int, hidden: torch.Tensor, calls: Sequence[LayerCall]) -> None:
    """Run a layer over a prompt's hidden states [1, R, h], with an empty cache."""
    group = RowGroup(None, None, 1, hidden.shape[1])
    with suppress(Exception):  # routing of experts, at the end of a layer, may fail on the meta device
        running = run_group(layers, index, hidden[0], calls[index], group, stand_in(layers))
        if isinstance(running.result, AttentionCall):
            running.resumed(running.result.query.transpose(1, 2)[..., : running.result.value.shape[-1]])


def _find(layers: Layers, index: int, hidden_Rh: torch.Tensor, call: LayerCall, kind: str | None) -> LayerState | None:
    if kind not in (*RECURRENT, *PLAIN):
        return None
    rows, found = len(hidden_Rh), []
    for group in (
        RowGroup(None, None, 1, rows),
        RowGroup(None, None, rows, 1),
    ):  # one prompt; several requests of one token
        found.append(_left(layers, index, hidden_Rh, call, group, stand_in(layers)))
    (long, attends), (short, _) = found
    if long != short:
        raise Unsupported(f"the state of layer {index} has no fixed size")
    state = LayerState(tuple(sorted(long, key=lambda tensor: not tensor.wide)), attends)
    if kind in RECURRENT and not state.tensors:
        raise Unsupported(f"layer {index} keeps a state elsewhere than in transformers' cache")
    if kind in PLAIN and (state.tensors or attends):
        raise Unsupported(f"layer {index} is more than a feed-forward network")
    if state.tensors:  # the layer must read a state, and write one of the same size
        held = [
            hidden_Rh.new_empty(rows, *t.size, dtype=torch.float32 if t.wide else hidden_Rh.dtype)
            for t in state.tensors
        ]
        made = stand_in(layers, state, held)
        after, _ = _left(layers, index, hidden_Rh, call, RowGroup(None, None, rows, 1), made)
        if after != long:
            raise Unsupported(f"the state of layer {index} does not stay of one size")
    return state


def _left(
    layers: Layers, index: int, hidden_Rh: torch.Tensor, call: LayerCall, group: RowGroup, made: Any
) -> tuple[list[StateTensor], bool]:
    """Run a layer on a group; return the tensors that it writes to its cache, and whether it attends."""
    attends = False
    try:
        running = run_group(layers, index, hidden_Rh, call, group, made)
        attends = isinstance(running.result, AttentionCall)
        if not attends and running.result.shape != (group.batch, group.tokens, hidden_Rh.shape[1]):
            raise Unsupported(f"layer {index} does not give one row a token")
    except Unsupported:
        raise
    except Exception as error:  # the sizes of a routing of experts, at the layer's end, are unknown on the meta device
        if not made.own.changes:
            raise Unsupported(f"layer {index} cannot be run by itself ({one_line(error)})") from error
    left = []
    states = [(kind, *item) for kind in KINDS for item in getattr(made.own, f"{kind}_states").items()]
    for kind, place, tensor in states:
        if tensor is not None and tensor.shape[0] != group.batch:
            raise Unsupported(f"the state of layer {index} is not one a request")
        if tensor is not None:
            left.append(StateTensor(kind, place, tuple(tensor.shape[1:]), tensor.dtype == torch.float32))
    return left, attends
