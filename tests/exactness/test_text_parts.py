"""Test models that also take pictures: their text part answers texts as the whole model does."""

import json

import pytest
import torch
from runs import run_wave
from safetensors.torch import load_file, save_file
from tiny_models import greedy, save_tiny, save_with_pictures

from flexhybrid.core.errors import InputError
from flexhybrid.jobs.doctor import doctor
from flexhybrid.runtime.models.module import ModulePath
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import DiskPlace, Weights
from sim import catalogue
from sim.presets import hybrid, kv_only

pytest.importorskip("greenlet")

PROMPTS = [[5, 9, 33, 2, 17, 60, 8, 44, 71, 3, 3, 90, 18, 25, 31, 12, 7], [4, 8, 15, 16, 23]]


@pytest.mark.parametrize(
    "model_type, text_type, tied", [("gemma3", "gemma3_text", True), ("mistral3", "mistral", False)]
)
def test_the_text_part_gives_the_whole_models_tokens(tmp_path, model_type, text_type, tied):
    expected = greedy(save_with_pictures(tmp_path, model_type, text_type, tied), PROMPTS, 8)
    file = tmp_path / "model.safetensors"
    for names in (
        str,
        lambda name: name.replace("language_model.model.", "model.language_model."),
    ):  # of later releases
        save_file({names(name): tensor for name, tensor in load_file(file).items()}, file)
        checkpoint = Checkpoint(tmp_path)
        assert checkpoint.shape.tied_head is tied
        for policy in (kv_only(), hybrid(0.5)):
            result = run_wave(checkpoint, policy, PROMPTS, 8, hardware=catalogue.load("t4"))
            assert result.tokens == expected
    (model,) = doctor(torch.device("cpu"), [str(tmp_path)], 16, 8)["models"]
    assert model["path"] == "transformers' own layers, text alone"


def test_a_model_that_takes_sound_and_has_no_part_for_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "moshi", "num_hidden_layers": 2}))
    with pytest.raises(InputError, match="moshi.*more than text"):
        Checkpoint(tmp_path)


def test_tensors_that_a_model_keeps_in_float32_stay_so(tmp_path):
    from transformers import AutoModelForCausalLM

    save_tiny(tmp_path, "deepseek_v3")
    checkpoint, cpu = Checkpoint(tmp_path), torch.device("cpu")
    weights = Weights(checkpoint.shape, checkpoint, "bfloat16", cpu, kv_only(), DiskPlace(None))
    modules = ModulePath(checkpoint.shape, torch.bfloat16, cpu)
    modules.place_outer(weights.outer)
    weights.close()
    ours = dict(modules.model.named_buffers())
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_buffers())
    assert any("correction_bias" in name for name in theirs) and any("inv_freq" in name for name in theirs)
    for name, buffer in theirs.items():
        assert ours[name].dtype == buffer.dtype == torch.float32, name
        assert torch.equal(ours[name], buffer), name
