"""What runs transformers' layers: its shortcuts change nothing that is computed."""

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from flexhybrid.runtime.models.transformer import call_directly

pytest.importorskip("greenlet")


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows):
        for part in self.parts[:2]:
            rows = part(rows)
        return self.parts[-1](rows)


def test_modules_called_directly_give_the_same_and_keep_their_hooks():
    model, rows, seen = Twice(), torch.randn(2, 4), []
    expected = model(rows)
    model.parts[1].register_forward_hook(lambda module, args, result: seen.append(module))
    call_directly(model)
    assert torch.equal(model(rows), expected)
    assert seen == [model.parts[1]]
    assert isinstance(model.parts[0], torch.nn.Linear) and len(model.state_dict()) == 6


@pytest.mark.parametrize("make", [LlamaConfig, MixtralConfig])  # a name of the second stands for another
def test_a_configuration_read_directly_gives_the_same(make):
    model, config = Twice(), make(num_hidden_layers=2)
    before = {name: getattr(config, name) for name in [*vars(config), *config.attribute_map]}
    model.config = config
    call_directly(model)
    assert {name: getattr(config, name) for name in before} == before
    assert isinstance(config, make)
