"""Test tools in chats: the text of the template, and calls in answers."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import answered, lines_of
from transformers import AutoTokenizer

from flexhybrid import LLM, InputError, SamplingParams, shipped
from flexhybrid.batch.tool_calls import HERMES, LLAMA, ToolForm, find_calls, form_of

HERMES_TEMPLATE = """{%- if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Call one by <tool_call>{"name": …, "arguments": …}</tool_call>
{%- endif %}{% for m in messages %}
{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}{% endfor %}
assistant:"""
LLAMA_TEMPLATE = (
    HERMES_TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "").replace('arguments"', 'parameters"')
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2), max_leaves=4
)
CALLS = st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSONS, max_size=3)), min_size=1, max_size=3)


@given(CALLS, st.text(alphabet="ab {}\n"), st.booleans(), st.sampled_from(["arguments", "parameters"]))
def test_calls_that_were_written_are_found(calls, said, parallel, word):
    bodies = [json.dumps({"name": name, word: arguments}) for name, arguments in calls]
    hermes = said + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    wanted = calls if parallel else calls[:1]
    for text, form, beside in ((hermes, HERMES, said.strip() or None), ("; ".join(bodies), LLAMA, None)):
        if form == HERMES and "<tool_call>" in json.dumps(calls):
            continue
        words, found = find_calls(text, ToolForm(form, parallel))
        assert words == beside and [(call.name, json.loads(call.arguments)) for call in found] == wanted
    assert find_calls(f"<|python_tag|>{bodies[0]}", ToolForm(LLAMA))[1][0].name == calls[0][0]


@pytest.mark.parametrize(
    "text",
    [
        "no call", "", "<tool_call>{", '<tool_call>{"name": "f"}</tool_call>', '{"name": "f"}', '{"a": 1}', "{", "[1]",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>', '{"name": "f", "parameters": 3}',
        '<tool_call>[1]</tool_call>', '{"name": "f", "parameters": {}} and more',
        *(f'<tool_call>{{"name": "f", "arguments": {{"x": {x}}}}}</tool_call>' for x in (
            "NaN", "[-Infinity]", "1e999", '1, "x": 2', "9" * 5000, "1}}x{{", "1,")),
    ],
)  # fmt: skip
def test_text_that_is_no_call_is_returned_unchanged(text):
    assert find_calls(text, ToolForm(HERMES)) == find_calls(text, ToolForm(LLAMA)) == (text, [])


def test_the_form_is_the_templates():
    assert form_of(HERMES_TEMPLATE) == HERMES and form_of(LLAMA_TEMPLATE) == LLAMA
    with pytest.raises(InputError, match="does not support tools"):
        form_of("{{ messages[0].content }}")
    assert form_of("{% for tool in tools %}[TOOL_CALLS]{% endfor %}") is None  # its calls are said as they stand


def test_a_file_of_chats_calls_tools(tmp_path, monkeypatch, capsys):
    """A pattern forces the answers, since no small model calls a tool by itself."""
    pytest.importorskip("llguidance")
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(shipped.CHECKPOINT, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    asked = {"role": "user", "content": "1 + 2?"}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    history = [asked, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c", "content": "3"}]  # fmt: skip
    one = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9]\}\}</tool_call>'
    tools = {"tools": [TOOL], "max_tokens": 120, "temperature": 0}
    bodies = {
        "two": {"messages": [asked], **tools, "guided_regex": f"ok{one}{one}"},
        "first": {"messages": [asked], **tools, "guided_regex": one * 2, "parallel_tool_calls": False},
        "silent": {"messages": [asked], **tools, "guided_regex": one, "tool_choice": "none"},
        "talk": {"messages": history, **tools, "guided_choice": ["three"]},
        "forced": {"messages": [asked], **tools, "tool_choice": "required"},
        "named": {"messages": [asked], **tools, "tool_choice": TOOL},
        "wrong": {"messages": [asked], "tools": [{"name": "add"}]},
        "broken": {"messages": [{**history[1], "tool_calls": [{"function": {}}]}], **tools},
    }
    got = answered(tmp_path, folder, lines_of(bodies, "/v1/chat/completions"))
    refused = {name: body["error"]["param"] for name, body in got.items() if "error" in body}
    assert refused == {"forced": "tool_choice", "named": "tool_choice", "wrong": "tools", "broken": "messages"}
    choice = got["two"]["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "ok" and len(calls) == 2
    assert len({one["id"] for one in calls}) == 2
    for one in calls:
        assert one["type"] == "function" and one["function"]["name"] == "add"
        assert json.loads(one["function"]["arguments"])["a"] in range(10)
    assert len(got["first"]["choices"][0]["message"]["tool_calls"]) == 1
    assert got["first"]["choices"][0]["message"]["content"] is None
    silent = got["silent"]["choices"][0]
    assert "tool_calls" not in silent["message"] and silent["message"]["content"].startswith("<tool_call>")
    assert got["talk"]["choices"][0]["message"] == {"role": "assistant", "content": "three"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    told = {"function": {"name": "add", "arguments": {"a": 7}}}
    plain = [asked, {"role": "assistant", "content": "", "tool_calls": [told]}, {"role": "tool", "content": "3"}]
    text = tokenizer.apply_chat_template(plain, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert "add(7)" in text and '"name": "add"' in text
    assert got["talk"]["usage"]["prompt_tokens"] == len(tokenizer(text, add_special_tokens=False)["input_ids"])
    llm = LLM(folder, "kv_only", device="cpu", dtype="float32")
    (answer,) = llm.chat(history, SamplingParams(max_tokens=2, temperature=0), tools=[TOOL])
    assert answer.prompt == text
    with pytest.raises(InputError, match="tools is"):
        llm.chat([asked], tools=[{"name": "add"}])
