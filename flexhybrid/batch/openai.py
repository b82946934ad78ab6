"""Converts the requests of OpenAI Batch lines to prompts and sampling parameters.

Formats: schema BatchRequestInput of openai-openapi, and the schemas of the two endpoints. A line with an unsupported
field is refused with the field's name; no field is silently dropped.
"""

import codecs
import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from flexhybrid.batch.formats import ChatRules
from flexhybrid.batch.tool_calls import DECODER, HERMES, ToolForm, check_tools, form_of, plain_call
from flexhybrid.core.errors import SHOWN, DiskError, InputError, is_integer
from flexhybrid.requests import Logprob, RequestCodec
from flexhybrid.sampling_params import MOST_LOGPROBS, SamplingParams, same
from flexhybrid.structured_outputs import StructuredOutputsParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (COMPLETIONS, CHAT)

#: Fields that do not affect the answer and are ignored: names, bookkeeping, caching.
IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}
IGNORED |= {"prompt_cache_key", "prompt_cache_retention"}
#: Field of an unsupported feature -> the values that do not use the feature, besides null.
NEUTRAL: dict[str, tuple] = {
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "stream_options", "verbosity"), ()),
    **dict.fromkeys(("echo", "stream"), (False,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("functions", "tools"), ([],)),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
    "web_search_options": (),
}
BLANK_LINE = "blank_line"  #: code of a line that consists of spaces only
MESSAGE_CHARS = 1000  #: characters of an exception's text that a line's error repeats
WHOLE_NUMBERS = {"max_tokens", "max_completion_tokens", "min_tokens", "n", "seed", "top_k"}
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")  #: vLLM's names for structured outputs
#: Role -> additional fields that its messages may have.
MESSAGE_FIELDS = {"assistant": ("tool_calls", "reasoning", "reasoning_content"), "tool": ("tool_call_id",)}
PROMPT_ENDS = ("add_generation_prompt", "continue_final_message")  #: vLLM's fields, which transformers' templates take
KNOWN_TEMPLATES = 64  #: number of chat templates with variables whose readings are cached
KNOWN_PARAMS = 1024  #: number of cached sampling parameters of lines
KNOWN_CHARACTERS = 4096  #: most characters of a body's fields whose sampling parameters are cached
MOST_NESTED = 256  #: most levels of lists and objects in a line


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its answers."""

    text: str
    first_token: Logprob | None  #: text of the prompt's first token; None without log probabilities
    alone: bool  #: whether the answers are left out


class Draft(NamedTuple):
    """The request of a line whose prompt is not encoded yet. It may still be refused because of the prompt."""

    custom_id: str
    prompt: str | list[int]
    params: SamplingParams
    model: str  #: name in the line
    url: str  #: one of URLS
    return_token_ids: bool = False
    echo: bool = False  #: whether the prompt is repeated before each answer
    echo_alone: bool = False  #: whether only the prompt is returned
    tool_form: ToolForm | None = None  #: form of tool calls to look for in the answers; None: do not look


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a line, which can be served."""

    custom_id: str
    token_ids: list[int]
    params: SamplingParams
    model: str  #: name in the line
    url: str  #: one of URLS
    return_token_ids: bool = False
    echo: Echo | None = None  #: prompt to repeat before each answer
    tool_form: ToolForm | None = None  #: form of tool calls to look for in the answers; None: do not look
    digest: str = ""  #: ``line_digest`` of the line


class Refused(ValueError):
    """The error of a refused line, with OpenAI's fields, and the line's custom_id if it is readable."""

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str | None = None):
        super().__init__(message)
        self.code, self.message, self.param, self.custom_id = code, message, param, custom_id


@contextlib.contextmanager
def refusing(custom_id: str | None = None) -> Iterator[None]:
    """Raise errors of the block as Refused, except errors of memory and files, which concern all lines."""
    try:
        yield
    except (Refused, MemoryError, OSError, DiskError):
        raise
    except BaseException as error:
        kind, text = type(error).__name__, " ".join(str(error)[:MESSAGE_CHARS].split())
        if not isinstance(error, Exception) and kind != "PanicException":  # raised by libraries in Rust
            raise
        text = text if isinstance(error, InputError) else f"the line cannot be served: {kind}: {text}"
        param = "prompt" if text.startswith("the prompt") else None
        raise Refused("invalid_value", text, param, custom_id) from None


def json_object(raw: bytes) -> dict:
    """Return the JSON object of a line. Raise Refused if it has none."""
    text = utf8(raw)
    if not text.strip(" \t\r\n"):
        raise Refused(BLANK_LINE, "the line is empty")
    if text.count("[") + text.count("{") > MOST_NESTED:
        signs = re.sub(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', "", text, flags=re.DOTALL)
        if max(accumulate((sign in "[{") - (sign in "]}") for sign in signs), default=0) > MOST_NESTED:
            raise Refused("invalid_json", f"the line is nested too deeply: at most {MOST_NESTED} levels are read")
    try:
        data = DECODER.decode(text)
    except ValueError as error:
        where = "a number has too many digits" if "digits" in str(error) else str(error)
        if isinstance(error, json.JSONDecodeError):  # its own text has line numbers, which are of no use here
            where = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise Refused("invalid_json", f"the line is not JSON: {where}") from None
    if not isinstance(data, dict):
        raise Refused("invalid_json", f"the line must be a JSON object, not {shown(data)}")
    return data


def utf8(raw: bytes) -> str:
    """Return a line as text, without a byte order mark. Raise Refused if it is not UTF-8."""
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        message = f"the line is not UTF-8: {error.reason} at byte {error.start}; --encoding names another encoding"
        raise Refused("invalid_utf8", message) from None


def check_utf8(name: str, text: str) -> str:
    """Return the text. Raise Refused if UTF-8 cannot encode it: half of a surrogate pair, as wrong encodings give."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"the {name} is not UTF-8, or has half of a surrogate pair; --encoding names another encoding"
        raise Refused("invalid_utf8", message, name) from None
    return text


def url_of(data: dict) -> str | None:
    """Return the endpoint in a line's url, else the one that the fields of a bare body belong to, else None."""
    if data.get("url") in URLS:
        return data["url"]
    return CHAT if "messages" in data else COMPLETIONS if "prompt" in data else None


@dataclass
class Bodies:
    """Converts the objects of Batch lines to requests for a checkpoint."""

    codec: RequestCodec
    sampling: dict  #: default sampling parameters
    chat: ChatRules = ChatRules()
    _known: dict[tuple[str, str], SamplingParams] = field(default_factory=dict)  #: cache: (url, fields) -> parameters

    def draft(self, data: dict) -> Draft:
        """Return the request of a line's object. Raise Refused if it cannot be served, whatever its prompt."""
        custom_id = data.get("custom_id")
        if "custom_id" not in data:
            raise Refused("missing_custom_id", "custom_id is missing", "custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            message = f"custom_id is {shown(custom_id)}; it must be a text that is not empty"
            raise Refused("invalid_custom_id", message, "custom_id")
        check_utf8("custom_id", custom_id)
        try:
            if data.get("method") != "POST":
                alone = "" if "method" in data else ', unless the line is a body alone: {"prompt": …}'
                message = f'method is {_given(data, "method")}; it must be "POST"{alone}'
                raise Refused("invalid_method", message, "method")
            if data.get("url") not in URLS:
                raise Refused("invalid_url", f"url is {_given(data, 'url')}; it must be {' or '.join(URLS)}", "url")
            body = data.get("body")
            if not isinstance(body, dict):
                raise Refused("invalid_body", f"body is {_given(data, 'body')}; it must be an object", "body")
            with refusing():
                return self.from_body(custom_id, body, data["url"])
        except Refused as refused:
            refused.custom_id = custom_id
            raise

    def from_body(self, custom_id: str, body: dict, url: str) -> Draft:
        """Return the request of a body. Raise Refused for a field that cannot be served."""
        body = {name: value for name, value in body.items() if value is not None}
        model = body.get("model", self.codec.shape.name)
        if not isinstance(model, str):
            raise Refused("invalid_value", f"model is {shown(model)}; it must be a text", "model")
        return_token_ids, echo = _flag(body, "return_token_ids"), url == COMPLETIONS and _flag(body, "echo")
        if echo_alone := echo and body.get("max_tokens") == 0:
            body["max_tokens"] = 1  # the token is computed, but left out of the answer
        name = "messages" if url == CHAT else "prompt"
        if name not in body:
            near = difflib.get_close_matches(name, [key[:SHOWN] for key in body], n=1)
            guess = f"; unknown field {near[0]!r}: did you mean {name!r}?" if near else ""
            raise Refused("missing_required_parameter", f"{name} is missing{guess}", name)
        prompt, variables = body.pop(name), body.pop("chat_template_kwargs", None) if url == CHAT else None
        ends = {end: _flag(body, end) for end in PROMPT_ENDS if end in body and url == CHAT}
        tools, form = self._take_tools(body) if url == CHAT else (None, None)
        params = self.params({name: value for name, value in body.items() if name not in IGNORED}, url)
        if echo and params.logprobs is not None:
            params = replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
        if form and form.name == HERMES and "<tool_call>" in self.codec.tokenizer.all_special_tokens:
            params = replace(params, skip_special_tokens=False)
        prompt = self.chat_text(prompt, variables, tools, ends) if url == CHAT else one_prompt(prompt)
        asked = {"return_token_ids": return_token_ids, "echo": echo, "echo_alone": echo_alone}
        return Draft(custom_id, prompt, params, model, url, tool_form=form, **asked)

    def _take_tools(self, body: dict) -> tuple[list | None, ToolForm | None]:
        """Remove the tools from a chat's body; return them and the form of their calls. Raise Refused if unusable."""
        tools, choice = body.pop("tools", None) or None, body.pop("tool_choice", "auto")
        parallel = body.pop("parallel_tool_calls", True)
        if choice not in ("none", "auto"):
            message = f'tool_choice is {shown(choice)}; "none" and "auto" are supported'
            raise Refused("unsupported_parameter", message, "tool_choice")
        if not isinstance(parallel, bool):
            message = f"parallel_tool_calls is {shown(parallel)}; it must be true or false"
            raise Refused("invalid_value", message, "parallel_tool_calls")
        if tools is None or self.codec.tokenizer is None:
            return tools, None
        try:
            check_tools(tools)
            if choice == "none":
                return tools, None
            form = form_of(template_of(self.codec.tokenizer, self.chat.template, tools))
            return tools, ToolForm(form, parallel) if form else None
        except InputError as error:
            raise Refused("invalid_value", str(error), "tools") from None

    def chat_text(self, messages, variables=None, tools: list | None = None, ends: dict | None = None) -> str:
        """Return the messages formatted by the template; see ``chat_text``. Raise Refused if that is impossible."""
        if not isinstance(variables, dict | None):
            message = f"chat_template_kwargs is {shown(variables)}; it must be an object"
            raise Refused("invalid_value", message, "chat_template_kwargs")
        variables = (self.chat.variables or {}) | (variables or {}) | (ends or {})
        return chat_text(messages, self.codec.tokenizer, self.chat.template, variables, tools)

    def params(self, fields: dict, url: str) -> SamplingParams:
        """Return a body's sampling parameters, cached because most lines of a file have the same."""
        key = (url, repr(fields))  # unlike a dict's equality, this distinguishes 1, 1.0 and true
        if (params := self._known.get(key)) is None:
            params = _params(fields, url, self.sampling)
            if len(self._known) >= KNOWN_PARAMS:
                self._known.clear()
            if len(key[1]) <= KNOWN_CHARACTERS:
                self._known[key] = params
        return params

    def request(self, draft: Draft) -> Request:
        """Return a draft's request with its prompt as tokens. Raise InputError if the prompt cannot be served."""
        ids = self.codec.check(draft.prompt, draft.params, "the prompt", draft.url != CHAT)
        return_ids, before = draft.return_token_ids or self.codec.tokenizer is None, None
        if draft.echo:
            text = draft.prompt if isinstance(draft.prompt, str) else self.codec.text(ids)
            first_token = self.codec.first_token(ids, text) if draft.params.logprobs is not None else None
            before = Echo(text, first_token, draft.echo_alone)
        return Request(
            custom_id=draft.custom_id,
            token_ids=ids,
            params=draft.params,
            model=draft.model,
            url=draft.url,
            return_token_ids=return_ids,
            echo=before,
            tool_form=draft.tool_form,
        )

    def prompt_tokens(self, drafts: list[Draft]) -> list[int]:
        """Return the lengths of the prompts; 0 for a prompt that cannot be served."""
        lengths = [0] * len(drafts)
        for url in URLS:  # separately, because chat templates write the special tokens themselves
            places = [place for place, draft in enumerate(drafts) if draft.url == url]
            asked = [(drafts[place].prompt, drafts[place].params) for place in places]
            try:
                with refusing():
                    counts = self.codec.count_all(asked, special_tokens=url != CHAT)
            except Refused:
                if len(drafts) == 1:
                    return [0]
                return [self.prompt_tokens([draft])[0] for draft in drafts]  # one by one, to find the one that fails
            for place, count in zip(places, counts):
                lengths[place] = 0 if isinstance(count, InputError) else count
        return lengths


def _given(data: dict, name: str) -> str:
    """Return a field's value as text, or "missing"."""
    return shown(data[name]) if name in data else "missing"


def _flag(body: dict, name: str) -> bool:
    """Remove a Boolean field from the body and return it. Raise Refused if it is not Boolean."""
    value = body.pop(name, False)
    if not isinstance(value, bool):
        raise Refused("invalid_value", f"{name} is {shown(value)}; it must be true or false", name)
    return value


def one_prompt(prompt) -> str | list[int]:
    """Return the prompt of a completion, or the only one of a list. Raise Refused for anything else."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and any(not is_integer(token) for token in prompt):
        several = any(isinstance(part, (str, list)) for part in prompt)
        message = f"prompt must be a text or a list of token ids{', not several prompts' * several}"
        raise Refused("invalid_value", message, "prompt")
    if not isinstance(prompt, (str, list)):
        raise Refused("invalid_value", f"prompt is {shown(prompt)}; it must be a text or a list of token ids", "prompt")
    return prompt


def _params(body: dict, url: str, defaults: dict) -> SamplingParams:
    """Return the sampling parameters of a body's fields. Raise Refused for a field that is wrong or unsupported."""
    wanted = {}
    body = _chat_logprobs(body) if url == CHAT else body
    for name, value in body.items():
        if name == "logprobs" and value is False:
            continue
        if name not in NEUTRAL:
            whole = isinstance(value, float) and name in WHOLE_NUMBERS and value.is_integer()
            wanted[name] = int(value) if whole else value  # pandas writes 16.0 for 16 if the column has empty cells
        elif not any(same(value, neutral) for neutral in NEUTRAL[name]):
            raise Refused("unsupported_parameter", f"{name} is {shown(value)}; it is not supported", name)
    if url == CHAT and "max_completion_tokens" in wanted:
        limit = wanted.pop("max_completion_tokens")
        if wanted.setdefault("max_tokens", limit) != limit:
            raise Refused("invalid_value", "max_tokens and max_completion_tokens differ; give one", "max_tokens")
    if is_integer(wanted.get("seed")):
        wanted["seed"] %= 2**64  # OpenAI's seeds are signed
    _take_form(wanted)
    try:
        return SamplingParams(**{"max_tokens": None if url == CHAT else 16, **defaults, **wanted})
    except InputError as error:
        # The first field that the message names is the wrong one; lists of known fields come later.
        param = next((word for word in re.findall(r"\w+", str(error)) if word in wanted), None)
        code = "unknown_parameter" if str(error).startswith("unknown") else "invalid_value"
        raise Refused(code, str(error), param) from None


def _take_form(wanted: dict) -> None:
    """Replace OpenAI's response_format and vLLM's guided_* by structured_outputs. Raise Refused for wrong values."""
    forms = {name: wanted.pop(name) for name in GUIDED if name in wanted}
    fields = {name.removeprefix("guided_"): value for name, value in forms.items()}
    if (response := wanted.pop("response_format", None)) is not None and response != {"type": "text"}:
        kind = response.get("type") if isinstance(response, dict) else None
        schema = response.get("json_schema") if kind == "json_schema" else None
        if kind == "json_object":
            fields["json_object"] = True
        elif isinstance(schema, dict) and isinstance(schema.get("schema", {}), dict):
            fields["json"] = schema.get("schema", {})
        else:
            message = f"response_format is {shown(response)}; its type must be text, json_object or json_schema"
            raise Refused("invalid_value", f"{message} with a schema", "response_format")
        forms["response_format"] = response
    if not forms:
        return
    if len(forms) > 1 or "structured_outputs" in wanted:
        raise Refused("invalid_value", f"{', '.join(forms)}: give one form of the answer", next(iter(forms)))
    try:
        wanted["structured_outputs"] = StructuredOutputsParams(**fields)
    except InputError as error:
        raise Refused("invalid_value", f"{next(iter(forms))}: {error}", next(iter(forms))) from None


def _chat_logprobs(body: dict) -> dict:
    """Return a chat's body with logprobs as in a completion's. Raise Refused for wrong values."""
    body = dict(body)
    asked, count = _flag(body, "logprobs"), body.pop("top_logprobs", 0)
    if not is_integer(count) or not 0 <= count <= MOST_LOGPROBS:
        message = f"top_logprobs is {shown(count)}; it must be a whole number from 0 to {MOST_LOGPROBS}"
        raise Refused("invalid_value", message, "top_logprobs")
    if count and not asked:
        raise Refused("invalid_value", "top_logprobs needs logprobs to be true", "top_logprobs")
    return {**body, "logprobs": count} if asked else body


NO_TEMPLATE = (
    "the model has no chat template: put chat_template.jinja into its folder, or give one (--chat-template of run "
    "and serve, chat_template= in Python)"
)


def check_template(template: str, name: str) -> None:
    """Raise InputError if the template is not valid Jinja; the message calls it ``name``."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)
    except TemplateSyntaxError as error:
        raise InputError(f"{name}, line {error.lineno}: {error.message}") from None


def template_of(tokenizer, template: str | None, tools: list | None) -> str:
    """Return the chat template, by default the tokenizer's own. Raise Refused if there is none."""
    if not template and not getattr(tokenizer, "chat_template", None):
        raise Refused("invalid_url", NO_TEMPLATE, "url")
    try:
        return tokenizer.get_chat_template(template, tools=tools)
    except ValueError:
        named = ", ".join(tokenizer.chat_template)
        message = f"the model has the chat templates {named}, but no default: give one with --chat-template"
        raise Refused("invalid_url", message, "url") from None


class Reading(NamedTuple):
    """The forms of a message's content that a chat template prints."""

    text: bool = True  #: whether it prints a text
    parts: int = 0  #: number of parts that it prints of a content with two text parts


def _readings(tokenizer, template: str | None, variables: dict, tools: list | None) -> dict[str, Reading]:
    """Return role -> the content forms that a template prints, found with sample words; without refused roles."""
    readings: dict[str, Reading] = {}
    for roles in (("user",), ("system", "user"), ("user", "assistant", "user")):
        seen = []
        for as_parts in (False, True):
            words = {role: (f"qz{role}qx", f"qy{role}qw") for role in roles}
            contents = {role: _parts(texts) if as_parts else texts[0] for role, texts in words.items()}
            said = [{"role": role, "content": contents[role]} for role in roles]
            try:
                text = tokenizer.apply_chat_template(
                    said, tools, chat_template=template, tokenize=False, add_generation_prompt=True, **variables
                )
                printed = re.sub(r"""["']text["']: *["']\w+""", "", text.lower())  # without parts printed as objects
                seen.append({role: [word in printed for word in texts] for role, texts in words.items()})
            except Exception:  # a template is a program that may raise anything
                seen.append(None)
        for role in roles if seen != [None, None] else ():
            shown_text, shown_parts = (one[role] if one else [False, False] for one in seen)
            readings.setdefault(role, Reading(shown_text[0], shown_parts[0] + all(shown_parts)))
    return readings


def readings_of(tokenizer, template: str | None, variables: dict, tools: list | None) -> dict[str, Reading]:
    """Return ``_readings``, cached in the tokenizer."""
    known = tokenizer.__dict__.setdefault("_template_readings", {})
    key = template, bool(tools), repr(variables)
    if key not in known:
        if len(known) >= KNOWN_TEMPLATES:
            known.clear()
        known[key] = _readings(tokenizer, template, variables, tools)
    return known[key]


def chat_text(
    messages,
    tokenizer,
    template: str | None = None,
    variables: dict | None = None,
    tools: list | None = None,
    content_format: str = "auto",
) -> str:
    """Return the messages formatted by a chat template (None: the tokenizer's), up to the assistant's answer.

    ``variables``: more variables of the template, add_generation_prompt and continue_final_message among them.
    ``tools``: tools that the answer may call. ``content_format``: whether the template gets contents as a "string", as
    "openai" parts, or in the form that it prints ("auto"). Raise Refused if the template cannot format the messages.
    """
    template_of(tokenizer, template, tools)
    if not isinstance(messages, list) or not messages:
        raise Refused("invalid_value", f"messages is {shown(messages)}; it must be a list of messages", "messages")
    given = {"add_generation_prompt": True, **(variables or {})}
    others = {name: value for name, value in given.items() if name not in PROMPT_ENDS}
    readings = readings_of(tokenizer, template, others, tools) if content_format == "auto" else {}
    if readings.get("user") == Reading(False, 0):
        raise Refused("invalid_value", "the chat template leaves out what the user says", "messages")
    error = None
    for as_text in (False, True):  # whether calls have arguments as text: few templates need that
        plain = []
        for place, message in enumerate(messages):
            where = f"messages[{place}]"
            if not isinstance(message, dict):
                raise Refused("invalid_value", f"{where} is {shown(message)}; it must be an object", "messages")
            if not isinstance(role := message.get("role"), str):
                raise Refused("invalid_value", f"{where}.role is {shown(role)}; it must be a text", "messages")
            message = _plain_message(message, where, as_text)
            reading = readings.get(role, readings.get("user", Reading()))
            plain.append({**message, "content": _content(message.get("content"), where, reading, content_format)})
        calls = [call["function"]["arguments"] for message in plain for call in message.get("tool_calls", ())]
        try:
            text = tokenizer.apply_chat_template(plain, tools=tools, chat_template=template, tokenize=False, **given)
        except Exception as raised:
            error = error or raised
        else:
            if as_text or not any(arguments and repr(arguments) in text for arguments in calls):
                return text
        if not calls:
            break
    raise Refused("invalid_value", f"the chat template refuses the messages: {error}", "messages")


def _plain_message(message: dict, where: str, as_text: bool) -> dict:
    """Return a message for a template, its content unchanged. Raise Refused for a wrong or unsupported field.
    ``as_text``: whether arguments of tool calls are a JSON text instead of an object."""
    message = {k: v for k, v in message.items() if k in ("role", "content") or v not in (None, "", [], {})}
    if strange := sorted(set(message) - {"role", "content", "name", *MESSAGE_FIELDS.get(message["role"], ())}):
        raise Refused("unsupported_parameter", f"{where}.{shown(strange[0])} is not supported", "messages")
    if thoughts := message.get("reasoning") or message.get("reasoning_content"):
        if not isinstance(thoughts, str):
            raise Refused("invalid_value", f"{where}.reasoning_content must be a text", "messages")
        message |= {"reasoning": thoughts, "reasoning_content": thoughts}  # templates use either name
    if calls := message.get("tool_calls"):
        try:
            message["tool_calls"] = [plain_call(call, as_text) for call in calls]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused("invalid_value", f"{where}.tool_calls are no calls of functions", "messages") from None
        if message.get("content") is None:
            return {**message, "content": ""}
    return message


def _content(content, where: str, reading: Reading, content_format: str) -> str | list[dict]:
    """Return a content in the form that the template prints. Raise Refused if it is not a text or text parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    is_text = [isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts]
    if not parts or not all(is_text):
        raise Refused("invalid_value", f"{where}.content must be a text, or a list of text parts", "messages")
    texts = [part["text"] for part in parts]
    whole = content_format == "openai" or reading.parts == 2
    if content_format == "string" or content_format == "auto" and reading.text and not (whole and parts is content):
        return "".join(texts)
    return _parts(texts if whole else ["".join(texts)])


def _parts(texts: Sequence[str]) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


def shown(value) -> str:
    """Return a line's value as JSON for an error message, cut to SHOWN characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
