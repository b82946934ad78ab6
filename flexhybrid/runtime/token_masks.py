"""Make masks of the tokens that grammars allow, on the host while the device computes.

A request's next mask depends on its latest token. When the token reaches the host (``store_out``), a separate thread
advances the grammar and makes the mask, during the next pass through the layers. ``sample`` waits for the mask on the
compute lane's thread. By then a GPU has the whole pass in its queue. Requests without a grammar do not wait.
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

BITS = 32  #: number of bits in a word of a mask


class Grammar(Protocol):
    """Decides which tokens are allowed next in an answer."""

    def begin(self) -> Grammar:
        """Return the grammar at the beginning of a new answer."""
        ...

    def fill(self, words: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 (int32) for each token t that is allowed next."""

    def advance(self, token: int) -> None:
        """Take the answer's next token."""


class TokenMasks:
    """The grammars of running requests, and the masks of their next tokens."""

    def __init__(self, vocab: int, device: torch.device):
        self._grammars: dict[int, Grammar] = {}  # by request, advanced to the end of its answer
        self._vocab, self._device, self._failed = vocab, device, False
        self._worker: ThreadPoolExecutor | None = None
        self._masks: dict[int, Future] = {}  # request -> words of its next mask
        self._shifts = torch.arange(BITS, dtype=torch.int32, device=device)
        self.errors: dict[int, str] = {}  #: request -> error of its grammar; all tokens are allowed from then on
        self.finished: deque[int] = deque()  #: requests that need no more masks; any thread may append

    def begin(
        self, step: MiniBatchStep, grammars: Sequence[Grammar | None], answers: Mapping[int, Sequence[int]]
    ) -> None:
        """Start to make the first masks of a step's requests. ``grammars`` [B]: theirs, or None.

        ``answers``: the requests' tokens so far, also from an earlier batch.
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
        """Wait for the masks; return logits with -inf for forbidden tokens (the same tensor, without grammars)."""
        if self._worker is None:
            return logits_BV
        rows = [row for row, request in enumerate(step.queued.tolist()) if request in self._grammars]
        if not rows:
            return logits_BV
        words = np.stack([self._masks[request].result() for request in step.queued[rows].tolist()])
        for request in step.queued[rows].tolist():  # the mask of the next token
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
        """Start to make the next masks when the new ``tokens`` [B] of the device reach the host.

        The calling thread's current stream copies them.
        """
        if self._worker is None:
            return
        rows = [(row, request) for row, request in enumerate(step.queued.tolist()) if request in self._grammars]
        if not rows:
            return
        read: Callable[[int], int] = tokens.tolist().__getitem__ if tokens.device.type == "cpu" else _Copy(tokens)
        for row, request in rows:
            if mask := self._masks.get(request):  # the request may have finished
                self._worker.submit(self._make, mask, request, lambda row=row: (read(row),))

    def _make(self, mask: Future, request: int, tokens: Callable[[], Iterable[int]], begins: bool = False) -> None:
        """Advance a request's grammar by new tokens (``tokens`` waits for them) and make its next mask."""
        if not mask.set_running_or_notify_cancel():
            return
        words = np.zeros(-(-self._vocab // BITS), dtype=np.int32)
        try:
            if begins:
                self._grammars[request] = self._grammars[request].begin()
            for token in tokens():
                self._grammars[request].advance(token)
            self._grammars[request].fill(words)
        except Exception as error:  # a grammar library may raise any error; other requests continue
            self.errors.setdefault(request, " ".join(str(error).split()) or type(error).__name__)
            words[:] = -1
        mask.set_result(words)

    def abort(self) -> None:
        """Release all waiting threads, because a lane has failed."""
        self._failed = True
        for mask in list(self._masks.values()):
            mask.cancel()


class _Copy:
    """Copies tokens [B] to the host. A call waits for the copy and returns a token."""

    def __init__(self, tokens: torch.Tensor):
        self._copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._copy.copy_(tokens, non_blocking=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record()

    def __call__(self, row: int) -> int:
        self._copied.synchronize()
        return int(self._copy[row])
