"""Test torch modules on their devices, and encoders from folders, against transformers."""

import io
import json
import os
import pickle
import types
import zipfile

import numpy as np
import pytest
import torch

from flexhybrid import InputError, cli, resolve
from flexhybrid.cascade.loading import load_model
from flexhybrid.cascade.routes import Cascade, CascadeModel
from flexhybrid.cascade.torch_models import TorchModel

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "the", "cat", "dog", "sat", "on", "mat", "who", "where", "ran", "away"]
TEXTS = ["the cat sat on the mat", "who ran", "the dog ran away on the mat", "dog", "where"]
PAIRS = [["who sat", "the cat sat on the mat"], ["where", "on the mat"], ["who ran away", "the dog"]]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Save three encoders with random weights; return their folders and transformers' modules."""
    from transformers import (
        BertConfig,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertTokenizer,
        ViTConfig,
        ViTForImageClassification,
    )

    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("encoders")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "initializer_range": 0.5, **size}
    vit = ViTConfig(image_size=8, patch_size=4, num_channels=1, initializer_range=0.5, num_labels=4, **size)
    modules = {
        "bert": BertForSequenceClassification(BertConfig(num_labels=3, **bert)),
        "squad": BertForQuestionAnswering(BertConfig(num_labels=2, **bert)),
        "vit": ViTForImageClassification(vit),
    }
    vocab = root / "vocab.txt"
    vocab.write_text("\n".join(WORDS))
    for name, module in modules.items():
        module.eval().save_pretrained(root / name)
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})
    for name in ("bert", "squad"):
        tokenizer.save_pretrained(root / name)
    return types.SimpleNamespace(root=root, modules=modules, tokenizer=tokenizer)


def alone(encoders, name: str, text: str | list[str]):
    """Return transformers' output for one request without padding."""
    texts = [text] if isinstance(text, str) else text
    encoded = encoders.tokenizer(*([one] for one in texts), return_tensors="pt")
    with torch.inference_mode():
        return encoded["input_ids"], encoders.modules[name](**encoded)


def test_texts_are_classified_as_by_transformers_alone(encoders):
    model = load_model("m", str(encoders.root / "bert"), "classification", device="cpu")
    for requests in (TEXTS, PAIRS):
        found = model.predict(requests)
        for i, request in enumerate(requests):
            _, expected = alone(encoders, "bert", request)
            np.testing.assert_allclose(found.logits[i, 0], expected.logits[0], rtol=1e-4, atol=1e-5)
            assert found.outputs[i] == int(expected.logits.argmax())
    ids = [alone(encoders, "bert", text)[0][0].tolist() for text in TEXTS]
    padded = np.array([row + [0] * (12 - len(row)) for row in ids])  # rows of token ids, as a file of arrays has them
    np.testing.assert_allclose(model.predict(padded).logits, model.predict(TEXTS).logits, rtol=1e-4, atol=1e-5)


def test_an_answer_in_a_text_is_never_padding(encoders):
    model = load_model("m", str(encoders.root / "squad"), "extraction", device="cpu")
    found = model.predict(PAIRS)
    for i, pair in enumerate(PAIRS):
        ids, expected = alone(encoders, "squad", pair)
        length = ids.shape[1]
        for slot, logits in enumerate((expected.start_logits, expected.end_logits)):
            np.testing.assert_allclose(found.logits[i, slot, :length], logits[0], rtol=1e-4, atol=1e-5)
            assert np.isneginf(found.logits[i, slot, length:]).all()
            assert found.outputs[i][slot] == int(logits.argmax())


def test_images_are_classified_as_by_transformers(encoders):
    x = np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype(np.float32)
    with torch.inference_mode():
        expected = encoders.modules["vit"](pixel_values=torch.as_tensor(x)).logits
    model = load_model("m", str(encoders.root / "vit"), "classification", device="cpu")
    np.testing.assert_allclose(model.predict(x).logits[:, 0], expected, rtol=1e-4, atol=1e-5)
    assert model.memory_bytes(x) > 4 * sum(parameter.numel() for parameter in encoders.modules["vit"].parameters())
    with pytest.raises(ValueError, match="takes no texts"):
        model.predict(TEXTS)
    with pytest.raises(ValueError, match="pixel values from its image processor, not torch.uint8"):
        model.predict(np.zeros((3, 1, 8, 8), dtype=np.uint8))  # raw ones would be answered, and wrongly


@pytest.mark.parametrize("task", ["classification", "extraction"])
def test_texts_from_fit_to_run(encoders, tmp_path, task, as_json):
    """Data are lines of texts and labels; batches have different longest texts; a text that is too long fails alone."""
    name = "bert" if task == "classification" else "squad"
    requests = (TEXTS if name == "bert" else PAIRS) * 30
    lines, answers = [], []
    for i, request in enumerate(requests):
        _, out = alone(encoders, name, request)
        parts = [out.logits] if name == "bert" else [out.start_logits, out.end_logits]
        right = [int(part.argmax()) for part in parts]
        answers.append(right[0] if name == "bert" else right)
        wrong = [int(part.argsort()[0, 0]) for part in parts]
        label = wrong if i % 5 == 0 else right
        lines.append(json.dumps({"text": request, "label": label[0] if name == "bert" else label}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    folder, fitted, cascade = str(encoders.root / name), f"{tmp_path}/fitted.json", f"{tmp_path}/cascade.json"
    command = ["cascade", "fit", "--task", task, "--models", f"m={folder}", "--data", f"{tmp_path}/data.jsonl"]
    assert as_json(*command, "--energy-j", "1", "-o", fitted)["models"][0]["accuracy"] == 0.8
    Cascade((CascadeModel("m", source=folder),), (), task=task).save(cascade)
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:7], json.dumps({"text": "the " * 40, "label": answers[0]})]))
    run = ["cascade", "run", "--cascade", cascade, "-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out.jsonl"]
    result = as_json(*run)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["output"] for line in written] == [*answers[:7], None] and result["unanswered"] == 1
    assert "tokens; m takes up to 16" in written[-1]["failed"]["m"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"text": 3, "label": 1}'], 'request 1: its "text" must be a text, or a list of two'),
        (['{"text": ["a", "b", "c"], "label": 1}'], 'request 1: its "text" must be'),
        (['{"text": "a", "label": 1}', '{"text": "b"}'], '"label" is missing in 1 of 2'),
        (['{"text": "a", "label": 1}', '{"text": "b", "label": "c"}'], 'each "label" must be a whole number'),
        (['{"text": "a", "label": 1}', '{"text": "b", "label": [1, 2]}'], 'each "label" must be'),
    ],
)
def test_files_of_texts_are_read_strictly(tmp_path, capsys, lines, words):
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    command = ["cascade", "fit", "--models", "a=x:y", "--data", f"{tmp_path}/data.jsonl", "-o", f"{tmp_path}/out.json"]
    assert cli.main(command) == 2 and words in capsys.readouterr().err


def test_a_folder_without_the_task_s_head_is_refused_by_name(encoders, tmp_path):
    with pytest.raises(InputError, match="has the class ViTForImageClassification; extraction needs one"):
        load_model("m", str(encoders.root / "vit"), "extraction", device="cpu")
    with pytest.raises(InputError, match="has no config of transformers"):
        load_model("m", str(tmp_path), "classification", device="cpu")


# ---- devices ---------------------------------------------------------------------------------------------------------

SEEN: list[tuple[str, str]] = []


class Watched(torch.nn.Module):
    """A module that records the devices of its weight and its rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append((self.weight.device.type, x.device.type))
        return torch.zeros(len(x), 2)


def test_a_module_computes_on_the_device_that_is_given(monkeypatch):
    """The meta device stands in for a GPU: its tensors have shapes but no data."""
    asked = []

    def pick(name: str):
        asked.append(name)
        return types.SimpleNamespace(device=torch.device("meta"))

    monkeypatch.setattr(resolve, "pick_device", pick)
    SEEN.clear()
    model = load_model("m", f"{__name__}:Watched", "classification", device="cuda")
    model.predict(np.ones((3, 2), dtype=np.float32))
    assert asked == ["cuda"] and SEEN == [("meta", "meta")] and model.device == "meta"


def test_an_exported_program_moves_to_its_device(tmp_path):
    """Constants move too, although a program stores the device of a tensor it makes."""

    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x) + torch.arange(2.0, device="cpu")

    program = torch.export.export(Shifted().eval(), (torch.zeros(2, 3),))
    torch.export.save(program, tmp_path / "m.pt2")
    model = TorchModel("m", str(tmp_path / "m.pt2"), place="meta")
    (logits,) = model.logits(np.zeros((2, 3), dtype=np.float32))
    assert logits.device.type == "meta"
    assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch finds no CUDA device"):
        load_model("m", f"{__name__}:Watched", "classification", device="cuda")


class Code:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_an_exported_program_runs_no_code_of_its_file(tmp_path):
    path, ran = tmp_path / "m.pt2", tmp_path / "ran"
    module, rows = torch.nn.Linear(4, 3), torch.randn(2, 4)
    torch.export.save(torch.export.export(module, (rows,), dynamic_shapes=({0: torch.export.Dim("b")},)), path)
    np.testing.assert_allclose(TorchModel("m", str(path)).logits(rows)[0].detach(), module(rows).detach())
    with zipfile.ZipFile(path) as archive:
        plain = {name: archive.read(name) for name in archive.namelist()}
    (graph,) = (name for name in plain if name.endswith("models/model.json"))
    (inputs,) = (name for name in plain if name.endswith("sample_inputs/model.pt"))
    (weights,) = (name for name in plain if name.endswith("model_weights_config.json"))
    pickled = io.BytesIO()
    torch.save(Code(ran), pickled)
    evil = f"__import__('os').mkdir({str(ran)!r})"
    linear, size = b"torch.ops.aten.linear.default", b"Symbol('s"
    assert linear in plain[graph] and size in plain[graph]
    changes = {
        "pickled inputs": {inputs: pickled.getvalue()},
        "pickled weights": {
            weights: plain[weights].replace(b'"use_pickle": false', b'"use_pickle": true'),
            weights.replace("model_weights_config.json", "weight_0"): pickled.getvalue(),
        },
        "evaluated size": {graph: plain[graph].replace(size, f"{evil} or Symbol('s".encode())},
        "called size": {graph: plain[graph].replace(size, b"(exec) ('1') or Symbol('s")},
        "loaded library": {graph: plain[graph].replace(linear, b"torch.ops.load_library")},
        "any function": {graph: plain[graph].replace(linear, b"torch.hub.load")},
        "compiled code": {graph.replace("models/model.json", "data/aotinductor/model/x.so"): b""},
    }
    for name, change in changes.items():
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in (plain | change).items():
                archive.writestr(member, content)
        with pytest.raises(InputError, match="cannot read"):
            TorchModel("m", str(path))
        assert not ran.exists(), name
    path.write_bytes(pickle.dumps(Code(ran)))
    with pytest.raises(InputError, match="cannot read"):
        TorchModel("m", str(path))
    assert not ran.exists()
