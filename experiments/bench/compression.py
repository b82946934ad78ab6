"""Bench rows of compression: the shipped model's logits and perplexity with quantized caches and weights.

Held-out text of the shipped model's corpus is forced through the executor token by token, so that quantized data is
read again at every step.
"""

from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from tqdm import tqdm

from experiments import token_ids
from experiments.bench.harness import Table
from flexhybrid import shipped
from flexhybrid.core.policy import Bits, Policy
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine, RunControl
from flexhybrid.runtime.forcing import force_tokens
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.threads import torch_threads

SEED = 0  #: of the checkpoint's training, which decides its held-out files
NUM_TEXTS, PROMPT, STEPS = 16, 96, 64
CACHE = {"kv@host": 0.5, "act@host": 0.5}
EXACT = "native"
BITS = {
    **{EXACT: Bits(), "cache in 8": Bits(kv=8, act=8), "cache in 4": Bits(kv=4, act=4)},
    **{"KV in 8": Bits(kv=8), "KV in 4": Bits(kv=4), "ACT in 8": Bits(act=8), "ACT in 4": Bits(act=4)},
    **{"weights in 8": Bits(weights=8), "weights in 4": Bits(weights=4)},
}
LOGITS_BAR = 1e-2
PERPLEXITY_BARS = {8: 1.01, 4: 1.06}  #: over the native perplexity, by bits


def bench_compression(table: Table) -> None:
    """Compare the 8-bit cache's logits with exact ones, and every perplexity with the native one."""
    checkpoint = Checkpoint(shipped.CHECKPOINT)
    texts = held_out_texts()
    with torch_threads(1):
        logits = {
            name: forced_logits(checkpoint, Policy(name, cache=CACHE, bits=bits), texts)
            for name, bits in tqdm(BITS.items(), unit="policy", leave=False)
        }
    exact, difference = logits[EXACT], logits["cache in 8"] - logits[EXACT]
    name = "compression: logits of an 8-bit cache from exact ones"
    table.at_most(f"{name}, all positions", float(difference.norm() / exact.norm()), LOGITS_BAR, "relative")
    worst = float((difference.norm(dim=-1) / exact.norm(dim=-1)).max())
    table.at_most(f"{name}, worst position", worst, LOGITS_BAR, "relative")
    targets = torch.tensor([text[PROMPT:] for text in texts])
    by_bits = {name: perplexity(values, targets) for name, values in logits.items()}
    native = by_bits.pop(EXACT)
    for name, value in by_bits.items():
        ratio, bar = value / native, PERPLEXITY_BARS[int(name[-1])]
        row = f"compression: perplexity over native's, {name} bits"
        table.at_most(row, ratio, bar, "x", perplexity=value, native=native)
    values = ", ".join(f"{name} {value:.3f}" for name, value in by_bits.items())
    tqdm.write(f"     perplexity of {targets.numel():,} held-out tokens: native {native:.3f}, {values}")


def held_out_texts() -> list[list[int]]:
    """Return token ids of files that the shipped model was not trained on, all of one length."""
    from experiments.training.corpus import read_corpus

    texts = map(token_ids, read_corpus(SEED).held_out)
    return list(islice((ids[: PROMPT + STEPS] for ids in texts if len(ids) >= PROMPT + STEPS), NUM_TEXTS))


def perplexity(logits: torch.Tensor, targets: torch.Tensor) -> float:
    return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).exp())


def forced_logits(checkpoint: Checkpoint, policy: Policy, texts: list[list[int]]) -> torch.Tensor:
    """Return logits [texts, STEPS, vocab] of each text's last tokens; the text is fed in place of sampled tokens."""
    workload = Workload.uniform(len(texts), PROMPT, STEPS)
    weights = Weights(checkpoint.shape, checkpoint, "float32", torch.device("cpu"), policy)
    logits = torch.zeros(len(texts), STEPS, checkpoint.shape.vocab)

    def hear(step: MiniBatchStep, step_logits: torch.Tensor, _targets: torch.Tensor) -> None:
        logits[step.requests, step.iteration] = step_logits.float()

    prompts = [text[:PROMPT] for text in texts]
    with Session.of(weights, policy, workload, prompts, make_engine=partial(Engine, num_threads=1)) as session:
        force_tokens(session.executor, texts, hear)
        session.generate(RunControl())
    return logits
