"""Record log probabilities of tokens on the device, and copy them to the host, for requests that ask for them.

Log probabilities are those of the model's logits, before sampling changes them, as in vLLM by default.

Shapes in names: R rows, V vocabulary, K most probable tokens. A record is a row of float64, which represents token ids
and float32 values exactly: [log probability, rank, K token ids, K log probabilities].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.cuda import CudaCopies
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.step_tensors import SamplingPlans, TokenTable, to_device

ROWS_AT_ONCE = 16  #: number of rows processed at a time, to limit temporary memory


def records(logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the records [R, 2 + 2K] of tokens. A token's rank is the number of tokens that are at least as probable.

    Among equally probable tokens, the smaller id comes first, whatever the rest of the batch is.
    """
    slices = zip(logits_RV.split(ROWS_AT_ONCE), tokens_R.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([_records(logits, tokens[:, None], num_top) for logits, tokens in slices])


def _records(logits_RV: torch.Tensor, tokens_R1: torch.Tensor, num_top: int) -> torch.Tensor:
    logprobs = logits_RV.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens_R1)
    parts = [chosen, (logprobs >= chosen).sum(dim=-1, keepdim=True)]
    if num_top:
        vocab = logprobs.shape[1]
        # Log probabilities are <= 0, so their order is that of the negated bits of their magnitude. The token id in the
        # lower half makes keys distinct.
        tokens = torch.arange(vocab, device=logprobs.device, dtype=torch.int64)
        keys = (logprobs.abs().view(torch.int32).to(torch.int64) << 32) + tokens
        top = keys.topk(min(num_top, vocab), dim=-1, largest=False).values & 0xFFFFFFFF
        padding = (0, num_top - top.shape[1])
        parts.append(torch.nn.functional.pad(top, padding, value=-1))
        parts.append(torch.nn.functional.pad(logprobs.gather(1, top), padding))
    return torch.cat([part.double() for part in parts], dim=1)


class Noted(NamedTuple):
    """The records of one request in an iteration."""

    answer: np.ndarray | None  #: [2 + 2K] of the new token; None: not requested
    prompt: np.ndarray | None  #: [prompt tokens - 1, 2 + 2K] of the prompt's tokens from the second on


class LogprobLog:
    """Log probabilities of the requests that ask for them.

    The verbs ``sample`` and ``finish`` make records on the device. ``store_out`` copies them to the host, where they
    stay until they are taken.
    """

    def __init__(self, wave: Wave, plan: SamplingPlans, tokens: TokenTable, copies: CpuCopies | CudaCopies):
        self.plan = plan
        everybody = wave.queue.workload if wave.queue else wave.workload
        self.prompt_tokens, self.tokens, self.copies = everybody.prompt_tokens, tokens, copies
        self._prompts: dict[int, list[torch.Tensor]] = {}  # request -> records of its prompt's chunks
        self._made: dict[int, list[tuple[list[int], str, torch.Tensor]]] = {}  # by mini-batch: requests, part, records
        #: by mini-batch, iteration and chunk: requests, part, records on the host and (for the running copy) the device
        self._on_host: dict[tuple[int, int, int], list[tuple[list[int], str, torch.Tensor, torch.Tensor]]] = {}

    def note_prompt(self, step: MiniBatchStep, hidden_Rh: torch.Tensor, head) -> None:
        """Record the prompt tokens after the step's tokens. ``head``: last hidden states [·, h] -> logits [·, V]."""
        wanted = self.plan.select(step.queued).num_prompt_logprobs
        if (wanted < 0).all():
            return
        lengths = self.prompt_tokens[step.queued] - 1 - step.context
        asking = (wanted >= 0) & (lengths > 0)
        for row in np.flatnonzero(asking).tolist():
            request, count = int(step.queued[row]), int(min(lengths[row], step.new_tokens[row]))
            first = row * step.computed_width + step.recomputed_width
            cell = int(self.tokens.start[step.requests[row]] + step.context[row]) + 1
            pieces = zip(
                hidden_Rh[first : first + count].split(ROWS_AT_ONCE),
                self.tokens.ids[cell : cell + count].split(ROWS_AT_ONCE),
                strict=True,
            )
            num_top = int(wanted[row])
            made = [records(head(hidden), tokens, num_top) for hidden, tokens in pieces]
            self._prompts.setdefault(request, []).extend(made)

    def note_sampled(self, step: MiniBatchStep, logits_BV: torch.Tensor, chosen_B: torch.Tensor) -> None:
        """Record the new tokens. The records of their prompts are then complete."""
        wanted = self.plan.select(step.queued).num_logprobs
        if (wanted < 0).all() and not self._prompts:
            return
        made = [
            ([request], "prompt", torch.cat(self._prompts.pop(request)))
            for request in step.queued.tolist()
            if request in self._prompts
        ]
        rows = np.flatnonzero(wanted >= 0)
        if len(rows):
            if len(rows) < len(wanted):
                on_device = to_device(rows, logits_BV.device)
                logits_BV, chosen_B = logits_BV[on_device], chosen_B[on_device]
            made.append((step.queued[rows].tolist(), "answer", records(logits_BV, chosen_B, int(wanted.max()))))
        if made:
            self._made[step.mini_batch] = made

    def store(self, step: MiniBatchStep) -> None:
        """Copy the records of a step to the host."""
        if step.mini_batch not in self._made:
            return
        stored = self._on_host[step.mini_batch, step.iteration, step.chunk] = []
        for requests, part, made in self._made.pop(step.mini_batch):
            target = torch.empty(made.shape, dtype=made.dtype, pin_memory=made.is_cuda)
            self.copies.copy_d2h(target, made)
            stored.append((requests, part, target, made))

    def take(self, step: MiniBatchStep) -> dict[int, Noted]:
        """Return {request: records} of a step, after its ``store_out``."""
        noted: dict[int, Noted] = {}
        for requests, part, stored, _ in self._on_host.pop((step.mini_batch, step.iteration, step.chunk), ()):
            for request, record in zip(requests, stored.numpy() if part == "answer" else [stored.numpy()]):
                noted[request] = noted.get(request, Noted(None, None))._replace(**{part: record})
        return noted
