"""Checkpoints that are trained here learn, and are saved as transformers and the engine read them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.training import train_checkpoint
from experiments.training.corpus import Stream
from experiments.training.train_checkpoint import ARCHITECTURES, evaluate, save_model, train
from flexhybrid.core.model.shape import shape_of_checkpoint


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_trained_model_has_learned_and_is_saved_as_it_is(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(train_checkpoint, "TOKENS_PER_STEP", 128)
    torch.manual_seed(0)
    built = ARCHITECTURES[architecture](64, 64, 2)
    tokens = torch.arange(3, 13).repeat(100)  # each token tells the next
    stream = Stream(tokens, torch.arange(0, 1000, 100))
    before = evaluate(built, stream.all_rows(64))
    train(built, stream, positions=64, steps=12, seed=0)
    assert evaluate(built, stream.all_rows(64)) < before - 1
    save_model(built, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert (
        all(torch.equal(read.pop(name), tensor) for name, tensor in built.bfloat16().state_dict().items()) and not read
    )
    shape = shape_of_checkpoint(tmp_path)
    assert (shape.family, shape.num_layers, shape.hidden) == ("opt" if architecture == "opt" else "llama", 2, 64)
