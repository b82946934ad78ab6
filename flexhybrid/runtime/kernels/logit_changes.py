"""Change logits before the temperature: forbid tokens, add biases, apply penalties.

The order is vLLM's: allowed tokens, bad words, held tokens and biases, then penalties for repetition, frequency and
presence. Each step counts tokens for the penalties from the token table. So penalties have no state, and requests may
be preempted.

Shapes in names: B requests of a mini-batch, V vocabulary, M changed logits, R rows with penalties, T tokens of the
longest such row, P bad words of several tokens, L length of the longest of them, without its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

ToDevice = Callable[[np.ndarray], torch.Tensor]  #: may copy asynchronously
ANY_TOKEN = -1  #: padding in front of short bad words


def no_ids() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class LogitChanges:
    """The changes that one request makes to its logits."""

    prompt_tokens: int  #: length of the prompt; later tokens are output
    frequency: float = 0.0  #: subtracted for each occurrence of a token in the output
    presence: float = 0.0  #: subtracted once for each token of the output
    repetition: float = 1.0  #: divides positive logits of tokens in prompt and output, multiplies negative ones
    bias_ids: np.ndarray = field(default_factory=no_ids)  #: tokens with a bias, each once
    bias_values: np.ndarray = field(default_factory=no_ids)  #: added to their logits; -inf forbids a token
    held_ids: np.ndarray = field(default_factory=no_ids)  #: tokens forbidden at positions below ``held_until``
    held_until: int = 0
    allowed_ids: np.ndarray | None = None  #: the only allowed tokens; None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  #: two or more tokens each; the last must not follow the others

    @cached_property
    def is_penalised(self) -> bool:
        return (self.frequency, self.presence, self.repetition) != (0, 0, 1)

    @cached_property
    def forbids(self) -> bool:
        never = np.isneginf(self.bias_values).any()
        return bool(self.allowed_ids is not None or self.bad_words or len(self.held_ids) or never)


@dataclass(frozen=True)
class Penalties:
    """The rows with penalties, and the tokens that they depend on."""

    rows_R1: torch.Tensor
    cells_R1: torch.Tensor  #: first cell of the request in the token table
    lengths_R1: torch.Tensor  #: length of prompt and output, in tokens
    prompts_R1: torch.Tensor  #: length of the prompt, in tokens
    values_3R1: torch.Tensor  #: float32: frequency, presence, repetition
    longest: int  #: T
    counts_output: bool  #: False: there are only repetition penalties


@dataclass(frozen=True)
class BadWords:
    """The bad words that the next token of a row could complete."""

    rows_P: torch.Tensor
    last_P: torch.Tensor  #: last token of the word
    cells_PL: torch.Tensor  #: cells of the token table that are compared with the word's other tokens
    others_PL: torch.Tensor  #: the word's other tokens; ANY_TOKEN for shorter words


@dataclass(frozen=True)
class StepChanges:
    """The changes of B requests in one step, on the device."""

    allowed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  #: changed rows; (row, token) of each allowed token
    added: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  #: [M] row, token, value to add to its logit
    bad_words: BadWords | None
    penalties: Penalties | None
    forbids: bool  #: whether a row may have no allowed token


def step_changes(
    changes: Sequence[LogitChanges | None], positions: np.ndarray, first_cells: np.ndarray, to_device: ToDevice
) -> StepChanges | None:
    """Return the changes of B requests to the logits of the tokens at ``positions`` [B]; None if there are none.

    ``first_cells`` [B]: first cells of the requests in the token table.
    """
    asking = [(row, change) for row, change in enumerate(changes) if change is not None]
    if not asking:
        return None
    allowed = [(row, change.allowed_ids) for row, change in asking if change.allowed_ids is not None]
    held = [(row, c.held_ids, np.full(len(c.held_ids), -np.inf)) for row, c in asking if positions[row] < c.held_until]
    added = [(row, change.bias_ids, change.bias_values) for row, change in asking if len(change.bias_ids)] + held
    values = np.concatenate([values for *_, values in added]) if added else np.empty(0)
    step = StepChanges(
        allowed=(to_device(np.array([row for row, _ in allowed])), *_cells(allowed, to_device)) if allowed else None,
        added=(*_cells(added, to_device), to_device(values.astype(np.float32))) if added else None,
        bad_words=_bad_words(asking, positions, first_cells, to_device),
        penalties=_penalties(asking, positions, first_cells, to_device),
        forbids=any(change.forbids for _, change in asking),
    )
    parts = step.allowed, step.added, step.bad_words, step.penalties
    return step if any(part is not None for part in parts) else None


def _cells(entries: Sequence[tuple], to_device: ToDevice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the token of each id in entries (row, ids, …)."""
    rows = np.repeat([row for row, *_ in entries], [len(ids) for _, ids, *_ in entries])
    return to_device(rows), to_device(np.concatenate([ids for _, ids, *_ in entries]))


def _bad_words(asking, positions: np.ndarray, first_cells: np.ndarray, to_device: ToDevice) -> BadWords | None:
    words = [
        (row, word)
        for row, change in asking
        for word in change.bad_words
        if len(word) - 1 <= positions[row] - change.prompt_tokens
    ]
    if not words:
        return None
    longest = max(len(word) for _, word in words) - 1
    rows = np.array([row for row, _ in words])
    others = np.array([(ANY_TOKEN,) * (longest - len(word) + 1) + word[:-1] for _, word in words])
    cells = first_cells[rows, None] + np.maximum(positions[rows, None] + np.arange(-longest, 0), 0)
    last = np.array([word[-1] for _, word in words])
    return BadWords(to_device(rows), to_device(last), to_device(cells), to_device(others))


def _penalties(asking, positions: np.ndarray, first_cells: np.ndarray, to_device: ToDevice) -> Penalties | None:
    penalised = [(row, change) for row, change in asking if change.is_penalised]
    if not penalised:
        return None
    rows = np.array([row for row, _ in penalised])
    prompts = np.array([change.prompt_tokens for _, change in penalised])
    values = np.array([(c.frequency, c.presence, c.repetition) for _, c in penalised], dtype=np.float32)
    numbers = np.stack([rows, first_cells[rows], positions[rows], prompts])[:, :, None]
    rows_R1, cells_R1, lengths_R1, prompts_R1 = to_device(numbers)
    return Penalties(
        rows_R1=rows_R1,
        cells_R1=cells_R1,
        lengths_R1=lengths_R1,
        prompts_R1=prompts_R1,
        values_3R1=to_device(values.T[:, :, None]),
        longest=int(positions[rows].max()),
        counts_output=bool(values[:, :2].any()),
    )


def change_(logits_BV: torch.Tensor, step: StepChanges, tokens: torch.Tensor) -> None:
    """Change float32 logits in place. ``tokens``: the token table."""
    never = logits_BV.new_full(
        (), -torch.inf
    )  # a tensor, because assigning a number would make the host wait for a copy
    if step.allowed is not None:
        rows, *places = step.allowed
        kept = logits_BV[*places]
        logits_BV[rows] = never
        logits_BV.index_put_(tuple(places), kept)
    if (words := step.bad_words) is not None:
        complete = ((tokens[words.cells_PL] == words.others_PL) | (words.others_PL == ANY_TOKEN)).all(dim=1)
        added = torch.where(complete, never, torch.zeros_like(never))
        logits_BV.index_put_((words.rows_P, words.last_P), added, accumulate=True)
    if step.added is not None:
        *places, values = step.added
        logits_BV.index_put_(tuple(places), values, accumulate=True)
    if step.penalties is not None:
        _penalise_(logits_BV, step.penalties, tokens)


def _penalise_(logits_BV: torch.Tensor, step: Penalties, tokens: torch.Tensor) -> None:
    """Apply penalties in place. A repeated token is written several times with the same value."""
    rows, vocab = step.rows_R1, logits_BV.shape[1]
    frequency, presence, repetition = step.values_3R1
    places = torch.arange(step.longest, device=tokens.device, dtype=torch.int64)
    ids_RT = tokens[step.cells_R1 + places.clamp(max=step.lengths_R1 - 1)]  # padding repeats the last token
    score = logits_BV[rows, ids_RT]
    logits_BV.index_put_((rows, ids_RT), torch.where(score > 0, score / repetition, score * repetition))
    if not step.counts_output:
        return
    is_output = (places >= step.prompts_R1) & (places < step.lengths_R1)
    ranked = torch.where(is_output, ids_RT, vocab).sort(dim=1).values
    count = torch.searchsorted(ranked, ids_RT, right=True) - torch.searchsorted(ranked, ids_RT)
    score = logits_BV[rows, ids_RT] - frequency * count
    logits_BV.index_put_((rows, ids_RT), score - presence * (count > 0))
