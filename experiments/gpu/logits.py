"""Bench rows of exactness in bfloat16: what recomputing keys and values from layer inputs changes in the logits.

Texts are forced token by token, so that all policies see equal contexts. The bar is bfloat16's own error: the mean
difference of the log-probabilities of "all keys and values" in bfloat16 from those in float32.
"""

from collections.abc import Callable

import numpy as np
import torch

from experiments.bench.harness import Table
from experiments.gpu.setting import Setting, make_bench
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.runtime.forcing import force_tokens
from flexhybrid.runtime.session import Session

SETTING = Setting("opt-6.7b", "bfloat16", 16, 256, 32, 8)
CACHES = {
    "KV": {"kv@host": 1.0},
    "half ACT": {"act@host": 0.5, "kv@host": 0.5},
    "ACT": {"act@host": 1.0},
}


def bench_logits(
    table: Table,
    shape: ModelShape | None = None,
    setting: Setting = SETTING,
    on_progress: Callable[[str], None] = print,
) -> None:
    """Add a row for each cache other than KV."""
    shape = shape or shape_by_name(setting.model)
    on_progress("logits in float32")
    exact = forced_logprobs(shape, setting._replace(dtype="float32"), "KV")
    on_progress(f"logits in {setting.dtype}")
    plain = forced_logprobs(shape, setting, "KV")
    rounding = float((plain - exact).abs().mean())
    for name in CACHES:
        if name != "KV":
            differs = (forced_logprobs(shape, setting, name) - plain).abs()
            row = f"logits, {setting.dtype}, {name} from KV: mean difference over {setting.dtype}'s own error"
            conditions = {"mean": float(differs.mean()), "most": float(differs.max()), "own_error": rounding}
            table.at_most(row, float(differs.mean()) / rounding, 1.0, "x", **conditions)


def forced_logprobs(shape: ModelShape, setting: Setting, cache: str) -> torch.Tensor:
    """Return log-probabilities [requests, tokens, vocab] at the forced tokens, in float32 on the host."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = Policy(cache, Placement(device=1.0), cache=CACHES[cache], max_mini_batch_tokens=setting.mini_batch_tokens)
    answers = np.random.default_rng(1).integers(3, shape.vocab, (setting.batch, setting.max_tokens)).tolist()
    logprobs = torch.empty(setting.batch, setting.max_tokens, shape.vocab)

    def keep(step: MiniBatchStep, logits: torch.Tensor, _: torch.Tensor) -> None:
        logprobs[torch.from_numpy(step.requests), step.iteration] = torch.log_softmax(logits.float(), -1).cpu()

    with make_bench(shape, device, setting) as bench:
        session = Session(bench.make_engine([policy]), bench.admit(policy), bench.prompts)
        force_tokens(session.executor, [[*prompt, *answer] for prompt, answer in zip(bench.prompts, answers)], keep)
        session.generate()
    return logprobs
