"""Finds tool calls in a model's text, in the two forms that chat templates ask for.

- Hermes (also Qwen): <tool_call>{"name": …, "arguments": …}</tool_call> for each call, after any other text.
- Llama 3: the answer is {"name": …, "parameters": …}, or several such objects separated by semicolons.
"""

import json
import re
from typing import NamedTuple

from flexhybrid.core.errors import InputError, shown


def _not_json(name: str):
    """Refuse NaN and Infinity, which are not JSON."""
    raise ValueError(f"{name} is no JSON number")


def _once(pairs: list[tuple]) -> dict:
    """Return the object of these pairs. Raise ValueError for a repeated name."""
    if len(named := dict(pairs)) < len(pairs):
        raise ValueError("a name appears twice")
    return named


DECODER = json.JSONDecoder(parse_constant=_not_json)  #: strict JSON
_CALLS = json.JSONDecoder(parse_constant=_not_json, object_pairs_hook=_once)
HERMES, LLAMA = "hermes", "llama3_json"
_HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_LLAMA_TAG = "<|python_tag|>"


class ToolForm(NamedTuple):
    """The form of an answer's tool calls."""

    name: str  #: HERMES or LLAMA
    parallel: bool = True  #: False: only the first call counts


class ToolCall(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: str  #: JSON


def form_of(template: str) -> str | None:
    """Return the form of tool calls that a chat template asks for; None for any other form.
    Raise InputError if the template does not support tools."""
    if "tools" not in template:
        raise InputError("the chat template does not support tools")
    if "<tool_call>" in template:
        return HERMES
    return LLAMA if _LLAMA_TAG in template or re.search(r'"parameters"\s*:', template) else None


def check_tools(tools) -> None:
    """Raise InputError if ``tools`` is not a list of tools in OpenAI's form."""
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(tools, list) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(
                f'tools is {shown(tools)}; it must be a list of {{"type": "function", "function": {{"name": …}}}}'
            )


def find_calls(text: str, form: ToolForm) -> tuple[str | None, list[ToolCall]]:
    """Return an answer's text without its tool calls (None if empty), and the calls.
    An incomplete call stays part of the text."""
    said, bodies = text, []
    if form.name == HERMES:
        said, bodies = _HERMES_CALL.sub("", text), _HERMES_CALL.findall(text)
    elif (body := text.strip().removeprefix(_LLAMA_TAG).strip()).startswith("{"):
        said, bodies = "", [body]
    try:
        calls = [call for body in bodies for call in _calls(body, several=form.name == LLAMA)]
    except (ValueError, KeyError, TypeError, RecursionError):
        calls = []
    if not calls:
        return text, []
    return said.strip() or None, calls if form.parallel else calls[:1]


def _calls(body: str, several: bool) -> list[ToolCall]:
    """Return the call of a JSON text, or ``several`` separated by semicolons.
    Raise ValueError, KeyError or TypeError for other texts."""
    calls, body = [], body.strip()
    while body or not calls:
        call, end = _CALLS.raw_decode(body)
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        if not isinstance(call["name"], str) or not isinstance(arguments, dict):
            raise TypeError
        calls.append(ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
        body = body[end:].strip()
        if body and not several:
            raise ValueError
        body = body.removeprefix(";").strip()
    return calls


def plain_call(call, as_text: bool) -> dict:
    """Return a message's tool call in the form for templates, with arguments as an object, or ``as_text`` as JSON.
    Raise ValueError, KeyError or TypeError for other objects."""
    function = dict(call["function"])
    text = arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments or "{}")
    else:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not isinstance(function["name"], str) or not isinstance(arguments, dict):
        raise TypeError
    return {**call, "function": function | {"arguments": text or "{}" if as_text else arguments}}
