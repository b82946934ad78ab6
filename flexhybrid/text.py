"""From tokens to text: an answer's text after its prompt, and stop texts found while the tokens come."""

from collections.abc import Callable

#: Tokens decoded before an answer's: many tokenizers drop the space of the first word that they decode.
CONTEXT_TOKENS = 5
#: Tokens decoded again with each new one, at most, before the window moves on.
WINDOW_TOKENS = 12
#: A character that is not complete yet ends so; it takes four tokens at most, of a byte each.
INCOMPLETE, LONGEST_CHARACTER = "\ufffd", 4

Decode = Callable[[list[int]], str]


def answer_text(decode: Decode, prompt_ids: list[int], token_ids: list[int]) -> str:
    """The text that the tokens add to the prompt's."""
    context = prompt_ids[-CONTEXT_TOKENS:]
    before, after = decode(context), decode(context + token_ids)
    # A prompt that ends within a character reads otherwise when the answer completes it.
    return after[len(before) :] if after.startswith(before) else decode(token_ids)


class StopWatch:
    """One answer's text, token by token, until one of the stop texts is complete in it, as vLLM finds it.

    Of stop texts completed by the same token, the one that ends first wins. Text of the first ``min_tokens`` tokens may
    begin a stop text, not end one. Each token decodes a short window, so the cost does not grow with the answer.
    """

    def __init__(self, decode: Decode, prompt_ids: list[int], stop: tuple[str, ...], min_tokens: int = 0):
        self.decode, self.stop, self.min_tokens = decode, stop, min_tokens
        self.text, self.num_tokens = "", 0  #: the answer so far
        self.stop_start = 0  #: once a stop text is complete: where in ``text`` the stop text begins
        self._window = prompt_ids[-CONTEXT_TOKENS:]
        self._seen = decode(self._window)  # the window's text without what is incomplete
        self._waiting = 0  # tokens at the window's end that are not in _seen

    def push(self, token: int) -> str | None:
        """The stop text that is complete with this token, or None."""
        self.num_tokens += 1
        self._window.append(token)
        decoded = self.decode(self._window)
        self._waiting += 1
        if decoded.endswith(INCOMPLETE) and self._waiting < LONGEST_CHARACTER:
            return None
        fresh, self._seen, self._waiting = decoded[len(self._seen) :], decoded, 0
        if len(self._window) > WINDOW_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            self._seen = self.decode(self._window)
        self.text += fresh
        if not fresh or self.num_tokens <= self.min_tokens:
            return None
        return self._find(len(self.text) - len(fresh))

    def _find(self, checked: int) -> str | None:
        """A stop text that ends behind the first ``checked`` characters."""
        ends = []
        for stop in self.stop:
            start = self.text.find(stop, max(0, checked - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if not ends:
            return None
        _, self.stop_start, stop = min(ends, key=lambda end: end[0])
        return stop
