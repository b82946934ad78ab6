"""Test chat templates: the text is the one transformers makes from contents in the form a template can read."""

import json

import pytest
from transformers import AutoTokenizer

from flexhybrid import LLM, InputError, SamplingParams, shipped
from flexhybrid.batch.openai import Refused, chat_text

END = "{% if add_generation_prompt %}assistant:{% endif %}"
EACH = "{% for m in messages %}{{ m.role }}:"
LOOP = EACH + "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}|{% endfor %}" + END
TEMPLATES = {
    "text": EACH + "{{ m.content }}|{% endfor %}" + END,
    "trimmed": EACH + "{{ m['content'] | trim | upper }}|{% endfor %}" + END,
    "joined": "{% set w = namespace(s='') %}{% for m in messages %}{% set w.s = w.s + m.content + '|' %}{% endfor %}"
    "{{ w.s }}" + END,
    "parts": LOOP,
    "chosen": EACH
    + "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}|{% endfor %}"
    + END,
    "first": EACH + "{{ m.content[0].text }}|{% endfor %}" + END,
    "first, strict": EACH + "{{ m.content[0]['text'] + '.' }}|{% endfor %}" + END,
    "macro": "{% macro say(content) %}{% for c in content %}{{ c['text'] }}{% endfor %}{% endmacro %}"
    + EACH
    + "{{ say(m.content) }}|{% endfor %}"
    + END,
    "users parts": "{% for m in messages %}{% if m.role == 'user' %}{% for c in m.content %}{{ c.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}|{% endfor %}" + END,
    "both": EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }},"
    "{% endfor %}{% endif %}|{% endfor %}" + END,
    "no system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content }}|{% endfor %}" + END,
}
#: Template -> what texts become for it: texts, parts, or parts of users alone.
READS = dict.fromkeys(TEMPLATES, "text") | dict.fromkeys(
    ("parts", "chosen", "first", "first, strict", "macro"), "parts"
)
READS["users parts"] = "users"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(shipped.CHECKPOINT)


def in_parts(messages: list[dict]) -> list[dict]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def said(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_loses_a_text(tokenizer, name):
    """Contents are given as text or in one or more parts."""
    template = TEMPLATES[name]

    def plain(messages):
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )

    for messages in (said("a"), said("What is it?", "One.", "u"), said("x" * 300)):
        wanted = {
            "text": messages,
            "parts": in_parts(messages),
            "users": [in_parts([m])[0] if m["role"] == "user" else m for m in messages],
        }
        expected = plain(wanted[READS[name]])
        assert chat_text(messages, tokenizer, template) == expected
        if name != "both":
            assert chat_text(in_parts(messages), tokenizer, template) == expected
    two = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("one, ", "two")]}]
    assert "one, " in (shown := chat_text(two, tokenizer, template).lower()) and "two" in shown
    if name in ("both", "parts", "chosen", "macro"):
        assert shown == plain(two)


def test_the_requested_content_format_is_given(tokenizer):
    """The option is vLLM's chat_template_content_format."""
    chat = said("hello")
    assert chat_text(chat, tokenizer, TEMPLATES["both"], content_format="openai") == "user:hello,|assistant:"
    assert chat_text(in_parts(chat), tokenizer, TEMPLATES["both"], content_format="string") == "user:hello|assistant:"
    assert chat_text(chat, tokenizer, LOOP, content_format="string") == "user:|assistant:"


def test_a_template_without_the_users_text_is_refused(tokenizer):
    for template in ("{% for m in messages %}{{ m.role }}|{% endfor %}", "Answer:", "{{ messages[0].text }}"):
        with pytest.raises(Refused, match="leaves out what the user says"):
            chat_text(said("hello"), tokenizer, template)


CALL = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": '{"x": "a"}'}}
CALLS = "{% for t in m.tool_calls or [] %}<call>{{ @ }}</call>{% endfor %}"
OF_CALLS = EACH + "{{ m.content or '' }}" + CALLS + "|{% endfor %}"
#: How a template writes a call -> whether it takes the arguments as text.
WRITES = {
    "t.function.name + ':' + t.function.arguments": True,
    "t.function.arguments": True,
    "t.function.arguments | trim": True,
    "t.function.arguments.replace('a', 'b')": True,
    "t.function.arguments | tojson": False,
    "t.function.arguments.x": False,
    "t.function.arguments if t.function.arguments is string else t.function.arguments | tojson": False,
}


@pytest.mark.parametrize("write", WRITES)
def test_arguments_of_calls_are_what_the_template_writes(tokenizer, write):
    template = OF_CALLS.replace("@", write)
    for text in ('{"x": "a"}', '{"x":"é\\n"}', '{"x": 1}', {"x": "a"}):
        history = [*said("What is it?"), {"role": "assistant", "content": None, "tool_calls": [dict(CALL)]}]
        history[1]["tool_calls"][0]["function"] = {"name": "lookup", "arguments": text}
        written = text if isinstance(text, str) else json.dumps(text)
        told = written if WRITES[write] else json.loads(written)
        calls = [{**CALL, "function": {"name": "lookup", "arguments": told}}]
        plain = [history[0], {"role": "assistant", "content": "", "tool_calls": calls}]
        assert chat_text(history, tokenizer, template) == tokenizer.apply_chat_template(
            plain, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    for text in ('{"x": NaN}', "[1]", "{", '{"x": 1} {}', "3"):
        history[1]["tool_calls"][0]["function"] = {"name": "lookup", "arguments": text}
        with pytest.raises(Refused, match=r"messages\[1\].tool_calls are no calls of functions"):
            chat_text(history, tokenizer, template)


def test_an_answer_sent_back_as_it_came(tokenizer):
    """Empty fields are ignored, reasoning is given to templates that read it, and other fields are refused by name."""
    template = EACH + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}|"
    template += "{% if m.tool_calls is defined or m.annotations is defined %}!{% endif %}{% endfor %}"
    empty = {"annotations": [], "audio": None, "refusal": None, "function_call": None, "tool_calls": [], "name": ""}
    reply = {"role": "assistant", "content": "One.", **empty}
    for thoughts in ({}, {"reasoning_content": "Hm."}, {"reasoning": "Hm.", "reasoning_content": None}):
        text = chat_text([*said("What?"), reply | thoughts, *said("And now?")], tokenizer, template)
        assert text == f"user:What?|assistant:{'<think>Hm.</think>' if thoughts else ''}One.|user:And now?|"
    for name, value in (("annotations", [{}]), ("refusal", "no"), ("audio", {"id": "a"}), ("reasoning", 3)):
        with pytest.raises(Refused, match=name):
            chat_text([*said("What?"), reply | {name: value}], tokenizer, template)


def test_named_templates_without_a_default_are_named(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", {"rag": TEMPLATES["text"], "tool_use": TEMPLATES["parts"]})
    with pytest.raises(Refused, match="chat templates rag, tool_use, but no default"):
        chat_text(said("hello"), tokenizer)
    assert (
        chat_text(said("hello"), tokenizer, tools=[{}]) == "user:hello|assistant:"
    )  # transformers takes tool_use for tools


def test_chat_takes_parts_and_ends_of_prompts(tokenizer):
    llm = LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32")
    greedy, chats = SamplingParams(max_tokens=1, temperature=0), [said("def f():", "return"), in_parts(said("import"))]

    def prompts(**asked):
        return [answer.prompt for answer in llm.chat(chats, greedy, chat_template=LOOP, use_tqdm=False, **asked)]

    assert prompts() == ["user:def f():|assistant:return|assistant:", "user:import|assistant:"]
    assert prompts(add_generation_prompt=False) == ["user:def f():|assistant:return|", "user:import|"]
    assert prompts(add_generation_prompt=False, continue_final_message=True) == [
        "user:def f():|assistant:return",
        "user:import",
    ]
    with pytest.raises(InputError, match="continue_final_message"):
        prompts(continue_final_message=True)
    with pytest.raises(InputError, match="must be auto, string or openai"):
        prompts(chat_template_content_format="parts")
