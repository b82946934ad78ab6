"""Test skewing: scores and logits stay, heads are concentrated in few columns, and files say so."""

import numpy as np
import pytest
import torch
from models import InMemory, save_llama, save_opt

from flexhybrid import cli
from flexhybrid.core.errors import InputError
from flexhybrid.jobs.compare.exactness import Reference
from flexhybrid.runtime.selections.skew import forward, save_skewed, skewing_matrices
from flexhybrid.runtime.storage.loader import SKEW_FILE, Checkpoint

SAMPLE = np.random.default_rng(3).integers(3, 61, 90).tolist()
MODELS = {
    "opt": lambda folder: save_opt(folder, layers=3, heads=4, positions=128, scale=0.15),
    "opt post-norm": lambda folder: save_opt(folder, layers=2, post_norm=True, embed_dim=32, positions=128),
    "llama": lambda folder: save_llama(folder, layers=3, kv_heads=2, positions=128, scale=0.15),
    "qwen2": lambda folder: save_llama(folder, kind="qwen2", kv_heads=1, tied=True, positions=128),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """Return transformers' own model, the checkpoint and the skewed checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    reference = MODELS[request.param](folder / "plain")
    save_skewed(Checkpoint(folder / "plain"), SAMPLE, folder / "skewed")
    return InMemory(reference), Checkpoint(folder / "plain"), Checkpoint(folder / "skewed")


def relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def turned_by(checkpoint):
    """Return the rotation of queries and keys that a skewed rotary checkpoint states."""

    def turned(layer, q_NHd, k_NGd):
        a = checkpoint.skew(layer)
        q = torch.stack([q_NHd[:, head] @ a[head * len(a) // q_NHd.shape[1]] for head in range(q_NHd.shape[1])], dim=1)
        return q, torch.stack([k_NGd[:, group] @ a[group] for group in range(len(a))], dim=1)

    return turned


def test_logits_are_still_transformers_own(model):
    reference, plain, skewed = model
    text = np.random.default_rng(4).integers(3, 61, 70).tolist()
    with torch.inference_mode():
        wanted = reference.model(torch.tensor([text])).logits[0]
    assert relative_difference(forward(plain, text), wanted) < 1e-5
    change = {"change": turned_by(skewed)} if plain.shape.rotary else {}
    logits = forward(skewed, text, **change)
    assert relative_difference(logits, wanted) < 1e-4
    assert not torch.equal(logits, forward(plain, text))  # something was done
    with torch.inference_mode():  # and transformers reads the folder
        assert relative_difference(Reference(skewed.path).model(torch.tensor([text])).logits[0], wanted) < 1e-4


def test_matrices_are_orthogonal_and_gather_the_queries(model):
    """Columns of Q·A are orthogonal, and the first k hold as much of Q as any k directions can."""
    _, plain, _ = model
    queries = []
    forward(plain, SAMPLE, lambda layer, q, k: (queries.append(q.double()) or q, k))
    for q_NHd, a_Gdd in zip(queries, skewing_matrices(plain, SAMPLE), strict=True):
        for group, a in enumerate(a_Gdd):
            assert torch.allclose(a.T @ a, torch.eye(len(a), dtype=a.dtype), atol=1e-10)
            heads = q_NHd.unflatten(1, (len(a_Gdd), -1))[:, group].flatten(0, 1)
            skewed = heads @ a
            product = skewed.T @ skewed
            assert (product - torch.diag(product.diag())).abs().max() < 1e-6 * product.max()
            assert torch.allclose(product.diag().sqrt(), torch.linalg.svdvals(heads), rtol=1e-6, atol=1e-6)


def test_a_text_may_be_shorter_than_the_width_of_a_head(tmp_path):
    MODELS["opt"](tmp_path / "plain")
    checkpoint = Checkpoint(tmp_path / "plain")
    for a_Gdd in skewing_matrices(checkpoint, SAMPLE[:5]):
        assert torch.allclose(a_Gdd @ a_Gdd.mT, torch.eye(16, dtype=a_Gdd.dtype).expand(4, -1, -1), atol=1e-10)


def test_an_existing_folder_is_not_overwritten(model, tmp_path):
    with pytest.raises(InputError, match="is there already"):
        save_skewed(model[1], SAMPLE, tmp_path)


def test_matrices_of_another_model_are_refused(tmp_path):
    for name, kv_heads in (("one", 2), ("other", 1)):
        save_llama(tmp_path / name, kv_heads=kv_heads)
        save_skewed(Checkpoint(tmp_path / name), SAMPLE, tmp_path / f"{name} skewed")
    (tmp_path / "one skewed" / SKEW_FILE).write_bytes((tmp_path / "other skewed" / SKEW_FILE).read_bytes())
    with pytest.raises(InputError, match=r"layers.1 of shape \[2, 16, 16\]"):
        Checkpoint(tmp_path / "one skewed").skew(1)


def test_the_command_writes_a_checkpoint_or_names_the_error(tmp_path, capsys, as_json):
    shipped, text = "flexhybrid/shipped/opt-stdlib-4m", tmp_path / "sample.py"
    text.write_text("def close(self):\n    self.file.close()\n" * 20, encoding="utf-8")
    command = ["skew", "--model", shipped, "--out", str(tmp_path / "skewed"), "--text"]
    assert as_json(*command, str(text), "--tokens", "64")["tokens"] == 64
    skewed = Checkpoint(tmp_path / "skewed")
    ids = list(range(5, 60))
    assert relative_difference(forward(skewed, ids), forward(Checkpoint(shipped), ids)) < 1e-4
    assert (tmp_path / "skewed" / "tokenizer.json").is_file()
    for wrong, words in ((text, "is there already"), (tmp_path / "absent", "cannot read text file")):
        assert cli.main([*command, str(wrong)]) == 2
        assert words in capsys.readouterr().err
