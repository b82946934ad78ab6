"""Checkpoints that are trained here are saved as transformers and the engine read them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.training.train_checkpoint import ARCHITECTURES, save_model
from flexhybrid.core.model.shape import shape_of_checkpoint


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_saved_model_is_the_one_that_was_built(architecture, tmp_path):
    built = ARCHITECTURES[architecture](64, 64, 2)
    save_model(built, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert (
        all(torch.equal(read.pop(name), tensor) for name, tensor in built.bfloat16().state_dict().items()) and not read
    )
    shape = shape_of_checkpoint(tmp_path)
    assert (shape.family, shape.num_layers, shape.hidden) == ("opt" if architecture == "opt" else "llama", 2, 64)
