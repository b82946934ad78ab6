"""Test changes to logits against transformers' processors; a row is changed the same way in any batch."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.warpers import changed

from flexhybrid.runtime.kernels.logit_changes import LogitChanges, change_, step_changes
from flexhybrid.runtime.kernels.sampling import choose, greedy_plan, step_sampling

VOCAB = 23
IDS = st.integers(0, VOCAB - 1)
FINITE = st.floats(-2, 2, width=32)


@dataclass(frozen=True)
class Row:
    """A request at one of its steps."""

    prompt: list[int]
    output: list[int]
    asked: dict  #: of ``oracles.warpers.changed``; min_tokens besides

    @property
    def changes(self) -> LogitChanges | None:
        if not self.asked:
            return None
        asked = dict(self.asked)
        bias, held, allowed = asked.pop("bias", {}), asked.pop("held", ()), asked.pop("allowed", None)
        return LogitChanges(
            len(self.prompt),
            bias_ids=np.array(list(bias), dtype=np.int64),
            bias_values=np.array(list(bias.values())),
            held_ids=np.array(held, dtype=np.int64),
            held_until=len(self.prompt) + asked.pop("min_tokens", 0),
            allowed_ids=None if allowed is None else np.array(allowed),
            **asked,
        )

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        asked = dict(self.asked)
        held = asked.pop("held", ())
        never = held if len(self.output) < asked.pop("min_tokens", 0) else ()
        return changed(logits, self.prompt, self.output, never=never, **asked)


ASKED = st.fixed_dictionaries(
    {},
    optional={
        "frequency": FINITE,
        "presence": FINITE,
        "repetition": st.floats(0.25, 4, width=32),
        "bias": st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=4),
        "held": st.lists(IDS, max_size=4, unique=True),
        "min_tokens": st.integers(0, 4),
        "allowed": st.lists(IDS, min_size=1, max_size=VOCAB, unique=True),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple), max_size=3).map(tuple),
    },
)
#: Few different tokens, so that they repeat.
TOKENS = st.lists(st.integers(0, 4) | IDS, max_size=9)
ROWS = st.lists(st.builds(Row, TOKENS.filter(len), TOKENS, ASKED), min_size=1, max_size=6)


def table_of(rows: list[Row]) -> tuple[torch.Tensor, np.ndarray]:
    """Return the token table, with a token after each request that no step may read, and each request's start."""
    texts = [[*row.prompt, *row.output, 0] for row in rows]
    firsts = np.cumsum([0, *map(len, texts)])[:-1]
    return torch.tensor([token for text in texts for token in text]), firsts


def changed_rows(rows: list[Row], logits: torch.Tensor) -> torch.Tensor:
    tokens, firsts = table_of(rows)
    positions = np.array([len(row.prompt) + len(row.output) for row in rows])
    step = step_changes([row.changes for row in rows], positions, firsts, torch.from_numpy)
    logits = logits.clone()
    if step is not None:
        change_(logits, step, tokens)
    return logits


@given(ROWS, st.integers(0, 2**32 - 1))
def test_rows_change_as_transformers_changes_each_of_them(rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    together = changed_rows(rows, logits)
    for place, row in enumerate(rows):
        torch.testing.assert_close(together[place], row.expected(logits[place]), rtol=1e-6, atol=1e-6)
        assert torch.equal(changed_rows([row], logits[place][None])[0], together[place])


def test_a_request_without_changes_costs_nothing():
    plan, positions, firsts = greedy_plan(3), np.array([4, 5, 6]), np.zeros(3, dtype=np.int64)
    assert step_sampling(plan, positions, firsts, torch.from_numpy) is None
    assert step_changes([None, LogitChanges(2)], positions[:2], firsts[:2], torch.from_numpy) is None


@given(st.lists(st.sampled_from([None, (1, 2), (0, 1, 2, 3)]), min_size=1, max_size=5), st.booleans())
def test_a_row_without_allowed_tokens_takes_the_most_probable(held, warm):
    """If all four tokens are held back, nothing is; other rows keep their limits."""
    rows = [Row([1], [], {} if ids is None else {"held": ids, "min_tokens": 9}) for ids in held]
    plan = greedy_plan(len(rows))
    if warm:
        plan.temperature[:] = 1e-3
    tokens, firsts = table_of(rows)
    vars(plan)["changes"] = tuple(row.changes for row in rows)
    step = step_sampling(plan, np.ones(len(rows), dtype=np.int64), firsts, torch.from_numpy)
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0]).expand(len(rows), -1)
    wanted = [3 if ids == (1, 2) else 1 for ids in held]
    assert choose(logits, step, tokens).tolist() == wanted
