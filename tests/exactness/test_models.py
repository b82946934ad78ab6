"""Test models without layer functions of ours: they give transformers' own greedy tokens under every policy. Some types
are tried here; `make check-models` tries all types in transformers."""

import json
from dataclasses import replace

import pytest
import torch
from models import save_llama
from policies import wider_policies
from runs import run_wave, some_requests
from test_refill import answers
from tiny_models import greedy, save_tiny
from transformers import GenerationConfig, MistralConfig

from flexhybrid import LLM, SamplingParams, cli
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Policy
from flexhybrid.core.trace import check_trace
from flexhybrid.jobs.doctor import doctor
from flexhybrid.runtime.kernels import compiled
from flexhybrid.runtime.models import empty_model
from flexhybrid.runtime.models.empty_model import _check_cache
from flexhybrid.runtime.models.transformer import Unsupported
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from sim import catalogue
from sim.presets import act_only, hybrid, kv_only

pytest.importorskip("greenlet")

#: The first one is longer than two blocks and a window of 9: its newest tokens take the places of others.
PROMPTS = [[5, 9, 33, 2, 17, 60, 8, 44, 71, 3, 3, 90, 18, 25, 31, 12, 7] * 2, [4, 8, 15, 16, 23], [42] * 11]
WIDER = wider_policies(400, 24, 12)
POLICIES = {"kv_only": kv_only(), "hybrid": hybrid(0.5), "act_only": act_only(), **WIDER}
#: How each type is run, and what is special about it.
TYPES = {
    "mixtral": ("hybrid", "disk"),  # experts, stacked on loading
    "gemma3_text": ("hybrid", "row"),  # two kinds of rotation in turn, norms behind
    "granite": ("hybrid", "two copies"),  # multipliers
    "cohere": ("hybrid", "chunks, hidden on host"),  # attention and feed-forward side by side
    "gpt_neox": ("hybrid", "kvpr"),  # one matrix for queries, keys and values
    "phi3": ("hybrid", "tok"),  # has a file of its own but for a long rotation
    "olmo2": ("hybrid", "act_only"),  # norms of whole rows
    "gemma2": ("hybrid", "kv_only", "split attention"),  # scores within a softcap, a window in every other layer
    "gpt_oss": ("hybrid", "host attention", "split attention, mixed"),  # sinks, windows, experts
    # latent attention: values narrower than keys; a dense first layer
    "deepseek_v3": (
        *("hybrid", "host attention", "disk", "row", "chunks, hidden on host", "kvpr", "two copies", "tok"),
        "split attention, mixed",
    ),
    # recurrent layers beside attention
    "qwen3_next": ("disk", "row", "chunks, hidden on host", "host attention", "kvpr", "split attention"),
    # layers that attend to other layers' keys and values
    "gemma4_text": ("disk", "row", "host attention", "kvpr", "tok", "split attention, mixed"),
    "gemma3n_text": ("disk", "chunks, hidden on host", "split attention"),
}


def check(checkpoint, name, expected):
    result = run_wave(checkpoint, POLICIES[name], PROMPTS, len(expected[0]), hardware=catalogue.load("t4"))
    assert result.tokens == expected, name
    assert check_trace(result.trace) == []


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_without_our_own_layers_gives_the_references_tokens(tmp_path, model_type):
    expected = greedy(save_tiny(tmp_path, model_type), PROMPTS, 10)
    checkpoint = Checkpoint(tmp_path, modules=True)
    for name in TYPES[model_type]:
        check(checkpoint, name, expected)


#: Type -> policies of a queue, the share of answers' limits that pools are made for, and whether prompts begin alike.
QUEUES = [
    *((kind, replace(hybrid(0.5), states="host"), 0.01, False) for kind in ("qwen3_next", "lfm2", "mamba")),
    *((kind, replace(hybrid(0.5), states="device"), 1.0, False) for kind in ("qwen3_next", "lfm2", "mamba")),
    *(("gemma4_text", policy, *how) for policy, *how in ((hybrid(0.5), 0.01, False), (act_only(), 1.0, True))),
]


@pytest.mark.parametrize("model_type, policy, share, sharing", QUEUES)
def test_requests_that_join_leave_and_are_preempted_get_the_references_tokens(
    tiny_of, tmp_path, batches, model_type, policy, share, sharing
):
    checkpoint, model = tiny_of(model_type)
    prompts, max_tokens, stops = some_requests(4, 4, 30)
    prompts = [list(range(5, 40)) * sharing + prompt for prompt in prompts]
    expected = [
        greedy(model, [prompt], min(length, stop))[0]
        for prompt, length, stop in zip(prompts, max_tokens, stops, strict=True)
    ]
    policy = replace(policy, max_mini_batch_tokens=120)
    assert answers(checkpoint, policy, prompts, max_tokens, stops, 3, tmp_path, share, sharing) == expected
    assert (batches[0].num_back > 0) == (share < 1)


@pytest.mark.parametrize("with_numba", (True, False))
def test_the_host_attends_to_blocks_that_it_reads_from_the_disk(tmp_path, monkeypatch, with_numba):
    """Scores have a softcap, and every other layer a window; compiled kernels and plain torch are tried."""
    if not with_numba:
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
    expected = greedy(save_tiny(tmp_path, "gemma2"), PROMPTS, 10)
    policy = Policy(attention="host", cache={"kv@host": 0.5, "kv@disk": 0.5}, max_mini_batch_tokens=100)
    result = run_wave(Checkpoint(tmp_path, modules=True), policy, PROMPTS, 10, hardware=catalogue.load("t4"))
    assert result.tokens == expected and check_trace(result.trace) == []
    assert any(event.task.verb == "read_kv" for event in result.trace)


def test_llama_gives_the_same_tokens_on_both_paths(tmp_path):
    expected = greedy(save_llama(tmp_path, vocab=97), PROMPTS, 10)
    for modules in (False, True):
        checkpoint = Checkpoint(tmp_path, modules=modules)
        assert (checkpoint.shape.modules is not None) is modules
        check(checkpoint, "hybrid", expected)


def test_a_model_is_built_and_looked_at_once_until_its_configuration_changes(tmp_path, monkeypatch):
    calls = []
    for name in ("build", "look"):
        own = getattr(empty_model, name)
        monkeypatch.setattr(empty_model, name, lambda *args, own=own, name=name: calls.append(name) or own(*args))
    expected = greedy(save_tiny(tmp_path, "olmo2"), PROMPTS, 6)
    checkpoint = Checkpoint(tmp_path)
    for name in ("kv_only", "hybrid"):
        check(checkpoint, name, expected)
    assert len(dict(RandomWeights(checkpoint.shape).outer_tensors())) == 3  # embedding, last norm, head
    assert calls == ["build", "look"]
    GenerationConfig(eos_token_id=[5, 9]).save_pretrained(tmp_path)
    assert Checkpoint(tmp_path).shape.eos_token_ids == (5, 9)


def test_commands_take_a_model_without_our_own_layers(tmp_path):
    expected = greedy(save_tiny(tmp_path, "olmo2"), PROMPTS, 6)
    with LLM(tmp_path, "hybrid(0.5)", device="cpu", dtype="float32") as llm:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=1))
    assert [answer.outputs[0].token_ids for answer in answers] == expected
    assert len(answers[0].prompt_logprobs) == len(PROMPTS[0])
    (model,) = doctor(torch.device("cpu"), [str(tmp_path)], 16, 8)["models"]
    assert model["path"] == "transformers' own layers"
    where = ["--model", str(tmp_path), "--hardware", "t4", "--batch", "1", "--input-len", "16", "--output-len", "8"]
    assert cli.main(["simulate", "--system", "kv_only", *where]) == 0
    kept = ["--keep", "cache=kv@host,act@host"]
    assert cli.main(["search", "--lossless", "--attention", "device", *kept, *where]) == 0


def test_a_cache_that_drops_visible_tokens_is_refused():
    config = MistralConfig(num_hidden_layers=2, sliding_window=9)
    _check_cache(config, {0: 9, 1: 5}, 128)
    for windows in ({0: 9, 1: None}, {0: 10, 1: 9}):
        with pytest.raises(Unsupported, match="keeps 9 tokens of a layer"):
            _check_cache(config, windows, 128)


@pytest.mark.parametrize(
    "model_type, changes, reason",
    [
        ("bloom", {}, "it attends by code of its own"),
        ("diffllama", {}, "attends twice|code of its own"),  # by version
        ("t5", {}, "has an encoder"),
        ("mine", {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "remote"),
        ("nothing", {}, "cannot build it"),
        ("moshi", {}, "more than text"),
    ],
)
def test_a_model_that_would_not_be_exact_is_refused_before_weights_are_read(tmp_path, model_type, changes, reason):
    sizes = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, num_layers=2, vocab_size=97)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **changes}))
    with pytest.raises(InputError, match=f"{model_type}.*{reason}"):
        Checkpoint(tmp_path)


def test_chunked_attention_runs_within_one_chunk(tmp_path):
    expected = greedy(save_tiny(tmp_path, "llama4_text"), PROMPTS, 10)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_chunk_size": 40}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shape.max_positions == 40
    check(checkpoint, "hybrid", expected)
    with LLM(tmp_path, kv_only(), device="cpu", dtype="float32") as llm, pytest.raises(InputError, match="40"):
        llm.generate([[7] * 41], SamplingParams(max_tokens=1))
