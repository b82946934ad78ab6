"""Detect packed (quantized) checkpoints, so that their bytes are never read as plain weights."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from flexhybrid.core.errors import SHOWN, InputError, check, file_errors, is_integer, shown
from flexhybrid.core.files import load_json

GIVE_PLAIN = "Packed weights are not read: give a plain checkpoint, in float32, bfloat16 or float16"
#: Packing method -> pattern for endings of tensor names that accompany or replace packed weights.
PARTS = {
    "GPTQ or AWQ": r"\.(qweight|qzeros|g_idx|scales)",
    "MXFP4": "_(blocks|scales)",
    "FP8, int8 or int4": r"(weight|proj|input)_scale|_scale_(inv|2)|weight_(packed|shape|zero_point|g_idx|global\w+)",
    "bitsandbytes": r"\.weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+)|\.SCB",
    "quanto, HQQ, AQLM or ExLlama": r"\.weight\._(data|scale|shift)|\.(W_q|codes|codebooks|q_weight|q_scale|trellis)",
}
#: Fields of config.json, or of an object in it such as text_config, with the settings of packed weights.
FIELDS = ("quantization_config", "compression_config")
#: File next to config.json with such settings -> the method if the file names none.
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
#: Names that methods use in settings, for their variant, the bits of an element, the elements that share a scale, and
#: modules that stay plain.
VARIANTS = ("quant_algo", "format", "weights")
BITS, GROUPS = ("bits", "num_bits", "w_bit", "nbits"), ("group_size", "q_group_size")
KEPT = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers", "llm_int8_skip_modules")
#: Word in a format's name -> bits of an element with its share of a scale.
FIXED_BITS = {"mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8.0, "float8": 8.0, "int8": 8.0, "float-quantized": 8.0}
ROUTER = re.compile(r"(^|\.)(gate|router)(\.\w+)?\.weight$")


class PackedWeights(InputError):
    """Raised for a model whose weights are packed."""

    method: str  #: packing method
    stored_bytes: float | None  #: bytes of the checkpoint; None: unknown


class PackedFormat(NamedTuple):
    """The format of a checkpoint's packed weights, from its files."""

    method: str  #: name of the packing method
    name: str  #: the method with its variant, bits and groups
    said_by: str  #: field or file with these settings
    bits: float | None = None  #: bits of an element with its share of scales and zero points; None: unknown
    kept: str = ""  #: pattern for names of modules that stay plain

    def packs(self, tensor: str, size: tuple[int, ...]) -> bool:
        """Return whether a tensor of a layer is packed: a matrix, except routers and modules that stay plain."""
        if len(size) < 2 or tensor.endswith("bias") or ROUTER.search(tensor):
            return False
        if self.method == "mxfp4":
            return len(size) > 2  # only experts are packed
        return not (self.kept and re.search(rf"(^|\.)({self.kept})(\.|$)", tensor.removesuffix(".weight")))


def method_of_part(name: str) -> str | None:
    """Return the packing method that uses a tensor of this name; None for tensors of plain weights."""
    return next((method for method, ending in PARTS.items() if re.search(f"({ending})$", name)), None)


def packed_format(config: dict, path: Path) -> PackedFormat | None:
    """Return the format of a model's packed weights; None for plain weights. ``path``: its config.json, next to which
    other files are also read. Raise InputError for settings that cannot be read."""
    places, folder = _objects(config, path.name), path.parent
    said = [(f"{key} of {where}", part[key]) for where, part in places for key in FIELDS if key in part]
    if path.name == "config.json":
        said += [(name, load_json(folder / name)) for name in FILES if (folder / name).is_file()]
    for where, settings in said:
        known = not settings or isinstance(settings, dict)
        check(f"{path}: {where}", settings, known, "a JSON object, or null for plain weights")
        if settings and (found := _format(settings, where)):
            return found
    if path.name == "config.json" and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        check_no_gguf(folder)
    return None


def check_no_gguf(path: Path) -> None:
    """Raise InputError if a path is a GGUF file, or a folder with one."""
    for file in sorted(path.glob("*.gguf")) if os.path.isdir(path) else [path] * os.path.isfile(path):
        with file_errors(f"read {file}"), file.open("rb") as opened:
            if opened.read(4) == b"GGUF":
                raise InputError(f"{file} is a GGUF file. {GIVE_PLAIN}")


def _objects(whole: dict, name: str) -> list[tuple[str, dict]]:
    """Return (path, object) for a JSON object and all objects in it, outer ones first."""
    found = [(name, whole)]
    for where, part in found:  # the list grows meanwhile
        found += [(f"{key} of {where}", value) for key, value in part.items() if isinstance(value, dict)]
    return found


def _format(settings: dict, where: str) -> PackedFormat | None:
    """Return the format that a packing tool's settings describe; None if weights are plain."""
    said = {}
    for place, part in _objects(settings, ""):
        said = said if "activations" in place else part | said
    usual = "modelopt" if "quant_algo" in said else FILES.get(where, "a method without a name")
    if loaded := next((bits for bits in (4, 8) if said.get(f"load_in_{bits}bit") is True), 0):
        usual, scale_bits = "bitsandbytes", 8 if said.get("bnb_4bit_use_double_quant") else 32
        said = {"bits": loaded} | said | ({"group_size": 64, "scale_bits": scale_bits} if loaded == 4 else {})
    method = str(said.get("quant_method") or usual).lower()
    variant = next((text for key in VARIANTS if isinstance(text := said.get(key), str)), "").lower()
    if (method == "modelopt" and not variant) or (method == "bitsandbytes" and not loaded):
        return None  # only the cache is packed, or nothing
    numbers = {key: value for key, value in said.items() if is_integer(value) and 0 < value < 1 << 16}
    bits, size = (next((numbers[key] for key in keys if key in numbers), 0) for keys in (BITS, GROUPS))
    name = f"{method} {variant}".strip() + f", {bits} bits" * (bits > 0) + f" in groups of {size}" * (size > 0)
    width = next((width for word, width in FIXED_BITS.items() if word in name), None)
    if width is None and bits:
        zero_bits = 0 if said.get("symmetric") is True else bits
        width = bits + (numbers.get("scale_bits", 16 + zero_bits) / size if size else 0)
    lists = (said.get(key) for key in KEPT)
    kept = [text for texts in lists if isinstance(texts, list) for text in texts if isinstance(text, str)]
    kept = [text[3:] if text.startswith("re:") else re.escape(text).replace(r"\*", ".*") for text in kept]
    try:
        re.compile("|".join(kept))
    except re.error as error:
        raise InputError(f"{where}: {shown(kept)} are no patterns of modules: {error}") from None
    return PackedFormat(method, " ".join(name.split())[:SHOWN], where, width, "|".join(kept))
