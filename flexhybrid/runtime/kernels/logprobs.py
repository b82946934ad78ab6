"""Log probabilities of tokens: of one token a row, with its rank, and of the most probable ones.

They are of the model's own logits, before anything that sampling makes of them, as vLLM's are by default.

Shapes in names: R rows, V vocabulary, K most probable tokens. A record is a row of float64, which holds token ids and
float32 values alike: [log probability, rank, K token ids, K log probabilities].
"""

from __future__ import annotations

import torch

ROWS_AT_ONCE = 16  #: so that what lies between logits and records takes little memory


def records(logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the records [R, 2 + 2K] of these tokens. A token's rank counts those at least equally probable.

    Among equally probable tokens the smaller id comes first, independently of the rest of the batch.
    """
    slices = zip(logits_RV.split(ROWS_AT_ONCE), tokens_R.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([_records(logits, tokens[:, None], num_top) for logits, tokens in slices])


def _records(logits_RV: torch.Tensor, tokens_R1: torch.Tensor, num_top: int) -> torch.Tensor:
    logprobs = logits_RV.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens_R1)
    parts = [chosen, (logprobs >= chosen).sum(dim=-1, keepdim=True)]
    if num_top:
        vocab = logprobs.shape[1]
        # Values up to 0 order as the negated bits of their magnitude do; behind them the token id makes keys distinct.
        tokens = torch.arange(vocab, device=logprobs.device, dtype=torch.int64)
        keys = (logprobs.abs().view(torch.int32).to(torch.int64) << 32) + tokens
        top = keys.topk(min(num_top, vocab), dim=-1, largest=False).values & 0xFFFFFFFF
        padding = (0, num_top - top.shape[1])
        parts.append(torch.nn.functional.pad(top, padding, value=-1))
        parts.append(torch.nn.functional.pad(logprobs.gather(1, top), padding))
    return torch.cat([part.double() for part in parts], dim=1)
