"""Converts the lines of an input to requests."""

import copy
import json
from dataclasses import dataclass, replace
from hashlib import blake2b

from flexhybrid.batch.formats import MAX_LINE_BYTES, ChatRules
from flexhybrid.batch.openai import (
    CHAT,
    COMPLETIONS,
    Bodies,
    Draft,
    Refused,
    Request,
    check_utf8,
    json_object,
    one_prompt,
    refusing,
    shown,
    url_of,
    utf8,
)
from flexhybrid.core.errors import is_integer
from flexhybrid.requests import RequestCodec


@dataclass(frozen=True)
class LineRules:
    """Rules by which the lines of an input become requests."""

    file_format: str  #: a key of FORMATS
    sampling: dict  #: default sampling parameters
    seed: int  #: seed of the job, from which each line gets its own
    chat: ChatRules = ChatRules()
    has_ids: bool = False  #: whether a table's lines have custom_ids


class LineReader:
    """Converts a line, given by its bytes and its number (from 1), to a request."""

    def __init__(self, rules: LineRules, codec: RequestCodec):
        self.rules, self.codec = rules, codec
        self._bodies = Bodies(codec, rules.sampling, rules.chat)
        self._draft = self._draft_batch if rules.file_format == "jsonl" else self._draft_prompt

    def __call__(self, raw: bytes, number: int) -> Request:
        """Return the request of a line, with a seed of its own. Raise Refused if it cannot be served."""
        draft = self.draft(raw, number)
        with refusing(draft.custom_id):
            request = self._bodies.request(draft)
        params = request.params
        if params.seed is None:
            params = replace(params, seed=line_seed(self.rules.seed, number))
        return replace(request, params=params, digest=line_digest(raw))

    def draft(self, raw: bytes, number: int) -> Draft:
        """Return the request of a line. Raise Refused if it cannot be served, whatever its prompt."""
        if len(raw) > MAX_LINE_BYTES:
            raise Refused("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
        with refusing():
            return self._draft(raw, number)

    def take_own_tokenizer(self) -> None:
        """Use a copy of the tokenizer from now on, because a tokenizer may not be shared by threads."""
        self.codec = replace(self.codec, tokenizer=copy.deepcopy(self.codec.tokenizer))
        self._bodies = replace(self._bodies, codec=self.codec)

    def prompt_tokens(self, drafts: list[Draft]) -> list[int]:
        """Return the lengths of the prompts, counted together; 0 for a prompt that cannot be served."""
        return self._bodies.prompt_tokens(drafts)

    def _draft_batch(self, raw: bytes, number: int) -> Draft:
        return self._bodies.draft(batch_line(json_object(raw), number))

    def _draft_prompt(self, raw: bytes, number: int) -> Draft:
        """Return the request of a line of text, or of a table's row."""
        value, custom_id = None, None if self.rules.has_ids else f"line-{number}"
        try:
            with refusing():
                value = utf8(raw).rstrip("\r\n") if self.rules.file_format == "text" else json.loads(raw)
                if self.rules.has_ids:
                    given, value = value
                    custom_id = _custom_id(given)
                if isinstance(value, str):
                    check_utf8("prompt", value)
                url = CHAT if self.rules.chat.prompts else COMPLETIONS
                prompt = self._chat(value) if self.rules.chat.prompts else _completion(value)
        except Refused as refused:
            refused.custom_id = custom_id
            raise
        return Draft(custom_id or "", prompt, self._bodies.params({}, url), self.codec.shape.name, url)

    def _chat(self, value) -> str:
        """Return a text (a user message), or a list of messages, formatted by the chat template."""
        system = self.rules.chat.system
        before = [] if system is None else [{"role": "system", "content": system}]
        messages = value if isinstance(value, list) else [{"role": "user", "content": _text(value)}]
        return self._bodies.chat_text([*before, *messages])


def batch_line(data: dict, number: int) -> dict:
    """Return the object of a line as a Batch line's: a bare body with ``prompt`` or ``messages`` is wrapped.
    Its id is ``custom_id`` or the line's number. Raise Refused if the line is neither."""
    url = url_of(data)
    if url is None and {"custom_id", "body", "url", "method"}.isdisjoint(data):
        others = f", but {', '.join(map(shown, list(data)[:4]))}" if data else ""
        message = f"the line has no prompt and no messages{others}"
        raise Refused("missing_required_parameter", message, "prompt", f"line-{number}")
    if url is None or not {"body", "url", "method"}.isdisjoint(data):
        return data
    body = {name: value for name, value in data.items() if name != "custom_id"}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, **data, "body": body}


def _custom_id(value) -> str:
    """Return a table's id as text. Raise Refused for an unusable one."""
    text = str(value) if isinstance(value, str) or is_integer(value) else ""
    if not text:
        message = f"the id column has {shown(value)}; it must be a text that is not empty, or a whole number"
        raise Refused("invalid_custom_id", message, "custom_id")
    return check_utf8("custom_id", text)


def _completion(value) -> str | list[int]:
    """Return a table's value as the prompt of a completion. Raise Refused for an unusable one."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        raise Refused("invalid_value", "the prompt is a list of messages: --chat answers it", "prompt")
    return one_prompt(value) if isinstance(value, list) else _text(value)


def _text(value) -> str:
    """Return a prompt's text. Raise Refused if it is empty or not a text."""
    if not isinstance(value, str):
        raise Refused("missing_required_parameter", "the prompt is not a text", "prompt")
    if not value.strip():
        raise Refused("empty_line", "the prompt is empty", "prompt")
    return value


def line_digest(raw: bytes) -> str:
    """Return a hash of a line without its end: 16 hexadecimal digits."""
    return blake2b(raw.rstrip(b"\r\n"), digest_size=8).hexdigest()


def line_seed(seed: int, number: int) -> int:
    """Return the seed of a line, which depends only on the job's seed and the line's number."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")
