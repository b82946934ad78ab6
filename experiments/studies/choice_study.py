"""What a fixed share of the keys costs where their true weights are known: the choice alone, without a guess.

InfiniGen guesses which keys have the largest weights; H2O keeps those with the most weight so far, and the newest. Here
transformers computes all weights of a text, and layers that choose attend to a share of the keys by either rule. It
tells what a guess costs from what leaving out the other keys costs, which no better guess would save.

Writes experiments/results/accuracy/choice/MODEL.json, from which ``experiments.reproduce.infinigen.accuracy`` makes
rows. On one core it takes some minutes.

Usage::

    python -m experiments.studies.choice_study [--model experiments/checkpoints/opt-stdlib-deep]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from experiments import CHECKPOINTS
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.studies.accuracy_study import TEXTS
from flexhybrid.core.context.selection import WHOLE_LAYERS
from flexhybrid.core.files import write_by_rename
from flexhybrid.jobs.accuracy.job import read_texts
from flexhybrid.llm import LLM
from flexhybrid.runtime.threads import torch_threads
from sim.presets import resident

SHARE = 0.2
NAME = "keys of a rule"  #: of the attention function in transformers

Rule = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


def largest(weights: torch.Tensor, prompt: int, _counts: torch.Tensor) -> torch.Tensor:
    """Return what ranks a query's keys [heads, queries, keys]: by their weights."""
    return weights[:, prompt:]


def heaviest_and_newest(weights: torch.Tensor, prompt: int, counts: torch.Tensor) -> torch.Tensor:
    """Return what ranks a query's keys [heads, queries, keys]: half of ``counts`` [queries] are the newest, the others
    have the most weight from all queries of the prompt."""
    length = weights.shape[-1]
    queries = torch.arange(prompt, length)[:, None]
    is_new = torch.arange(length) > queries - counts[:, None] // 2
    return weights[:, :prompt].sum(1)[:, None].masked_fill(is_new, float("inf"))


RULES: dict[str, Rule] = {"largest weights": largest, "heaviest and newest, as H2O": heaviest_and_newest}


def thinned(weights: torch.Tensor, prompt: int, rule: Rule, share: float = SHARE) -> torch.Tensor:
    """Return causal weights [heads, queries, keys] whose queries behind the prompt attend to a share of the keys."""
    length = weights.shape[-1]
    counts = torch.ceil(share * torch.arange(prompt + 1, length + 1) - 1e-9).long()
    causal = torch.ones(length, length, dtype=torch.bool).tril()[prompt:]
    rank = rule(weights, prompt, counts).masked_fill(~causal, -1.0).argsort(-1, descending=True).argsort(-1)
    kept = weights[:, prompt:].masked_fill(rank >= counts[:, None], 0.0)
    return torch.cat([weights[:, :prompt], kept / kept.sum(-1, keepdim=True)], 1)


def attention(rule: Rule | None, layers: Collection[int], prompt: int) -> Callable:
    """Return an attention function of transformers' in which ``layers`` choose by a rule."""

    def attend(module, query, key, value, _mask, scaling, **_more):
        length = query.shape[2]
        scores = query[0] @ key[0].mT * scaling
        weights = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        if rule and module.layer_idx in layers:
            weights = thinned(weights, prompt, rule)
        return (weights @ value[0]).transpose(0, 1)[None], None

    return attend


@torch.inference_mode()
def logprobs(network, texts: Sequence[list[int]], prompt: int) -> list[float]:
    """Return the mean log probability of each text's tokens behind the prompt."""
    means = []
    for text in texts:
        ids = torch.tensor([text])
        of_vocab = network(ids, use_cache=False).logits[0, prompt - 1 : -1].log_softmax(-1)
        means.append(float(of_vocab.gather(-1, ids[0, prompt:, None]).mean()))
    return means


def study(model: Path, num_texts: int = 20, length: int = 2048) -> dict:
    """Measure both rules in the layer whose attention is the broadest, and in the others that choose."""
    with LLM(model, resident(), device="cpu", dtype="float32") as llm:
        cut, num_layers = read_texts(llm, TEXTS, length, num_texts), llm.shape.num_layers
    prompt = int(studied.PROMPT_SHARE * length)
    AttentionInterface.register(NAME, attention(None, (), prompt))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=NAME).eval()
    broad = broadest_layer(network, cut.ids[0], range(WHOLE_LAYERS, num_layers))
    others = [layer for layer in range(WHOLE_LAYERS, num_layers) if layer != broad]
    numbers, counts = np.unique(cut.documents, return_counts=True)

    def by_document(rule: Rule | None, layers: Collection[int]) -> list[float]:
        AttentionInterface.register(NAME, attention(rule, layers, prompt))
        of_texts = np.array(logprobs(network, cut.ids, prompt))
        return [float(of_texts[cut.documents == number].mean()) for number in numbers]

    variants = {
        name: {"layer": by_document(rule, [broad]), "others": by_document(rule, others)} for name, rule in RULES.items()
    }
    return {
        "model": model.name,
        "length": length,
        "prompt_tokens": prompt,
        "share": SHARE,
        "layer": broad,
        "texts_by_document": counts.tolist(),
        "full": by_document(None, ()),
        "rules": variants,
    }


@torch.inference_mode()
def broadest_layer(network, text: list[int], layers: Sequence[int]) -> int:
    """Return which of the layers spreads the last query's weight over the most keys, by its entropy."""
    entropy: dict[int, float] = {}

    def attend(module, query, key, value, mask, scaling, **more):
        if module.layer_idx in layers:
            last = (query[0, :, -1:] @ key[0].mT * scaling).softmax(-1)
            entropy[module.layer_idx] = float(torch.special.entr(last).sum(-1).mean())
        return attention(None, (), len(text))(module, query, key, value, mask, scaling, **more)

    AttentionInterface.register(NAME, attend)
    network(torch.tensor([text]), use_cache=False)
    return max(entropy, key=lambda layer: entropy[layer])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=CHECKPOINTS / "opt-stdlib-deep")
    parser.add_argument("--out", type=Path, default=studied.CHOICE_RESULTS)
    args = parser.parse_args()
    with torch_threads(1):
        figures = study(args.model)
    write_by_rename(args.out / f"{args.model.name}.json", json.dumps(figures, indent=1))
    print(f"{args.out / args.model.name}.json")


if __name__ == "__main__":
    main()
