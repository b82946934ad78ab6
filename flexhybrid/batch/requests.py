"""Lines of an input, and the requests that they are."""

import json
from dataclasses import dataclass, replace
from hashlib import blake2b

from flexhybrid.batch.formats import MAX_LINE_BYTES
from flexhybrid.batch.openai import COMPLETIONS, Bodies, Draft, Refused, Request, json_object, utf8
from flexhybrid.requests import RequestCodec


@dataclass(frozen=True)
class LineRules:
    """How the lines of an input become requests."""

    file_format: str  #: a key of FORMATS
    sampling: dict  #: sampling parameters of lines that do not name them
    seed: int

    def reader(self, codec: RequestCodec) -> "LineReader":
        """Return what makes requests of lines."""
        return LineReader(self, codec)


class LineReader:
    """Makes requests of lines, given by their bytes and their number (from 1)."""

    def __init__(self, rules: LineRules, codec: RequestCodec):
        self.rules, self.codec = rules, codec
        self._bodies = Bodies(codec, rules.sampling)
        self._draft = self._draft_batch if rules.file_format == "jsonl" else self._draft_prompt

    def __call__(self, raw: bytes, number: int) -> Request:
        """Return the request of a line, with a seed of its own where it has none. Raise Refused."""
        request = self._bodies.request(self.draft(raw, number))
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=line_seed(self.rules.seed, number)))
        return request

    def draft(self, raw: bytes, number: int) -> Draft:
        """Return what a line asks for. Raise Refused when it cannot be served, whatever its prompt."""
        if len(raw) > MAX_LINE_BYTES:
            raise Refused("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
        return self._draft(raw, number)

    def prompt_tokens(self, drafts: list[Draft]) -> list[int]:
        """Return the lengths of the prompts, counted together; 0 of one that cannot be served."""
        return self._bodies.prompt_tokens(drafts)

    def _draft_batch(self, raw: bytes, _number: int) -> Draft:
        return self._bodies.draft(json_object(raw))

    def _draft_prompt(self, raw: bytes, number: int) -> Draft:
        custom_id = f"line-{number}"
        try:
            text = utf8(raw).rstrip("\r\n") if self.rules.file_format == "text" else json.loads(raw)
            if text is None:
                raise Refused("missing_required_parameter", "the column holds no text here", "prompt")
            if not text.strip():
                raise Refused("empty_line", "the prompt is empty", "prompt")
        except Refused as refused:
            refused.custom_id = custom_id
            raise
        return Draft(custom_id, text, self._bodies.params({}, COMPLETIONS), self.codec.shape.name, COMPLETIONS)


def line_seed(seed: int, number: int) -> int:
    """Return the seed of a line without one, so that its random numbers do not depend on the lines around it; it is the
    same on every machine."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")
