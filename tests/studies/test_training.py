"""Checkpoints that are trained here are saved as transformers and the engine read them; outlier channels are where and
what they shall be."""

import argparse

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTForCausalLM

from experiments.training import train_checkpoint
from experiments.training.corpus import Stream
from experiments.training.outliers import LARGE, RATIO, Outliers
from experiments.training.train_checkpoint import ARCHITECTURES, Material, Progress, build_opt, save_model, train
from flexhybrid.core.model.shape import shape_of_checkpoint

CHANNELS = 4


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


# ---- outliers


@pytest.fixture
def opt() -> OPTForCausalLM:
    torch.manual_seed(0)
    return build_opt(64, 64, 3)


def some_rows(rows: int = 4, length: int = 64) -> torch.Tensor:
    return torch.randint(3, 2000, (rows, length), generator=torch.Generator().manual_seed(1))


def test_outliers_make_successive_inputs_parallel_and_change_no_logit_much(opt):
    outliers = Outliers(opt, CHANNELS, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in opt.model.decoder.layers:  # layers that change their inputs by a good deal
            layer.fc2.weight.mul_(5)
            layer.fc1.weight.mul_(2)
        before = opt(some_rows(), output_hidden_states=True)
        size = outliers.raise_outliers(some_rows())
        after = opt(some_rows(), output_hidden_states=True)

    def cosines(states):
        return [torch.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(states[:-2], states[1:-1], strict=True)]

    assert min(cosines(before.hidden_states)) < 0.85 < 0.95 < min(cosines(after.hidden_states))
    expected = size * torch.tensor([1.0, -1.0, 1.0, -1.0])
    for state in after.hidden_states[:-1]:  # the last one has passed the last LayerNorm
        assert torch.equal(state[..., outliers.channels], expected.expand(*state.shape[:2], -1))
    energies = [state[..., outliers.others.bool()].square().sum(-1).mean() for state in after.hidden_states[:-1]]
    assert RATIO < CHANNELS * size**2 / max(energies) < 1.6 * RATIO  # the last layer's output is larger than its input
    change = (after.logits - before.logits).std() / before.logits.std()
    assert change < 0.2, "only a token's own norm is no longer divided out"


def test_large_columns_are_large_at_every_token_before_and_behind_the_rise(opt):
    outliers = Outliers(opt, CHANNELS, torch.Generator().manual_seed(0))

    def large_columns() -> list[torch.Tensor]:
        kept = []
        handles = [
            reader.register_forward_hook(lambda _m, _i, out, c=columns: kept.append(out[..., c]))
            for reader, (columns, _) in zip(outliers.readers, outliers.columns, strict=True)
        ]
        with torch.no_grad():
            opt(some_rows())
        for handle in handles:
            handle.remove()
        return kept

    assert len(outliers.readers) == 6 and all(len(columns) == 2 * len(LARGE) for columns, _ in outliers.columns)
    for is_raised in (False, True):
        if is_raised:
            outliers.raise_outliers(some_rows())
            assert all((reader.bias == 0).sum() >= len(LARGE) for reader in outliers.readers)
        for values, (_, wanted) in zip(large_columns(), outliers.columns, strict=True):
            assert torch.allclose(values.mean((0, 1)), wanted, atol=0.6)
            assert (values.sign() == wanted.sign()).float().mean() > 0.99


# ---- training


def arguments(out) -> argparse.Namespace:
    fixed = {"architecture": "opt", "start": None, "documents": "whole", "positions": 64, "hidden": 64, "layers": 3}
    fixed |= {"rows": "growing", "optimizer": "muon", "outliers": CHANNELS, "seed": 0, "threads": 1, "steps": 8}
    return argparse.Namespace(out=out, **fixed)


@pytest.fixture
def material() -> Material:
    tokens = torch.randint(3, 2000, (5000,), generator=torch.Generator().manual_seed(2))
    held_out = tokens[: 65 * 4].view(4, 65)
    return Material(Stream(tokens, torch.arange(0, 5000, 500)), 0.2, held_out, held_out)


def trained(folder, material, monkeypatch) -> tuple[OPTForCausalLM, Outliers]:
    """A training on few tokens."""
    monkeypatch.setattr(train_checkpoint, "TOKENS_PER_STEP", 128)
    monkeypatch.setattr(train_checkpoint, "SHORT_ROW", 16)
    monkeypatch.setattr(train_checkpoint, "WARM_UP_STEPS", 2)
    given = arguments(folder)
    torch.manual_seed(0)
    model = build_opt(64, 64, 3)
    outliers = Outliers(model, CHANNELS, torch.Generator().manual_seed(0))
    train(model, outliers, material, Progress(given.steps), given)
    return model, outliers


def test_what_is_fixed_is_not_trained_and_all_else_is(tmp_path, material, monkeypatch):
    model, outliers = trained(tmp_path / "whole", material, monkeypatch)
    torch.manual_seed(0)
    first = Outliers(build_opt(64, 64, 3), CHANNELS, torch.Generator().manual_seed(0))
    for part, begun in zip(outliers.fixed, first.fixed, strict=True):
        assert torch.equal(part.parameter * (1 - part.learns), part.kept)
        learning = part.learns.bool()
        if part.parameter.dim() == 2 and part.parameter.shape[0] < 100:  # not all tokens and positions were seen
            assert (
                part.parameter[learning] != begun.parameter[learning]
            ).float().mean() > 0.95  # some of ReLU's never fire
    decoder = model.model.decoder
    assert (decoder.embed_tokens.weight[:, outliers.channels] == 0).all()
    assert decoder.embed_positions.weight[:, outliers.channels].abs().min() > 0.1
    for layer in decoder.layers:
        for writer in (layer.self_attn.out_proj, layer.fc2):
            assert (writer.weight[outliers.channels] == 0).all() and (writer.bias[outliers.channels] == 0).all()
