"""Model shapes: what schedule and cost model need to know of a model, read without torch or transformers."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from flexhybrid.core.errors import InputError, NotBuiltIn, check, is_number, shown, unknown
from flexhybrid.core.files import load_json
from flexhybrid.core.model.attention import PLAIN, AttentionKind, kinds_from_config
from flexhybrid.core.model.generation_config import end_tokens
from flexhybrid.core.model.layers import ModuleLayers
from flexhybrid.core.model.rope import Rope, rope_from_config, scaled_positions
from flexhybrid.core.model.states import LayerState
from flexhybrid.core.model.stored import GIVE_PLAIN, PackedFormat, PackedWeights, check_no_gguf, packed_format
from flexhybrid.core.policy import GROUP_ELEMENTS
from flexhybrid.core.units import gib

Width = TypeVar("Width", int, float)  #: bytes of an element, a fraction where scales and zeros are stored with it

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: model_type in config.json -> family. All families share the decoder-layer shape below; which ones the executor can
#: run is the runtime's affair (flexhybrid.runtime.models).
FAMILIES = {"opt": "opt", "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "phi3": "llama"}


class LayerKind(NamedTuple):
    """What a layer's work depends on beyond the sizes that all layers have."""

    weights: int  #: index of its tensors in ``ModuleLayers.kinds``; 0 where all layers have the same
    window: int | None  #: of its attention; None: it sees all tokens
    state: LayerState | None  #: state of a request in addition to keys and values; None: none
    borrows: bool = False  #: it attends to keys and values that another layer made, and stores none


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Sizes are counts of elements, never bytes."""

    name: str
    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    gated_mlp: bool = False
    rotary: bool = False
    tied_head: bool = True
    pre_norm: bool = True
    bias: bool = True  #: of every projection and norm
    embed_dim: int = 0  #: width of the embedding table; 0 means hidden (OPT-350m projects 512 -> 1024)
    dtype: str = "float16"  #: of the stored checkpoint
    eos_token_ids: tuple[int, ...] = (2,)
    qkv_bias: bool = False  #: without ``bias``: of the query, key and value projections alone (Qwen2)
    qk_norm: bool = False  #: keys and queries are normed head by head, before their rotation (Qwen3)
    norm_eps: float = 1e-5
    rope: Rope = Rope()  #: where ``rotary``
    attention: tuple[AttentionKind, ...] = (PLAIN,)  #: of the layers, in turn; behind the last the first comes again
    states: tuple[LayerState | None, ...] = ()  #: by layer, None of attention alone; empty: all layers are that
    #: by layer, the one whose keys and values it attends to: its own or an earlier layer's; empty: each its own
    sources: tuple[int, ...] = ()
    limit: int | None = None  #: tokens for which a request has room, where fewer than ``max_positions`` are wanted
    modules: ModuleLayers | None = None  #: of a model that runs through transformers' own layers

    def __post_init__(self):
        where = f"model {self.name}: "
        for field in (*_SIZES, "head_dim"):
            value = getattr(self, field)
            check(where + field, value, _is_count(value) and value >= 1, "a positive whole number")
        check(f"{where}embed_dim", self.embed_dim, _is_count(self.embed_dim) and self.embed_dim >= 0, "a whole number")
        for field in ("gated_mlp", "rotary", "tied_head", "pre_norm", "bias", "qkv_bias", "qk_norm"):
            check(where + field, getattr(self, field), isinstance(getattr(self, field), bool), "true or false")
        check(f"{where}eos_token_ids", self.eos_token_ids, all(map(_is_count, self.eos_token_ids)), "whole numbers")
        for kind in self.attention:
            kind.check(where)
        for layer, source in enumerate(self.sources):
            earlier = source < layer and self.sources[source] == source
            windows = {self.attention[of % len(self.attention)].window for of in (layer, source)}
            fits = source == layer or earlier and len(windows) == 1 and not self.states
            check(f"{where}sources[{layer}]", source, fits, "the layer itself, or an earlier one with the same window")
        small = is_number(self.norm_eps) and 0 < self.norm_eps < 1
        check(f"{where}norm_eps", self.norm_eps, small, "a small positive number")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model {self.name}: {self.num_heads} heads cannot be shared by {self.num_kv_heads} key/value heads"
            )

    @property
    def max_context(self) -> int:
        """Longest sequence that the executor runs."""
        return min(self.max_positions, self.limit or self.max_positions)

    @cached_property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """``attention`` without windows that no sequence outgrows."""
        narrow = (kind.window is not None and kind.window < self.max_context for kind in self.attention)
        return tuple(
            kind if keep else replace(kind, window=None) for kind, keep in zip(self.attention, narrow, strict=True)
        )

    def attention_of(self, layer: int) -> AttentionKind:
        """Return what attention of a layer is."""
        return self.attention_kinds[layer % len(self.attention)]

    def state_of(self, layer: int) -> LayerState | None:
        """Return what a layer keeps of a request in addition to keys and values; None for attention alone."""
        return self.states[layer] if self.states else None

    def source_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to."""
        return self.sources[layer] if self.sources else layer

    def borrows(self, layer: int) -> bool:
        """Return whether a layer attends to keys and values that another layer made."""
        return self.source_of(layer) != layer

    @cached_property
    def lending(self) -> tuple[int, ...]:
        """Return the layers whose keys and values other layers also attend to."""
        return tuple(sorted({source for layer, source in enumerate(self.sources) if source != layer}))

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """The layers that keep keys and values."""
        states = enumerate(map(self.state_of, range(self.num_layers)))
        own = (layer for layer, state in states if state is None or state.attends)
        return tuple(layer for layer in own if not self.borrows(layer))

    @cached_property
    def whole_prompts(self) -> bool:
        """Return whether prompts are computed whole: a recurrent state passes from token to token; and after a piece, a
        window's ring of blocks lacks what a borrowing layer needs for its first tokens."""
        return bool(self.recurrent) or any(self.attention_of(layer).window is not None for layer in self.lending)

    @cached_property
    def recurrent(self) -> tuple[int, ...]:
        """The layers that keep a state."""
        states = map(self.state_of, range(self.num_layers))
        return tuple(layer for layer, state in enumerate(states) if state and state.tensors)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(
            LayerKind(
                self.weights_kind(layer), self.attention_of(layer).window, self.state_of(layer), self.borrows(layer)
            )
            for layer in range(self.num_layers)
        )

    def weights_kind(self, layer: int) -> int:
        """Return which tensors a layer has: see ``LayerKind``."""
        return self.modules.kind_of[layer] if self.modules else 0

    @cached_property
    def weights_counts(self) -> tuple[int, ...]:
        """How many layers have the tensors of each kind."""
        of_layers = [self.weights_kind(layer) for layer in range(self.num_layers)]
        return tuple(map(of_layers.count, range(len(self.modules.kinds) if self.modules else 1)))

    def of_layers(self, layers: Sequence[int]) -> "ModelShape":
        """Return the shape of a model with only these layers. A layer whose lender is missing borrows from the last
        earlier one with the same window. Raise ValueError without one."""
        attention = tuple(self.attention[layer % len(self.attention)] for layer in layers)
        modules = self.modules and replace(self.modules, kind_of=tuple(self.modules.kind_of[layer] for layer in layers))
        states = tuple(self.states[layer] for layer in layers) if self.states else self.states
        return replace(
            self,
            num_layers=len(layers),
            attention=attention,
            modules=modules,
            states=states,
            sources=self._sources_of(layers) if self.sources else (),
        )

    def _sources_of(self, layers: Sequence[int]) -> tuple[int, ...]:
        sources: list[int] = []
        for place, layer in enumerate(layers):
            own = [at for at in range(place) if sources[at] == at]
            if not self.borrows(layer):
                sources.append(place)
            elif exact := [at for at in own if layers[at] == self.source_of(layer)]:
                sources.append(exact[-1])
            elif alike := [at for at in own if self.attention_of(layers[at]) == self.attention_of(layer)]:
                sources.append(alike[-1])
            else:
                raise ValueError(f"no layer before layer {layer} has the keys and values that it borrows")
        return tuple(sources)

    def of_weights(self, kind: int) -> "ModelShape":
        """Return the shape of a model whose layers all have the tensors of one kind."""
        return self if not self.modules or len(self.modules.kinds) == 1 else _of_weights(self, kind)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The windows of its layers, each once; empty where every layer sees all tokens."""
        return tuple(sorted({kind.window for kind in self.attention_kinds if kind.window is not None}))

    @cached_property
    def softcaps(self) -> bool:
        """Return whether some layer caps its scores."""
        return any(kind.softcap is not None for kind in self.attention)

    @property
    def passed_width(self) -> int:
        """Elements of what passes from layer to layer of one token: its hidden states."""
        return self.hidden * (self.modules.streams if self.modules else 1)

    @property
    def query_width(self) -> int:
        """H·d: columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def queries_per_key(self) -> int:
        """r = H/G: query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """2·G·d: elements of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def act_width(self) -> int:
        """Elements of one token's ACT in one layer, from which its keys and values are recomputed: h of the layer's
        input (after its norm), or a narrower row of the attention module, the latent of DeepSeek-V2."""
        return self.modules.latent or self.hidden if self.modules else self.hidden

    @property
    def act_group(self) -> int:
        """Elements of packed ACT that share a scale and a zero point: GROUP_ELEMENTS, or for a latent the largest
        divisor of its width that is no more."""
        if self.act_width == self.hidden:
            return GROUP_ELEMENTS
        return max(size for size in range(1, GROUP_ELEMENTS + 1) if self.act_width % size == 0)

    @property
    def kv_gen_elements(self) -> int:
        """Elements of the matrices with which keys and values are recomputed from ACT: h·2·G·d."""
        return self.modules.most("kv_gen", outside=True) if self.modules else self.hidden * self.kv_width

    @property
    def kv_group(self) -> int:
        """Elements of packed keys or values that share a scale and a zero point.

        The largest divisor of a head's width that is no more than GROUP_ELEMENTS: no group spans two heads.
        """
        return max(size for size in range(1, GROUP_ELEMENTS + 1) if self.head_dim % size == 0)

    @property
    def layer_matrix_elements(self) -> int:
        """Elements of a layer's matrices: OPT 2hHd + 2hGd + 2h·ffn, Llama 3h·ffn in the last term. Where layers have
        different ones, the most of each part; ``of_weights`` has a single kind."""
        if self.modules:
            return self.modules.most("early") + self.modules.most("late")
        mlp_matrices = 3 if self.gated_mlp else 2
        return self.hidden * (2 * self.query_width + self.kv_width + mlp_matrices * self.ffn)

    @property
    def layer_vector_elements(self) -> int:
        """Elements of a layer's norms and biases."""
        if self.modules:
            return self.modules.most("vectors")
        if not self.bias:  # RMSNorm scales
            biases = self.query_width + self.kv_width if self.qkv_bias else 0
            return 2 * self.hidden + biases + (2 * self.head_dim if self.qk_norm else 0)
        return 4 * self.hidden + (self.query_width + self.kv_width + self.hidden) + (self.ffn + self.hidden)

    def layer_bytes(self, matrix_bytes: float, vector_bytes: float | None = None) -> float:
        """Return the bytes of a decoder layer's weights (``layer_matrix_elements``); ``vector_bytes``: of norms,
        biases."""
        vector_bytes = matrix_bytes if vector_bytes is None else vector_bytes
        return self.layer_matrix_elements * matrix_bytes + self.layer_vector_elements * vector_bytes

    def embedding_bytes(self, bytes_per_element: int) -> int:
        """Return the bytes outside the layers.

        Token embedding; learned positions, if any; the final norm, if norms come first (a scale; in OPT also a bias);
        the output head, unless tied; and, if the embedding is narrower than the hidden state, the projections in and
        out.
        """
        if self.modules:
            return self.modules.outer_elements * bytes_per_element
        width = self.embed_dim or self.hidden
        elements = self.vocab * width * (1 if self.tied_head else 2)
        if self.pre_norm:
            elements += self.hidden * (2 if self.bias else 1)
        if not self.rotary:
            elements += (self.max_positions + OPT_POSITION_OFFSET) * self.hidden
        if width != self.hidden:
            elements += 2 * width * self.hidden
        return elements * bytes_per_element

    def weights_bytes(self, bytes_per_element: int) -> int:
        """Bytes of all weights, none of them packed."""
        counts = enumerate(self.weights_counts)
        layers = sum(count * self.of_weights(kind).layer_bytes(bytes_per_element) for kind, count in counts)
        return int(layers) + self.embedding_bytes(bytes_per_element)

    def stored_bytes(self, packed: PackedFormat) -> float | None:
        """Return the bytes of a checkpoint with packed layers; None if the format does not give its bits."""
        if packed.bits is None:
            return None
        elements = self.num_layers * self.layer_matrix_elements
        if self.modules:
            layers = [(index, self.modules.kinds[kind]) for index, kind in enumerate(self.modules.kind_of)]
            own = ((f"model.layers.{index}.{t.name}", t) for index, kind in layers for t in kind if not t.outside)
            elements = sum(t.elements for name, t in own if packed.packs(name, t.size))
        plain = DTYPE_BYTES[self.dtype]
        return self.weights_bytes(plain) - elements * (plain - packed.bits / 8)

    def kv_token_bytes(self, bytes_per_element: Width) -> Width:
        """Bytes of one token's keys and values in one layer: 2·G·d·p. A packed row is whole bytes."""
        return type(bytes_per_element)(round(self.kv_width * bytes_per_element))

    def act_token_bytes(self, bytes_per_element: Width) -> Width:
        """Bytes of one token's ACT in one layer. A packed row is whole bytes."""
        return type(bytes_per_element)(round(self.act_width * bytes_per_element))


@cache
def _of_weights(shape: ModelShape, kind: int) -> ModelShape:
    return replace(shape, modules=shape.modules.only(kind) if shape.modules else None)


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: OPT's learned positions start at row 2 of the table (a padding row that fairseq left behind).
OPT_POSITION_OFFSET = 2

#: Head size of Qwen3 at any hidden size, unless the configuration has it.
QWEN3_HEAD_DIM = 128

#: model_type -> the end token where neither config.json nor generation_config.json names one; of the others it is 2.
_END_TOKEN: dict[object, int | None] = {"qwen2": None, "qwen3": None, "phi3": 32000}


#: Sizes of a row of ``KNOWN_SHAPES`` after its name; OPT's rows have the first three.
_SIZES = ("num_layers", "hidden", "num_heads", "num_kv_heads", "ffn", "vocab", "max_positions")


def _opt(name: str, *row: int, **more) -> ModelShape:
    sizes = dict(zip(_SIZES, row))
    hidden, heads = sizes["hidden"], sizes["num_heads"]
    more |= dict(ffn=4 * hidden, vocab=50272, max_positions=2048)
    return ModelShape(name=f"opt-{name}", family="opt", num_kv_heads=heads, head_dim=hidden // heads, **sizes, **more)


def _gated(name: str, row: tuple[int, ...], eos: int = 2, theta: float = 1e4, **more) -> ModelShape:
    """Llama and those built like it: gated feed-forward, rotary positions, RMSNorm; bfloat16, its head not tied."""
    sizes = dict(zip(_SIZES, row, strict=True))
    built = dict(gated_mlp=True, rotary=True, bias=False, tied_head=False, dtype="bfloat16", rope=Rope(theta))
    fields: dict = sizes | built | more
    fields.setdefault("head_dim", sizes["hidden"] // sizes["num_heads"])
    return ModelShape(name=name, family="llama", eos_token_ids=(eos,), **fields)


def _qwen(name: str, row: tuple[int, ...], norm_eps: float = 1e-6, **more) -> ModelShape:
    return _gated(f"qwen2.5-{name}", row, 151643, theta=1e6, qkv_bias=True, norm_eps=norm_eps, **more)


def _qwen3(size: str, row: tuple[int, ...], **more) -> ModelShape:
    """Qwen3 as it is published for chats; the base models, "-base", end at another token and have 32,768 positions."""
    fields: dict = dict(qk_norm=True, norm_eps=1e-6, head_dim=QWEN3_HEAD_DIM) | more
    sizes = (*row, 151936, 40960)
    return replace(_gated(f"qwen3-{size}", sizes, theta=1e6, **fields), eos_token_ids=(151645, 151643))


_LLAMA_2_7B = 32, 4096, 32, 32, 11008, 32000
#: Public shapes, from config.json of published base models (OPT also: Zhang et al. 2022, table 1; Qwen3: chat).
KNOWN_SHAPES = {
    shape.name: shape
    for shape in (
        _opt("125m", 12, 768, 12),
        _opt("350m", 24, 1024, 16, pre_norm=False, embed_dim=512),
        _opt("1.3b", 24, 2048, 32),
        _opt("2.7b", 32, 2560, 32),
        _opt("6.7b", 32, 4096, 32),
        _opt("13b", 40, 5120, 40),
        _opt("30b", 48, 7168, 56),
        _opt("66b", 64, 9216, 72),
        _opt("175b", 96, 12288, 96),
        _gated("llama-2-7b", (*_LLAMA_2_7B, 4096), dtype="float16"),
        # Together's: Llama-2-7B, its positions scaled (config.json of togethercomputer/LLaMA-2-7B-32K)
        _gated("llama-2-7b-32k", (*_LLAMA_2_7B, 32768), dtype="float16", rope=Rope(type="linear", factor=8.0)),
        _gated("llama-2-13b", (40, 5120, 40, 40, 13824, 32000, 4096), dtype="float16"),
        _gated("llama-2-70b", (80, 8192, 64, 8, 28672, 32000, 4096), dtype="float16"),
        _gated("llama-3-8b", (32, 4096, 32, 8, 14336, 128256, 8192), 128001, theta=5e5),
        _gated("llama-3-70b", (80, 8192, 64, 8, 28672, 128256, 8192), 128001, theta=5e5),
        _gated("mistral-7b", (32, 4096, 32, 8, 14336, 32000, 32768), attention=(AttentionKind(4096),)),
        _qwen("0.5b", (24, 896, 14, 2, 4864, 151936, 32768), tied_head=True),
        _qwen("1.5b", (28, 1536, 12, 2, 8960, 151936, 131072), tied_head=True),
        _qwen("3b", (36, 2048, 16, 2, 11008, 151936, 32768), tied_head=True),
        _qwen("7b", (28, 3584, 28, 4, 18944, 152064, 131072)),
        _qwen("14b", (48, 5120, 40, 8, 13824, 152064, 131072), norm_eps=1e-5),
        _qwen("32b", (64, 5120, 40, 8, 27648, 152064, 131072), norm_eps=1e-5),
        _qwen("72b", (80, 8192, 64, 8, 29568, 152064, 131072), norm_eps=1e-5),
        _qwen3("0.6b", (28, 1024, 16, 8, 3072), tied_head=True),
        _qwen3("1.7b", (28, 2048, 16, 8, 6144), tied_head=True),
        _qwen3("4b", (36, 2560, 32, 8, 9728), tied_head=True),
        _qwen3("8b", (36, 4096, 32, 8, 12288)),
        _qwen3("14b", (40, 5120, 40, 8, 17408)),
        _qwen3("32b", (64, 5120, 64, 8, 25600)),
    )
}


def _plain_name(name: str) -> str:
    """How KNOWN_SHAPES spells a name: small letters, without what Hugging Face writes around it.

    "meta-llama/Llama-2-7b-hf" is llama-2-7b, "Meta-Llama-3-8B" llama-3-8b, "mistralai/Mistral-7B-v0.1" mistral-7b
    (v0.3 is not: its vocabulary is larger).
    """
    last = name.strip().rstrip("/").split("/")[-1].lower().removeprefix("meta-")
    return last.removesuffix("-v0.1" if last.startswith("mistral") else "-hf")


def shape_by_name(name: str) -> ModelShape:
    """A known shape: "opt-6.7b", any case, also as Hugging Face spells it ("facebook/opt-6.7b", "Llama-2-7b-hf").

    Raises InputError that lists the nearest known names, then all.
    """
    shape = KNOWN_SHAPES.get(_plain_name(name)) if isinstance(name, str) else None
    if shape is None:
        raise unknown("model", name, KNOWN_SHAPES)
    return shape


def shape_of(name_or_path: str | Path) -> ModelShape:
    """Return the shape of a known model name, or of the path of a config.json or its folder.

    A Path, and a text that contains an existing folder, is a path; any other text is a name if known, so that a local
    folder "opt-30b" is "./opt-30b". Raise InputError for anything else.
    """
    if isinstance(name_or_path, Path):
        return shape_from_config(name_or_path)
    if not isinstance(name_or_path, str):
        raise unknown("model", name_or_path, KNOWN_SHAPES, other=_OR_A_PATH)
    exists = os.path.exists(name_or_path)
    if os.path.dirname(name_or_path) and exists:
        return shape_from_config(name_or_path)
    if shape := KNOWN_SHAPES.get(_plain_name(name_or_path)):
        return shape
    if exists or name_or_path.endswith(".json"):
        return shape_from_config(name_or_path)
    raise unknown("model", name_or_path, KNOWN_SHAPES, other=_OR_A_PATH)


_OR_A_PATH = "the path of a config.json or of the folder that holds one"


MOST_LAYERS = 1_000


def shape_from_config(path: str | Path) -> ModelShape:
    """Read a Hugging Face ``config.json`` (or the folder that holds one).

    Raises InputError for a missing or broken file, an unknown architecture or a missing size.
    """
    path = given = Path(path)
    if os.path.isdir(path):  # no OSError for a name that is too long, as Path.is_dir has
        path = path / "config.json"
    if path == given or not os.path.exists(path):
        check_no_gguf(given)
    if not os.path.exists(path):
        raise InputError(f"no model configuration at {path}: give a local folder that holds config.json")
    config = load_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path} does not hold a JSON object")
    for part in (config, config.get("text_config")):
        for key, value in part.items() if isinstance(part, dict) else ():  # each layer costs memory before any weights
            few = not is_number(value) or value <= MOST_LAYERS
            check(f"{path}: {key}", value, few or not key.endswith(("layer", "layers")), f"at most {MOST_LAYERS}")
    packed = packed_format(config, path)
    shape = _shape_from_dict(config | {"dtype": stored_dtype(config, packed)}, path)
    check_plain(shape, packed, path)
    return shape


def stored_dtype(config: dict, packed: PackedFormat | None) -> str:
    """Return the dtype of a checkpoint's plain weights. Without one in the configuration it is bfloat16 next to packed
    weights, as in gpt-oss, else float32, as in transformers."""
    named = config.get("dtype") or config.get("torch_dtype") or ("bfloat16" if packed else "float32")
    return str(named).removeprefix("torch.")


def check_plain(shape: ModelShape, packed: PackedFormat | None, path: Path) -> None:
    """Raise PackedWeights for packed weights. Every reader of a model ends here: what cannot run is not predicted."""
    if packed:
        size, copy = shape.stored_bytes(packed), gib(shape.weights_bytes(DTYPE_BYTES[shape.dtype]))
        error = PackedWeights(
            f"{path}: the weights are packed as {packed.name}{f', {gib(size)}' if size else ''} ({packed.said_by}). "
            f'{GIVE_PLAIN}. To predict a plain copy, {copy}, set "dtype" to "{shape.dtype}" and remove {packed.said_by}'
        )
        error.method, error.stored_bytes = packed.method, size
        raise error


def has_own_file(folder: Path) -> bool:
    """Return whether the layer functions of ``FAMILIES`` run a checkpoint. Others, and a Llama with biases or long
    rotation, use transformers' layers. True for a broken config.json, whose error ``shape_from_config`` raises."""
    try:
        shape_from_config(folder / "config.json")
    except NotBuiltIn:
        return False
    except InputError:
        pass
    return True


def shape_of_checkpoint(folder: Path) -> ModelShape:
    """``shape_from_config`` of a checkpoint, which ``checkpoint_folder`` finds."""
    return shape_from_config(checkpoint_folder(folder))


def checkpoint_folder(model: str | Path) -> Path:
    """Return the folder of a checkpoint: the named one, or that of a name like facebook/opt-1.3b, or of a known shape,
    in the local Hugging Face cache. Raise InputError if there is none, with how to get it."""
    if os.path.isdir(model):
        return Path(model)
    check_no_gguf(Path(model))
    name, advice = str(model), ""
    repository = name if REPOSITORY.fullmatch(name) else _repository(_plain_name(name))
    if repository:
        cached = hugging_face_cache() / f"models--{repository.replace('/', '--')}"
        head = cached / "refs" / "main"
        if head.is_file() and (snapshot := cached / "snapshots" / head.read_text().strip()).is_dir():
            return snapshot
        short = repository.split("/")[1]
        advice = f". To get it: hf download {repository} --local-dir {short}"
    raise InputError(f"no checkpoint at {name}: give a local folder (nothing is ever downloaded){advice}")


#: How names of KNOWN_SHAPES begin -> where their weights are published; {} is the rest as the publisher writes it.
_PUBLISHED = {
    "opt-": "facebook/opt-{}", "llama-2-": "meta-llama/Llama-2-{}-hf", "llama-3-": "meta-llama/Meta-Llama-3-{}",
    "mistral-": "mistralai/Mistral-{}-v0.1", "qwen2.5-": "Qwen/Qwen2.5-{}", "qwen3-": "Qwen/Qwen3-{}",
}  # fmt: skip


def _repository(name: str) -> str | None:
    """Return the repository of a known shape on the Hugging Face Hub; None for a name that is not known."""
    if name not in KNOWN_SHAPES or name == "opt-175b":  # which is given on request alone
        return None
    start, repository = next((start, to) for start, to in _PUBLISHED.items() if name.startswith(start))
    size = name.removeprefix(start)
    return repository.format(size if start in ("opt-", "llama-2-") else size.upper())


#: A model's name on the Hugging Face Hub.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def hugging_face_cache() -> Path:
    """Return where huggingface_hub keeps what it has downloaded, by its environment variables."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or home)
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def _checkpoint_name(folder: Path) -> str:
    """Return the name of a checkpoint's folder, or of the repository of which it is a snapshot."""
    cached = folder.parent.parent.name
    return cached.split("--")[-1] if folder.parent.name == "snapshots" and "--" in cached else folder.name


def _shape_from_dict(config: dict, path: Path) -> ModelShape:  # noqa: C901 (one check for each field)
    model_type = config.get("model_type")
    check(f"{path}: model_type", model_type, isinstance(model_type, str), "the name of an architecture, such as llama")
    if (family := FAMILIES.get(str(model_type))) is None:
        raise NotBuiltIn(f"{path}: {unknown('architecture', model_type, sorted(FAMILIES))}")
    # By these fields transformers' cache forgets tokens, whether or not its attention has them, too.
    windowed = ["sliding_window"] if model_type in ("mistral", "phi3", "qwen2", "qwen3") else []
    windowed += ["layer_types"] if config.get("use_sliding_window") and model_type in ("qwen2", "qwen3") else []
    for key in ("sliding_window", "layer_types", "attention_chunk_size", "text_config", "is_encoder_decoder"):
        value, positions = None if key in windowed else config.get(key), config.get("max_position_embeddings")
        names = (
            set(map(str, value)) if isinstance(value, list) and len(value) == config.get("num_hidden_layers") else None
        )
        whole = names is not None and names <= {"full_attention"}
        whole = value is False or whole and model_type not in ("mistral", "phi3")  # of which all layers have windows
        if not (value is None or whole or is_number(value) and is_number(positions) and value >= positions):
            raise NotBuiltIn(f"{path}: {key} = {shown(value)} is not supported for {model_type}")

    def size(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        if default is None:
            raise InputError(f"{path}: {' or '.join(keys)} is missing")
        return default

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise InputError(f"{path}: hidden_size and num_attention_heads must be positive whole numbers")
    if config.get("head_dim") is None and model_type != "qwen3" and hidden % heads:
        raise InputError(f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if (dtype := config["dtype"]) not in DTYPE_BYTES:
        raise InputError(f"{path}: dtype {shown(dtype)} is not one of {', '.join(DTYPE_BYTES)}")
    folder = path.parent if path.name == "config.json" else None
    common: dict = dict(
        name=_checkpoint_name(path.parent) or model_type,
        family=family,
        num_layers=size("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=QWEN3_HEAD_DIM if model_type == "qwen3" else hidden // heads),
        ffn=size("ffn_dim", "intermediate_size"),
        vocab=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        dtype=dtype,
        eos_token_ids=end_tokens(folder, config.get("eos_token_id", _END_TOKEN.get(model_type, 2))),
    )
    if family == "opt":
        activation = config.get("activation_function", "relu")
        if activation != "relu":
            raise NotBuiltIn(f"{path}: activation_function {shown(activation)} is not supported; OPT uses relu")
        for key in ("enable_bias", "layer_norm_elementwise_affine", "_remove_final_layer_norm"):
            if config.get(key, wanted := not key.startswith("_remove")) is not wanted:
                raise NotBuiltIn(f"{path}: {key} = {shown(config[key])} is not supported")
        return ModelShape(
            **common,
            pre_norm=config.get("do_layer_norm_before", True),
            tied_head=config.get("tie_word_embeddings", True),
            embed_dim=size("word_embed_proj_dim", default=hidden),
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise NotBuiltIn(f"{path}: hidden_act {shown(activation)} is not supported; the gated feed-forward uses silu")
    for key in ("attention_bias", "mlp_bias"):  # Qwen2 has its biases without saying so
        if model_type != "qwen2" and config.get(key, False) is not False:
            raise NotBuiltIn(f"{path}: {key} = {shown(config[key])} is not supported")
    if not _is_count(common["head_dim"]) or common["head_dim"] % 2:
        raise InputError(f"{path}: head_dim {shown(common['head_dim'])} is not even; rotary positions turn pairs")
    shape = ModelShape(
        **common,
        gated_mlp=True,
        rotary=True,
        bias=False,
        tied_head=config.get("tie_word_embeddings", False),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        norm_eps=config.get("rms_norm_eps", 1e-5 if model_type == "phi3" else 1e-6),
        attention=kinds_from_config(config, path, common["num_layers"]),
    )
    rope = rope_from_config(config, path, shape.max_positions)
    positions = scaled_positions(shape.max_positions, rope.type, rope.factor, rope.original_max_positions)
    return replace(shape, rope=rope, max_positions=positions)
