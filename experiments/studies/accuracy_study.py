"""InfiniGen's accuracy experiments (OSDI 2024, Tables 1 and 2, Fig. 4, 5, 11 to 13, 17, 19, 20) on a small model.

Runs the model in the executor under every policy that these compare, and measures the similarity of its layers' inputs
and the number of tokens that its attention needs. Writes experiments/results/accuracy/MODEL.json, from which
``experiments.reproduce.infinigen.accuracy`` makes tables and figures. Takes some minutes on one core.

Usage::

    python -m experiments.studies.accuracy_study [--models experiments/checkpoints/opt-stdlib-2k …] [--num-texts 4]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import torch

from experiments import CHECKPOINTS
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.reproduce.infinigen.accuracy_policies import h2o, infinigen, quantized, share_of_all_layers
from flexhybrid import shipped
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import write_by_rename
from flexhybrid.jobs.accuracy.job import AccuracyOptions, accuracy, read_texts
from flexhybrid.jobs.skew import skew
from flexhybrid.llm import LLM
from flexhybrid.runtime.selections.skew import forward, skewing_matrices
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.threads import torch_threads
from sim.presets import resident

MODELS = (shipped.CHECKPOINT, CHECKPOINTS / "opt-stdlib-2k", CHECKPOINTS / "llama-stdlib-2k")
MOST_POSITIONS = 2048


def plain_policies(num_layers: int, alpha: float) -> list[str]:
    """Return the policies for the plain checkpoint: fewer bits; H2O with InfiniGen's whole layers and shares, and with
    no layer whole, at these shares and at those that InfiniGen moves in all; InfiniGen not skewed."""
    of_all = (share_of_all_layers(num_layers, share) for share in (0.1, 0.2))
    return [
        *map(quantized, studied.BITS),
        *map(h2o, studied.SHARES),
        *(h2o(share, 0) for share in (*studied.SHARES, *of_all)),
        *(infinigen(cap=share) for share in studied.SHARES),
        infinigen(alpha, 0.2),
    ]


def skewed_policies(alpha: float) -> list[str]:
    """Return the policies for the skewed checkpoint: shares, thresholds, ratios, limited pools, one full layer."""
    return [
        infinigen(),
        *(infinigen(cap=share) for share in studied.SHARES),
        infinigen(alpha, 0.2),
        *(infinigen(threshold) for threshold in studied.ALPHAS),
        *(infinigen(alpha, 0.2, partial_ratio=ratio) for ratio in studied.RATIOS if ratio != studied.PARTIAL),
        *(infinigen(alpha, 0.2, pool=studied.POOL, victim=victim) for victim in ("fifo", "lru", "counter")),
        infinigen(alpha, 0.2, whole_layers=1),
        infinigen(cap=0.2, whole_layers=1),
    ]


def study(model: Path, num_texts: int, folder: Path) -> dict:
    """Measure all figures of one model. ``folder`` takes the skewed checkpoint and the tables of each run."""
    shape = Checkpoint(model).shape
    alpha = 5.0 if shape.rotary else 4.0  # the paper's
    length = min(shape.max_context, MOST_POSITIONS)
    skewed = folder / "skewed"
    skew(model, shipped.PROMPTS, skewed)

    def measure(path: Path, policies: list[str], length: int = length) -> dict:
        options = AccuracyOptions(
            path,
            policies=tuple(policies),
            length=length,
            prompt_tokens=int(studied.PROMPT_SHARE * length),
            num_texts=num_texts,
            device="cpu",
            hardware="rtx4090",
            out=folder / "run",
        )
        result = accuracy(options, quiet=True)
        return {name: result[name] for name in ("policies", "chunks", "num_texts")}

    by_length = {}
    for tokens in [*(tokens for tokens in (256, 512, 1024, 2048) if tokens < length), length]:
        share = min(1.0, studied.KEPT / ((1 + studied.PROMPT_SHARE) / 2 * tokens))
        by_length[tokens] = {
            "h2o": measure(model, [h2o(share), h2o(share, 0)], tokens)["policies"],
            "infinigen": measure(skewed, [infinigen(cap=round(share, 4))], tokens)["policies"],
        }
    with LLM(model, resident(), device="cpu", dtype="float32") as llm:
        (text,) = read_texts(llm, shipped.HELD_OUT, length, 1).ids
    fields = ("family", "num_layers", "num_heads", "num_kv_heads", "head_dim", "kv_group")
    return (
        {"model": shape.name}
        | {name: getattr(shape, name) for name in fields}
        | {
            "length": length,
            "prompt_tokens": int(studied.PROMPT_SHARE * length),
            "alpha": alpha,
            "plain": measure(model, plain_policies(shape.num_layers, alpha)),
            "skewed": measure(skewed, skewed_policies(alpha)),
            "by_length": by_length,
            "skewing_alone": logits_change(model, skewed, text),
            "inputs": block_inputs(model, text),
            "attention": attention_needs(Checkpoint(model), text),
            "columns": columns_held(Checkpoint(model), text, skewing_matrices(Checkpoint(model), sample(model))),
        }
    )


def sample(model: Path) -> list[int]:
    """Return the tokens of the text from which skewing matrices are computed."""
    with LLM(model, resident(), device="cpu", dtype="float32") as llm:
        if llm.tokenizer is None:
            raise InputError(f"{model} has no tokenizer")
        text = shipped.PROMPTS.read_text(encoding="utf-8")
        return llm.tokenizer(text, verbose=False)["input_ids"][: llm.shape.max_context]


def logits_change(model: Path, skewed: Path, text: list[int]) -> float:
    """Return the largest change of a logit by skewing alone, over the largest logit."""
    before, after = (forward(Checkpoint(path), text) for path in (model, skewed))
    return float((after - before).abs().max() / before.abs().max())


@torch.inference_mode()
def block_inputs(model: Path, text: list[int]) -> dict[str, list[float]]:
    """Return the mean cosine over tokens of each block's input (from layer 1 on) with the preceding block's input,
    attention output and FFN output (Table 1), and of the normed attention inputs, from which queries are guessed."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    is_opt = network.config.model_type == "opt"
    layers = network.model.decoder.layers if is_opt else network.model.layers
    kept: dict[str, list[torch.Tensor]] = {"input": [], "attention": [], "ffn": [], "normed": []}

    def keep(name: str):
        def hook(_module, _arguments, output):
            kept[name].append((output[0] if isinstance(output, tuple) else output).flatten(end_dim=-2))

        return hook

    for layer in layers:
        layer.register_forward_pre_hook(lambda module, arguments: kept["input"].append(arguments[0][0]))
        layer.self_attn.register_forward_hook(keep("attention"))
        (layer.fc2 if is_opt else layer.mlp).register_forward_hook(keep("ffn"))
        (layer.self_attn_layer_norm if is_opt else layer.input_layernorm).register_forward_hook(keep("normed"))
    network(torch.tensor([text]))

    def cosines(of: str, other: str) -> list[float]:
        pairs = zip(kept[of][1:], kept[other][:-1], strict=True)
        return [float(torch.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairs]

    return {
        "block input": cosines("input", "input"),
        "attention output": cosines("input", "attention"),
        "FFN output": cosines("input", "ffn"),
        "normed input": cosines("normed", "normed"),
    }


def attention_needs(checkpoint: Checkpoint, text: list[int]) -> dict:
    """Measure the full attention of one text, by layer.

    The number of key tokens that hold WEIGHT of a query's attention: its histogram over queries and heads, and means by
    position. The entropy of the weights over that of equal weights. The cosine of each query's best KEPT tokens with
    all tokens, by chunk of 256 positions.
    """
    shape, layers = checkpoint.shape, []
    positions = np.arange(len(text))
    chunk = positions // 256

    def look(_layer: int, q: torch.Tensor, k: torch.Tensor):
        repeated = k.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1)
        scores = torch.einsum("nhd,mhd->hnm", q, repeated) * shape.head_dim**-0.5
        causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        weights = torch.softmax(scores.masked_fill_(~causal, -torch.inf), dim=-1)
        ordered = weights.sort(dim=-1, descending=True).values
        needed = ((ordered.cumsum(-1) < studied.WEIGHT).sum(-1) + 1).float()  # [H, N]
        best = (ordered[..., : studied.KEPT].square().sum(-1) / ordered.square().sum(-1)).sqrt().mean(0).numpy()
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)[:, 1:]
        even = torch.arange(2, len(text) + 1).log()
        mean = needed.mean(0).numpy()
        few = (needed < 0.01 * torch.arange(1, len(text) + 1)).float().mean(0).numpy()
        shown = (n for n in (500, 998, 999, 1000, 1001, 1002, 1500, 2000) if n <= len(text))
        row = {
            "histogram": np.bincount((needed.numpy().astype(int) // studied.BIN).ravel()).tolist(),
            "needed_at": {int(n): float(mean[n - 1]) for n in shown},
            "needed_by_chunk": [float(mean[chunk == c].mean()) for c in np.unique(chunk)],
            "below_a_percent_by_chunk": [float(few[chunk == c].mean()) for c in np.unique(chunk)],
            "best_cosine_by_chunk": [float(best[chunk == c].mean()) for c in np.unique(chunk)],
            "relative_entropy_by_head": (entropy / even).mean(-1).tolist(),
            "revival": revival(weights),
        }
        layers.append(row)
        return q, k

    forward(checkpoint, text, look)
    return {"kept": studied.KEPT, "weight": studied.WEIGHT, "bin": studied.BIN, "chunk": 256, "layers": layers}


def revival(weights: torch.Tensor) -> dict:
    """Find keys that regain weight (Fig. 20b) in a layer's causal weights [H, N, N].

    The queries are the last quarter, the keys those before it. Of the keys and heads with a weight of at least LOUD for
    a query of the quarter's second half, the share below QUIET for all of its first half; and the weights of the
    loudest of these.
    """
    window = weights.shape[-1] // 4
    seen = weights[:, -window:, : weights.shape[-1] - window]
    quiet = seen[:, : window // 2].amax(1) < studied.QUIET
    later = seen[:, window // 2 :].amax(1)
    loud = later >= studied.LOUD
    head, key = divmod(int((later * quiet).argmax()), later.shape[-1])
    series = [round(float(weight), 6) for weight in seen[head, :, key]]
    of_loud = float((loud & quiet).sum() / loud.sum().clamp_min(1))
    return {"of_loud": of_loud, "head": head, "key": key, "weights": series}


def columns_held(checkpoint: Checkpoint, text: list[int], matrices: list[torch.Tensor]) -> list[dict[str, float]]:
    """Return, by layer, the share of the squares of queries and keys in the PARTIAL columns with the largest sums of
    |Q| + |K|, before and after skewing, and the largest share of a single column of a head (an outlier)."""
    shape, layers = checkpoint.shape, []

    def look(layer: int, q: torch.Tensor, k: torch.Tensor):
        row = {}
        same = torch.eye(shape.head_dim).expand_as(matrices[layer])
        for name, turn in (("plain", same), ("skewed", matrices[layer].float())):
            keys = torch.einsum("ngd,gde->nge", k, turn)
            queries = torch.einsum("ngrd,gde->ngre", q.unflatten(1, (shape.num_kv_heads, -1)), turn)
            sums = queries.abs().mean(2).sum(0) + keys.abs().sum(0)
            columns = sums.topk(math.ceil(studied.PARTIAL * shape.head_dim - 1e-9), dim=-1).indices
            for part, squares in (("query", queries.square().mean(2).sum(0)), ("key", keys.square().sum(0))):
                share = squares / squares.sum(-1, keepdim=True)
                row[f"{name} {part}"] = float(share.gather(-1, columns).sum(-1).mean())
                row[f"{name} {part}, largest column"] = float(share.amax(-1).mean())
        layers.append(row)
        return q, k

    forward(checkpoint, text, look)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, nargs="+", help="folders (default: the small checkpoints that exist)")
    parser.add_argument("--num-texts", type=int, default=4)
    parser.add_argument("--out", type=Path, default=studied.RESULTS)
    args = parser.parse_args()
    for model in args.models or [path for path in MODELS if (path / "config.json").is_file()]:
        with torch_threads(1), tempfile.TemporaryDirectory() as folder:
            figures = study(model, args.num_texts, Path(folder))
        write_by_rename(args.out / f"{model.name}.json", json.dumps(figures, indent=1))
        print(f"{args.out / model.name}.json")


if __name__ == "__main__":
    main()
