"""Broken and odd checkpoints: each is refused in one line, or gives the tokens of transformers' model of its files.

    python tests/runtime/models/fuzz_checkpoints.py [--cases 2000] [--seed 0] [--types llama gemma2 …]

A case is a tiny checkpoint of one of the types that docs/models.md calls exact (every other case of one that has layer
functions of its own, which read config.json by code of their own), with one or two changes to its
config.json, its tensors or its safetensors header; all of it follows from the seed and the case's number. A case that
ends in another way (an error that is no InputError or takes several lines, other tokens, more than TIME_LIMIT_S) is
printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import loaded
from safetensors.torch import load_file, save_file
from tiny_models import greedy, save_tiny
from toy_machine import machine

from flexhybrid import LLM, SamplingParams
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import FAMILIES

PROMPTS = [[5, 9, 33, 2, 17], [42] * 21]
MAX_TOKENS = 6
TIME_LIMIT_S = 120  #: of a case: many times what the slowest takes
CASES_A_PROCESS = 250  #: transformers keeps some megabytes of each model that it has made
MEMORY_BYTES = 12 << 30  #: of the process: a huge allocation fails
NUMBERS = (-1, 0, 1, 2, 3, 0.5, -0.5, 1e-30, 1e30, 10**9, 2**31, 2**63, 10**30, float("nan"), float("inf"))
TEXTS = ("", "x", "2", "silu", "../x", "\0", "é" * 999)
ODD: list[Any] = [..., None, True, False, *NUMBERS, *TEXTS, [], [1], [None], {}, {"a": 1}, [[]]]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES = [
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0},
    {"rope_type": "llama3", **LLAMA3},
    {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    {"type": "su"},
    {"type": None},
    "linear",
]
#: Fields that files of other types, or of other tools, have.
EXTRA: dict[str, list[Any]] = {
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "sliding_window": [4, 16, 4096, None, "4"],
    "use_sliding_window": [True],
    "max_window_layers": [0, 1],
    "layer_types": [["sliding_attention"] * 3, ["full_attention"] * 3, ["x"], "full_attention"],
    "attention_bias": [True, None],
    "mlp_bias": [True],
    "hidden_act": ["gelu", "relu", "swish", "x"],
    "activation_function": ["gelu", "gelu_new", "x"],
    "partial_rotary_factor": [0.5, 1, 1.0, 0],
    "rope_theta": [1e6, 0, -1, None, "1e6"],
    "tie_word_embeddings": [True, False, None],
    "quantization_config": [None, {}, {"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}],
    "auto_map": [{"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}, None, {}],
    "head_dim": [8, 16, 17, 32, None],
    "dtype": ["float64", "bfloat16", "torch.float16", "int8", None, 3],
    "architectures": [[], None, ["X"], "X"],
    "is_encoder_decoder": [True],
    "num_key_value_heads": [1, 3, 4, None],
    "text_config": [{}, {"vocab_size": 97}, None],
    "model_type": ["llama", "opt", "gpt2", "x", None, 3, "t5"],
    "pad_token_id": [0, 96, 97, -1],
    "eos_token_id": [[1, 2], "2", 1e3, []],
    "transformers_weights": ["other.safetensors"],
}
REPLACED = ("garbage", "empty", "huge length", "long length", "short length", "no object", "deep", "twice", "truncated")
CHANGED = ("metadata", "offsets", "shape", "dtype", "overlap")  #: of one tensor in the header
HEADERS = (*REPLACED, "trailing", "missing", "folder", *CHANGED)
TENSORS = ("drop", "rename", "transpose", "cut", "cast", "extra", "scalar", "prefix", "scale", "nan")
FLOATS = (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
CASTS = (*FLOATS, torch.int8, torch.uint8, torch.int64, torch.bool)


class Case(NamedTuple):
    model_type: str
    base: Path  #: the checkpoint without changes
    changes: list[str]
    folder: Path


def exact_types() -> list[str]:
    """Return the types that docs/models.md calls exact."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    return re.findall(r"[\w-]+", text.split("## Exact")[1].split("##")[0])


class Cases:
    """Cases in a folder; each type's checkpoint is made once."""

    def __init__(self, folder: Path, types: list[str], seed: int):
        self.folder, self.types, self.seed = folder, types, seed

    def base(self, model_type: str) -> Path:
        folder = self.folder / model_type
        if not folder.is_dir():
            save_tiny(folder, model_type)
        return folder

    def case(self, number: int) -> Case:
        draw = random.Random(f"{self.seed} {number}")
        own = [kind for kind in self.types if kind in FAMILIES] or self.types
        types = self.types if number % 2 else own
        model_type = types[number // 2 % len(types)]
        folder = self.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.base(model_type), folder)
        changes = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            if "config.json is no object" in changes:
                break
            change = draw.choice((change_config, change_config, change_config, change_header, change_tensors))
            if change is change_config or (folder / "model.safetensors").is_file() and not changes:
                changes.append(change(folder, draw))
        return Case(model_type, self.base(model_type), changes, folder)


def change_config(folder: Path, draw: random.Random) -> str:
    path = folder / "config.json"
    config = fields = json.loads(path.read_text())
    where = ""
    while inner := [key for key, value in fields.items() if isinstance(value, dict) and value]:
        if draw.random() < 0.5:
            break
        where, fields = f"{where}{inner[0]}.", fields[inner[0]]
    kind = draw.random()
    if kind < 0.05:
        path.write_bytes(draw.choice((b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 9999, b'{"a": NaN}')))
        return "config.json is no object"
    if kind < 0.1:
        own = {key: config.pop(key) for key in list(config) if key not in ("model_type", "architectures", "dtype")}
        config["text_config"] = own | {"model_type": draw.choice((config.get("model_type"), "llama", None))}
        change = "all fields in text_config"
    elif kind < 0.5:
        key = draw.choice(list(EXTRA))
        fields[key] = value = draw.choice(EXTRA[key])
        change = f"{where}{key} = {value!r}"
    else:
        key = draw.choice(list(fields) or ["x"])
        old, value = fields.get(key), draw.choice(ODD)
        if type(old) in (int, float) and draw.random() < 0.4:
            value = draw.choice((-old, old * 2, old + 1, old - 1, str(old), float(old), [old], old // 2))
        fields[key] = value
        if value is ...:
            del fields[key]
        change = f"{where}{key} = {str(value)[:60]!r}"
    path.write_text(json.dumps(config))
    return change


def change_header(folder: Path, draw: random.Random) -> str:
    path, kind = folder / "model.safetensors", draw.choice(HEADERS)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    one, other = draw.choice(names), draw.choice(names)

    def joined(text: bytes, size: int | None = None) -> bytes:
        return struct.pack("<Q", len(text) if size is None else size) + text + data

    spot = header[one]
    start, end = spot["data_offsets"]
    if kind in CHANGED:
        odd = draw.choice((-1, 0, 2**40, 2**63, 10**30, 1.5, "1", None))
        offsets = draw.choice(([start, odd], [odd, end], [end, start], [start], [start, end + 4], odd))
        dtype = draw.choice(("F16", "BF16", "I32", "U8", "F8_E4M3", "F4", "X", 3, None))
        changed = {
            "offsets": {"data_offsets": offsets},
            "shape": {
                "shape": draw.choice(([odd, *spot["shape"][1:]], [*spot["shape"], 1], spot["shape"][::-1], [], odd))
            },
            "dtype": {"dtype": dtype},
            "overlap": {"data_offsets": header[other]["data_offsets"]},
            "metadata": {},
        }[kind]
        header[one] = spot | changed
        if kind == "metadata":
            header["__metadata__"] = draw.choice((3, {"format": 3}, {"format": "tf"}, {}, {"format": "x" * 9999}))
        path.write_bytes(joined(json.dumps(header).encode()))
        return f"header: {kind} of {one}: {changed or header.get('__metadata__')}"[:120]
    text = json.dumps(header).encode()
    if kind in ("missing", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return f"model.safetensors: {kind}"
    path.write_bytes(
        {  # one of them is made: a type's file may have a gigabyte
            "garbage": lambda: bytes(draw.randrange(256) for _ in range(200)),
            "empty": lambda: draw.choice((b"", content[:5], content[:8])),
            "huge length": lambda: joined(text, draw.choice((2**63, 2**64 - 1, 2**40, 10**8 + 1))),
            "long length": lambda: joined(text, length + 9),
            "short length": lambda: joined(text, draw.choice((0, 1, length - 9))),
            "no object": lambda: joined(draw.choice((b"[]", b"3", b"null", b'"x"', b"{"))),
            "deep": lambda: joined(b'{"a":' * 9999 + b"1" + b"}" * 9999),
            "twice": lambda: joined(text[:-1] + b"," + json.dumps({one: header[other]})[1:].encode()),
            "truncated": lambda: content[: draw.randrange(len(content))],
            "trailing": lambda: content + bytes(16),
        }[kind]()
    )
    return f"header: {kind}"


def change_tensors(folder: Path, draw: random.Random) -> str:
    path, kind = folder / "model.safetensors", draw.choice(TENSORS)
    weights = load_file(path)
    name = draw.choice(sorted(weights))
    tensor = weights[name]
    if kind in ("drop", "rename"):
        del weights[name]
    if kind == "rename":
        weights[f"x.{name}"] = tensor
    elif kind == "transpose":
        weights[name] = tensor.movedim(0, -1).contiguous()
    elif kind == "cut":
        weights[name] = tensor[: len(tensor) // 2].clone()
    elif kind == "cast":
        weights[name] = (tensor * 4).to(draw.choice(CASTS))
    elif kind == "extra":
        weights |= {"lm_head.weight": torch.randn(97, 64), "x.rotary_emb.inv_freq": torch.ones(3)}
    elif kind == "scalar":
        weights[name] = torch.tensor(1.0)
    elif kind == "prefix":
        prefix = draw.choice(("model.", "_orig_mod.", "base_model.model.", "module."))
        cut = draw.random() < 0.5
        weights = {name.removeprefix("model.") if cut else prefix + name: t for name, t in weights.items()}
    elif kind == "scale":
        weights[name.replace("weight", "weight_scale")] = torch.ones(1)
    elif kind == "nan":
        weights[name] = torch.full_like(tensor, float("nan"))
    save_file(weights, path, {"format": "pt"})
    return f"tensor {name}: {kind}"


def ours(folder: Path) -> list[list[int]]:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    options: Any = dict(device="cpu", dtype="float32", hardware=machine(), host_memory="1GiB", disk_dir=folder.parent)
    with LLM(folder, "hybrid(0.5)", **options) as llm:
        return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params)]


def outcome(case: Case) -> tuple[str, str]:
    """Return how a case ends, and what to report about it."""
    try:
        tokens = ours(case.folder)
    except InputError as error:
        text = str(error)
        return ("refused", text) if "\n" not in text and len(text) < 600 else ("several lines", text)
    except TimeoutError as error:
        return "hang", str(error)
    except Exception as error:
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-3:])
        return "traceback", "".join([*frames, *traceback.format_exception_only(error)])
    try:
        expected, equal = greedy(loaded(case.folder), PROMPTS, MAX_TOKENS), "equal"
    except Exception as error:
        # What transformers checks, and no text layer reads, a field or a tensor of pictures or sounds: without it the
        # tokens are the same.
        shutil.copy(case.base / "config.json", case.folder)
        if OTHER_PARTS.search(case.changes[0]):
            shutil.copy(case.base / "model.safetensors", case.folder)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if len(case.changes) > 1:
            return "no oracle", reason
        try:
            expected, equal = (
                greedy(loaded(case.folder), PROMPTS, MAX_TOKENS),
                "equal, with what transformers refuses",
            )
        except Exception:
            return "wrong", f"transformers does not load it: {reason}"
    return (equal, "") if tokens == expected else ("wrong", f"{tokens} instead of {expected}")


OTHER_PARTS = re.compile(r"^tensor \S*(tower|vision|visual|audio)")
FAILURES = ("traceback", "several lines", "wrong", "hang")


def _too_long(*_):
    raise TimeoutError(f"longer than {TIME_LIMIT_S} s")


def run(types: list[str], numbers: range, seed: int, quiet: bool = True, alarm=lambda seconds: None) -> Counter:
    """Run cases; return counts of outcomes, printing bad ones. ``alarm`` raises TimeoutError after seconds."""
    counts: Counter = Counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = Cases(Path(folder), types, seed)
        for number in numbers:
            case = cases.case(number)
            alarm(TIME_LIMIT_S)
            try:
                result, detail = outcome(case)
            except TimeoutError as error:
                result, detail = "hang", str(error)
            finally:
                alarm(0)
            counts[result] += 1
            if result in FAILURES or not quiet:
                print(f"{number} {case.model_type} {case.changes}: {result}: {detail}", flush=True)
    return counts


def run_alone(types: list[str], seed: int, quiet: bool, numbers: range) -> Counter:
    """Run cases in their own process."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _too_long)
    return run(types, numbers, seed, quiet, signal.alarm)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--types", nargs="+", help="types of models (default: all that docs/models.md calls exact)")
    parser.add_argument("--all", action="store_true", help="print every case")
    args = parser.parse_args()
    start, counts, end = time.monotonic(), Counter(), args.first + args.cases
    parts = [range(first, min(first + CASES_A_PROCESS, end)) for first in range(args.first, end, CASES_A_PROCESS)]
    these = partial(run_alone, args.types or exact_types(), args.seed, not args.all)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for found in pool.map(these, parts):
            counts += found
    print(", ".join(f"{name} {count}" for name, count in counts.most_common()), f"{time.monotonic() - start:.0f} s")
    return int(any(counts[name] for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
