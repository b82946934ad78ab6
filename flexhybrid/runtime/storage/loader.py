"""Checkpoints in Hugging Face layout, read one tensor at a time from local files; and random weights of any shape.

Headers are checked against the model's shape before any weights are read, so that a truncated or foreign file is
refused at once. This module never opens a network connection.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.model.shape import ModelShape, shape_of_checkpoint
from flexhybrid.runtime.models import architecture

#: Dtypes of stored weights, by safetensors' names.
FLOATS = ("F64", "F32", "F16", "BF16")

#: File of a rotary model's skewing matrices, in the checkpoint's folder.
SKEW_FILE = "skew.safetensors"


class Checkpoint:
    """A local checkpoint folder. Raises InputError when a tensor of the model is missing or has a wrong shape.

    Tensors that the model does not use (rotary inv_freq of old checkpoints, the head of a tied model) are not read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.shape: ModelShape = shape_of_checkpoint(self.path)
        self._model = architecture(self.shape)
        self._files = _tensor_files(self.path)
        self._open: dict[Path, object] = {}
        self.prefix = self._find_prefix()
        self._check_shapes()

    def _find_prefix(self) -> str:
        names = {f"{prefix}embed_tokens.weight": prefix for prefix in self._model.PREFIXES}
        for name, prefix in names.items():
            if name in self._files:
                return prefix
        raise InputError(
            f"{self.path}: the checkpoint holds none of {', '.join(names)}; is it a {self.shape.family} model?"
        )

    def _layer_name(self, layer: int, tensor: str) -> str:
        return f"{self.prefix}layers.{layer}.{tensor}"

    def _outer_name(self, tensor: str) -> str:
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
            yield self._outer_name(tensor), wanted

    def _check_shapes(self) -> None:
        if "quantization_config" in json.loads((self.path / "config.json").read_text(encoding="utf-8")):
            raise InputError(
                f"{self.path}: config.json has a quantization_config; packed checkpoints are not read. Give the plain "
                "one (policy bits pack it while loading)"
            )
        for name, wanted in self._wanted():
            if name not in self._files:
                hint = " (it says tie_word_embeddings = false)" if name == "lm_head.weight" else ""
                raise InputError(
                    f"{self.path}: tensor {name} is missing; config.json asks for shape {list(wanted)}{hint}"
                )
            if (dtype := self._files[name].dtype_of(name)) not in FLOATS:
                raise InputError(
                    f"{self.path}: tensor {name} holds {dtype}; weights must be one of {', '.join(FLOATS)}"
                )
            stored = self._files[name].shape_of(name)
            if tuple(stored) != wanted:
                raise InputError(
                    f"{self.path}: tensor {name} has shape {list(stored)}, config.json asks for {list(wanted)}"
                )

    def read(self, name: str) -> torch.Tensor:
        try:
            return self._files[name].read(name)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise InputError(f"{self.path}: cannot read tensor {name}: {error}") from None

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        rows: dict[str, int] = {}
        for name, _, data in self.named_layer(layer):
            row = rows.get(name, 0)
            yield name, row, data
            rows[name] = row + data.shape[0]

    def named_layer(self, layer: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (layout name, checkpoint name, tensor) of one layer; tensors that share a layout name come in the order
        of their rows: keys, values, queries."""
        for name, tensors in self._model.layer_tensors(self.shape).items():
            for tensor in tensors:
                own_name = self._layer_name(layer, tensor)
                yield name, own_name, self.read(own_name)

    def named_outer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, tensor) of the tensors outside the layers."""
        for tensor in self._model.outer_tensors(self.shape):
            yield self._outer_name(tensor), self.read(self._outer_name(tensor))

    def outer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (layout name, tensor) outside the layers, copied: a tensor as read is a view of the mapped file."""
        for tensor in self._model.outer_tensors(self.shape):
            yield tensor, self.read(self._outer_name(tensor)).clone()

    def skew(self, layer: int) -> torch.Tensor | None:
        """Return a layer's skewing matrices [G, d, d], None for a model without. Raise InputError for another shape."""
        if not (file := self.path / SKEW_FILE).is_file():
            return None
        matrices, name = _SafetensorsFile(file), f"layers.{layer}"
        wanted = [self.shape.num_kv_heads, self.shape.head_dim, self.shape.head_dim]
        if name not in matrices.names or matrices.shape_of(name) != wanted:
            raise InputError(f"{file} holds no {name} of shape {wanted}: is it of another model?")
        return matrices.read(name)


class _SafetensorsFile:
    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            self.names = tuple(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot open {path}: {error}; is the file complete?") from None

    def shape_of(self, name: str) -> list[int]:
        return self._file.get_slice(name).get_shape()

    def dtype_of(self, name: str) -> str:
        return self._file.get_slice(name).get_dtype()

    def read(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)


class _PickleFile:
    """A pytorch_model.bin, loaded with weights_only: a pickle that would run code is refused."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many types for a broken or unsafe pickle
            raise InputError(f"cannot open {path}: {str(error).splitlines()[0]}") from None
        self.names = tuple(self._tensors)

    def shape_of(self, name: str) -> list[int]:
        return list(self._tensors[name].shape)

    def dtype_of(self, name: str) -> str:
        dtype = self._tensors[name].dtype
        return {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}.get(
            dtype, str(dtype)
        )

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _tensor_files(path: Path) -> dict[str, _SafetensorsFile | _PickleFile]:
    """Return {tensor name: the open file that holds it}: safetensors first, shards by their index."""
    for stem, suffix, opener in (("model", ".safetensors", _SafetensorsFile), ("pytorch_model", ".bin", _PickleFile)):
        index = path / f"{stem}{suffix}.index.json"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise InputError(f"cannot read {index}: {error}") from None
            files = [path / name for name in names]
        elif (path / f"{stem}{suffix}").is_file():
            files = [path / f"{stem}{suffix}"]
        else:
            continue
        opened = [opener(_existing(file)) for file in files]
        return {name: file for file in opened for name in file.names}
    raise InputError(f"{path} holds neither model.safetensors nor pytorch_model.bin (nor an index of shards)")


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise InputError(f"{file} is missing: the checkpoint's index names it")
    return file


class RandomWeights:
    """Random weights of any shape, fixed by their seed: for timing, where only sizes matter."""

    def __init__(self, shape: ModelShape, seed: int = 0, scale: float = 0.02, device: str = "cpu"):
        self.shape, self.seed, self.scale, self.device = shape, seed, scale, device
        self._model = architecture(shape)

    def _random(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm1.weight") or name.endswith("norm2.weight") or name.endswith("norm.weight"):
            return torch.ones(size)
        if name.endswith(".bias"):
            return torch.zeros(size)
        generator = torch.Generator(device=self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return torch.empty(size, device=self.device).normal_(0.0, self.scale, generator=generator)

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        for spot in layer_layout(self.shape, 2).spots:
            size = (spot.rows, spot.cols) if spot.cols else (spot.rows,)
            yield spot.name, 0, self._random(f"layer {layer} {spot.name}", size)

    def skew(self, layer: int) -> None:
        """Return None: random weights are not skewed."""

    def outer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, size in self._model.outer_tensors(self.shape).items():
            yield name, self._random(name, size)
