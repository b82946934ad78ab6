"""A cascade of language models on the next token of held-out text, like the paper's on LAMBADA.

Three OPT of this repository, of 0.3, 1 and 4 million parameters, with one tokenizer. The text is ``held_out.txt``:
files of the standard library on which none of them was trained. Energy is stated: multiply-adds of a prompt.
"""

import numpy as np

from experiments import CHECKPOINTS, token_ids
from experiments.bench.cascade import Trial, evaluated
from experiments.training.digits import PICOJOULES
from flexhybrid import shipped
from flexhybrid.cascade.data import scored
from flexhybrid.cascade.models import TOP_K, Generator, ModelOutputs
from flexhybrid.cascade.routes import CascadeModel
from flexhybrid.cascade.thresholds.fit import BATCH, fit, joined
from flexhybrid.core.model.shape import ModelShape

MODELS = {
    "opt-300k": CHECKPOINTS / "opt-stdlib-300k",
    "opt-1m": CHECKPOINTS / "opt-stdlib-1m",
    "opt-4m": shipped.CHECKPOINT,
}
PROMPT_TOKENS, STRIDE = 48, 24
NUM_VALIDATION, NUM_HELD_OUT = 700, 700


def multiply_adds(shape: ModelShape) -> int:
    """Return the multiply-adds of a prompt and of the head at its end, without attention's scores."""
    layer = 4 * shape.hidden**2 + 2 * shape.hidden * shape.ffn
    return PROMPT_TOKENS * shape.num_layers * layer + shape.hidden * shape.vocab


def rows(seed: int = 0) -> tuple[list[list[int]], np.ndarray]:
    """Return prompts from all documents, shuffled, and the token after each [N, 1]."""
    windows = []
    for document in shipped.HELD_OUT.read_text(encoding="utf-8").split("\f"):
        ids = token_ids(document)
        windows += [ids[at : at + PROMPT_TOKENS + 1] for at in range(0, len(ids) - PROMPT_TOKENS, STRIDE)]
    order = np.random.default_rng(seed).permutation(len(windows))[: NUM_VALIDATION + NUM_HELD_OUT]
    return [windows[i][:PROMPT_TOKENS] for i in order], np.array([windows[i][PROMPT_TOKENS:] for i in order])


def trial() -> Trial:
    """Fit the confidence on one half of the prompts, and evaluate it on the other."""
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
    fitted = fit(models, [_part(outputs, first) for outputs in predictions], labels[first], "generation", TOP_K)
    held_out = [
        scored(model.name, _part(outputs, second), labels[second], "generation", TOP_K)
        for model, outputs in zip(models, predictions, strict=True)
    ]
    return evaluated(fitted, held_out)


def _part(outputs: ModelOutputs, rows: slice) -> ModelOutputs:
    classes = None if outputs.classes is None else outputs.classes[rows]
    return ModelOutputs(outputs.outputs[rows], outputs.logits[rows], outputs.counted[rows], classes)
