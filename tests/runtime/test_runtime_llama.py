"""Llama-like models: layer functions and rotation equal transformers'; checkpoints read or refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from models import save_llama
from safetensors.torch import load_file, save_file

from flexhybrid import LLM, SamplingParams
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.attention import AttentionKind
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.model.shape import shape_by_name, shape_from_config
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.runtime.kernels import attention
from flexhybrid.runtime.kernels.norms import rms_norm
from flexhybrid.runtime.kernels.rotary import rotary_tables, rotate_
from flexhybrid.runtime.models import architecture, llama
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.storage.parts import linear
from flexhybrid.runtime.storage.weights import Weights
from sim import presets

CPU = torch.device("cpu")


@torch.inference_mode()
def forward(folder, tokens: list[int], dtype="float32", resident=1.0) -> torch.Tensor:
    """Logits [N, vocab] of one text: the layer functions one after the other, no cache, no engine."""
    checkpoint = Checkpoint(folder)
    shape, policy = checkpoint.shape, Policy(weights=Placement(device=resident, host=1 - resident))
    weights = Weights(shape, checkpoint, dtype, CPU, policy)
    rotary = rotary_tables(shape, len(tokens), weights.dtype, CPU)
    groups, heads, d = shape.num_kv_heads, shape.num_heads, shape.head_dim
    hidden = llama.embed(shape, weights.outer, torch.tensor(tokens), torch.arange(len(tokens)))
    for layer in range(shape.num_layers):
        w = weights.views(layer, weights.on_host[layer] if len(weights.on_host[layer]) else None)
        rows = llama.attention_input(shape, w, hidden)
        kvq = linear(rows, w["kvq.weight"], w["kvq.bias"][0] if "kvq.bias" in w else None)
        k, v, q = kvq.split([groups * d, groups * d, heads * d], dim=-1)
        q, k = q.unflatten(-1, (heads, d)), k.unflatten(-1, (groups, d))
        if shape.qk_norm:
            q, k = (rms_norm(x, w[f"{name}_norm.weight"][0], shape.norm_eps) for name, x in (("q", q), ("k", k)))
        q, k = rotate_(q, *rotary), rotate_(k, *rotary)
        heads_first = (x.transpose(0, 1)[None] for x in (k, v.unflatten(-1, (groups, d))))
        attended = attention.fused(q[None], attention.Assembled(*heads_first))[0]
        hidden = llama.finish(shape, w, hidden, attended)
    return llama.head(shape, weights.outer, hidden)


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
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    for resident in (1.0, 0.37):
        ours = forward(tmp_path, tokens, resident=resident)
        assert (ours - wanted).abs().max() <= 2e-5 * wanted.abs().max(), name


def test_the_logits_test_can_fail(tmp_path):
    """Without its rotation scaling, its biases or its eps a model is another one."""
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
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        with torch.inference_mode():
            wanted = reference(torch.tensor([tokens])).logits[0]
        assert (forward(folder, tokens) - wanted).abs().max() > 1e-2 * wanted.abs().max(), name


@pytest.mark.parametrize("name", ["llama grouped", "qwen2", "qwen3", "phi3"])
def test_bfloat16_stays_as_near_to_float32_as_transformers_does(tmp_path, name):
    reference = save_llama(tmp_path, dtype=torch.bfloat16, **MODELS[name])
    tokens = torch.randint(3, 61, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
        theirs = reference.to(torch.bfloat16)(torch.tensor([tokens])).logits[0].float()
    off = (forward(tmp_path, tokens, "bfloat16").float() - wanted).pow(2).mean().sqrt()
    assert off <= 1.3 * (theirs - wanted).pow(2).mean().sqrt()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_shards_and_tensors_that_nobody_needs(tmp_path):
    """Sharded by an index; inv_freq of old checkpoints and other extra tensors are left unread."""
    reference = save_llama(tmp_path, kind="qwen2", layers=3, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    save_file(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.vision.weight": torch.ones(2, 2)},
        tmp_path / "extra.safetensors",
    )
    index["weight_map"] |= {"model.layers.0.self_attn.rotary_emb.inv_freq": "extra.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = list(range(3, 50))
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert (forward(tmp_path, tokens) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_a_checkpoint_of_the_bare_model_needs_no_prefix(tmp_path):
    reference = save_llama(tmp_path, tied=True)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    tokens = [5, 6, 7, 8]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert (forward(tmp_path, tokens) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


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
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
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
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("layer_types", None)  # as older versions wrote it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_from_config(tmp_path).attention == shape.attention
    of_layers = [getattr(layer.self_attn, "sliding_window", None) for layer in reference.model.layers]
    if more["kind"] == "qwen2":
        assert [shape.attention_of(layer).window for layer in range(2)] == of_layers
    if window is None:
        return
    tokens = torch.randint(3, 61, (96,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    off = (forward(tmp_path, tokens) - wanted).abs().amax(-1)
    assert off[:window].max() <= 2e-5 * wanted.abs().max()  # up to the window it is plain attention,
    assert off[window:].max() > 1e-2 * wanted.abs().max()  # behind it not
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
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_from_config(tmp_path).attention == (AttentionKind(4096),)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
        (dict(attention_bias=True), ["attention_bias"]),
        (dict(mlp_bias=True), ["mlp_bias"]),
        (dict(rms_norm_eps="small"), ["norm_eps", "small"]),
        (dict(rms_norm_eps=0), ["norm_eps", "0"]),
        (dict(model_type="mistral", sliding_window=0), ["sliding_window", "0"]),
        (dict(model_type="mistral", sliding_window=True), ["sliding_window", "True"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, changes, words):
    save_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InputError) as error:
        shape_from_config(tmp_path)
    for word in [tmp_path.name, *words]:
        assert word in str(error.value)
