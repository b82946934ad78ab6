"""Run an unmodified transformers model one decoder layer at a time, and interrupt each layer at its attention call.

The model is on the meta device: it defines the computation and has no memory. When a layer runs, its parameters are
views of weight slots. The layer's call is interrupted (``coroutines``) at the attention function, so that the parts
before (``Layers.begin``) and after it (``Layers.finish``) are separate calls. ``Layers.embed`` and ``Layers.head`` run
the model's own forward with stand-ins for the layers.

Shapes: R rows (tokens, in any order, of any request), h hidden, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexhybrid.core.errors import InputError
from flexhybrid.runtime.models.coroutines import Coroutine, interrupt, started

NAME = "flexhybrid"  #: name of our attention function in transformers' registry
LIBRARIES = ("transformers", "greenlet")
#: Kinds of layers in configurations: layers with a state, and layers that are only a feed-forward network.
RECURRENT, PLAIN = ("linear_attention", "mamba", "conv", "hybrid"), ("moe", "mlp")
DTYPE = torch.bfloat16  #: dtype of models on the meta device
OLDEST = (5, 6)  #: oldest version of transformers whose layers run here; tested up to 5.23


SENSES = ("vision", "audio")
PART = "language_model."  #: part of the names of a text part's tensors in the whole model's checkpoint
#: Fields of the whole model's configuration that are valid for its text part too.
OF_THE_WHOLE = ("dtype", "eos_token_id", "tie_word_embeddings")

#: Reason for an Unsupported error.
OWN_ATTENTION = "it attends by code of its own, not through transformers' AttentionInterface"


class Unsupported(Exception):
    """The model cannot run with exact results. The message says why."""


class AttentionCall(NamedTuple):
    """The arguments of a layer's attention call: queries [1, H, R, d], keys and values [1, G, R, d], and others."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    options: dict[str, Any]


class ExpertsCall(NamedTuple):
    """A layer's call of its experts: rows [R, h]; the k experts of each row and their weights."""

    function: Callable[..., torch.Tensor]  #: transformers'
    module: torch.nn.Module
    rows: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


class LayerCall(NamedTuple):
    """The arguments with which the model calls a layer, without the first one (the hidden states)."""

    args: tuple
    kwargs: dict[str, Any]


class Embedded(NamedTuple):
    """A model's forward, interrupted at its last layer."""

    hidden: torch.Tensor  #: input of the first layer: [1, R, h], or [n, 1, R, h] for n hidden states per token
    calls: list[LayerCall]  #: one for each layer
    rest: Coroutine  #: the rest of the forward: resumed with the last hidden states, it returns logits


_AT_THE_LAST = object()  #: value with which the last layer's stand-in interrupts the forward
_NOTHING_ELSE = object()  #: replaces a layer's second result


def check_libraries() -> None:
    """Raise InputError if a library that runs transformers' layers is missing or too old."""
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise InputError(
            f"this model would run through transformers' own layers, for which {' and '.join(missing)} must be "
            f"installed: pip install {' '.join(missing)}"
        )
    installed = version("transformers")
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InputError(
            f"this model would run through transformers' own layers, which needs transformers {oldest} or later; "
            f"installed is {installed}: pip install 'transformers>={oldest}'"
        )


def _attend(module, query, key, value, attention_mask=None, **options):
    return interrupt(AttentionCall(module, query, key, value, attention_mask, options))


EXPERTS = "grouped_mm"  #: transformers' function for experts that ours stands in for
_at_experts = threading.local()  #: ``stop`` is True in this thread inside ``stopping_at_experts``


@contextmanager
def stopping_at_experts() -> Iterator[None]:
    """Interrupt layers that run inside the context at the call of their experts (``ExpertsCall``)."""
    _at_experts.stop = True
    try:
        yield
    finally:
        _at_experts.stop = False


def _experts(function, module, hidden_states, top_k_index, top_k_weights):
    call = ExpertsCall(function, module, hidden_states, top_k_index, top_k_weights)
    return interrupt(call) if getattr(_at_experts, "stop", False) else function(*call[1:])


#: Functions of ``masks_made_by``. The last one replaces transformers' mask maker (``mask_interface``).
_mask_maker: list[Callable] = []


def _mask(*_, mask_function, **others):
    return _mask_maker[-1](mask_function) if _mask_maker else None


@contextmanager
def masks_made_by(maker: Callable) -> Iterator[None]:
    """Let ``maker`` make the model's masks from mask functions inside the context. Outside, masks are None."""
    _mask_maker.append(maker)
    try:
        yield
    finally:
        _mask_maker.pop()


_BUILDING = threading.Lock()  #: held while transformers changes torch's default dtype, which is global
_rows = threading.local()  #: ``asked`` is True while this thread runs a model's forward (``Layers.embed``)


def _skip_search_for_packed_texts() -> None:
    """Stop transformers from searching our rows for several packed texts, by comparing positions.

    The resulting mask is unused here, and on a GPU the host would wait for the comparison.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    own = getattr(masking_utils, name, None)
    if own is None or hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def find(*args, **kwargs):
        return None if getattr(_rows, "asked", False) else own(*args, **kwargs)

    setattr(masking_utils, name, find)


#: Packages of CUDA kernels that transformers' recurrent layers could use but are missing. It warns of each once.
missing_kernels: set[str] = set()


def _is_about_other_things(record: logging.LogRecord) -> bool:
    """Return False, and record the package, if a transformers warning is about a missing package of CUDA kernels.

    Machines without a GPU do not need them. On a GPU machine, `flexhybrid doctor` reports missing packages.
    """
    text = record.getMessage()
    packages = re.findall(r"`([^`]+)` is not installed", text)
    if "reference PyTorch implementation" not in text or not packages:
        return True
    missing_kernels.update(packages)
    return False


def _hide_missing_kernels() -> None:
    """Hide transformers' warnings about missing CUDA kernels, and no others."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    if _is_about_other_things not in logger.filters:
        logger.addFilter(_is_about_other_things)


def build(folder: Path):
    """Return transformers' model for a checkpoint's config.json, without weights.

    The model has DTYPE; parts that differ keep their dtype at any compute dtype. Raise Unsupported if transformers
    cannot build the model, or if its layers or inputs are not supported.
    """
    import transformers
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    known = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    known.register(NAME, partial(_experts, known[EXPERTS]))
    AttentionMaskInterface.register(NAME, _mask)
    _skip_search_for_packed_texts()
    _hide_missing_kernels()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(config, "is_encoder_decoder", False):
            raise Unsupported("it has an encoder")
        if takes_more_than_text(config) and (config := text_part(config)) is None:
            raise Unsupported("it takes more than text, and has no part for text alone")
        if kinds := _stateful_kinds(config.get_text_config()):
            raise Unsupported(
                f"its layers of kind {kinds[0]} keep or see something else than keys and values of all tokens"
            )
        config._attn_implementation, dtype = NAME, config.dtype
        with _BUILDING, torch.device("meta"), torch.inference_mode(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=DTYPE)
        model.config.dtype = dtype
    except Unsupported:
        raise
    except Exception as error:  # transformers raises many error types for unknown models and unreadable files
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise Unsupported(OWN_ATTENTION) from None
        raise Unsupported(f"transformers {transformers.__version__} cannot build it: {one_line(error)}") from None
    finally:
        transformers.logging.set_verbosity(level)
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
            module.config._attn_implementation = NAME
        if getattr(getattr(module, "config", None), "_experts_implementation", None) == EXPERTS:
            module.config._experts_implementation = NAME
    return model.eval()


def takes_more_than_text(config) -> bool:
    """Return whether a configuration has a part for pictures or sound."""
    return any(sense in name for name in vars(config) if name.endswith("_config") for sense in SENSES)


def text_part(config):
    """Return the configuration of a model's text part; None if there is none."""
    text = config.get_text_config()
    if text is config or not getattr(text, "model_type", None):
        return None
    for field in OF_THE_WHOLE:
        if getattr(config, field, None) is not None:
            setattr(text, field, getattr(config, field))
    return text


def own_name(name: str) -> str:
    """Return the text part's name of a tensor, given its name in the whole model's checkpoint."""
    return name.replace(PART, "", 1)


def one_line(error: Exception) -> str:
    """Return an error as one line, shortened if long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240] or '-'}"


def _stateful_kinds(config) -> list[str]:
    """Return the unsupported kinds of layers in a configuration, sorted."""
    kinds = []
    for field in ("layer_types", "layers_block_type"):
        kinds += getattr(config, field, None) or []
    known = {"full_attention", "sliding_attention", "chunked_attention", "attention", *RECURRENT, *PLAIN}
    return sorted({str(kind) for kind in kinds} - known)


def decoder_layers(model) -> torch.nn.ModuleList:
    """Return the list of a model's decoder layers. Raise Unsupported unless there is exactly one such list."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    lists = [m for m in lists if all(any(part.children()) for part in m)]  # exclude lists of single matrices
    whole = [m for m in lists if not any(m is not other and m in set(other.modules()) for other in lists)]
    if len(whole) != 1:
        raise Unsupported(f"it has {len(whole)} lists of {count} layers")
    return whole[0]


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors view the same elements of the same memory. Works on the meta device."""
    return one is other or all(
        of(one) == of(other)
        for of in (
            lambda t: t.untyped_storage()._cdata,
            torch.Tensor.storage_offset,
            lambda t: (t.dtype, t.shape, t.stride()),
        )
    )


class Layers:
    """The layers of a model. Each layer runs in two calls, before and after its attention."""

    def __init__(self, model):
        self.model, self.layers = model, decoder_layers(model)
        self._records: dict[int, LayerCall] | None = None  # calls of the stand-ins; None: layers run
        self.hidden_size, self.streams = 0, 1  #: size of a hidden state, and hidden states per token
        self._passed: torch.Tensor | None = None
        self._pairs: bool | None = None  # whether a layer returns a pair; None: unknown
        for index, layer in enumerate(self.layers):
            self._wrap(index, layer)

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, *_) -> None:
        """Restore the model."""
        for layer in self.layers:
            del layer.forward

    def _wrap(self, index: int, layer: torch.nn.Module) -> None:
        own, last = layer.forward, len(self.layers) - 1

        def forward(hidden_states, *args, **kwargs):
            if self._records is None:
                return own(hidden_states, *args, **kwargs)
            if index == 0:
                self._passed = hidden_states
            elif self._passed is None or not same_tensor(hidden_states, self._passed):
                raise Unsupported("it computes something between its layers")
            if any(value is _NOTHING_ELSE for value in (*args, *kwargs.values())):
                raise Unsupported("its layers pass on more than hidden states")
            self._records[index] = LayerCall(args, kwargs)
            if index == last:
                hidden_states = interrupt(_AT_THE_LAST)
            return (hidden_states, _NOTHING_ELSE) if self._pairs else hidden_states

        layer.forward = forward

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> Embedded:
        """Run the model's forward up to its last layer's result, with stand-ins for its layers.

        ``ids``, ``positions``: token ids and positions, both [R]. Raise Unsupported if the forward does not call each
        layer once, in order, on the hidden states of the layer before.
        """
        if self._pairs is not None:
            return self._embed(ids, positions)
        try:
            embedded = self._embed(ids, positions)
            self._pairs = False
        except Exception as error:  # a model that unpacks its layers' results raises here
            self._pairs = True
            try:
                return self._embed(ids, positions)
            except Exception as second:
                self._pairs = None
                raise (second if isinstance(second, Unsupported) and "pass on" in str(second) else error) from None
        return embedded

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor) -> Embedded:
        rows = dict(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        self._records, _rows.asked = {}, True
        try:
            rest, interrupted_with = started(lambda: self.model(**rows).logits[0])
        finally:
            _rows.asked = False
            records, hidden = self._records, self._passed
            self._records = self._passed = None
        if interrupted_with is not _AT_THE_LAST or hidden is None or len(records) < len(self.layers):
            raise Unsupported("its forward does not call each of its layers once")
        self.hidden_size, self.streams = hidden.shape[-1], hidden.shape[0] if hidden.dim() == 4 else 1
        return Embedded(hidden, [records[index] for index in range(len(self.layers))], rest)

    def rows_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert the model's hidden states to one row per token: [R, h], or [R, n·h] if each token has n."""
        return hidden[0] if self.streams == 1 else hidden[:, 0].transpose(0, 1).flatten(1)

    def states_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Convert rows to the model's hidden states. Inverse of ``rows_of``."""
        if self.streams == 1:
            return rows[None]
        return rows.unflatten(1, (self.streams, -1)).transpose(0, 1).contiguous()[:, None]

    def head(self, hidden_Rh: torch.Tensor, rest: Coroutine | None = None) -> torch.Tensor:
        """Return the logits [R, vocab] of the last layer's hidden states.

        ``rest``: the rest of a forward over the same number of rows (default: a new forward). Raise Unsupported if the
        result is not one row per token.
        """
        if rest is None:
            zeros = torch.zeros(len(hidden_Rh), dtype=torch.int64, device=hidden_Rh.device)
            rest = self.embed(zeros, zeros).rest
        logits = rest.resume(self.states_of(hidden_Rh))
        if not rest.ended or logits.shape[0] != len(hidden_Rh):
            raise Unsupported("its forward does not end in one row of logits a token")
        return logits

    def begin(self, index: int, hidden: torch.Tensor, call: LayerCall) -> Pending:
        """Run a layer on hidden states of the model's shape, up to its attention call."""
        layer = self.layers[index]
        return begun(lambda: layer(hidden, *call.args, **call.kwargs))

    def finish(self, pending: Pending, attended: torch.Tensor) -> torch.Tensor:
        """Run the rest of a layer after its attention (output [1, R, H, d]); return the layer's hidden states."""
        return hidden_states(pending.run.resume((attended, None)))


def hidden_states(result: Any) -> Any:
    """Return the hidden states in a layer's result, or a call of its experts. Raise Unsupported if it attends again."""
    if isinstance(result, AttentionCall):
        raise Unsupported("a layer attends twice")
    if isinstance(result, ExpertsCall):
        return result
    return result[0] if isinstance(result, tuple) else result


def call_directly(model) -> None:
    """Make modules call their forward directly, and make attribute access of modules and configurations direct.

    Otherwise half of a small layer's Python time is spent on looking for hooks and attributes. Modules with hooks and
    configurations with computed attributes stay unchanged.
    """
    for module in model.modules():
        if not any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
            module.__class__ = _called_directly(type(module))
        for name, part in module._modules.items():
            vars(module).setdefault(name, part)
        config = vars(module).get("config")
        if config is not None and _holds_what_it_gives(config):
            config.__class__ = _read_directly(type(config))


@cache
def _called_directly(kind: type) -> type:
    def call(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def item(self, index):
        if isinstance(index, slice):  # the base class would build another ModuleList
            return list(self._modules.values())[index]
        return super(made, self).__getitem__(index)

    made: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": call})
    made.forward = kind.forward  # transformers' classes wrap the forward of a subclass
    if kind is torch.nn.ModuleList:
        made.__getitem__ = item
    return made


def _holds_what_it_gives(config) -> bool:
    """Return whether each attribute of a configuration is the value stored under the same name."""
    try:
        return not config.attribute_map and all(getattr(config, name) is held for name, held in vars(config).items())
    except RuntimeError:  # Gemma 4 forbids reading values that differ between layers
        return False


@cache
def _read_directly(kind: type) -> type:
    body = {"__module__": kind.__module__, "__getattribute__": object.__getattribute__}
    return type(kind.__name__, (kind,), body)


class Pending(NamedTuple):
    """A layer that is interrupted at its attention call."""

    run: Coroutine
    call: AttentionCall


def begun(function: Callable[[], Any]) -> Pending:
    """Run a function up to its attention call. Raise Unsupported if there is none."""
    run, call = started(function)
    if not isinstance(call, AttentionCall):
        raise Unsupported("a layer makes no attention call through transformers' AttentionInterface")
    return Pending(run, call)
