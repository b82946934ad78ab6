"""InfiniGen's accuracy experiments (OSDI 2024, Table 2, Fig. 4, 11 to 13, 17, 19) on a small model.

Runs the model in the executor under every policy that these compare, on texts of as many documents, none of which it
has learned from. Writes experiments/results/accuracy/MODEL.json, from which
``experiments.reproduce.infinigen.accuracy`` makes tables and figures. On one core it takes some minutes for a model of
640 positions, the better part of an hour for one of 2,048.

Usage::

    python -m experiments.studies.accuracy_study [--models experiments/checkpoints/opt-stdlib-deep …] [--num-texts 20]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from experiments import CHECKPOINTS
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.reproduce.infinigen.accuracy_policies import at_ratio, h2o, infinigen, quantized
from flexhybrid import shipped
from flexhybrid.core.files import write_by_rename
from flexhybrid.jobs.accuracy.job import AccuracyOptions, accuracy
from flexhybrid.jobs.skew import skew
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.runtime.storage.loader import Checkpoint

MODELS = (shipped.CHECKPOINT, CHECKPOINTS / "opt-stdlib-deep")
TEXTS = Path(__file__).with_name(
    "long_texts.txt"
)  #: documents that no model here learned from, separated by form feeds
MOST_POSITIONS = 2048
BY_POSITION = 1024, 0.5  #: most tokens of a text that is followed from early on, and the share of its prompt (Fig. 12)
ANSWER = 128  #: tokens of each text behind the prompt, where its length varies (Fig. 19b)


def plain_policies() -> list[str]:
    """Return the policies for the plain checkpoint: fewer bits; H2O with InfiniGen's whole layers and shares, and once
    with no layer whole; InfiniGen not skewed."""
    return [
        *map(quantized, studied.BITS),
        *map(h2o, studied.SHARES),
        h2o(0.1, 0),
        *fixed_shares(),
    ]


def fixed_shares() -> list[str]:
    """Return InfiniGen at fixed shares, with and without skewing (Fig. 13)."""
    return [
        *(infinigen(cap=share) for share in studied.SHARES),
        *(at_ratio(share, ratio) for ratio in studied.SKEWED_RATIOS for share in studied.SKEWED_SHARES),
    ]


def skewed_policies(alpha: float) -> list[str]:
    """Return the policies for the skewed checkpoint: shares, thresholds, ratios, limited pools, one whole layer."""
    return [
        *fixed_shares(),
        infinigen(alpha, 0.2),
        *(infinigen(threshold) for threshold in studied.ALPHAS),
        *(infinigen(alpha, 0.2, partial_ratio=ratio) for ratio in studied.RATIOS if ratio != studied.PARTIAL),
        *(infinigen(alpha, 0.2, pool=studied.POOL, victim=victim) for victim in studied.VICTIMS),
        infinigen(alpha, 0.2, whole_layers=1),
        infinigen(cap=0.05, whole_layers=1),
    ]


def study(model: Path, num_texts: int, folder: Path) -> dict:
    """Measure all figures of one model. ``folder`` takes the skewed checkpoint and the tables of each run."""
    shape = Checkpoint(model).shape
    alpha = 5.0 if shape.rotary else 4.0  # the paper's
    length = min(shape.max_context, MOST_POSITIONS)
    skewed = folder / "skewed"
    skew(model, shipped.PROMPTS, skewed)

    def measure(path: Path, policies: list[str], length: int = length, share: float = studied.PROMPT_SHARE) -> dict:
        options = AccuracyOptions(
            path,
            TEXTS,
            policies=tuple(policies),
            length=length,
            prompt_tokens=int(share * length),
            num_texts=num_texts,
            device="cpu",
            hardware="rtx4090",
            out=folder / "run",
        )
        result = accuracy(options, quiet=True)
        return {name: result[name] for name in ("policies", "chunks", "num_texts", "texts_by_document")}

    by_length = {}
    for tokens in [*(tokens for tokens in (256, 512, 1024) if tokens < length), length]:
        prompt_share = 1 - min(ANSWER, tokens // 4) / tokens
        share = min(1.0, studied.KEPT / ((1 + prompt_share) / 2 * tokens))
        kept = [h2o(share, prompt_share=prompt_share)]
        fetched = [infinigen(cap=round(share, 4))]
        by_length[tokens] = {
            "h2o": measure(model, kept, tokens, prompt_share),
            "infinigen": measure(skewed, fetched, tokens, prompt_share),
        }
    most, early = BY_POSITION
    followed = min(length, most)
    fields = ("family", "num_layers", "num_heads", "num_kv_heads", "head_dim", "kv_group")
    return (
        {"model": shape.name}
        | {name: getattr(shape, name) for name in fields}
        | {
            "length": length,
            "prompt_tokens": int(studied.PROMPT_SHARE * length),
            "alpha": alpha,
            "plain": measure(model, plain_policies()),
            "skewed": measure(skewed, skewed_policies(alpha)),
            "by_position": {
                "length": followed,
                "plain": measure(model, [h2o(0.1, prompt_share=early), quantized(4)], followed, early),
                "skewed": measure(skewed, [infinigen(cap=0.1)], followed, early),
            },
            "by_length": by_length,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, nargs="+", help="folders (default: the small checkpoints that exist)")
    parser.add_argument("--num-texts", type=int, default=20)
    parser.add_argument("--out", type=Path, default=studied.RESULTS)
    args = parser.parse_args()
    for model in args.models or [path for path in MODELS if (path / "config.json").is_file()]:
        with torch_threads(1), tempfile.TemporaryDirectory() as folder:
            figures = study(model, args.num_texts, Path(folder))
        write_by_rename(args.out / f"{model.name}.json", json.dumps(figures, indent=1))
        print(f"{args.out / model.name}.json")


if __name__ == "__main__":
    main()
