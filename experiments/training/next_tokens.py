"""A cascade of language models on the next token of held-out text, as the paper does on LAMBADA.

Three OPT of this repository, of 0.3, 1 and 4 million parameters, with one tokenizer. The text is ``held_out.txt``:
files of the standard library that none of them learned from. Energy is stated: multiply-adds of a prompt.
"""

from __future__ import annotations

import numpy as np

from experiments import CHECKPOINTS
from experiments.bench.cascade import Trial, evaluated
from experiments.training.digits import PICOJOULES
from flexhybrid import shipped
from flexhybrid.cascade.data import scored
from flexhybrid.cascade.models import TOP_K, Generator, ModelOutputs
from flexhybrid.cascade.routes import CascadeModel
from flexhybrid.cascade.thresholds.fit import BATCH, fit, joined
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.requests import load_tokenizer

MODELS = {
    "opt-300k": CHECKPOINTS / "opt-stdlib-300k",
    "opt-1m": CHECKPOINTS / "opt-stdlib-1m",
    "opt-4m": shipped.CHECKPOINT,
}
PROMPT_TOKENS, STRIDE = 48, 24
NUM_VALIDATION, NUM_HELD_OUT = 700, 700


def multiply_adds(shape: ModelShape) -> int:
    """Of a prompt and the head at its end, without attention's scores."""
    layer = 4 * shape.hidden**2 + 2 * shape.hidden * shape.ffn
    return PROMPT_TOKENS * shape.num_layers * layer + shape.hidden * shape.vocab


def rows(seed: int = 0) -> tuple[list[list[int]], np.ndarray]:
    """(prompts, the token after each [N, 1]) from all documents, shuffled."""
    tokenizer = load_tokenizer(shipped.CHECKPOINT)
    found = []
    for document in shipped.HELD_OUT.read_text(encoding="utf-8").split("\f"):
        ids = tokenizer(document)["input_ids"]
        found += [ids[at : at + PROMPT_TOKENS + 1] for at in range(0, len(ids) - PROMPT_TOKENS, STRIDE)]
    order = np.random.default_rng(seed).permutation(len(found))[: NUM_VALIDATION + NUM_HELD_OUT]
    return [found[i][:PROMPT_TOKENS] for i in order], np.array([found[i][PROMPT_TOKENS:] for i in order])


def trial() -> Trial:
    """Confidence fitted on one half of the prompts, looked at on the other."""
    prompts, labels = rows()
    models, predictions = [], []
    for name, folder in MODELS.items():
        generator = Generator(name, str(folder), policy="kv_only")
        energy = multiply_adds(generator.llm.shape) * PICOJOULES * 1e-12
        models.append(CascadeModel(name, energy_j=energy))
        parts = [generator.predict(prompts[at : at + BATCH]) for at in range(0, len(prompts), BATCH)]
        predictions.append(joined(parts))
        generator.close()
    first, second = slice(0, NUM_VALIDATION), slice(NUM_VALIDATION, None)
    fitted = fit(models, [_part(one, first) for one in predictions], labels[first], "generation", TOP_K)
    seen = [
        scored(model.name, _part(one, second), labels[second], "generation", TOP_K)
        for model, one in zip(models, predictions)
    ]
    return evaluated(fitted, seen)


def _part(one: ModelOutputs, rows: slice) -> ModelOutputs:
    return ModelOutputs(one.outputs[rows], one.logits[rows], one.counted[rows], one.classes[rows])
