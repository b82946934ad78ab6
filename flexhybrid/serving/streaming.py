"""Cuts an answer that is still generated into pieces for server-sent events."""

from dataclasses import replace

from flexhybrid.requests import CompletionOutput, Generated, RequestCodec
from flexhybrid.serving.live import News
from flexhybrid.text import INCOMPLETE, StopWatch

#: Characters that may still change if the tokenizer cleans up spaces: " n't" becomes "n't".
CLEANED_UP_CHARS = 4


class AnswerPieces:
    """Makes pieces whose texts, token ids and log probabilities together are the answer's.

    A piece has no text that a later token may change: an incomplete character, the beginning of a stop text, or spaces
    that the tokenizer cleans up.
    """

    def __init__(self, codec: RequestCodec, answer: Generated):
        self.codec, self.params = codec, answer.params
        self.so_far = Generated(answer.index, answer.prompt_ids, answer.params, None)
        self.num_chars, self.num_tokens = 0, 0  #: of the pieces so far
        self._watch = None
        if codec.tokenizer is not None:
            decode = codec.texts.decoders[answer.params.skip_special_tokens]
            self._watch = StopWatch(decode, answer.prompt_ids)
            cleans = getattr(codec.tokenizer, "clean_up_tokenization_spaces", False)
            self._held = max([len(stop) - 1 for stop in answer.params.stop], default=0)
            self._held = max(self._held, CLEANED_UP_CHARS if cleans else 0)

    def add(self, news: News) -> CompletionOutput | None:
        """Return the next piece after new tokens; None if nothing is certain yet."""
        self.so_far.token_ids += news.token_ids
        self.so_far.records += news.records
        if self._watch is None:
            return self._piece("", len(self.so_far.token_ids))
        for token in news.token_ids:
            self._watch.push(token)
        text = (self._watch.settled + self._watch.tail).rstrip(INCOMPLETE)
        end, count = len(text) - self._held, len(self.so_far.token_ids)
        if self.params.logprobs is not None and end > self.num_chars:
            ids, skips = self.so_far.token_ids, self.params.skip_special_tokens
            ends = [begin + len(added) for added, begin in self.codec.texts.along(self.so_far.prompt_ids, ids, skips)]
            while count > self.num_tokens and ends[count - 1] > end:
                count -= 1
            end = ends[count - 1] if count else 0
        return self._piece(text[self.num_chars : end], count) if end > self.num_chars else None

    def _piece(self, text: str, count: int) -> CompletionOutput:
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = (self.codec.completion(self.so_far).logprobs or ())[self.num_tokens : count]
        ids = self.so_far.token_ids[self.num_tokens : count]
        self.num_chars, self.num_tokens = self.num_chars + len(text), count
        return CompletionOutput(self.so_far.index, text, ids, "", logprobs=logprobs)

    def last(self, whole: CompletionOutput) -> CompletionOutput:
        """Return the last piece of a complete answer."""
        logprobs = None if whole.logprobs is None else whole.logprobs[self.num_tokens :]
        return replace(
            whole, text=whole.text[self.num_chars :], token_ids=whole.token_ids[self.num_tokens :], logprobs=logprobs
        )
