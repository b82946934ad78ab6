"""Test how a checkpoint's files are read: the tokens are those of transformers' model of the same folder."""

from __future__ import annotations

import json
import os
import shutil

import fuzz_checkpoints
import pytest
import torch
from models import edit_config, loaded, save_llama
from runs import run_wave
from safetensors.torch import load_file, save_file
from tiny_models import greedy, save_tiny

from flexhybrid.core.errors import InputError
from flexhybrid.jobs.paths import shape_to_simulate
from flexhybrid.runtime.storage.loader import Checkpoint
from sim.presets import hybrid

PROMPTS = [[5, 9, 33, 2, 17], [42] * 11]


def check(folder, prompts=PROMPTS, max_tokens=8) -> Checkpoint:
    """Assert that a checkpoint gives the tokens of transformers' model of the same files."""
    checkpoint = Checkpoint(folder)
    tokens = run_wave(checkpoint, hybrid(0.5), prompts, max_tokens).tokens
    assert tokens == greedy(loaded(folder), prompts, max_tokens)
    return checkpoint


# ---- scaled rotations, and what the project's own layers do not cover

LONG = [list(range(3, 53)), list(range(3, 60)) * 2]


@pytest.mark.parametrize("model_type", ["llama", "olmo2"])
@pytest.mark.parametrize("scaling", [{"type": "yarn"}, {"type": "linear"}], ids=str)
def test_prompts_reach_into_the_extended_context(tmp_path, model_type, scaling):
    save_tiny(tmp_path, model_type)
    scaling = {**scaling, "factor": 4.0}
    edit_config(tmp_path, rope_parameters=..., rope_theta=1e4, rope_scaling=scaling, max_position_embeddings=40)
    checkpoint = check(tmp_path, LONG)
    assert checkpoint.shape.max_positions == 160


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.5] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 48,
            }
        },
        {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_options_that_our_layers_lack_run_through_transformers_layers(tmp_path, changes):
    save_tiny(tmp_path, "opt" if {"enable_bias", "_remove_final_layer_norm"} & {*changes} else "llama", **changes)
    assert check(tmp_path).shape.modules


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_code_in_the_checkpoint_is_not_run_if_transformers_has_the_class(tmp_path, model_type):
    save_tiny(tmp_path, model_type)
    (tmp_path / "remote.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    edit_config(tmp_path, auto_map={"AutoConfig": "remote.Config", "AutoModelForCausalLM": "remote.Model"})
    check(tmp_path)
    assert not (tmp_path / "ran").exists()


# ---- a head of its own beside a configuration that says tied

TIED = ["llama", "opt", "gpt2", "gemma2", "phi", "cohere"]


@pytest.mark.parametrize("model_type", TIED)
def test_a_separate_head_is_used_even_if_the_configuration_says_tied(tmp_path, model_type):
    model = save_tiny(tmp_path, model_type, tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    shape = check(tmp_path).shape
    head = model.get_output_embeddings().weight.numel() * 4
    assert shape_to_simulate(tmp_path) == shape and not shape.tied_head
    weights = load_file(tmp_path / "model.safetensors")
    (name,) = (name for name, tensor in weights.items() if torch.equal(tensor, model.get_input_embeddings().weight))
    save_file(weights | {"lm_head.weight": weights[name].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    same = check(tmp_path).shape
    assert same.tied_head and shape.embedding_bytes(4) - same.embedding_bytes(4) == head


# ---- files of weights


def as_bin(folder, weights, **options) -> None:
    """Replace a checkpoint's weights by a pytorch_model.bin."""
    torch.save(weights, folder / "pytorch_model.bin", **options)
    (folder / "model.safetensors").unlink(missing_ok=True)


def refusal(folder) -> str:
    with pytest.raises(InputError) as error:
        Checkpoint(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


class Code:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [False, True])
def test_old_and_new_pickles_are_read_and_run_no_code(tmp_path, zipped):
    save_llama(tmp_path, tied=True, vocab=97)
    weights = load_file(tmp_path / "model.safetensors")
    options = {"_use_new_zipfile_serialization": zipped}
    table = weights["model.embed_tokens.weight"]
    as_bin(tmp_path, weights | {"lm_head.weight": table, "global_step": 3, "args": {"lr": 0.1}}, **options)
    assert check(tmp_path).shape.tied_head
    as_bin(tmp_path, weights | {"lm_head.weight": table.flip(0)}, **options)
    assert not check(tmp_path).shape.tied_head
    as_bin(tmp_path, {"state_dict": weights}, **options)
    assert "no tensors by name, but ['state_dict']" in refusal(tmp_path)
    as_bin(tmp_path, weights | {"model.norm.weight": table.to_sparse()}, **options)
    assert "model.norm.weight holds torch.sparse_coo" in refusal(tmp_path)
    as_bin(tmp_path, {"lm_head.weight": table}, **options)
    assert "is it a llama model?" in refusal(tmp_path)
    for content in (weights | {"code": Code(tmp_path / "ran")}, Code(tmp_path / "ran"), [1], 1):
        as_bin(tmp_path, content, **options)
        assert "cannot open" in refusal(tmp_path) and not (tmp_path / "ran").exists()


def test_a_single_file_comes_before_an_index_of_shards(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    save_llama(old, vocab=97, seed=1, max_shard_size="20KB")
    save_llama(new, vocab=97, seed=2)
    assert len(list(old.glob("model-*.safetensors"))) > 1
    shutil.copy(new / "model.safetensors", old)
    with pytest.warns(UserWarning, match="model.safetensors, as in transformers; model.safetensors.index.json is igno"):
        check(old)
    for shard in old.glob("model-*"):
        shard.unlink()
    with pytest.warns(UserWarning):
        check(old)
    (old / "model.safetensors").unlink()
    assert "the checkpoint's index names it" in refusal(old)
    for names in ({"a": 1}, {"a": ["b"]}, {"a": "\0"}, [], None, 3):
        (old / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        assert "index" in refusal(old)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"]
)
def test_git_lfs_pointers_are_named(tmp_path, name):
    save_llama(tmp_path)
    if "bin" in name or "index" in name:
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5135149760\n")
    assert f"{name} is a git-lfs pointer" in refusal(tmp_path)


# ---- slices of what `make fuzz` and `make check-models` run


def test_odd_checkpoints_are_refused_in_one_line_or_give_the_tokens(monkeypatch):
    counts = fuzz_checkpoints.run(["llama", "opt", "gpt2"], range(24), seed=1)
    assert (
        counts["equal"] > 3 and counts["refused"] > 10 and not any(counts[name] for name in fuzz_checkpoints.FAILURES)
    )
    monkeypatch.setattr(fuzz_checkpoints, "ours", lambda folder: [[3] * 6] * 2)
    assert fuzz_checkpoints.run(["llama"], range(8), seed=3)["wrong"]
