"""Model shapes: the sizes and layer kinds that schedule and cost model need, read without torch or transformers."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from flexhybrid.core.errors import InputError, NotBuiltIn, check, is_integer, is_number, shown, unknown
from flexhybrid.core.files import load_json
from flexhybrid.core.model.attention import PLAIN, AttentionKind, kinds_from_config
from flexhybrid.core.model.generation_config import end_tokens
from flexhybrid.core.model.layers import ModuleLayers
from flexhybrid.core.model.packing import PackedRun
from flexhybrid.core.model.rope import Rope, rope_from_config, scaled_positions
from flexhybrid.core.model.states import LayerState
from flexhybrid.core.model.stored import GIVE_PLAIN, PackedFormat, PackedWeights, check_no_gguf, packed_format
from flexhybrid.core.policy import GROUP_ELEMENTS
from flexhybrid.core.units import gib

Width = TypeVar("Width", int, float)  #: bytes of an element; a fraction for packed elements with scales and zeros

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: model_type in config.json -> family. ``flexhybrid.runtime.models`` has the layer functions of each family.
FAMILIES = {"opt": "opt", "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "phi3": "llama"}


class LayerKind(NamedTuple):
    """Properties in which layers of a model may differ."""

    weights: int  #: index of its tensors in ``ModuleLayers.kinds``; 0 if all layers have the same tensors
    window: int | None  #: tokens of its attention window; None: it attends to all tokens
    state: LayerState | None  #: recurrent state in addition to keys and values; None: none
    borrows: bool = False  #: it attends to keys and values of another layer, and stores none
    routed: bool = False  #: see ``ModelShape.routed``


@dataclass(frozen=True)
class ModelShape:
    """The sizes and layers of a decoder-only transformer. Sizes count elements, not bytes."""

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
    bias: bool = True  #: every projection and norm has a bias
    embed_dim: int = 0  #: width of the embedding table; 0: ``hidden`` (OPT-350m projects 512 -> 1024)
    dtype: str = "float16"  #: dtype of the checkpoint
    eos_token_ids: tuple[int, ...] = (2,)
    qkv_bias: bool = False  #: without ``bias``: the query, key and value projections have biases (Qwen2)
    qk_norm: bool = False  #: queries and keys are normalized by head before their rotation (Qwen3)
    norm_eps: float = 1e-5
    rope: Rope = Rope()  #: parameters of rotary positions, if ``rotary``
    attention: tuple[AttentionKind, ...] = (PLAIN,)  #: attention of layer i is item i modulo the length
    states: tuple[LayerState | None, ...] = ()  #: recurrent state by layer; empty: no layer has one
    #: by layer, the layer whose keys and values it attends to, itself or an earlier one; empty: each its own
    sources: tuple[int, ...] = ()
    #: by layer, whether its experts can be computed for several mini-batches together; empty: no layer has such experts
    routed: tuple[bool, ...] = ()
    limit: int | None = None  #: most tokens of a request, if fewer than ``max_positions`` are wanted
    modules: ModuleLayers | None = None  #: tensors of a model that runs through transformers' own layers; else None
    #: (layout name, packed matrices that fill it) of each layer, for models with own layer functions (``own_matrices``)
    stored: tuple[tuple[str, tuple[PackedRun, ...]], ...] = ()

    def __post_init__(self):
        where = f"model {self.name}: "
        for field in (*_SIZES, "head_dim"):
            value = getattr(self, field)
            check(where + field, value, is_integer(value) and value >= 1, "a positive whole number")
        check(f"{where}embed_dim", self.embed_dim, is_integer(self.embed_dim) and self.embed_dim >= 0, "a whole number")
        for field in ("gated_mlp", "rotary", "tied_head", "pre_norm", "bias", "qkv_bias", "qk_norm"):
            check(where + field, getattr(self, field), isinstance(getattr(self, field), bool), "true or false")
        check(f"{where}eos_token_ids", self.eos_token_ids, all(map(is_integer, self.eos_token_ids)), "whole numbers")
        for kind in self.attention:
            kind.check(where)
        for layer, source in enumerate(self.sources):
            earlier = source < layer and self.sources[source] == source
            windows = {self.attention[i % len(self.attention)].window for i in (layer, source)}
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
        """Return the tokens of the longest sequence that the executor runs."""
        return min(self.max_positions, self.limit or self.max_positions)

    @cached_property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Return ``attention`` without windows that are as long as the longest sequence."""
        longest = self.max_context
        return tuple(kind if (kind.window or 0) < longest else replace(kind, window=None) for kind in self.attention)

    def attention_of(self, layer: int) -> AttentionKind:
        """Return the kind of attention of a layer."""
        return self.attention_kinds[layer % len(self.attention)]

    def state_of(self, layer: int) -> LayerState | None:
        """Return the recurrent state of a layer; None if it has only attention."""
        return self.states[layer] if self.states else None

    def source_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to."""
        return self.sources[layer] if self.sources else layer

    def borrows(self, layer: int) -> bool:
        """Return whether a layer attends to keys and values of another layer."""
        return self.source_of(layer) != layer

    @cached_property
    def lending(self) -> tuple[int, ...]:
        """Return the layers whose keys and values other layers also attend to."""
        return tuple(sorted({source for layer, source in enumerate(self.sources) if source != layer}))

    @cached_property
    def attending(self) -> tuple[int, ...]:
        """Return the layers that keep keys and values."""
        states = enumerate(map(self.state_of, range(self.num_layers)))
        own = (layer for layer, state in states if state is None or state.attends)
        return tuple(layer for layer in own if not self.borrows(layer))

    @cached_property
    def whole_prompts(self) -> bool:
        """Return whether prompts must be computed whole, not in chunks. A recurrent state passes from token to token.
        And after a chunk, the blocks of a layer with a window lack keys and values that a borrowing layer needs for the
        chunk's first tokens."""
        return bool(self.recurrent) or any(self.attention_of(layer).window is not None for layer in self.lending)

    @cached_property
    def recurrent(self) -> tuple[int, ...]:
        """Return the layers that keep a recurrent state."""
        states = map(self.state_of, range(self.num_layers))
        return tuple(layer for layer, state in enumerate(states) if state and state.tensors)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer."""
        routed = self.routed or (False,) * self.num_layers
        return tuple(
            LayerKind(self.weights_kind(n), self.attention_of(n).window, self.state_of(n), self.borrows(n), routed[n])
            for n in range(self.num_layers)
        )

    def weights_kind(self, layer: int) -> int:
        """Return ``LayerKind.weights`` of a layer."""
        return self.modules.kind_of[layer] if self.modules else 0

    @cached_property
    def weights_counts(self) -> tuple[int, ...]:
        """Return the number of layers with each kind of weights."""
        kinds = [self.weights_kind(layer) for layer in range(self.num_layers)]
        return tuple(map(kinds.count, range(len(self.modules.kinds) if self.modules else 1)))

    def of_layers(self, layers: Sequence[int]) -> "ModelShape":
        """Return the shape of a model with only these layers. A borrowing layer whose source is missing gets the last
        earlier layer with the same window as its source. Raise ValueError if there is none."""
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
            routed=tuple(self.routed[layer] for layer in layers) if self.routed else (),
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
        """Return the windows of the layers, each once; empty if every layer attends to all tokens."""
        return tuple(sorted({kind.window for kind in self.attention_kinds if kind.window is not None}))

    @cached_property
    def softcaps(self) -> bool:
        """Return whether a layer caps its attention scores."""
        return any(kind.softcap is not None for kind in self.attention)

    @property
    def passed_width(self) -> int:
        """Return the elements of a token's hidden states that pass from layer to layer."""
        return self.hidden * (self.modules.streams if self.modules else 1)

    @property
    def query_width(self) -> int:
        """Return H·d, the columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def queries_per_key(self) -> int:
        """Return H/G, the query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Return 2·G·d, the elements of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def act_width(self) -> int:
        """Return the elements of one token's ACT in one layer: h of the layer's normalized input, or the narrower
        latent row of DeepSeek-V2's attention."""
        return self.modules.latent or self.hidden if self.modules else self.hidden

    @property
    def act_group(self) -> int:
        """Return the elements of packed ACT that share a scale and a zero point: GROUP_ELEMENTS, or for a latent row
        its largest divisor up to that."""
        if self.act_width == self.hidden:
            return GROUP_ELEMENTS
        return max(size for size in range(1, GROUP_ELEMENTS + 1) if self.act_width % size == 0)

    @property
    def kv_gen_elements(self) -> int:
        """Return the elements of the matrices that recompute keys and values from ACT: h·2·G·d."""
        return self.modules.most("kv_gen", outside=True) if self.modules else self.hidden * self.kv_width

    @property
    def kv_group(self) -> int:
        """Return the elements of packed keys or values that share a scale and a zero point: the largest divisor of a
        head's width up to GROUP_ELEMENTS, so that no group spans two heads."""
        return max(size for size in range(1, GROUP_ELEMENTS + 1) if self.head_dim % size == 0)

    @property
    def layer_matrix_elements(self) -> int:
        """Return the elements of a layer's matrices: 2hHd + 2hGd + 2h·ffn (OPT) or 2hHd + 2hGd + 3h·ffn (Llama). If
        layers have different tensors, each part counts with its largest size; ``of_weights`` has one kind."""
        if self.modules:
            return self.modules.most("early") + self.modules.most("late")
        mlp_matrices = 3 if self.gated_mlp else 2
        return self.hidden * (2 * self.query_width + self.kv_width + mlp_matrices * self.ffn)

    @property
    def layer_vector_elements(self) -> int:
        """Return the elements of a layer's norms and biases."""
        if self.modules:
            return self.modules.most("vectors")
        if not self.bias:  # RMSNorm scales
            biases = self.query_width + self.kv_width if self.qkv_bias else 0
            return 2 * self.hidden + biases + (2 * self.head_dim if self.qk_norm else 0)
        return 4 * self.hidden + (self.query_width + self.kv_width + self.hidden) + (self.ffn + self.hidden)

    @cached_property
    def own_matrices(self) -> dict[str, tuple[int, int]]:
        """Return {layout name: (rows, columns)} of a layer's matrices, for models with own layer functions."""
        h, q, ffn = self.hidden, self.query_width, self.ffn
        gate = {} if self.family == "opt" else {"gate.weight": (ffn, h)}
        first = {"kvq.weight": (self.kv_width + q, h), "o.weight": (h, q)}
        return first | gate | {"up.weight": (ffn, h), "down.weight": (h, ffn)}

    @cached_property
    def unpacked(self) -> "ModelShape":
        """Return the shape of the same model with plain weights; kinds of layers keep their numbers."""
        if not self.packed_elements:
            return self
        return replace(self, stored=(), modules=self.modules and self.modules.unpacked)

    @cached_property
    def _packed_runs(self) -> list[tuple[PackedRun, ...]]:
        """Return the packed matrices of each kind of layers."""
        if self.modules:
            return [tuple(run for tensor in kind for run in tensor.stored) for kind in self.modules.kinds]
        return [tuple(run for _, runs in self.stored for run in runs)]

    @property
    def packed_elements(self) -> int:
        """Return the most elements of a layer's packed matrices; 0 if the checkpoint's weights are plain."""
        return max(sum(run.elements for run in runs) for runs in self._packed_runs)

    @property
    def packed_bytes(self) -> int:
        """Return the most bytes of a layer's packed matrices, as stored."""
        return max(sum(sum(run.part_bytes) for run in runs) for runs in self._packed_runs)

    def unpacks(self, weights_bits: str | int) -> bool:
        """Return whether layers are unpacked before they compute, with this ``bits.weights``."""
        return weights_bits != "native" or self.packed_elements > 0

    def layer_bytes(self, matrix_bytes: float, vector_bytes: float | None = None) -> float:
        """Return the bytes of a layer's weights, for these bytes of an element of matrices, and of norms and biases
        (default: the same)."""
        vector_bytes = matrix_bytes if vector_bytes is None else vector_bytes
        return self.layer_matrix_elements * matrix_bytes + self.layer_vector_elements * vector_bytes

    def embedding_bytes(self, bytes_per_element: int) -> int:
        """Return the bytes of weights outside the layers.

        These are the token embedding, learned positions, the final norm if norms come first (a scale; in OPT also a
        bias), the output head unless it is tied, and two projections if the embedding is narrower than hidden states.
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
        """Return the bytes of all weights; packed ones count as the checkpoint stores them."""
        layers = 0
        for kind, count in enumerate(self.weights_counts):
            one = self.of_weights(kind)
            plain = one.layer_bytes(bytes_per_element) - one.packed_elements * bytes_per_element
            layers += count * (plain + one.packed_bytes)
        return int(layers) + self.embedding_bytes(bytes_per_element)

    def stored_bytes(self, packed: PackedFormat) -> float | None:
        """Return the bytes of a checkpoint in a format that is not read; None if its settings do not give the bits."""
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
        """Return the bytes of one token's keys and values in one layer, rounded to whole bytes for packed rows."""
        return type(bytes_per_element)(round(self.kv_width * bytes_per_element))

    def act_token_bytes(self, bytes_per_element: Width) -> Width:
        """Return the bytes of one token's ACT in one layer, rounded to whole bytes for packed rows."""
        return type(bytes_per_element)(round(self.act_width * bytes_per_element))


@cache
def _of_weights(shape: ModelShape, kind: int) -> ModelShape:
    return replace(shape, modules=shape.modules.only(kind) if shape.modules else None)


#: OPT's learned positions start at row 2 of the table, because of padding rows in fairseq.
OPT_POSITION_OFFSET = 2

#: Head size of Qwen3, at any hidden size, if the configuration has none.
QWEN3_HEAD_DIM = 128

#: model_type -> end token if neither config.json nor generation_config.json has one (default: 2).
_END_TOKEN: dict[object, int | None] = {"qwen2": None, "qwen3": None, "phi3": 32000}


#: Columns of ``KNOWN_SHAPES`` after the name; OPT's rows have only the first three.
_SIZES = ("num_layers", "hidden", "num_heads", "num_kv_heads", "ffn", "vocab", "max_positions")


def _opt(name: str, *row: int, **more) -> ModelShape:
    sizes = dict(zip(_SIZES, row))
    hidden, heads = sizes["hidden"], sizes["num_heads"]
    more |= dict(ffn=4 * hidden, vocab=50272, max_positions=2048)
    return ModelShape(name=f"opt-{name}", family="opt", num_kv_heads=heads, head_dim=hidden // heads, **sizes, **more)


def _gated(name: str, row: tuple[int, ...], eos: int = 2, theta: float = 1e4, **more) -> ModelShape:
    """Return the shape of a model like Llama: gated feed-forward, rotary positions, RMSNorm; by default bfloat16 and a
    head that is not tied."""
    sizes = dict(zip(_SIZES, row, strict=True))
    built = dict(gated_mlp=True, rotary=True, bias=False, tied_head=False, dtype="bfloat16", rope=Rope(theta))
    fields: dict = sizes | built | more
    fields.setdefault("head_dim", sizes["hidden"] // sizes["num_heads"])
    return ModelShape(name=name, family="llama", eos_token_ids=(eos,), **fields)


def _qwen(name: str, row: tuple[int, ...], norm_eps: float = 1e-6, **more) -> ModelShape:
    return _gated(f"qwen2.5-{name}", row, 151643, theta=1e6, qkv_bias=True, norm_eps=norm_eps, **more)


def _qwen3(size: str, row: tuple[int, ...], **more) -> ModelShape:
    """Return the shape of a Qwen3 chat model. Base models ("-base") have another end token and 32,768 positions."""
    fields: dict = dict(qk_norm=True, norm_eps=1e-6, head_dim=QWEN3_HEAD_DIM) | more
    sizes = (*row, 151936, 40960)
    return replace(_gated(f"qwen3-{size}", sizes, theta=1e6, **fields), eos_token_ids=(151645, 151643))


_LLAMA_2_7B = 32, 4096, 32, 32, 11008, 32000
#: Shapes of published models, from the config.json of base models (Qwen3: chat models; OPT also from Zhang et al. 2022,
#: table 1).
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
        # Llama-2-7B with scaled positions, by Together (config.json of togethercomputer/LLaMA-2-7B-32K)
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
    """Return a Hugging Face name as KNOWN_SHAPES spells it: in small letters, without owner, prefix and suffix.

    "meta-llama/Llama-2-7b-hf" becomes llama-2-7b, "Meta-Llama-3-8B" llama-3-8b, "mistralai/Mistral-7B-v0.1" mistral-7b.
    Mistral v0.3 differs, because its vocabulary is larger.
    """
    last = name.strip().rstrip("/").split("/")[-1].lower().removeprefix("meta-")
    return last.removesuffix("-v0.1" if last.startswith("mistral") else "-hf")


def shape_by_name(name: str) -> ModelShape:
    """Return a known shape by name, in any case, also as Hugging Face spells it ("facebook/opt-6.7b"). Raise InputError
    for an unknown name."""
    shape = KNOWN_SHAPES.get(_plain_name(name)) if isinstance(name, str) else None
    if shape is None:
        raise unknown("model", name, KNOWN_SHAPES)
    return shape


def shape_of(name_or_path: str | Path) -> ModelShape:
    """Return the shape of a known model by name, or of a config.json by its path or its folder's.

    A Path is a path, and so is an existing file or folder whose text has a "/". Another text is a name if it is known,
    so a local folder "opt-30b" must be given as "./opt-30b". Raise InputError for anything else.
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


MOST_LAYERS = 1_000  #: limit that rejects a broken config.json before its layers take memory


def shape_from_config(path: str | Path) -> ModelShape:
    """Read a Hugging Face ``config.json``, or the one in a folder. Raise InputError for a missing or broken file, an
    unknown architecture or a missing size."""
    path = given = Path(path)
    if os.path.isdir(path):  # Path.is_dir would raise OSError for a name that is too long
        path = path / "config.json"
    if path == given or not os.path.exists(path):
        check_no_gguf(given)
    if not os.path.exists(path):
        raise InputError(f"no model configuration at {path}: give a local folder that holds config.json")
    config = load_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path} does not hold a JSON object")
    for part in (config, config.get("text_config")):
        for key, value in part.items() if isinstance(part, dict) else ():
            few = not is_number(value) or value <= MOST_LAYERS
            check(f"{path}: {key}", value, few or not key.endswith(("layer", "layers")), f"at most {MOST_LAYERS}")
    packed = packed_format(config, path)
    shape = _shape_from_dict(config | {"dtype": stored_dtype(config, packed)}, path)
    if packed and packed.form and config.get("model_type") == "phi3":  # its joined matrices have joined scales
        raise NotBuiltIn(f"{path}: packed weights of phi3 are joined")
    check_plain(shape, packed, path)
    return replace(shape, stored=_own_stored(shape, packed, path)) if packed else shape


_KVQ = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.q_proj.weight")
#: Family -> layout name of a layer's matrix -> tensors of the checkpoint, stacked by rows in this order.
MATRICES: dict[str, dict[str, tuple[str, ...]]] = {
    "opt": {
        "kvq.weight": _KVQ,
        "o.weight": ("self_attn.out_proj.weight",),
        "up.weight": ("fc1.weight",),
        "down.weight": ("fc2.weight",),
    },
    "llama": {
        "kvq.weight": _KVQ,
        "o.weight": ("self_attn.o_proj.weight",),
        "gate.weight": ("mlp.gate_proj.weight",),
        "up.weight": ("mlp.up_proj.weight",),
        "down.weight": ("mlp.down_proj.weight",),
    },
}


def _own_stored(shape: ModelShape, packed: PackedFormat, path: Path) -> tuple[tuple[str, tuple[PackedRun, ...]], ...]:
    """Return ``ModelShape.stored`` by the settings. Raise NotBuiltIn if layers differ."""
    layers, stored = "model.decoder.layers" if shape.family == "opt" else "model.layers", {}
    for name, (rows, cols) in shape.own_matrices.items():
        parts = [shape.kv_width // 2] * 2 + [shape.query_width] if name == "kvq.weight" else [rows]
        tensors = MATRICES[shape.family][name]
        which = {packed.packs(f"{layers}.{n}.{tensor}", (1, 1)) for n in range(shape.num_layers) for tensor in tensors}
        if len(which) > 1:
            raise NotBuiltIn(f"{path}: {packed.said_by} leaves some layers plain")
        if which == {True}:
            stored[name] = stacked(
                run for tensor, part in zip(tensors, parts) for run in packed.runs(f"{layers}.0.{tensor}", (part, cols))
            )
    return tuple((name, runs) for name, runs in stored.items() if runs)


def stacked(runs: Iterable[PackedRun]) -> tuple[PackedRun, ...]:
    """Return runs of one matrix each as rows of one tensor, one below the other."""
    placed, first = [], 0
    for run in runs:
        placed.append(run._replace(first=first))
        first += run.packing.rows
    return tuple(placed)


def stored_dtype(config: dict, packed: PackedFormat | None) -> str:
    """Return the dtype of a checkpoint's unpacked weights. If the configuration has none, it is bfloat16 next to packed
    weights (as in gpt-oss), otherwise float32 (as in transformers)."""
    named = config.get("dtype") or config.get("torch_dtype") or ("bfloat16" if packed else "float32")
    return str(named).removeprefix("torch.")


def check_plain(shape: ModelShape, packed: PackedFormat | None, path: Path) -> None:
    """Raise PackedWeights if weights are packed in a format that is not read. Every reader of a model calls this, so
    that models that cannot run are not predicted, either."""
    if packed and not packed.form:
        size, copy = shape.stored_bytes(packed), gib(shape.weights_bytes(DTYPE_BYTES[shape.dtype]))
        error = PackedWeights(
            f"{path}: the weights are packed as {packed.name}{f', {gib(size)}' if size else ''} ({packed.said_by}). "
            f'{GIVE_PLAIN}. To predict a plain copy, {copy}, set "dtype" to "{shape.dtype}" and remove {packed.said_by}'
        )
        error.method, error.stored_bytes = packed.method, size
        raise error


def has_own_file(folder: Path) -> bool:
    """Return whether the layer functions of ``FAMILIES`` run a checkpoint; other checkpoints use transformers' layers.
    True for a broken config.json, whose error ``shape_from_config`` raises later."""
    try:
        shape_from_config(folder / "config.json")
    except NotBuiltIn:
        return False
    except InputError:
        pass
    return True


def shape_of_checkpoint(folder: Path) -> ModelShape:
    """Return the shape of the checkpoint that ``checkpoint_folder`` finds."""
    return shape_from_config(checkpoint_folder(folder))


def checkpoint_folder(model: str | Path) -> Path:
    """Return the folder of a checkpoint: ``model`` if it is a folder, or the folder of a Hugging Face name or a known
    shape in the local Hugging Face cache. Raise InputError if there is none."""
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


#: Beginning of names of KNOWN_SHAPES -> Hugging Face repository; {} is the rest of the name.
_PUBLISHED = {
    "opt-": "facebook/opt-{}", "llama-2-": "meta-llama/Llama-2-{}-hf", "llama-3-": "meta-llama/Meta-Llama-3-{}",
    "mistral-": "mistralai/Mistral-{}-v0.1", "qwen2.5-": "Qwen/Qwen2.5-{}", "qwen3-": "Qwen/Qwen3-{}",
}  # fmt: skip


def _repository(name: str) -> str | None:
    """Return the repository of a known shape on the Hugging Face Hub; None for another name."""
    if name not in KNOWN_SHAPES or name == "opt-175b":  # its weights are not public
        return None
    start, repository = next((start, to) for start, to in _PUBLISHED.items() if name.startswith(start))
    size = name.removeprefix(start)
    return repository.format(size if start in ("opt-", "llama-2-") else size.upper())


#: Pattern of a model's name on the Hugging Face Hub.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def hugging_face_cache() -> Path:
    """Return the folder of huggingface_hub's downloads, by its environment variables."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or home)
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def _checkpoint_name(folder: Path) -> str:
    """Return the name of a checkpoint: its folder's, or its repository's if the folder is a snapshot in the cache."""
    cached = folder.parent.parent.name
    return cached.split("--")[-1] if folder.parent.name == "snapshots" and "--" in cached else folder.name


def _shape_from_dict(config: dict, path: Path) -> ModelShape:  # noqa: C901 (one check for each field)
    model_type = config.get("model_type")
    check(f"{path}: model_type", model_type, isinstance(model_type, str), "the name of an architecture, such as llama")
    if (family := FAMILIES.get(str(model_type))) is None:
        raise NotBuiltIn(f"{path}: {unknown('architecture', model_type, sorted(FAMILIES))}")
    # With these fields, transformers' cache drops tokens outside the window.
    windowed = ["sliding_window"] if model_type in ("mistral", "phi3", "qwen2", "qwen3") else []
    windowed += ["layer_types"] if config.get("use_sliding_window") and model_type in ("qwen2", "qwen3") else []
    for key in ("sliding_window", "layer_types", "attention_chunk_size", "text_config", "is_encoder_decoder"):
        value, positions = None if key in windowed else config.get(key), config.get("max_position_embeddings")
        named = value if isinstance(value, list) and len(value) == config.get("num_hidden_layers") else [None]
        whole = set(map(str, named)) <= {"full_attention"}
        whole = value is False or whole and model_type not in ("mistral", "phi3")  # their layers all have windows
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
    for key in ("attention_bias", "mlp_bias"):  # Qwen2 has biases without these fields
        if model_type != "qwen2" and config.get(key, False) is not False:
            raise NotBuiltIn(f"{path}: {key} = {shown(config[key])} is not supported")
    if not is_integer(common["head_dim"]) or common["head_dim"] % 2:
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
