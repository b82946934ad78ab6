"""Kinds of models times what published checkpoints vary: the tokens of transformers, or a refusal.

    python tests/runtime/models/check_variants.py [--kinds llama …] [--variants plain …]

Exit status 1 where a cell gives other tokens, or an error that is no InputError in one line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import edit_config, loaded
from runs import run_wave
from safetensors.torch import load_file, save_file
from tiny_models import greedy, save_tiny, save_with_pictures

from flexhybrid.core.errors import InputError
from flexhybrid.runtime.storage.loader import Checkpoint
from sim.presets import hybrid

KINDS = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "opt",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "gemma3_text",
    "cohere",
    "phi",
    "olmo2",
    "granite",
    "stablelm",
    "starcoder2",
    "glm4",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "jamba",
]
SHORT, MAX_TOKENS = [[5, 9, 33, 2, 17], [42] * 21], 6
LONG = [list(range(3, 63)), list(range(3, 60)) * 2]


def plain(folder: Path, kind: str) -> Any:
    save_tiny(folder, kind)


def tied_with_own_head(folder: Path, kind: str) -> Any:
    save_tiny(folder, kind, tie_word_embeddings=False)
    edit_config(folder, tie_word_embeddings=True)


def scaled(folder: Path, kind: str) -> Any:
    """YaRN by 4 of 40 positions, as model cards ask for it: into config.json by hand."""
    save_tiny(folder, kind)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 1e4}
    edit_config(folder, rope_parameters=..., rope_scaling=scaling, max_position_embeddings=40)


def nested(folder: Path, kind: str) -> Any:
    """The text part of a model that takes pictures."""
    return save_with_pictures(folder, "llava", kind, vision_feature_layer=-1)


def fp8_without_config(folder: Path, kind: str) -> Any:
    save_tiny(folder, kind)
    file = folder / "model.safetensors"
    weights = load_file(file)
    matrices = {name for name, tensor in weights.items() if tensor.dim() > 1 and "layers" in name or ".h." in name}
    scales = {name.replace("weight", "weight_scale"): torch.ones(1) for name in matrices if name.endswith("weight")}
    packed = {name: t.to(torch.float8_e4m3fn) if name in matrices else t for name, t in weights.items()}
    save_file(packed | scales, file, {"format": "pt"})


VARIANTS: dict[str, Callable[[Path, str], Any]] = {
    "plain": plain,
    "tied with own head": tied_with_own_head,
    "scaled": scaled,
    "nested": nested,
    "fp8 without config": fp8_without_config,
}


def tried(folder: Path, kind: str, variant: str) -> tuple[str, str]:
    """Return how a cell ends ("equal", "refused", "wrong", or "none" where there is no such checkpoint), and why."""
    prompts = LONG if variant == "scaled" else SHORT
    try:
        model = VARIANTS[variant](folder, kind)
    except Exception as error:
        return "none", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        checkpoint = Checkpoint(folder)
        longest = max(map(len, prompts)) + MAX_TOKENS
        if longest > checkpoint.shape.max_positions:
            return "refused", f"{checkpoint.shape.max_positions} positions"
        tokens = run_wave(checkpoint, hybrid(0.5), prompts, MAX_TOKENS).tokens
    except InputError as error:
        return ("wrong" if "\n" in str(error) else "refused"), str(error).replace(str(folder), "the checkpoint")
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    return ("equal" if tokens == greedy(model or loaded(folder), prompts, MAX_TOKENS) else "wrong"), ""


def main() -> int:
    import transformers

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    counts = dict.fromkeys(("equal", "refused", "none", "wrong"), 0)
    for kind in args.kinds:
        for variant in args.variants:
            with tempfile.TemporaryDirectory() as folder:
                result, why = tried(Path(folder), kind, variant)
            counts[result] += 1
            print(f"{kind:14} {variant:20} {result:8} {why[:160]}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
