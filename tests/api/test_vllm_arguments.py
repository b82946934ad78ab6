"""Test vLLM's arguments of LLM, generate and chat: neutral values are accepted, others are answered with our name."""

import json

import pytest
import torch
from models import save_opt

from flexhybrid import LLM, InputError, SamplingParams, shipped
from flexhybrid.batch.formats import ChatRules
from flexhybrid.batch.openai import CHAT, COMPLETIONS, Bodies
from flexhybrid.jobs import progress

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ mood }}"
GREEDY = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture(scope="module")
def text_llm():
    with LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32") as llm:
        yield llm


def test_neutral_arguments_are_accepted(tiny):
    """They have their defaults in vLLM 0.10 (vllm/entrypoints/llm.py), or values that change no answer."""
    defaults = dict(
        tokenizer=None, tokenizer_mode="auto", skip_tokenizer_init=False, trust_remote_code=False, quantization=None,
        allowed_local_media_path="", tensor_parallel_size=1, revision=None, tokenizer_revision=None, seed=None,
        gpu_memory_utilization=0.9, swap_space=4, cpu_offload_gb=0, enforce_eager=False, hf_overrides=None,
        disable_custom_all_reduce=False, disable_async_output_proc=False, hf_token=None, max_seq_len_to_capture=8192,
    )  # fmt: skip
    others = dict(tokenizer=str(tiny), seed=0, enforce_eager=True, enable_prefix_caching=True, load_format="auto")
    others["speculative_config"] = {}
    LLM(str(tiny), policy="kv_only", device="cpu", **defaults)
    LLM(str(tiny), policy="kv_only", device="cpu", **others)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is 0.5.*device_memory="),
        ({"cpu_offload_gb": 10}, "cpu_offload_gb is 10.*host_memory="),
        ({"max_num_seqs": 16}, r"max_num_seqs is 16.*Policy\(max_batch="),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2.*--engine ray"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True"),
        ({"quantization": "awq"}, r"quantization is 'awq'.*bits=Bits\(weights=4\)"),
        ({"kv_cache_dtype": "fp8"}, r"kv_cache_dtype is 'fp8'.*bits=Bits\(kv=8\)"),
        ({"download_dir": "/models"}, "download_dir is '/models'.*hf download NAME --local-dir"),
        ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2'; put its files into the model's folder"),
        ({"device_memory": 0.9}, "memory size 0.9 must be a positive number of bytes, such as '20GiB', not a share"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config is .*which is not supported: leave it out$"),
        ({"seed": 7}, r"seed is 7.*SamplingParams\(seed="),
        ({"max_model_len": 10**6}, "max_model_len is 1000000; it must be a whole number from 2 to"),
        ({"gpu_memory_utilisation": 0.9}, "unknown argument of LLM"),
        ({"max_model_length": 9}, "did you mean max_model_len"),
        ({"polcy": "auto"}, r"unknown argument of LLM 'polcy'; did you mean policy\b.* enable_prefix_caching"),
    ],
)
def test_other_arguments_are_answered_with_our_name(tiny, arguments, words):
    with pytest.raises(InputError, match=words):
        LLM(tiny, policy="kv_only", device="cpu", **arguments)


@pytest.mark.parametrize(
    "name, words",
    [
        ("embed", "'embed': models only generate text"),
        ("sleep", r"release\(\) frees the memory"),
        ("beam_search", r"SamplingParams\(n="),
        ("genrate", "has no attribute 'genrate'$"),
    ],
)
def test_missing_methods_name_their_replacement(text_llm, name, words):
    assert not hasattr(text_llm, name)
    with pytest.raises(AttributeError, match=words):
        getattr(text_llm, name)


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"guided_json": {}}, r'write structured_outputs=\{"json": …\}'),
        ({"max_new_tokens": 5}, "write max_tokens$"),
        ({"best_of": 2}, "best_of is not supported: .* write n;"),
        ({"do_sample": False}, "write temperature=0"),
    ],
)
def test_names_of_other_programs_are_answered_with_ours(asked, words):
    with pytest.raises(InputError, match=words):
        SamplingParams(**asked)


def test_a_limit_of_the_lengths_is_kept(tmp_path):
    save_opt(tmp_path)
    free = LLM(tmp_path, "kv_only", device="cpu", dtype=torch.float32)
    with LLM(tmp_path, "kv_only", device="cpu", dtype="float", max_model_len=20) as llm:
        params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
        (tokens,) = [answer.outputs[0].token_ids for answer in llm.generate([[5] * 8], params)]
        assert len(tokens) == 12
        assert (
            tokens
            == free.generate([[5] * 8], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0]
            .outputs[0]
            .token_ids
        )
        with pytest.raises(InputError, match="has 20 tokens; .* has room for 20 tokens"):
            llm.generate([[5] * 20], params)


def test_a_prompt_may_be_a_dictionary_and_one_prompt_needs_no_list(text_llm):
    (expected,) = text_llm.generate(["import os"], GREEDY)
    by_ids = {"prompt_token_ids": expected.prompt_token_ids}
    for prompt in ("import os", {"prompt": "import os"}, by_ids, [by_ids]):
        (answer,) = text_llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=None)
        assert answer.outputs == expected.outputs
    with pytest.raises(InputError, match="lora_request is 'x'; it is not supported"):
        text_llm.generate("import os", lora_request="x")
    with pytest.raises(InputError, match="unknown argument 'use_tqmd'; did you mean use_tqdm?"):
        text_llm.generate("import os", use_tqmd=False)
    with pytest.raises(InputError, match="messages is 'hi'; it must be a list of messages"):
        text_llm.chat("hi")
    with pytest.raises(InputError, match="stop is ''; it must be a text or a list of texts, none empty"):
        SamplingParams(stop="")
    with pytest.raises(InputError, match="must be a list of texts or of token-id lists, not int"):
        text_llm.generate(5)


def test_a_chat_is_its_template_s_text(text_llm):
    chats = [
        [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": "ho"}],
    ]
    texts = ["<system>be<user>hi<assistant>", "<user>ho<assistant>"]
    ids = text_llm.get_tokenizer()(texts, add_special_tokens=False)["input_ids"]
    expected = [answer.outputs for answer in text_llm.generate(ids, GREEDY)]
    answers = text_llm.chat(chats, GREEDY, chat_template=TEMPLATE)
    assert [(answer.prompt, answer.prompt_token_ids, answer.outputs) for answer in answers] == list(
        zip(texts, ids, expected)
    )
    (alone,) = text_llm.chat(chats[1], GREEDY, chat_template=TEMPLATE, use_tqdm=False, add_generation_prompt=True)
    assert (alone.prompt, alone.outputs) == (texts[1], expected[1])
    (moody,) = text_llm.chat(chats[1], GREEDY, chat_template=TEMPLATE, chat_template_kwargs={"mood": "!"})
    assert moody.prompt == texts[1] + "!"
    for arguments, words in (
        ({}, "the model has no chat template"),
        ({"chat_template": TEMPLATE, "tools": [{}]}, "tools is"),
        ({"chat_template": "{{ raise_exception('odd') }}"}, "conversation 0: .*odd"),
    ):
        with pytest.raises(InputError, match=words):
            text_llm.chat(chats, GREEDY, **arguments)


def test_a_checkpoint_s_own_sampling_is_the_default(tmp_path):
    save_opt(tmp_path)
    path = tmp_path / "generation_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(config | {"temperature": 0.0, "top_k": 3, "max_new_tokens": 5, "do_sample": False}))
    with LLM(tmp_path, "kv_only", device="cpu", dtype="float32") as llm:
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.0, top_k=3, max_tokens=5)
        (expected,) = llm.generate([[5, 6]], params)
        assert llm.generate([[5, 6]])[0].outputs == expected.outputs
    with LLM(tmp_path, "kv_only", device="cpu", dtype="float32", generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    "values, words", [({"top_p": 2}, "top_p is 2"), ({"eos_token_id": [1, "a"]}, "eos_token_id is"), ([], "JSON obj")]
)
def test_a_wrong_generation_config_is_reported_before_weights_are_read(tmp_path, values, words):
    save_opt(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=words):
        LLM(tmp_path, "kv_only", device="cpu")


def test_template_variables_of_a_line_override_those_of_the_command(text_llm):
    bodies = Bodies(text_llm.codec, {}, ChatRules(template=TEMPLATE, variables={"mood": "?", "name": "x"}))
    messages = [{"role": "user", "content": "hi"}]
    for asked, mood in (({}, "?"), ({"chat_template_kwargs": {"mood": "!"}}, "!"), ({"chat_template_kwargs": {}}, "?")):
        line = dict(custom_id="a", method="POST", url=CHAT, body={"messages": messages} | asked)
        assert bodies.draft(line).prompt == "<user>hi<assistant>" + mood


def test_progress_is_shown_where_it_is_asked_for(tmp_path, capsys, monkeypatch):
    save_opt(tmp_path)
    monkeypatch.setattr(progress, "FIRST_S", 1e-4)
    with LLM(tmp_path, "kv_only", device="cpu", dtype="float32") as llm:
        for shown in (None, False, True):
            llm.generate([[5, 6]], GREEDY, use_tqdm=shown)
            assert ("generate" in capsys.readouterr().err) == bool(shown)


@pytest.mark.parametrize("value", [16.0, 16])
def test_whole_numbers_may_be_written_as_pandas_does(text_llm, value):
    bodies = Bodies(text_llm.codec, {})
    assert bodies.params({"max_tokens": value, "top_k": value}, COMPLETIONS) == SamplingParams(max_tokens=16, top_k=16)
    with pytest.raises(ValueError, match="max_tokens is 16.5"):
        bodies.params({"max_tokens": 16.5}, COMPLETIONS)
