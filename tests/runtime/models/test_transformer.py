"""Test running transformers' layers: shortcuts change no result, and unknown behaviour is refused with a reason."""

import re
from typing import Any

import pytest
import torch
from tiny_models import save_tiny, tiny_config
from transformers import LlamaConfig, MixtralConfig

from flexhybrid.core.errors import InputError
from flexhybrid.runtime.models import transformer
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.models.transformer import call_directly
from flexhybrid.runtime.storage.loader import Checkpoint

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


def eager_instead(monkeypatch):
    """Request attention other than by name."""
    from transformers.models.gemma2 import modeling_gemma2 as gemma2

    interface = type(vars(gemma2)["ALL_ATTENTION_FUNCTIONS"])
    monkeypatch.setattr(interface, "get_interface", lambda self, name, default: default)


def renamed_layers(monkeypatch):
    """Give a cache another name for its layers."""

    class Renamed:
        def __init__(self, config):
            self.parts = [config]

    monkeypatch.setattr("transformers.DynamicCache", Renamed)


def renamed_window(monkeypatch):
    """Give a cache's layers another name for the number of tokens they keep."""
    from transformers.cache_utils import DynamicSlidingWindowLayer

    def own_name(layer, name):
        if name == "sliding_window":
            raise AttributeError(name)
        return object.__getattribute__(layer, name)

    monkeypatch.setattr(DynamicSlidingWindowLayer, "__getattribute__", own_name)


def renamed_mask_function(monkeypatch):
    """Give a mask's rule another name."""
    own: Any = transformer._mask
    monkeypatch.setattr(transformer, "_mask", lambda *args, mask_function, **more: own(*args, rule=mask_function))


def masks_of_its_own(monkeypatch):
    """Make masks without requesting them by name."""
    from transformers.models.gemma2 import modeling_gemma2 as gemma2

    def made(**_):
        return None

    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        monkeypatch.setattr(gemma2, name, made)


def broken_behind_attention(monkeypatch):
    """Call a feed-forward network with other arguments."""
    from transformers.models.gemma2 import modeling_gemma2 as gemma2

    def forward(self, rows, gate):
        return rows * gate

    monkeypatch.setattr(gemma2.Gemma2MLP, "forward", forward)


@pytest.mark.parametrize(
    "change, reason",
    [
        (eager_instead, "its own code uses the attention mask"),
        (renamed_layers, "'layers'"),
        (renamed_window, "sliding_window"),
        (renamed_mask_function, "mask_function"),
        (masks_of_its_own, "AttentionMaskInterface"),
        (broken_behind_attention, "layer 0 cannot be run behind its attention (TypeError: "),
    ],
)
def test_a_change_inside_transformers_is_refused_with_a_reason(tmp_path, monkeypatch, change, reason):
    save_tiny(tmp_path, "gemma2")
    change(monkeypatch)
    with pytest.raises(InputError, match=f"'gemma2' cannot be run exactly: .*{re.escape(reason)}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "model_type, reason",
    [
        ("bloom", "it attends by code of its own, not through transformers' AttentionInterface"),
        ("mpt", "it attends by code of its own, not through transformers' AttentionInterface"),
        ("doge", "its own code uses the attention mask, outside transformers' AttentionInterface"),
        ("jetmoe", "layer 0, up to its attention, computes what depends on the values of tensors"),
    ],
)
def test_the_reason_of_a_refusal_is_what_the_model_s_code_does(tmp_path, model_type, reason):
    tiny_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=re.escape(f"{model_type!r} cannot be run exactly: {reason}")):
        empty_model(tmp_path)


def test_an_older_transformers_is_refused_with_its_version(tmp_path, monkeypatch):
    save_tiny(tmp_path, "gemma2")
    monkeypatch.setattr(transformer, "version", {"transformers": "5.5.4"}.get)
    with pytest.raises(InputError, match=r"needs transformers 5\.6 or later; installed is 5\.5\.4"):
        Checkpoint(tmp_path)
