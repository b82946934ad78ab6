"""InfiniGen's selection in the search: what it gains where the user allows it, and whether ACT pays under it.

A selection changes what a policy costs in kind: a KV row is fetched for each head that wants it, an ACT row serves all
heads and is recomputed, and layers that look at all tokens pay for all of them. So it is no term of the linear program:
every mix in quarters, every twelfth of the weights and every cut into mini-batches is bounded, the best are walked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Placement, Policy, Selection
from policy_search.grid import Question, pairs_of
from sim.array_clock import Prediction, predict
from sim.candidates import Candidates

ACT_SHARES = np.arange(5) / 4
WEIGHT_SHARES = np.arange(13) / 12
WALKED = 48  #: of each side, with ACT and without


@dataclass(frozen=True)
class UnderSelection:
    """The best policy with a given selection."""

    policy: Policy
    batch: int
    value: float  #: of the objective: tokens/s, or for latency seconds below zero
    with_act: float | None  #: the same of the best that keeps any ACT; None: nothing with ACT fits
    without_act: float | None

    @property
    def act_pays(self) -> bool:
        return self.with_act is not None and self.with_act > (self.without_act or -np.inf)


def value_of(objective: str, found: Prediction) -> np.ndarray:
    """The larger the better."""
    if objective == "latency":
        return -found.total_s
    return found.decode_tokens_per_s if objective == "decode_throughput" else found.tokens_per_s


def best_under_selection(question: Question, selection: Selection, batches, bounds) -> UnderSelection:
    """Raises InputError where nothing with this selection fits, or the policy cannot be planned."""
    pairs = pairs_of(question, batches, bounds)
    shares = WEIGHT_SHARES if question.weights_device is None else np.array([question.weights_device])
    acts = ACT_SHARES if selection.pool == 1 and {"act@host", "kv@host"} <= set(question.space.entries) else np.zeros(1)
    cut, device, act = (
        one.reshape(-1) for one in np.meshgrid(np.arange(len(pairs[0])), shares, acts, indexing="ij")
    )  # fmt: skip
    policy = Policy("searched", cache={"act@host": 0.5, "kv@host": 0.5}, selection=selection)
    if len(acts) == 1:
        policy = replace(policy, cache={"kv@host": 1.0})
    batch, bound = (one[cut] for one in pairs)

    def priced(which: np.ndarray, walk: bool) -> Prediction:
        cache = {"kv@host": 1.0 - act[which]} | ({"act@host": act[which]} if len(acts) > 1 else {})
        candidates = Candidates(
            policy, batch[which], question.prompt_tokens, question.max_tokens, bound[which], cache, device[which], 0.0
        )  # fmt: skip
        return predict(question.shape, question.hardware, question.bytes_per_element, candidates, walk)

    bounded = priced(np.arange(len(cut)), False)
    fits = np.all([bounded.peak_bytes[tier] <= question.budgets[tier] for tier in TIERS], axis=0)
    if not fits.any():
        raise InputError("no policy with the selection asked for fits the machine: leave it out, or give more memory")
    hopes = np.where(fits, value_of(question.objective, bounded), -np.inf)
    best: dict[bool, tuple[float, int]] = {}
    for has_act in (False, True):
        members = np.flatnonzero(fits & ((act > 0) == has_act))
        if len(members):
            members = members[np.argsort(-hopes[members])[:WALKED]]
            values = value_of(question.objective, priced(members, True))
            best[has_act] = float(values.max()), int(members[values.argmax()])
    value, winner = max(best.values())
    shared = {"kv@host": 1.0 - float(act[winner]), "act@host": float(act[winner])}
    chosen = replace(
        policy, cache={kind: share for kind, share in shared.items() if share},
        weights=Placement(device=float(device[winner]), host=1.0 - float(device[winner])),
        max_mini_batch_tokens=int(bound[winner]),
    )  # fmt: skip
    return UnderSelection(chosen, int(batch[winner]), value, *(best.get(one, (None,))[0] for one in (True, False)))
