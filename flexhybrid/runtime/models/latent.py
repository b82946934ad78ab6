"""Find the rows from which an attention module recomputes keys and values: its input, or a narrower row inside it.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, Sec. 2.1) projects a token's hidden state to a short row,
the latent, and expands it to the keys and values of all heads. ``kv_gen_of`` finds this row on the meta device: the
narrowest output of a linear layer such that keys and values depend on the hidden state only through it. ACT blocks then
hold this row, and KV-Gen is the rest of the module up to its attention call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexhybrid.runtime.models.transformer import AttentionCall, begun


class KvGen(NamedTuple):
    """How an attention module recomputes keys and values."""

    source: str | None  #: path of the linear layer whose output ACT blocks hold; None: the module's input
    width: int  #: number of elements in a row of an ACT block
    unread: tuple[str, ...]  #: paths of linear layers that are not needed to recompute keys and values
    read: tuple[str, ...]  #: names of the module's parameters that are needed to recompute them


class Marks(TorchDispatchMode):
    """Records on which marked tensors each tensor may depend.

    Each memory has a set of marks. An operation's outputs, and all views of them, get the marks of its inputs. On the
    meta device, no value can change what is computed, so a tensor without a mark does not depend on the marked tensor.
    """

    def __init__(self):
        super().__init__()
        self._marks: dict[int, set[str]] = {}
        self._alive: list[Any] = []  # keeps memories alive, so that no address is reused

    def mark(self, tensor: torch.Tensor, marks: Iterable[str]) -> None:
        memory = tensor.untyped_storage()
        self._alive.append(memory)
        self._marks.setdefault(memory._cdata, set()).update(marks)

    def of(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        return set().union(*(self._marks.get(tensor.untyped_storage()._cdata, ()) for tensor in tensors))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if marks := self.of(tensors_in((args, kwargs))):
            for tensor in tensors_in((result, list(_written(func, args, kwargs)))):
                self.mark(tensor, marks)
        return result


def _written(func, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def tensors_in(value) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)


_INPUT = (
    "hidden states"  #: mark of an attention module's input; other marks are paths of layers and names of parameters
)


def kv_gen_of(
    attention: torch.nn.Module, hidden: torch.Tensor, args: tuple, kwargs: dict[str, Any], latents: bool
) -> KvGen:
    """Return how an attention module on the meta device recomputes keys and values.

    ``hidden``: [1, R, h]. ``args`` and ``kwargs``: the module's other arguments. ``latents``: False to recompute from
    the module's input in any case.
    """
    linear = {path: part for path, part in attention.named_modules() if isinstance(part, torch.nn.Linear)}
    widths: dict[str, int] = {}

    def needed(source: str | None) -> tuple[set[str], AttentionCall]:
        """Run the module; return the marks of keys and values, and the call. ``source`` outputs only its own mark."""
        with Marks() as marks, ExitStack() as hooks:

            def mark(path: str, _module: torch.nn.Module, _args: tuple, made: torch.Tensor) -> torch.Tensor:
                if made.shape[:-1] == hidden.shape[:-1]:
                    widths[path] = made.shape[-1]
                if path == source:
                    made = torch.empty(made.shape, dtype=made.dtype, device=made.device)  # without marks
                marks.mark(made, (path,))
                return made

            for path, part in linear.items():
                hooks.enter_context(part.register_forward_hook(partial(mark, path)))
            for name, parameter in attention.named_parameters():
                marks.mark(parameter, (name,))
            given = torch.empty_like(hidden)
            marks.mark(given, (_INPUT,))
            pending = begun(lambda: attention(given, *args, **kwargs))
            pending.run.leave()
            return marks.of((pending.call.key, pending.call.value)), pending.call

    on, call = needed(None)
    most = min(hidden.shape[-1], call.key.shape[1] * (call.key.shape[3] + call.value.shape[3]))
    source = None
    narrow = [(widths[path], path) for path in on & widths.keys() if latents and widths[path] < most]
    for _, path in sorted(narrow):
        through, _ = needed(path)
        if _INPUT not in through:
            source, on = path, through
            break
    return KvGen(
        source=source,
        width=widths[source] if source else hidden.shape[-1],
        unread=tuple(path for path in linear if path not in on),
        read=tuple(name for name, _ in attention.named_parameters() if name in on),
    )


class ActRows:
    """Records the rows for ACT blocks when an attention module runs, and feeds them back to it for KV-Gen."""

    def __init__(self, attention: torch.nn.Module, gen: KvGen, hidden: int):
        self._attention, self._source, self._hidden = attention, gen.source, hidden
        self._taken: torch.Tensor | None = None
        self._given: torch.Tensor | None = None  # rows of ACT blocks, during KV-Gen
        parts = dict(attention.named_modules())
        for path in gen.unread:
            self._leave_out(parts[path])
        if gen.source is None:
            self._watch_input()
        else:
            self._watch_output(parts[gen.source])

    def take(self) -> torch.Tensor:
        """Return the rows of the module's latest run: [1, R, width], or as many dimensions as its hidden states had."""
        taken, self._taken = self._taken, None
        if taken is None:
            raise ValueError("the attention module has not run")
        return taken

    def keys_and_values(self, rows: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> AttentionCall:
        """Run the module on rows [R, width] up to its attention call."""
        hidden = rows if self._source is None else rows.new_zeros(self._hidden).expand(len(rows), -1)
        self._given = rows
        try:
            pending = begun(lambda: self._attention(hidden[None], *args, **kwargs))
        finally:
            self._given = self._taken = None
        pending.run.leave()
        return pending.call

    def _watch_input(self) -> None:
        own = self._attention.forward

        def forward(*args, **kwargs):
            self._taken = args[0] if args else kwargs["hidden_states"]
            return own(*args, **kwargs)

        vars(self._attention)["forward"] = forward

    def _watch_output(self, source: torch.nn.Module) -> None:
        own = source.forward

        def forward(rows: torch.Tensor) -> torch.Tensor:
            if self._given is not None:
                return self._given[None]
            self._taken = made = own(rows)
            return made

        vars(source)["forward"] = forward

    def _leave_out(self, layer: Any) -> None:
        """Make a linear layer return zeros, which nothing reads, during KV-Gen."""
        own, columns = layer.forward, layer.out_features

        def forward(rows: torch.Tensor) -> torch.Tensor:
            if self._given is None:
                return own(rows)
            return rows.new_zeros(columns).expand(*rows.shape[:-1], columns)

        vars(layer)["forward"] = forward
