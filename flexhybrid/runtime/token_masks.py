"""Masks of the tokens that grammars allow, made on the host while the device computes.

A request's next mask depends on its latest token. When that reaches the host (``store_out``), a separate thread
advances the grammar and makes the mask during the next pass through the layers. ``sample`` waits for it on the compute
lane's thread; a GPU then has that pass queued. Requests without a grammar do not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.runtime.step_tensors import to_device

BITS = 32  #: of a mask's word


class Grammar(Protocol):
    """Which tokens may come in an answer."""

    def begin(self) -> Grammar:
        """Return the beginning of another answer."""
        ...

    def fill(self, words: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 (int32) where token t may come next."""

    def advance(self, token: int) -> None:
        """Take the token that came."""


class TokenMasks:
    """The grammars of requests that run, each where its answer is, and the masks of their next tokens."""

    def __init__(self, vocab: int, device: torch.device):
        self._grammars: dict[int, Grammar] = {}  # the answers so far, by request
        self._vocab, self._device, self._failed = vocab, device, False
        self._worker: ThreadPoolExecutor | None = None
        self._masks: dict[int, Future] = {}  # by request: the words of its next mask
        self._shifts = torch.arange(BITS, dtype=torch.int32, device=device)
        self.errors: dict[int, str] = {}  #: by request, what its grammar has raised: from then on any token may come
        self.finished: deque[int] = deque()  #: requests that need no mask any more; any thread may add to it

    def begin(
        self, step: MiniBatchStep, grammars: Sequence[Grammar | None], answers: Mapping[int, Sequence[int]]
    ) -> None:
        """Make the first masks as the prompts of a step begin; ``grammars`` [B]: of its requests.

        ``answers``: tokens of requests so far, also from an earlier batch.
        """
        for request, grammar in zip(step.queued.tolist(), grammars, strict=True):
            if grammar is None or request in self._masks:
                continue
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "flexhybrid-masks")
            mask, begun = Future(), tuple(answers.get(request, ()))
            self._grammars[request], self._masks[request] = grammar, mask
            self._worker.submit(self._make, mask, request, lambda tokens=begun: tokens, begins=True)
        while self.finished:
            request = self.finished.popleft()
            for kept in (self._grammars, self._masks, self.errors):
                kept.pop(request, None)

    def masked(self, step: MiniBatchStep, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the logits with -inf for forbidden tokens; the same tensor without a grammar. Waits for the masks."""
        if self._worker is None:
            return logits_BV
        rows = [row for row, request in enumerate(step.queued.tolist()) if request in self._grammars]
        if not rows:
            return logits_BV
        words = np.stack([self._masks[request].result() for request in step.queued[rows].tolist()])
        for request in step.queued[rows].tolist():  # of the token after this one
            self._masks[request] = Future()
            if self._failed:
                self._masks[request].cancel()
        words, rows = to_device(words, self._device), to_device(np.array(rows), self._device)
        bits = (words[:, :, None] >> self._shifts) & 1
        allowed = bits.flatten(1)[:, : self._vocab].bool()
        masked = logits_BV.clone()
        masked[rows] = logits_BV[rows].masked_fill(~allowed, -torch.inf)
        return masked

    def advance(self, step: MiniBatchStep, tokens: torch.Tensor) -> None:
        """Have the next masks made, once the new ``tokens`` [B] of the device are on the host. The calling thread's
        stream brings them."""
        if self._worker is None:
            return
        rows = [(row, request) for row, request in enumerate(step.queued.tolist()) if request in self._grammars]
        if not rows:
            return
        read: Callable[[int], int] = tokens.tolist().__getitem__ if tokens.device.type == "cpu" else _Copy(tokens)
        for row, request in rows:
            if mask := self._masks.get(request):  # it may have finished meanwhile
                self._worker.submit(self._make, mask, request, lambda row=row: (read(row),))

    def _make(self, mask: Future, request: int, tokens: Callable[[], Iterable[int]], begins: bool = False) -> None:
        """Advance a grammar and make its next mask; ``tokens`` waits for new ones."""
        if not mask.set_running_or_notify_cancel():
            return
        words = np.zeros(-(-self._vocab // BITS), dtype=np.int32)
        try:
            if begins:
                self._grammars[request] = self._grammars[request].begin()
            for token in tokens():
                self._grammars[request].advance(token)
            self._grammars[request].fill(words)
        except Exception as error:  # a Rust library raises what it likes; the other requests go on
            self.errors.setdefault(request, " ".join(str(error).split()) or type(error).__name__)
            words[:] = -1
        mask.set_result(words)

    def abort(self) -> None:
        """Release all waiting threads: a lane failed."""
        self._failed = True
        for mask in list(self._masks.values()):
            mask.cancel()


class _Copy:
    """Tokens [B] on their way to the host; calling it waits for one."""

    def __init__(self, tokens: torch.Tensor):
        self._copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._copy.copy_(tokens, non_blocking=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record()

    def __call__(self, row: int) -> int:
        self._copied.synchronize()
        return int(self._copy[row])
