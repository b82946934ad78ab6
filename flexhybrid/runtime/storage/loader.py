"""Read checkpoints in Hugging Face layout from local files, one tensor at a time; and make random weights.

Headers are compared with the model's shape before any weights are read, so that truncated or wrong files are refused at
once. This module never opens a network connection.
"""

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from flexhybrid.core.errors import InputError, shown
from flexhybrid.core.files import check_no_pointer, load_json
from flexhybrid.core.model.layers import LayerTensor
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.model.packing import Header, PackedRun
from flexhybrid.core.model.shape import MATRICES, ModelShape, checkpoint_folder, has_own_file, shape_of_checkpoint
from flexhybrid.core.model.stored import GIVE_PLAIN, method_of_part, packed_format
from flexhybrid.runtime.models import architecture
from flexhybrid.runtime.models.empty_model import EmptyModel, TensorNames, empty_model
from flexhybrid.runtime.models.llama import packed_tensors
from flexhybrid.runtime.models.transformer import one_line
from flexhybrid.runtime.storage.conversion import Conversion
from flexhybrid.runtime.storage.packed import (
    UNUSED,
    Filling,
    PackedTensor,
    check_values,
    filling,
    find_packed,
    stacked_filling,
)

#: Allowed dtypes of stored weights -> their names in safetensors.
FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
PACKED = "packed"  #: in place of a dtype, for a tensor that ``flexhybrid.runtime.storage.packed`` reads

#: Name of the file with a rotary model's skewing matrices.
SKEW_FILE = "skew.safetensors"


class Checkpoint:
    """A local checkpoint folder. Raise InputError if a tensor of the model is missing or has a wrong shape.

    Unused tensors (like inv_freq of old checkpoints) are not read. A head that differs from the embedding is used even
    if the configuration ties them, as in transformers and vLLM. ``modules``: run the model through transformers' layers
    even if ``runtime.models`` has its architecture.
    """

    def __init__(self, path: str | Path, modules: bool = False):
        self.path = checkpoint_folder(path)
        self._modules = None
        if modules or not has_own_file(self.path):
            self._modules = ModuleTensors(self.path)
            self.shape: ModelShape = self._modules.shape
            return
        self.shape = shape_of_checkpoint(self.path)
        self._model = architecture(self.shape)
        self._stored, self._packed = _with_packed(self.path, _stored_tensors(self.path))
        self.prefix = self._find_prefix()
        self._fillings = self._find_fillings() if self._packed else [{}]
        if self._fillings is None:
            self._modules = ModuleTensors(self.path)
            self.shape = self._modules.shape
            return
        if self._packed:
            self.shape = replace(self.shape, stored=tuple((name, of.runs) for name, of in self._fillings[0].items()))
        head = self._stored.get("lm_head.weight")
        if self.shape.tied_head and head and not _is_same(head, self._stored[f"{self.prefix}embed_tokens.weight"]):
            self.shape = replace(self.shape, tied_head=False)
        if load_json(self.path / "config.json").get("model_type") == "phi3":
            self._unpack(packed_tensors(self.shape))
        self._check_shapes()

    def _find_prefix(self) -> str:
        names = {f"{prefix}embed_tokens.weight": prefix for prefix in self._model.PREFIXES}
        for name, prefix in names.items():
            if name in self._stored:
                return prefix
        raise InputError(
            f"{self.path}: the checkpoint holds none of {', '.join(names)}; is it a {self.shape.family} model?"
        )

    def _find_fillings(self) -> list[dict[str, Filling]] | None:
        """Return {layout name: filling} of each layer's packed matrices; None if the layers differ, or a matrix is
        packed in part."""
        fillings = []
        for layer in range(self.shape.num_layers):
            fillings.append({})
            for name, tensors in MATRICES[self.shape.family].items():
                names = [self._layer_name(layer, tensor) for tensor in tensors]
                if found := stacked_filling(names, self._packed):
                    fillings[-1][name] = found
                elif not self._packed.keys().isdisjoint(names):
                    return None
        alike = {tuple((name, of.runs) for name, of in found.items()) for found in fillings}
        return fillings if len(alike) == 1 else None

    def _unpack(self, packed: dict[str, dict[str, int]]) -> None:
        """Add the parts of joined tensors (``packed_tensors``) as separate tensors, if their shape is as expected."""
        for layer in range(self.shape.num_layers):
            for name, parts in packed.items():
                whole, first = self._stored.get(self._layer_name(layer, name)), 0
                if whole is None or whole.shape != [sum(parts.values()), self.shape.hidden]:
                    continue
                for part, rows in parts.items():
                    self._stored[self._layer_name(layer, part)] = whole.rows(first, first + rows)
                    first += rows

    def _layer_name(self, layer: int, tensor: str) -> str:
        return f"{self.prefix}layers.{layer}.{tensor}"

    def outer_name(self, tensor: str) -> str:
        """Return the checkpoint's name of a tensor outside the layers."""
        return tensor if tensor.startswith("lm_head") else self.prefix + tensor

    def _wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        spots = {spot.name: spot for spot in layer_layout(self.shape, 2).spots}
        kv_rows = self.shape.kv_width // 2
        for layer in range(self.shape.num_layers):
            for name, tensors in self._model.layer_tensors(self.shape).items():
                spot = spots[name]
                rows = [spot.rows] if len(tensors) == 1 else [kv_rows, kv_rows, spot.rows - 2 * kv_rows]
                for tensor, count in zip(tensors, rows, strict=True):
                    yield self._layer_name(layer, tensor), (count, spot.cols) if spot.cols else (count,)
        for tensor, wanted in self._model.outer_tensors(self.shape).items():
            yield self.outer_name(tensor), wanted

    def _check_shapes(self) -> None:
        needed = dict(self._wanted())
        _check_plain(self.path, self._stored, dict.fromkeys(needed, True))
        for name, wanted in needed.items():
            stored = self._stored.get(name)
            hint = " (it says tie_word_embeddings = false)" if name == "lm_head.weight" else ""
            _check_size(f"{self.path}: tensor {name}", stored and stored.shape, list(wanted), hint)

    def read(self, name: str) -> torch.Tensor:
        try:
            return self._stored[name].read()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise InputError(f"{self.path}: cannot read tensor {name}: {error}") from None

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (layout name, checkpoint name, tensor) of a layer. Tensors of one layout name come in row order."""
        if self._modules:
            yield from self._modules.layer_tensors(layer)
            return
        for name, tensors in self._model.layer_tensors(self.shape).items():
            if packed := self._fillings[layer].get(name) if self._fillings and self._packed else None:
                for own_name, piece in packed.pieces(self._packed):
                    yield name, own_name, piece
                continue
            for tensor in tensors:
                own_name = self._layer_name(layer, tensor)
                yield name, own_name, self.read(own_name)

    def outer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (layout name, tensor) outside the layers. They are copies; reading gives views of a mapped file."""
        if self._modules:
            yield from self._modules.outer_tensors()
            return
        _check_packed(self._packed)
        for tensor in self._model.outer_tensors(self.shape):
            yield tensor, self.read(self.outer_name(tensor)).clone()

    def skew(self, layer: int) -> torch.Tensor | None:
        """Return a layer's skewing matrices [G, d, d], or None. Raise InputError if their shape is wrong."""
        if not (file := self.path / SKEW_FILE).is_file():
            return None
        name = f"layers.{layer}"
        wanted = [self.shape.num_kv_heads, self.shape.head_dim, self.shape.head_dim]
        matrices = _open_safetensors(file).get(name)
        if matrices is None or matrices.shape != wanted:
            raise InputError(f"{file} holds no {name} of shape {wanted}: is it of another model?")
        return matrices.read()


class ModuleTensors:
    """The tensors of a checkpoint, converted for transformers' modules."""

    def __init__(self, path: Path):
        self.path = path
        empty = empty_model(path)
        self._stored, self._packed = _with_packed(path, _stored_tensors(path))
        self._conversion = Conversion(empty.model, list(self._stored))
        empty = empty_model(path, self._untied(empty))
        self.shape, model, _ = empty
        self._names = TensorNames.of(empty)
        self._sizes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        self._steps: dict[int | None, list[str]] = {None: []}  # layer (None: outside) -> first tensors of its steps
        self._fillings: dict[str, Filling] = {}
        self._check()
        own = {place: name for name, place in self._names.inside.items()}
        modules = self.shape.modules

        def runs_of(layer: int, tensor: LayerTensor) -> tuple[PackedRun, ...]:
            found = self._fillings.get(own[layer, tensor.name])
            return found.runs if found else ()

        if modules and self._packed:
            self.shape = replace(self.shape, modules=modules.with_runs(runs_of))
        placed = {own[n, t.name] for n, k in enumerate(self._kinds()) for t in k if t.stored}
        self._fillings = {name: of for name, of in self._fillings.items() if name in placed}

    def _untied(self, empty: EmptyModel) -> frozenset[str]:
        """Return tensors that the configuration ties to others, but which differ from them in the files."""
        own, untied = self._conversion.renamed, set()
        for names in TensorNames.of(empty).outside.values():
            stored = {name: self._stored[own[name]] for name in names if name in own}
            first, *others = stored or names
            untied |= {name for name in others if name in stored and not _is_same(stored[first], stored[name])}
        return frozenset(untied)

    def _check(self) -> None:
        """Convert all tensors on the meta device, and record each layer's steps.

        Raise InputError if a tensor is missing or has a wrong shape.
        """
        _check_plain(self.path, self._stored, self._conversion.sources())
        reads = {name: partial(torch.empty, part.shape, device="meta") for name, part in self._stored.items()}
        found = {}
        for first in self._conversion:
            try:
                made = {name: list(t.shape) for name, t in self._conversion.tensors(first, reads)}
            except Exception as error:
                raise InputError(f"{self.path}: transformers cannot convert {first}: {error}") from None
            found |= made
            self._fillings |= self._filled(first, made)
            for layer in {self._names.inside.get(name, (None, ""))[0] for name in made}:
                self._steps.setdefault(layer, []).append(first)
        tied = {name: names for names in self._names.outside.values() for name in names}
        for name, size in self._sizes.items():
            have = next((found[other] for other in tied.get(name, (name,)) if other in found), None)
            _check_size(f"{self.path}: tensor {name}", have, size)

    def _kinds(self) -> list[tuple[LayerTensor, ...]]:
        """Return the tensors of each layer."""
        modules = self.shape.modules
        return [modules.kinds[kind] for kind in modules.kind_of] if modules else []

    def _filled(self, first: str, made: Mapping[str, list[int]]) -> dict[str, Filling]:
        """Return {model tensor: filling} for the packed tensors of a step. The step is done with the numbers of rows in
        place of their elements, so that its result tells where each row goes."""
        names = self._conversion.sources_of(first)
        sources = [(name, self._packed[name]) for name in names if name in self._packed]
        if not sources or len(sources) < len(names):
            return {}
        numbers, start = {}, 0
        for name, tensor in sources:
            count = tensor.count * tensor.packing.rows
            numbered = torch.arange(start, start + count, dtype=torch.int64)
            turned = tensor.packing.format == "mxfp4"
            size = [*tensor.shape[:-2], 1, -1] if turned else [*tensor.shape[:-1], 1]
            numbers[name], start = partial(numbered.view, size), start + count
        found = {}
        for name, rows in self._conversion.tensors(first, numbers):
            if rows.numel() * sources[0][1].packing.cols != math.prod(made[name]):
                continue
            if of := filling(made[name], rows.flatten().numpy(), sources):
                found[name] = of
        return found

    def _converted(self, first: str) -> Iterator[tuple[str, torch.Tensor]]:
        reads = {name: part.read for name, part in self._stored.items()}
        try:
            yield from self._conversion.tensors(first, reads)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise InputError(f"{self.path}: cannot read {first}: {error}") from None

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (layout name, model's name, tensor) of a layer; of packed tensors, their bytes."""
        inside = self._names.inside
        for first in self._steps.get(layer, ()):
            if packed := self._fillings.get(first):
                for own_name, piece in packed.pieces(self._packed):
                    yield inside[first][1], own_name, piece
                continue
            for name, tensor in self._converted(first):
                if inside.get(name, (None, ""))[0] == layer:
                    yield inside[name][1], name, tensor

    def outer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (model's name, tensor) for each tensor that is no parameter of a layer, once."""
        _check_packed(self._packed)
        given = set()
        first = {name: names[0] for names in self._names.outside.values() for name in names}
        for name, tensor in (made for step in self._steps[None] for made in self._converted(step)):
            if name in first and first[name] not in given:
                given.add(first[name])
                yield first[name], tensor


class _Stored(NamedTuple):
    """A tensor of an open file."""

    shape: list[int]
    dtype: str  #: its name in safetensors
    read: Callable[[], torch.Tensor]
    file: str = ""

    def rows(self, first: int, end: int) -> "_Stored":
        """Return rows first … end - 1 as a tensor."""
        return self._replace(shape=[end - first, *self.shape[1:]], read=lambda: self.read()[first:end])


def _with_packed(path: Path, stored: dict[str, _Stored]) -> tuple[dict[str, _Stored], dict[str, PackedTensor]]:
    """Return (stored tensors, with packed ones as if they were plain; the packed ones)."""
    config = path / "config.json"
    if not (packed := packed_format(load_json(config), config)):
        return stored, {}
    headers = {name: Header(of.dtype, tuple(of.shape), of.file) for name, of in stored.items()}
    tensors, parts = find_packed(path, headers, {name: of.read for name, of in stored.items()}, packed)
    plain = {name: of for name, of in stored.items() if name not in parts and not name.endswith(UNUSED)}
    for note in packed.notes:
        _say_once(f"{path}: {note}")
    as_plain = {name: _Stored(of.shape, PACKED, of.read, Path(of.file).name) for name, of in tensors.items()}
    return plain | as_plain, tensors


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _check_packed(tensors: Mapping[str, PackedTensor]) -> None:
    """Raise InputError if a packed tensor has a scale that is not finite, or a wrong index."""
    for name, tensor in tensors.items():
        check_values(name, tensor)


def _check_size(tensor: str, found: list[int] | None, wanted: list[int], hint: str = "") -> None:
    """Raise InputError if a tensor is missing (None) or has a wrong shape."""
    if found is None:
        raise InputError(f"{tensor} is missing; config.json asks for shape {wanted}{hint}")
    if found != wanted:
        raise InputError(f"{tensor} has shape {found}, config.json asks for {wanted}")


def _is_same(one: _Stored, other: _Stored) -> bool:
    """Return whether two tensors have the same plain floating-point numbers."""
    alike = one.shape == other.shape and one.dtype == other.dtype and one.dtype in FLOATS.values()
    return alike and torch.equal(one.read(), other.read())


def _open_safetensors(path: Path) -> dict[str, _Stored]:
    check_no_pointer(path)
    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in tuple(file.keys())}
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot open {path}: {error}; is the file complete?") from None
    return {
        name: _Stored(part.get_shape(), part.get_dtype(), partial(file.get_tensor, name))
        for name, part in slices.items()
    }


def _open_pickle(path: Path) -> dict[str, _Stored]:
    """Open a pytorch_model.bin with weights_only, which refuses pickles that would run code.

    Values that are not tensors are ignored, as in transformers. Files of torch before 1.6 cannot be mapped, so they are
    read whole.
    """
    check_no_pointer(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        stored = {name: _Stored(list(t.shape), _dtype_of(t), lambda t=t: t) for name, t in tensors.items()}
    except Exception as error:  # torch raises many types for a broken or unsafe pickle
        raise InputError(f"cannot open {path}: {one_line(error)}") from None
    if not stored:
        raise InputError(f"{path} holds no tensors by name, but {shown(list(found))}: save the state_dict alone")
    return stored


def _dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype in safetensors; another name if the tensor cannot be used as it is."""
    plain = tensor.layout is torch.strided and not tensor.is_meta
    return FLOATS.get(tensor.dtype, str(tensor.dtype)) if plain else f"{tensor.layout} of {tensor.device}"


def _stored_tensors(path: Path) -> dict[str, _Stored]:
    """Return {name: tensor} of all the checkpoint's files.

    Files are chosen as in transformers: safetensors first, and a single file before an index of shards.
    """
    if other := load_json(path / "config.json").get("transformers_weights"):
        raise InputError(f"{path}: transformers_weights {shown(other)} of config.json is not supported")
    for stem, suffix, read in (("model", ".safetensors", _open_safetensors), ("pytorch_model", ".bin", _open_pickle)):
        index, single = path / f"{stem}{suffix}.index.json", path / f"{stem}{suffix}"
        if single.is_file():
            names = [single.name]
            if index.is_file():
                warnings.warn(f"weights come from {single}, as in transformers; {index.name} is ignored", stacklevel=2)
        elif index.is_file():
            try:
                names = sorted({str(name) for name in load_json(index)["weight_map"].values()})
            except (KeyError, AttributeError, TypeError) as error:
                raise InputError(f"cannot read {index}: {one_line(error)}") from None
            for name in names:
                if not (path / name).is_file():
                    raise InputError(f"{path / name} is missing: the checkpoint's index names it")
        else:
            continue
        return {name: stored._replace(file=file) for file in names for name, stored in read(path / file).items()}
    raise InputError(f"{path} holds neither model.safetensors nor pytorch_model.bin (nor an index of shards)")


def _check_plain(path: Path, stored: Mapping[str, _Stored], used: Mapping[str, bool]) -> None:
    """Raise InputError if weights are quantized: not floating-point numbers, or with an unused tensor such as a scale.

    ``used``: tensor -> whether it is a weight (and not, for instance, an index).
    """
    for name, tensor in stored.items():
        if used.get(name) and tensor.dtype not in (*FLOATS.values(), PACKED):
            found = f"holds {tensor.dtype}; weights must be one of {', '.join(FLOATS.values())}"
        elif name not in used and (method := method_of_part(name)):
            found = f"is a part of packed weights ({method})"
        else:
            continue
        raise InputError(f"{path / tensor.file}: tensor {name} {found}. {GIVE_PLAIN}")


DRAWN_AT_A_TIME = 1 << 24  #: maximum of elements drawn at a time: 64 MiB in float32


class RandomWeights:
    """Random weights of any shape, for timing, where only sizes matter. They are equal in every run."""

    def __init__(self, shape: ModelShape, device: str = "cpu"):
        self.shape, self.device = shape, device
        self._model: Any = None if shape.modules else architecture(shape)

    def _random(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(("norm1.weight", "norm2.weight", "norm.weight")):
            return torch.ones(size, dtype=torch.float32)
        if name.endswith(".bias"):
            return torch.zeros(size, dtype=torch.float32)
        generator = torch.Generator(device=self.device).manual_seed(zlib.crc32(f"0 {name}".encode()))
        return torch.empty(size, device=self.device, dtype=torch.float32).normal_(0.0, 0.02, generator=generator)

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield the tensors of a layer. Large ones come in several row parts, so that they fit on the device."""
        for spot in layer_layout(self.shape, 2, layer=layer).spots:
            if spot.runs:  # any bytes would do, but scales must be finite
                yield spot.name, spot.name, torch.zeros(spot.end - spot.start, dtype=torch.uint8)
                continue
            size = (spot.rows, spot.cols) if spot.cols else (spot.rows,)
            for piece in self._pieces(f"layer {layer} {spot.name}", size):
                yield spot.name, spot.name, piece

    def _pieces(self, name: str, size: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Yield a tensor in parts of up to DRAWN_AT_A_TIME elements, or of one row if that is longer."""
        at_a_time = max(1, DRAWN_AT_A_TIME // math.prod(size[1:]))
        for first in range(0, size[0], at_a_time):
            rows = min(at_a_time, size[0] - first)
            yield self._random(f"{name} from {first}" if first else name, (rows, *size[1:]))

    def skew(self, layer: int) -> None:
        """Return None: random weights are not skewed."""

    def outer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        of = self.shape.modules
        sizes = empty_model(Path(of.folder), of.untied).outer_sizes if of else self._model.outer_tensors(self.shape)
        for name, size in sizes.items():
            yield name, self._gathered(self._pieces(name, size), size)

    def _gathered(self, pieces: Iterator[torch.Tensor], size: tuple[int, ...]) -> torch.Tensor:
        """Return pieces as one tensor: on the host if there are several, because the device may lack room."""
        if math.prod(size) <= DRAWN_AT_A_TIME:
            return next(pieces)
        whole, first = torch.empty(size, dtype=torch.float32), 0
        for piece in pieces:
            whole[first : first + len(piece)] = piece
            first += len(piece)
        return whole
