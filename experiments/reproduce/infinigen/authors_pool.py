"""The rule by which the authors' evaluation of a limited pool (Table 2) drops tokens, on random scores.

Their program makes a mask of all queries of a text at once (github.com/snu-comparch/InfiniGen, commit 3754f52,
accuracy/src/modeling_opt_ours_prune.py, ``gen_mask_2``): from the query on that fills the pool, each query drops one
key by lowering its scores for all later queries. Under lru it is the key that was chosen longest ago, under counter the
one that was chosen least often, among the first half of the keys; the tables are of all queries so far. A dropped key
is never chosen again, so that it stays the one chosen longest ago, or least often: it is dropped again and again, and
the pool goes on growing. Written anew from the rule, for one head.
"""

from __future__ import annotations

import numpy as np

LENGTH, POOL = 512, 0.8
BUDGET, ALPHA = 0.2, 4.0  #: most keys of a query, and the threshold below the largest score
HEADS = 4
DROPPED = -10_000.0  #: a dropped key's score


def distinct_victims(seed: int = 0) -> tuple[int, dict[str, list[int]]]:
    """Return how many evictions are due, and rule -> how many distinct keys they drop, for each of HEADS heads."""
    generator = np.random.default_rng(seed)
    pool = int(POOL * LENGTH)
    distinct: dict[str, list[int]] = {"fifo": [], "lru": [], "counter": []}
    for scores in generator.standard_normal((HEADS, LENGTH, LENGTH)) * 2:
        for rule, counts in distinct.items():
            counts.append(len(set(victims(scores, rule, pool))))
    return LENGTH - pool - 1, distinct


def victims(scores: np.ndarray, rule: str, pool: int) -> list[int]:
    """Return the keys that a rule drops, one for each query behind the pool but the last.

    ``scores`` are [queries, keys].
    """
    scores, length = scores.copy(), len(scores)
    chosen = np.zeros(scores.shape, dtype=bool)
    dropped: list[int] = []
    most = int(BUDGET * length)
    for query in range(length):
        seen = scores[query, : query + 1]
        if query < most:
            chosen[query, : query + 1] = True
            continue
        count = min(int((seen >= seen.max() - ALPHA).sum()), most)
        chosen[query, np.argsort(-seen, kind="stable")[:count]] = True
        if query < pool or query == length - 1:
            continue
        if rule == "fifo":
            victim = query - pool
        else:
            older = chosen[: query + 1, : query // 2]
            uses = (np.arange(query + 1)[:, None] * older).max(0) if rule == "lru" else older.sum(0)
            victim = int(uses.argmin())
        scores[query + 1 :, victim] = DROPPED
        dropped.append(victim)
    return dropped
