"""Search the best policy with InfiniGen's selection, with and without ACT.

Under a selection, costs are not linear in the shares: a KV row is loaded for each head that needs it, an ACT row serves
all heads and is recomputed, and some layers attend to all tokens. So the linear program does not apply. Instead, ACT
shares in quarters, weight shares in twelfths, and all numbers of mini-batches are bounded, and the best are walked.
"""

from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Placement, Policy, Selection
from policy_search.search_problem import SearchProblem, pairs_of
from sim.array_clock import Prediction, predict

ACT_SHARES = np.arange(5) / 4
WEIGHT_SHARES = np.arange(13) / 12
WALKED = 48  #: policies walked with ACT, and as many without


@dataclass(frozen=True)
class UnderSelection:
    """The best policy with a given selection."""

    policy: Policy
    batch: int
    value: float  #: objective (``value_of``); -inf if no policy keeps the latency limits
    with_act: float | None  #: value of the best policy that keeps any ACT; None: nothing with ACT fits
    without_act: float | None  #: value of the best policy without ACT; None: nothing without ACT fits

    @property
    def act_pays(self) -> bool:
        return self.with_act is not None and self.with_act > (self.without_act or -np.inf)


def value_of(objective: str, prediction: Prediction) -> np.ndarray:
    """Return the objective of predictions, [candidates]: tokens/s, or negative seconds for latency."""
    if objective == "latency":
        return -prediction.total_s
    return prediction.decode_tokens_per_s if objective == "decode_throughput" else prediction.tokens_per_s


def best_under_selection(
    problem: SearchProblem, selection: Selection, batches: np.ndarray, mini_batch_tokens
) -> UnderSelection:
    """Return the best policy with a selection. Raise InputError if no policy fits, is allowed, or can be planned."""
    if problem.weights_disk or not problem.space.allows(Policy(cache={"kv@host": 1.0})):
        raise InputError("what is kept leaves no policy with the selection asked for")
    batch, tokens = pairs_of(problem, batches, mini_batch_tokens)
    device = WEIGHT_SHARES if problem.weights_device is None else np.array([problem.weights_device])
    mixes = selection.pool == 1 and {"act@host", "kv@host"} <= set(problem.space.entries)
    axes = np.meshgrid(np.arange(len(batch)), device, ACT_SHARES if mixes else np.zeros(1), indexing="ij")
    pair, device, act = axes[0].reshape(-1).astype(int), axes[1].reshape(-1), axes[2].reshape(-1)
    batch, tokens = batch[pair], tokens[pair]
    cache = {"act@host": 0.5, "kv@host": 0.5} if mixes else {"kv@host": 1.0}
    policy = Policy("searched", cache=cache, selection=selection)

    def predicted(members: np.ndarray, walk: bool) -> Prediction:
        cache = {"kv@host": 1.0 - act[members]} | ({"act@host": act[members]} if mixes else {})
        shares = {"cache": cache, "weights_device": device[members], "weights_disk": np.zeros(len(members))}
        return predict(problem, problem.candidates(policy, batch[members], tokens[members], **shares), walk=walk)

    bounded = predicted(np.arange(len(pair)), False)
    fits = problem.effective_budgets.hold(bounded.peak_bytes)
    if not fits.any():
        raise InputError("no policy with the selection asked for fits the machine: leave it out, or give more memory")
    may = fits & problem.may_be_in_time(bounded.prefill_s, bounded.decode_s)
    promise = np.where(may, value_of(problem.objective, bounded), -np.inf)
    best: dict[bool, tuple[float, int]] = {}
    for has_act in (False, True):
        members = np.flatnonzero(fits & ((act > 0) == has_act))
        if len(members):
            members = members[np.argsort(-promise[members])[:WALKED]]
            walked = predicted(members, True)
            values = np.where(problem.in_time(walked), value_of(problem.objective, walked), -np.inf)
            best[has_act] = float(values.max()), int(members[values.argmax()])
    value, winner = max(best.values())
    shares = {"kv@host": 1.0 - float(act[winner]), "act@host": float(act[winner])}
    chosen = replace(
        policy,
        cache={entry: share for entry, share in shares.items() if share},
        weights=Placement(device=float(device[winner]), host=1.0 - float(device[winner])),
        max_mini_batch_tokens=int(tokens[winner]),
    )
    with_act, without_act = (best[has_act][0] if has_act in best else None for has_act in (True, False))
    return UnderSelection(chosen, int(batch[winner]), value, with_act, without_act)
