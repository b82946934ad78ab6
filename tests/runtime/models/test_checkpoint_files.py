"""What a checkpoint's files say, read as transformers reads them: its own model of the same folder gives the tokens."""

from __future__ import annotations

import pytest
from models import edit_config, loaded
from runs import run_wave
from tiny_models import greedy, save_tiny

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
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.5] * 8,
                             "long_factor": [4.0] * 8, "original_max_position_embeddings": 48}},
        {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
    ],
    ids=lambda changes: " ".join(changes),
)  # fmt: skip
def test_what_the_own_layers_do_not_cover_runs_through_transformers_layers(tmp_path, changes):
    save_tiny(tmp_path, "opt" if {"enable_bias", "_remove_final_layer_norm"} & {*changes} else "llama", **changes)
    assert check(tmp_path).shape.modules


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_code_beside_the_weights_is_never_run_where_transformers_has_the_class(tmp_path, model_type):
    save_tiny(tmp_path, model_type)
    (tmp_path / "remote.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    edit_config(tmp_path, auto_map={"AutoConfig": "remote.Config", "AutoModelForCausalLM": "remote.Model"})
    check(tmp_path)
    assert not (tmp_path / "ran").exists()
