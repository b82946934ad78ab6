"""Find the format of packed (quantized) checkpoints, so that their bytes are never read as plain weights."""

import os
import re
from math import prod
from pathlib import Path
from typing import NamedTuple

from flexhybrid.core.errors import SHOWN, InputError, check, file_errors, is_integer, shown
from flexhybrid.core.files import load_json
from flexhybrid.core.model.packing import MXFP4_GROUP, PackedRun, Packing, default_packing

GIVE_PLAIN = (
    "Such weights are not read: give plain ones, in float32, bfloat16 or float16, or MXFP4, FP8 (by block, row or "
    "tensor), int8 or int4 (compressed-tensors, GPTQ, AWQ gemm)"
)
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
#: Packing method -> its usual format in ``packing.FORMATS``.
READ = {"mxfp4": "mxfp4", "fp8": "block", "fbgemm_fp8": "scaled", "gptq": "gptq", "awq": "awq"}
#: Variant of compressed-tensors or ModelOpt -> the same.
READ_VARIANTS = {
    **dict.fromkeys(("float-quantized", "int-quantized", "naive-quantized", "fp8"), "scaled"),
    "pack-quantized": "grouped",
}
#: Format -> usual dtype of its scales, if not BF16.
SCALES = {"block": "F32", "gptq": "F16", "awq": "F16"}
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
    form: str = ""  #: usual format of its matrices, a key of ``packing.FORMATS``; empty: not read
    code_bits: int = 8  #: bits of a code
    block: tuple[int, int] = (0, 0)  #: rows and columns that share a scale; 0: all
    zeros: bool = False  #: there are zero points
    order: bool = False  #: the group of each column is stored
    zero_offset: int = 0  #: added to stored zero points
    notes: tuple[str, ...] = ()  #: settings that a run does not follow

    def packs(self, tensor: str, size: tuple[int, ...]) -> bool:
        """Return whether a tensor of a layer is packed: a matrix, except routers and modules that stay plain."""
        if len(size) < 2 or tensor.endswith("bias") or ROUTER.search(tensor):
            return False
        if self.method == "mxfp4":
            return len(size) > 2  # only experts are packed
        return not (self.kept and re.search(rf"(^|\.)({self.kept})(\.|$)", tensor.removesuffix(".weight")))

    def runs(self, tensor: str, size: tuple[int, ...]) -> tuple[PackedRun, ...]:
        """Return how a layer's tensor is stored, by the settings alone; empty if it is plain. A checkpoint's files may
        have scales of another dtype."""
        if not self.form or not self.packs(tensor, size):
            return ()
        rows, cols = size[-2:] if self.form != "mxfp4" else (size[-1], size[-2])
        block = self.block[0] or rows, self.block[1] or cols
        matrix = Packing(self.form, rows, cols, self.code_bits, block, zero_offset=self.zero_offset)
        packing = default_packing(matrix, SCALES.get(self.form, "BF16"), self.zeros, self.order)
        return (PackedRun(packing, prod(size[:-2]), 0, rows),)


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
    name = " ".join(name.split())[:SHOWN]
    found = PackedFormat(method, name, where, width, "|".join(kept), notes=_notes(settings, said))
    return _read(found, said, variant, bits, size)


def _read(found: PackedFormat, said: dict, variant: str, bits: int, group: int) -> PackedFormat:
    """Return a format with the fields that reading it needs; unchanged if it is not read."""
    method = found.method
    form = READ.get(method) or (READ_VARIANTS.get(variant, "") if method in ("compressed-tensors", "modelopt") else "")
    sparse = said.get("sparsity_config")
    if isinstance(sparse, dict) and sparse.get("format") not in (None, "dense"):
        return found._replace(name=f"{method} with sparsity {shown(sparse.get('format'))}")
    version = str(said.get("version" if method == "awq" else "checkpoint_format") or "").lower()
    if form in ("gptq", "awq"):
        known = ("", "gptq", "gptq_v2") if form == "gptq" else ("", "gemm")
        if version not in known or said.get("is_marlin_format") or bits not in ((4, 8) if form == "gptq" else (4,)):
            return found._replace(name=f"{found.name} {version}".strip())
    elif form == "grouped" and bits not in (4, 8):
        return found
    block = said.get("weight_block_size") or said.get("block_structure")
    strategy = str(said.get("strategy") or {"fbgemm_fp8": "channel"}.get(method, ""))
    if not isinstance(block, list) or len(block) != 2 or not all(is_integer(n) and n > 0 for n in block):
        by_row = strategy in ("channel", "group") or form in ("grouped", "gptq", "awq")
        block = 1 if by_row else 0, MXFP4_GROUP if form == "mxfp4" else group
    symmetric = said.get("symmetric", True) is True
    return found._replace(
        form=form,
        code_bits=4 if form == "mxfp4" else bits or 8,
        block=tuple(block),
        zeros=not symmetric,
        order=form == "gptq" or said.get("actorder") == "group",
        zero_offset=int(form == "gptq" and version != "gptq_v2"),
    )


def _notes(settings: dict, said: dict) -> tuple[str, ...]:
    """Return sentences about settings that a run does not follow."""
    parts = _objects(settings, "")
    rounded = said.get("activation_scheme") or any(part for where, part in parts if "activations" in where)
    cache = said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo")
    notes = ["activations stay in the compute dtype; only weights are packed"] * bool(rounded)
    return (*notes, *["its kv_cache_scheme is ignored: bits.kv of the policy decides"] * bool(cache))
