"""Every decoder type of the installed transformers, at a tiny random size, against its own greedy generate.

    python tests/check_models.py [TYPE ...] [--table docs/models.md]

Each type must give the same tokens under every policy of POLICIES, or be refused with a reason before weights are read.
Exit status 1 where one gives other tokens, or is refused where it ran before (``LEAST``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from policies import wider_policies
from runs import run_wave
from tiny_models import greedy, save_tiny, tiny_config

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import FAMILIES
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.storage.loader import Checkpoint
from sim import catalogue
from sim.presets import act_only, hybrid, kv_only

LEAST = 65  #: types that must be exact
MOST_ELEMENTS = 20_000_000  #: of a model that is tiny
LENGTHS, MAX_TOKENS = (41, 5, 11), 14  # the first one is longer than the blocks that a window of 9 lies in
WIDER = wider_policies(400, 24, 12)
POLICIES = {
    "kv_only": kv_only(), "hybrid(0.5)": hybrid(0.5), "act_only": act_only(),
    **{name: WIDER[name] for name in ("disk", "row", "host attention")},
}  # fmt: skip


class Row(NamedTuple):
    model_type: str
    outcome: str  #: exact, refused, wrong, or no tiny model
    detail: str


def rows(types: list[str]) -> Iterator[Row]:
    """Yield the outcome of each type."""
    for model_type in types:
        with tempfile.TemporaryDirectory() as folder:
            yield Row(model_type, *_tried(Path(folder), model_type))


def _tried(folder: Path, model_type: str) -> tuple[str, str]:
    try:
        tiny_config(model_type).save_pretrained(folder)
    except Exception as error:  # whatever a configuration raises about sizes that do not fit
        return "no tiny model", _line(error)
    try:
        empty = empty_model(folder).model
    except InputError as error:
        return "refused", str(error).split("exactly: ")[-1]
    if (size := sum(parameter.numel() for parameter in empty.parameters())) > MOST_ELEMENTS:
        return "no tiny model", f"{size:,} parameters: its sizes have other names"
    try:
        model = save_tiny(folder, model_type)
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]
        expected = greedy(model, prompts, MAX_TOKENS)
    except Exception as error:
        return "no tiny model", _line(error)
    try:
        checkpoint = Checkpoint(folder, modules=True)
        wrong = [
            name
            for name, policy in POLICIES.items()
            if run_wave(checkpoint, policy, prompts, MAX_TOKENS, hardware=catalogue.load("t4")).tokens != expected
        ]
    except InputError as error:
        return "refused", str(error).split("exactly: ")[-1].replace(str(folder), "the checkpoint")
    except Exception as error:
        return "wrong", _line(error)
    return ("wrong", f"under {', '.join(wrong)}") if wrong else ("exact", "")


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:120]}"


PACKED = [
    "Of every type, weights in float32, bfloat16, float16 or float64 are read, and packed weights [in their stored",
    "bits](stored-bits.md): MXFP4 (gpt-oss), FP8 (DeepSeek-V3, Qwen3-FP8, compressed-tensors, ModelOpt), int8 and int4",
    "(compressed-tensors, GPTQ, AWQ gemm). Tried token for token: llama, qwen3, opt, phi3, qwen3_moe, mixtral,",
    "deepseek_v2, deepseek_v3, gpt_oss. Other formats (bitsandbytes, NVFP4, AQLM, GGUF, …) are refused by name, with",
    "their stored bytes, by `run`, `simulate`, `search` and `doctor`.",
]


def table(made: list[Row]) -> str:
    """Return docs/models.md."""
    import transformers

    count = {outcome: sum(row.outcome == outcome for row in made) for outcome in ("exact", "refused", "wrong")}
    untried = [row for row in made if row.outcome == "no tiny model"]
    lines = [
        "# Models",
        "",
        f"Made by `make check-models` with transformers {transformers.__version__} and torch {torch.__version__}.",
        f"Each of its {len(made)} types of causal models was tried at a tiny random size, in float32, on a CPU:",
        f"{len(LENGTHS)} prompts, {MAX_TOKENS} greedy tokens each, against transformers' own `generate`, under the",
        f"policies {', '.join(POLICIES)}.",
        f"{count['exact']} gave the same tokens under all of them, {count['refused']} are refused before weights are",
        f"read, {count['wrong']} gave others; of {len(untried)} no tiny model could be made.",
        "",
        f"Windows were shorter than the prompts. {', '.join(FAMILIES)} run on files of their own otherwise; here "
        "they ran through transformers' layers.",
        "",
        *PACKED,
        "",
        "## Exact",
        "",
        ", ".join(row.model_type for row in made if row.outcome == "exact"),
        "",
        "## Refused",
        "",
        "| type | reason |",
        "| --- | --- |",
        *(f"| {row.model_type} | {row.detail} |" for row in made if row.outcome == "refused"),
    ]
    for outcome, title in (("wrong", "Other tokens"), ("no tiny model", "Not tried")):
        if chosen := [row for row in made if row.outcome == outcome]:
            lines += ["", f"## {title}", "", "| type | what happened |", "| --- | --- |"]
            lines += [f"| {row.model_type} | {row.detail} |" for row in chosen]
    return "\n".join(lines) + "\n"


def main() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types (all)")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    made, start = [], time.perf_counter()
    for row in rows(args.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        made.append(row)
        print(f"{time.perf_counter() - start:6.0f} s  {row.model_type:24} {row.outcome:14} {row.detail}", flush=True)
    if args.table:
        args.table.write_text(table(made), encoding="utf-8")
    exact = sum(row.outcome == "exact" for row in made)
    wrong = [row.model_type for row in made if row.outcome == "wrong"]
    print(f"{exact} exact, {len(wrong)} wrong: {', '.join(wrong)}")
    sys.exit(bool(wrong) or not args.types and exact < LEAST)


if __name__ == "__main__":
    main()
