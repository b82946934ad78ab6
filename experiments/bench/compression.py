"""Bench rows of compression: how far packed caches and weights move the shipped model's logits and its perplexity.

Held-out text of the shipped model's own corpus is forced through the executor token by token, so that what is packed is
read again at every step.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from tqdm import tqdm

from flexhybrid import shipped
from flexhybrid.core.policy import Bits, Policy
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.workload import Workload
from flexhybrid.requests import load_tokenizer
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.threads import torch_threads
from flexhybrid.scoring import force_tokens

SEED = 0  #: of the checkpoint's training: names its held-out files
NUM_TEXTS, PROMPT, STEPS = 16, 96, 64
CACHE = {"kv@host": 0.5, "act@host": 0.5}
EXACT = "native"
BITS = {
    EXACT: Bits(), "cache in 8": Bits(kv=8, act=8), "cache in 4": Bits(kv=4, act=4), "KV in 8": Bits(kv=8),
    "KV in 4": Bits(kv=4), "ACT in 8": Bits(act=8), "ACT in 4": Bits(act=4), "weights in 8": Bits(weights=8),
    "weights in 4": Bits(weights=4),
}  # fmt: skip
LOGITS_BAR = 1e-2
PERPLEXITY_BARS = {8: 1.01, 4: 1.06}  #: times the native one's


def bench_compression(table) -> None:
    """The 8-bit cache's logits against exact ones, and the perplexity of each number of bits."""
    checkpoint = Checkpoint(shipped.CHECKPOINT)
    texts = held_out_texts()
    with torch_threads(1):
        logits = {
            name: forced_logits(checkpoint, Policy(name, cache=CACHE, bits=bits), texts)
            for name, bits in tqdm(BITS.items(), unit="policy", leave=False)
        }
    exact, difference = logits[EXACT], logits["cache in 8"] - logits[EXACT]
    name = "compression: logits of an 8-bit cache from exact ones"
    table.add(f"{name}, all positions", difference.norm() / exact.norm(), LOGITS_BAR, "relative", False)
    worst = (difference.norm(dim=-1) / exact.norm(dim=-1)).max()
    table.add(f"{name}, worst position", worst, LOGITS_BAR, "relative", False)
    targets = torch.tensor([text[PROMPT:] for text in texts])
    found = {name: perplexity(values, targets) for name, values in logits.items()}
    for name, value in found.items():
        if name != EXACT:
            bar = PERPLEXITY_BARS[int(name[-1])]
            table.add(f"compression: perplexity over native's, {name} bits", value / found[EXACT], bar, "x", False,
                      perplexity=value, native=found[EXACT])  # fmt: skip
    tqdm.write(f"     perplexity of {targets.numel():,} held-out tokens: " + ", ".join(
        f"{name} {value:.3f}" for name, value in found.items()
    ))  # fmt: skip


def held_out_texts() -> list[list[int]]:
    """Token ids of files that the shipped model was not trained on, all of one length."""
    from experiments.training.corpus import read_corpus

    tokenizer, texts = load_tokenizer(shipped.CHECKPOINT), []
    for document in read_corpus(SEED).held_out:
        ids = tokenizer(document)["input_ids"]
        if len(ids) >= PROMPT + STEPS:
            texts.append(ids[: PROMPT + STEPS])
        if len(texts) == NUM_TEXTS:
            break
    return texts


def perplexity(logits: torch.Tensor, targets: torch.Tensor) -> float:
    return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).exp())


def forced_logits(checkpoint: Checkpoint, policy: Policy, texts: list[list[int]]) -> torch.Tensor:
    """Logits [texts, STEPS, vocab] that foretell each text's last tokens, with the text fed whatever is sampled."""
    workload = Workload.uniform(len(texts), PROMPT, STEPS)
    weights = Weights(checkpoint.shape, checkpoint, "float32", torch.device("cpu"), policy)
    logits = torch.zeros(len(texts), STEPS, checkpoint.shape.vocab)

    def hear(step: MiniBatchStep, step_logits: torch.Tensor, targets: torch.Tensor) -> None:
        logits[step.requests, step.iteration] = step_logits.float()

    prompts = [text[:PROMPT] for text in texts]
    with Session.of(weights, policy, workload, prompts, make_engine=partial(Engine, num_threads=1)) as session:
        force_tokens(session.executor, texts, hear)
        session.generate(keep_trace=False)
    return logits
