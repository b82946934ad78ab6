"""Recall of facts that are asked for after the eviction (MQAR), under H2O, InfiniGen and fewer bits.

Each text's facts and filler are prefilled, its queries pass the decode token by token, through the executor; every
answer is judged. Beside them, by transformers under a mask: caches that keep K facts in all heads of the thinned
layers, at random or those that will be asked, which a real policy cannot know. Writes
experiments/results/accuracy/recall/MODEL.json, from which ``experiments.reproduce.infinigen.recall`` makes the figure.

Usage::

    python -m experiments.studies.recall_study [--model experiments/checkpoints/opt-recall] [--num-texts 48]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from experiments import CHECKPOINTS
from experiments.reproduce.infinigen.accuracy_policies import infinigen, quantized
from experiments.reproduce.infinigen.recall import RESULTS
from experiments.studies import recall_texts as recall
from experiments.studies.recall_texts import Sizes
from flexhybrid.core.files import write_by_rename
from flexhybrid.core.task import Task
from flexhybrid.jobs.accuracy.attention_watch import watch_loads, watch_positions
from flexhybrid.jobs.skew import skew
from flexhybrid.llm import LLM
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.scoring import score

MODEL = CHECKPOINTS / "opt-recall"
SEED = 1  #: of the texts; the training's is another
SIZES = Sizes(facts=128, filler=63, queries=32)
WHOLE_LAYERS = 2  #: as in the authors' code
PLACES = (16, 32, 64, 128, 192)  #: whole blocks of a prompt's 320 tokens
FEWER_PLACES = (4, 8)  #: less than a block, which InfiniGen may fetch and H2O may not keep
ONE_WHOLE = (16, 64)  #: places that are tried with layer 0 alone whole, the fewest that InfiniGen can have
NOT_SKEWED = (4, 16, 64)  #: places that InfiniGen is tried with on the plain checkpoint
ALPHAS = (1.0, 2.0, 4.0, 8.0)
RATIOS = (0.1, 1.0)  #: of columns, beside the paper's 0.3
BITS = (8, 4, 2, 1)
CAP = 0.2  #: the paper's most, of a context
VARIED = 16  #: places at which variants are compared
FEW = 8  #: texts that tell which heads read facts


class RecallWatch:
    """What the attention of a run reads: bytes that move, tokens that thinned layers look at, and which asked facts
    the heads that read facts still see there. ``texts`` are token ids [N, tokens], ``reading`` (layer, head)."""

    def __init__(self, texts: np.ndarray, sizes: Sizes, whole_layers: int, reading: Collection[tuple[int, int]]):
        self.sizes, self.whole_layers, self.reading = sizes, whole_layers, reading
        self.facts = torch.tensor(asked_facts(texts, sizes))  # [N, Q]
        self.seen = torch.zeros(self.facts.shape, dtype=torch.bool)  #: by a head that reads facts
        self.looked_at: list[float] = []
        self.moved_bytes = 0.0

    def __call__(self, executor: Executor, members: np.ndarray) -> None:
        attend, positions_of = executor.verbs["attend"], watch_positions(executor)

        def attended(executor: Executor, task: Task) -> None:
            if task.iteration and task.layer >= self.whole_layers:
                self._look(task, positions_of(task), members[task.payload.step.requests])
            attend(executor, task)

        def add(num_bytes: float) -> None:
            self.moved_bytes += num_bytes

        executor.verbs["attend"] = attended
        watch_loads(executor, add)

    def _look(self, task: Task, positions_BGT: torch.Tensor, texts: np.ndarray) -> None:
        context = self.sizes.prompt_tokens + task.iteration
        self.looked_at.append(float((positions_BGT >= 0).sum(-1).float().mean()) / context)
        query, is_answer = divmod(task.iteration - 1, 2)
        heads = [head for layer, head in self.reading if layer == task.layer]
        if heads and not is_answer:  # the step that takes a name gives its number
            rows = torch.tensor(texts)
            number = 2 + 2 * self.facts[rows, query]  # where the fact is read, as ``one_token_of_each`` shows
            positions = positions_BGT.expand(-1, max(positions_BGT.shape[1], 1 + max(heads)), -1)[:, heads]
            self.seen[rows, query] |= (positions == number[:, None, None]).any(-1).any(-1)


def asked_facts(texts: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Return which fact each query of a text asks for, [N, Q]."""
    names = texts[:, 1 : 1 + 2 * sizes.facts : 2]
    return (names[:, None] == texts[:, sizes.prompt_tokens :: 2, None]).argmax(-1)


def measure(
    model: Path, policy: str, whole_layers: int, texts: np.ndarray, sizes: Sizes, heads: Sequence[dict]
) -> dict:
    """Return a policy's share of right answers, by text and in all, and among the facts that no reading head sees.

    ``whole_layers``: the policy's. The reading heads are those of ``heads`` (``reading_heads``) in later layers.
    """
    forced = 2 * sizes.queries
    with LLM(model, policy, device="cpu", dtype="float32", hardware="rtx4090") as llm:
        reading = [(row["layer"], row["head"]) for row in heads if row["reads"] and row["layer"] >= whole_layers]
        watch = RecallWatch(texts, sizes, whole_layers, reading)
        scores = score(llm, texts.tolist(), forced, watch)
        token_bytes = llm.shape.num_layers * llm.shape.kv_token_bytes(llm.problem.bytes_per_element)
    right = np.stack([run.greedy[1::2] for run in scores]) == texts[:, sizes.prompt_tokens + 1 :: 2]
    seen = watch.seen.numpy()
    return {
        "right": float(right.mean()),
        "right_by_text": right.mean(1).tolist(),
        "seen": float(seen.mean()),
        "seen_by_text": seen.mean(1).tolist(),
        "unseen": int((~seen).sum()),
        "right_of_unseen": int((right & ~seen).sum()),
        "looked_at": float(np.mean(watch.looked_at)),
        "moved": watch.moved_bytes / (token_bytes * len(texts) * sizes.mean_context * (forced - 1)),
    }


@torch.inference_mode()
def right_under_mask(network, texts: np.ndarray, sizes: Sizes, seen_LNHP: torch.Tensor) -> np.ndarray:
    """Return which answers are right, bool [N, Q], under a mask: tokens behind the prompt see only these places of it,
    bool [layers, N or 1, heads or 1, prompt tokens]."""
    ids, prompt = torch.tensor(texts[:, :-1]), sizes.prompt_tokens
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    handles = []
    for layer, seen_NHP in zip(network.model.decoder.layers, seen_LNHP, strict=True):
        mask = causal.expand(len(ids), seen_NHP.shape[1], -1, -1).clone()
        mask[:, :, prompt:, :prompt] = seen_NHP[:, :, None]

        def masked(_module, arguments, words, mask=mask):
            return arguments, words | {"attention_mask": mask}

        handles.append(layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True))
    answers = network(ids).logits[:, prompt::2].argmax(-1).numpy()
    for handle in handles:
        handle.remove()
    return answers == texts[:, prompt + 1 :: 2]


def seen_facts(num_layers: int, sizes: Sizes, kept_NM: np.ndarray) -> torch.Tensor:
    """Return which prompt places caches hold, bool [layers, N, 1, prompt tokens]: all but facts, and both tokens of the
    kept facts, bool [N, facts]."""
    seen = np.ones((num_layers, len(kept_NM), 1, sizes.prompt_tokens), dtype=bool)
    seen[:, :, 0, 1 : 1 + 2 * sizes.facts] = kept_NM.repeat(2, axis=1)
    return torch.tensor(seen)


def kept_facts(texts: np.ndarray, sizes: Sizes, count: int, which: str, rng: np.random.Generator) -> np.ndarray:
    """Return ``count`` facts of each text, bool [N, facts]: drawn at random ("random"), or those that will be asked,
    and others if these are fewer ("asked")."""
    order = rng.random((len(texts), sizes.facts))
    if which == "asked":
        np.put_along_axis(order, asked_facts(texts, sizes), -1.0, axis=1)
    return order.argsort(1).argsort(1) < count


def one_token_of_each(network, texts: np.ndarray, sizes: Sizes) -> dict[str, float]:
    """Return the share of right answers where layers behind layer 0 see only the names, or only the numbers."""
    shares = {}
    for token, name in enumerate(("names", "numbers")):
        seen = seen_facts(network.config.num_hidden_layers, sizes, np.zeros((1, sizes.facts), dtype=bool))
        seen[0] = True
        seen[..., 1 + token : 1 + 2 * sizes.facts : 2] = True
        shares[name] = float(right_under_mask(network, texts, sizes, seen).mean())
    return shares


def reading_heads(network, texts: np.ndarray, sizes: Sizes, chance: float) -> list[dict]:
    """Return a row for every head behind layer 0: the share of right answers where it alone sees the facts, where it
    alone does not, and whether it reads facts, that is, has more right answers than chance explains (three standard
    errors) if it alone sees them."""
    layers, heads = network.config.num_hidden_layers, network.config.num_attention_heads
    none = np.zeros((1, sizes.facts), dtype=bool)
    blind = seen_facts(layers, sizes, none).repeat(1, 1, heads, 1)
    blind[0] = True
    most = chance + 3 * math.sqrt(chance * (1 - chance) / (len(texts) * sizes.queries))
    rows = []
    for layer in range(1, layers):
        for head in range(heads):
            alone, without = blind.clone(), torch.ones_like(blind)
            alone[layer, :, head], without[layer, :, head] = True, blind[layer, :, head]
            right, rest = (float(right_under_mask(network, texts, sizes, seen).mean()) for seen in (alone, without))
            rows.append({"layer": layer, "head": head, "alone": right, "without": rest, "reads": right > most})
    return rows


def policies(sizes: Sizes) -> list[dict]:
    """Return the policies with what sets them apart: the checkpoint that they run (plain or skewed), method, whole
    layers, places. At K places H2O keeps K of the prompt's tokens in each thinned layer, and InfiniGen fetches as large
    a share of the context as K is of the decode's mean context: equal bytes in equal layers."""
    plain, skewed = {"checkpoint": "plain"}, {"checkpoint": "skewed"}
    exact = plain | {"whole_layers": 0}
    rows = [exact | {"method": "full", "policy": "resident"}]
    rows += [exact | {"method": "bits", "bits": bits, "policy": quantized(bits)} for bits in BITS]

    def h2o(places: int, layers: int) -> dict:
        cells = plain | {"whole_layers": layers, "method": "h2o", "places": places}
        return cells | {"policy": keeping(places, sizes, layers)}

    def guess(part: dict, places: int, layers: int = WHOLE_LAYERS, **more) -> dict:
        cells = part | {"whole_layers": layers, "method": "infinigen", "places": places}
        return cells | more | {"policy": fetching(places, sizes, layers, **more)}

    rows += [row for places in PLACES for row in (h2o(places, WHOLE_LAYERS), guess(skewed, places))]
    rows += [row for places in ONE_WHOLE for row in (h2o(places, 1), guess(skewed, places, 1))]
    rows += [guess(skewed, places) for places in FEWER_PLACES] + [guess(plain, places) for places in NOT_SKEWED]
    rows += [guess(skewed, VARIED, partial_ratio=ratio) for ratio in RATIOS]
    rows.append(guess(skewed, VARIED, columns="request"))
    for alpha in ALPHAS:
        cells = skewed | {"whole_layers": WHOLE_LAYERS, "method": "infinigen", "alpha": alpha}
        rows.append(cells | {"policy": infinigen(alpha, CAP, whole_layers=WHOLE_LAYERS)})
    return rows


def keeping(places: int, sizes: Sizes, whole_layers: int) -> str:
    """Return H2O with ``places`` in every thinned layer."""
    return f"h2o({places / sizes.prompt_tokens:.6g},whole_layers={whole_layers})"


def fetching(places: int, sizes: Sizes, whole_layers: int, **more) -> str:
    """Return InfiniGen that fetches ``places`` at the mean context, whatever the scores."""
    return infinigen(cap=round(places / sizes.mean_context, 6), whole_layers=whole_layers, **more)


def study(model: Path, num_texts: int, folder: Path, sizes: Sizes = SIZES) -> dict:
    """Measure all figures of a model. ``folder`` takes the skewed checkpoint and its sample text."""
    rng = np.random.default_rng(SEED)
    texts = recall.draw_texts(sizes, num_texts, rng)
    words = recall.words()
    sample = folder / "sample.txt"
    sample.write_text(" ".join(words[token] for token in recall.draw_texts(sizes, 1, rng)[0, 1:]), encoding="utf-8")
    skew(model, sample, folder / "skewed")
    paths = {"plain": model, "skewed": folder / "skewed"}
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    heads = reading_heads(network, texts[:FEW], sizes, 1 / recall.NUM_VALUES)
    rows = []
    for row in policies(sizes):
        path = paths[row["checkpoint"]]
        rows.append(row | measure(path, row["policy"], row["whole_layers"], texts, sizes, heads))
        say(rows[-1])
    return {
        "model": model.name,
        **asdict(sizes),
        "values": recall.NUM_VALUES,
        "num_texts": num_texts,
        "seed": SEED,
        "heads": heads,
        "one_token": one_token_of_each(network, texts[:FEW], sizes),
        "policies": rows,
        "kept": list(kept_answers(network, texts, sizes, rng)),
    }


def kept_answers(network, texts: np.ndarray, sizes: Sizes, rng: np.random.Generator) -> Iterator[dict]:
    """Yield the answers of caches that keep a number of facts in all heads of the thinned layers: at random; or those
    that will be asked, then others; or none, with layer 0 alone whole."""
    random = [("random", count, WHOLE_LAYERS) for count in (0, *PLACES) if count <= sizes.facts]
    for which, count, layers in (*random, ("asked", PLACES[0], WHOLE_LAYERS), ("random", 0, 1)):
        kept = kept_facts(texts, sizes, count, which, rng)
        seen = seen_facts(network.config.num_hidden_layers, sizes, kept)
        seen[:layers] = True
        right = right_under_mask(network, texts, sizes, seen)
        row = {"which": which, "facts": count, "whole_layers": layers, "right": float(right.mean())}
        row |= {"right_by_text": right.mean(1).tolist()}
        say(row)
        yield row


def say(row: dict) -> None:
    print(json.dumps({name: cell for name, cell in row.items() if not name.endswith("_by_text")}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--num-texts", type=int, default=48)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with torch_threads(1), tempfile.TemporaryDirectory() as folder:
        figures = study(args.model, args.num_texts, Path(folder))
    write_by_rename(args.out / f"{args.model.name}.json", json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
