"""Converts answers and errors to output lines of OpenAI's Batch format, and reads such lines.

Formats: schema BatchRequestOutput of openai-openapi, and the schemas of the two endpoints; prompt_logprobs as in vLLM.
"""

import io
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from flexhybrid.batch.openai import CHAT, Refused, Request
from flexhybrid.batch.tool_calls import find_calls
from flexhybrid.requests import CompletionOutput, Logprob, Logprobs, RequestOutput

ID = re.compile(r"batch_req_(\d{8,19})")
DIGEST = re.compile(r"req_\d+_([0-9a-f]{16})")
LEAST_LOGPROB = -9999.0  #: replaces minus infinity, which JSON lacks, as in vLLM


def answer_tokens(request: Request, output: RequestOutput) -> int:
    """Return the number of tokens of all choices; 0 if only the prompt is to be returned."""
    return 0 if request.echo and request.echo.alone else sum(len(one.token_ids) for one in output.outputs)


def answer_line(number: int, request: Request, output: RequestOutput, created: int) -> bytes:
    """Return the output line that answers input line ``number``. ``created``: Unix time of the job's start."""
    body = answer_head(number, request, created) | usage_of(request, output)
    made = (choice_of(request, output, one, number) for one in output.outputs)
    digest = f"_{request.digest}" * bool(request.digest)
    before, behind = _line(number, request.custom_id, 200, body, digest).split(b'"choices": []', 1)
    line = io.BytesIO()  # its getvalue makes no copy
    line.write(before + b'"choices": [')
    line.writelines(b", " * (place > 0) + to_json(choice) for place, choice in enumerate(made))  # saves memory
    line.write(b"]" + behind)
    return line.getvalue()


def answer_body(number: int, request: Request, output: RequestOutput, created: int) -> dict:
    """Return the body of a request's answer, as ``answer_line`` has it."""
    choices = [choice_of(request, output, one, number) for one in output.outputs]
    return answer_head(number, request, created) | {"choices": choices} | usage_of(request, output)


def answer_head(number: int, request: Request, created: int) -> dict:
    """Return the first fields of an answer's body, without choices."""
    chat = request.url == CHAT
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number:08d}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": request.model,
        "choices": [],
    }


def usage_of(request: Request, output: RequestOutput) -> dict[str, object]:
    """Return the last fields of an answer's body: its token counts, and a chat's prompt_logprobs if requested."""
    prompt_tokens, tokens = len(output.prompt_token_ids), answer_tokens(request, output)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    if request.url == CHAT and output.prompt_logprobs is not None:
        return {"usage": usage, "prompt_logprobs": _by_id(output.prompt_logprobs)}
    return {"usage": usage}


def choice_of(request: Request, output: RequestOutput, completion: CompletionOutput, number: int) -> dict:
    """Return the choice of a completion of either endpoint."""
    if request.url == CHAT:
        return _chat_choice(request, completion, number)
    return _choice(request, output, completion)


def _choice(request: Request, output: RequestOutput, completion: CompletionOutput) -> dict:
    """Return a completion's choice."""
    text, ids, logprobs = completion.text, completion.token_ids, completion.logprobs
    echo, shown = request.echo, None
    if echo and echo.alone:
        text, ids, logprobs = "", [], logprobs and []
    if echo:
        text, ids = echo.text + text, output.prompt_token_ids + ids
        logprobs = None if logprobs is None else [*(output.prompt_logprobs or []), *logprobs]
    if logprobs is not None:
        shown = _completion_logprobs(ids, logprobs, request.params.logprobs or 0, echo and echo.first_token)
        if echo:
            of_prompt, offsets = len(output.prompt_token_ids), shown["text_offset"]
            offsets[of_prompt:] = [len(echo.text) + offset for offset in offsets[of_prompt:]]
    choice = {"index": completion.index, "text": text, "logprobs": shown, "finish_reason": completion.finish_reason}
    if output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _by_id(output.prompt_logprobs)
    return {**choice, "token_ids": ids} if request.return_token_ids else choice


def _chat_choice(request: Request, completion: CompletionOutput, number: int) -> dict:
    """Return a chat's choice, for input line ``number``."""
    logprobs = None
    if completion.logprobs is not None:
        num_top, places = request.params.logprobs or 0, zip(completion.token_ids, completion.logprobs, strict=True)
        logprobs = {"content": [_chat_logprobs(token, place, num_top) for token, place in places], "refusal": None}
    said, calls = find_calls(completion.text, request.tool_form) if request.tool_form else (completion.text, [])
    message: dict = {"role": "assistant", "content": said}
    if calls:
        name = f"call_{number:08d}_{completion.index}"
        functions = enumerate(call._asdict() for call in calls)
        message["tool_calls"] = [{"id": f"{name}_{k}", "type": "function", "function": of} for k, of in functions]
    choice = {
        "index": completion.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": "tool_calls" if calls else completion.finish_reason,
    }
    return {**choice, "token_ids": completion.token_ids} if request.return_token_ids else choice


def _completion_logprobs(
    ids: list[int], places: Sequence[Logprobs | None], num_top: int, first_token: Logprob | None
) -> dict[str, list]:
    """Return the logprobs of a completion: texts, log probabilities and offsets of its tokens.
    ``first_token``: the first token of an echoed prompt, which has no log probability."""
    columns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, place in zip(ids, places, strict=True):
        text, logprob, top, offset = first_token and _text(token, first_token, "bytes:"), None, None, 0
        if place:
            chosen = place[token]
            text, logprob, offset = _text(token, chosen, "bytes:"), _number(chosen), chosen.text_offset
            top = {text: logprob}
            for one in (one for one in _most_probable(place, num_top) if one != token):
                name = _text(one, place[one], "bytes:")
                top[f"token_id:{one}" if name in top else name] = _number(place[one])
            top = dict(sorted(top.items(), key=lambda item: item[1]))
        for column, value in zip(columns.values(), (text, logprob, top, offset), strict=True):
            column.append(value)
    return columns


def _chat_logprobs(token: int, place: Logprobs, num_top: int) -> dict:
    def entry(one: int) -> dict:
        text, part = _text(one, place[one]), place[one].token_bytes
        return {"token": text, "logprob": _number(place[one]), "bytes": list(part or text.encode("utf-8", "replace"))}

    return {**entry(token), "top_logprobs": [entry(one) for one in _most_probable(place, num_top)]}


def _most_probable(place: Logprobs, num_top: int) -> list[int]:
    """Return the ``num_top`` most probable tokens. The chosen token is added only if it is one of them."""
    return sorted((token for token, logprob in place.items() if logprob.rank <= num_top), key=lambda t: place[t].rank)


def _by_id(places: Sequence[Logprobs | None]) -> list[dict | None]:
    """Return the candidates at each place of a prompt, by token id."""

    def entry(one: Logprob) -> dict:
        return {"logprob": _number(one), "rank": one.rank, "decoded_token": one.decoded_token}

    return [place and {str(token): entry(one) for token, one in place.items()} for place in places]


def _text(token: int, logprob: Logprob, of_bytes: str = "") -> str:
    """Return OpenAI's name of a token: its text, or for a part of a character ``of_bytes`` and its bytes."""
    if logprob.token_bytes is not None:
        return of_bytes + repr(logprob.token_bytes)[2:-1]
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def _number(logprob: Logprob) -> float:
    """Return the log probability as a number that JSON can represent."""
    return max(logprob.logprob, LEAST_LOGPROB)


def error_line(number: int, refused: Refused) -> bytes:
    """Return the output line with the reason why input line ``number`` was refused."""
    message = f"line {number}: {refused.message}"
    error = {"message": message, "type": "invalid_request_error", "param": refused.param, "code": refused.code}
    return _line(number, refused.custom_id, 400, {"error": error})


def _line(number: int, custom_id: str | None, status: int, body: dict, digest: str = "") -> bytes:
    response = {"status_code": status, "request_id": f"req_{number:08d}{digest}", "body": body}
    line = {"id": f"batch_req_{number:08d}", "custom_id": custom_id, "response": response, "error": None}
    return to_json(line) + b"\n"


def renumbered(raw: bytes, number: int, custom_id: str | None) -> bytes:
    """Return an answer's line changed to answer input line ``number`` with this custom_id."""
    line = json.loads(raw)
    body, old = line["response"]["body"], line["id"].removeprefix("batch_req_")
    calls = [call for choice in body["choices"] for call in choice.get("message", {}).get("tool_calls", ())]
    for named, field in [(line["response"], "request_id"), *((one, "id") for one in (line, body, *calls))]:
        named[field] = named[field].replace(old, f"{number:08d}", 1)
    return to_json(line | {"custom_id": custom_id}) + b"\n"


def to_json(value: dict) -> bytes:
    """Return the value as JSON in UTF-8."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can escape but UTF-8 cannot encode
        return json.dumps(value).encode()


class Reply(NamedTuple):
    """The facts that a line of an output file has about its input line."""

    number: int  #: number of the input line, from 1
    answered: bool  #: False: refused
    num_tokens: int  #: tokens of all its answers; 0 if not given
    digest: int = 0  #: hash of the input line; 0 if not given


def parse_answer(raw: bytes) -> Reply | None:
    """Return the facts of a complete line of an output file; None for any other line."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or set(line) != {"id", "custom_id", "response", "error"}:
        return None
    match = ID.fullmatch(line["id"]) if isinstance(line["id"], str) else None
    response = line["response"]
    if match is None or not isinstance(response, dict) or not isinstance(response.get("body"), dict):
        return None
    usage = response["body"].get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    found = DIGEST.fullmatch(str(response.get("request_id")))
    digest = int(found[1], 16) if found else 0
    return Reply(int(match[1]), response.get("status_code") == 200, tokens if type(tokens) is int else 0, digest)
