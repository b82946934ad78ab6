"""Test Llama-like models: layer functions and rotation equal transformers'; checkpoints are read or refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from models import edit_config, save_llama
from runs import forced_logits
from safetensors.torch import load_file, save_file

from flexhybrid import LLM, SamplingParams
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.attention import AttentionKind
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.model.shape import shape_by_name, shape_from_config
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.runtime.models import architecture, llama
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from sim import presets

CPU = torch.device("cpu")


STEPS = 16  #: tokens of a text whose logits are compared, behind a prompt


def ours(folder, tokens: list[int], dtype="float32", resident=1.0) -> torch.Tensor:
    """Return logits [STEPS, vocab] of the last tokens of a text."""
    policy = Policy(weights=Placement(device=resident, host=1 - resident))
    return forced_logits(Checkpoint(folder), policy, [tokens], STEPS, dtype=dtype)[0]


@torch.inference_mode()
def theirs(reference, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0, -STEPS - 1 : -1].float()


def check(folder, reference, tokens: list[int], **options) -> None:
    wanted = theirs(reference, tokens)
    assert (ours(folder, tokens, **options) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


MODELS = {
    "llama multi-head": dict(heads=4, kv_heads=4),
    "llama grouped": dict(heads=6, kv_heads=2, head_dim=8),
    "llama one group": dict(heads=4, kv_heads=1),
    "llama narrow heads": dict(heads=3, kv_heads=1, head_dim=8, hidden=48),
    "llama wide heads": dict(heads=2, kv_heads=2, head_dim=24, hidden=20),
    "llama tied": dict(tied=True),
    "llama eps": dict(rms_norm_eps=1e-2),
    "llama theta": dict(theta=500_000.0),
    "llama linear": dict(rope=dict(rope_type="linear", factor=2.0)),
    "llama dynamic": dict(rope=dict(rope_type="dynamic", factor=2.0)),
    "llama yarn": dict(rope=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=24)),
    "llama llama3": dict(rope=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                   original_max_position_embeddings=48)),
    "mistral": dict(kind="mistral", sliding_window=None),
    "mistral window": dict(kind="mistral", sliding_window=96),
    "qwen2": dict(kind="qwen2"),
    "qwen3": dict(kind="qwen3"),
    "qwen3 wide heads": dict(kind="qwen3", tied=True, heads=3, kv_heads=1, head_dim=24, hidden=40),
    "phi3": dict(kind="phi3"),
    "phi3 multi-head, tied": dict(kind="phi3", heads=3, kv_heads=3, tied=True, sliding_window=96),
    "qwen2 tied narrow heads": dict(kind="qwen2", tied=True, heads=3, kv_heads=3, head_dim=8, hidden=48),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_own(tmp_path, name):
    reference = save_llama(tmp_path, **MODELS[name])
    tokens = torch.randint(3, 61, (96,), generator=torch.Generator().manual_seed(1)).tolist()
    for resident in (1.0, 0.37):
        check(tmp_path, reference, tokens, resident=resident)


def test_the_logits_test_can_fail(tmp_path):
    """Without rotation scaling, biases or the right eps, logits differ."""
    tokens = list(range(3, 60))
    for name, changes in (
        ("llama linear", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))),
        ("llama theta", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))),
        ("llama eps", dict(rms_norm_eps=1e-6)),
        ("qwen2", dict(model_type="llama")),
        ("qwen3", dict(model_type="llama")),
    ):
        folder = tmp_path / name.replace(" ", "_")
        reference = save_llama(folder, **MODELS[name])
        edit_config(folder, **changes)
        wanted = theirs(reference, tokens)
        assert (ours(folder, tokens) - wanted).abs().max() > 1e-2 * wanted.abs().max(), name


@pytest.mark.parametrize("name", ["llama grouped", "qwen2", "qwen3", "phi3"])
def test_bfloat16_stays_as_near_to_float32_as_transformers_does(tmp_path, name):
    reference = save_llama(tmp_path, dtype=torch.bfloat16, **MODELS[name])
    tokens = torch.randint(3, 61, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    wanted, half = theirs(reference, tokens), theirs(reference.to(torch.bfloat16), tokens)
    off = (ours(tmp_path, tokens, "bfloat16") - wanted).pow(2).mean().sqrt()
    assert off <= 1.3 * (half - wanted).pow(2).mean().sqrt()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_shards_are_read_without_unused_tensors(tmp_path):
    """The checkpoint has an index of shards; inv_freq of old checkpoints and other extra tensors are not read."""
    reference = save_llama(tmp_path, kind="qwen2", layers=3, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    save_file(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.vision.weight": torch.ones(2, 2)},
        tmp_path / "extra.safetensors",
    )
    index["weight_map"] |= {"model.layers.0.self_attn.rotary_emb.inv_freq": "extra.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check(tmp_path, reference, list(range(3, 50)))


def test_a_checkpoint_of_the_bare_model_needs_no_prefix(tmp_path):
    reference = save_llama(tmp_path, tied=True)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    check(tmp_path, reference, list(range(5, 30)))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(tie_word_embeddings=False), ["lm_head.weight is missing", "tie_word_embeddings"]),
        (dict(model_type="qwen2"), ["layers.0.self_attn.k_proj.bias is missing"]),
        (dict(num_key_value_heads=1), ["layers.0.self_attn.k_proj.weight", "[32, 64]", "[16, 64]"]),
        (dict(intermediate_size=48), ["mlp.gate_proj.weight", "[40, 64]", "[48, 64]"]),
        (dict(num_hidden_layers=3), ["layers.2.input_layernorm.weight is missing"]),
    ],
)
def test_a_checkpoint_that_its_config_does_not_describe(tmp_path, changes, words):
    save_llama(tmp_path, tied=True)
    edit_config(tmp_path, **changes)
    with pytest.raises(InputError) as error:
        Checkpoint(tmp_path)
    for word in [tmp_path.name, *words]:
        assert word in str(error.value)


def test_a_family_without_layer_functions_is_refused():
    shape = replace(shape_by_name("llama-2-7b"), family="bloom")
    with pytest.raises(InputError, match="llama-2-7b: the executor cannot run the bloom family; it runs opt, llama"):
        architecture(shape)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_every_tensor_of_the_layout_has_a_name_and_random_weights(name):
    shape = shape_by_name(name)
    assert set(llama.layer_tensors(shape)) == {spot.name for spot in layer_layout(shape, 2).spots}
    small = replace(shape, num_layers=1, hidden=8, head_dim=2, ffn=6, vocab=10)
    random = dict((name, tensor) for name, _, tensor in RandomWeights(small).layer_tensors(0))
    assert ("kvq.bias" in random) == shape.qkv_bias
    assert (random["norm1.weight"] == 1).all() and random["kvq.weight"].std() > 0
    outer = dict(RandomWeights(small).outer_tensors())
    assert (outer["norm.weight"] == 1).all() and ("lm_head.weight" in outer) != shape.tied_head
    parameters = small.layer_bytes(1) + small.embedding_bytes(1)
    assert parameters == sum(t.numel() for t in [*random.values(), *outer.values()])


# --- sliding windows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, window",
    [
        (dict(kind="mistral", sliding_window=None), None),
        (dict(kind="mistral", sliding_window=40), 40),
        (dict(kind="qwen2"), None),
        (dict(kind="qwen2", sliding_window=40), None),
        (dict(kind="qwen2", sliding_window=40, use_sliding_window=True), None),  # from layer 28 of 2 on
        (dict(kind="qwen2", sliding_window=40, use_sliding_window=True, max_window_layers=1), 40),
        (dict(kind="llama"), None),
    ],
)
def test_a_sliding_window_is_that_of_its_layers(tmp_path, more, window):
    reference = save_llama(tmp_path, **more)
    shape = shape_from_config(tmp_path)
    assert shape.windows == (() if window is None else (window,)) and shape.max_context == 96
    edit_config(tmp_path, layer_types=...)  # as older versions wrote it
    assert shape_from_config(tmp_path).attention == shape.attention
    of_layers = [getattr(layer.self_attn, "sliding_window", None) for layer in reference.model.layers]
    if more["kind"] == "qwen2":
        assert [shape.attention_of(layer).window for layer in range(2)] == of_layers
    if window is None:
        return
    tokens = torch.randint(3, 61, (96,), generator=torch.Generator().manual_seed(3)).tolist()
    check(tmp_path, reference, tokens)
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    with LLM(tmp_path, device="cpu", dtype="float32", max_model_len=window) as llm:
        assert llm.shape.windows == ()  # which nobody outgrows
        answer = llm.generate([tokens[:7]], params)[0].outputs[0]
        assert len(answer.token_ids) == window - 7 and answer.finish_reason == "length"
        with pytest.raises(InputError, match="prompt 0 has 40 tokens.* room for 40 tokens .max_model_len"):
            llm.generate([tokens[:40]], params)
    with pytest.raises(InputError, match="selection of tokens .* windows .*max_model_len"):
        LLM(tmp_path, presets.h2o(0.5), device="cpu", dtype="float32")


def test_a_window_that_is_absent_has_transformers_default(tmp_path):
    save_llama(tmp_path, kind="mistral")
    edit_config(tmp_path, sliding_window=...)
    assert shape_from_config(tmp_path).attention == (AttentionKind(4096),)
