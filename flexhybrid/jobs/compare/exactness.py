"""The exactness check: our tokens against those of transformers' greedy ``generate`` for each prompt alone.

A first difference is excused if rounding may decide: the reference's two best logits at that token, computed from the
reference's own tokens, must differ by less than EXCUSABLE_GAP standard deviations of the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EXCUSABLE_GAP = 1e-5  #: gap of the two best logits, in standard deviations of the logits
MAX_EXCUSED = 1e-4  #: excused differences as a share of all tokens


@dataclass(frozen=True)
class Exactness:
    """The result of a comparison of tokens."""

    num_tokens: int
    num_equal: int  #: tokens before each prompt's first difference
    num_excused: int  #: prompts with an excused difference
    first_wrong: str  #: description of the first difference that is not excused; empty without one

    @property
    def exact(self) -> bool:
        return not self.first_wrong and self.num_excused <= MAX_EXCUSED * self.num_tokens


class Reference:
    """The model that transformers loads from a checkpoint's local files, in float32."""

    def __init__(self, path: str | Path):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True).float().eval()

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        ignore_eos: bool = False,
        on_prompt: Callable[[], None] | None = None,
    ) -> list[list[int]]:
        """Return the greedy tokens of each prompt alone."""
        stop = {"eos_token_id": None} if ignore_eos else {}
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt], dtype=torch.int64)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=1,
                **stop,
            )  # fmt: skip
            answers.append(out[0, len(prompt) :].tolist())
            if on_prompt:
                on_prompt()
        return answers

    @torch.inference_mode()
    def top_two_gap(self, ids: list[int]) -> float:
        """Return the gap between the two best next-token logits, in standard deviations of the logits."""
        logits = self.model(torch.tensor([ids], dtype=torch.int64)).logits[0, -1]
        best = logits.topk(2).values
        return float((best[0] - best[1]) / logits.std())


def compare_tokens(
    reference: Reference, prompts: list[list[int]], expected: list[list[int]], ours: list[list[int]]
) -> Exactness:
    """Compare answers prompt by prompt, each up to its first difference: after it, the texts may diverge."""
    num_tokens = num_equal = num_excused = 0
    first_wrong = ""
    for i, (prompt, wanted, got) in enumerate(zip(prompts, expected, ours, strict=True)):
        num_tokens += len(wanted)
        place = next((t for t, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
        if place is None and len(wanted) == len(got):
            num_equal += len(wanted)
            continue
        place = min(len(wanted), len(got)) if place is None else place
        num_equal += place
        gap = reference.top_two_gap(prompt + wanted[:place])
        if gap < EXCUSABLE_GAP:
            num_excused += 1
        elif not first_wrong:
            first_wrong = f"prompt {i} differs at token {place}, where the reference's gap is {gap:.2e}"
    return Exactness(num_tokens, num_equal, num_excused, first_wrong)
