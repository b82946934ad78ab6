"""Test `cascade fit`, `search` and `run` on files of logits and on local models, and their errors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import forced_machine
import numpy as np
import pandas as pd
import pytest
import torch

from flexhybrid import cli, shipped
from flexhybrid.cascade.models import Generator, ModelOutputs
from flexhybrid.cascade.routes import Cascade, CascadeModel, Skip
from flexhybrid.cascade.serving import run as run_module
from flexhybrid.cascade.serving.answers import serve
from flexhybrid.cascade.serving.run import CHUNK
from flexhybrid.cascade.thresholds.confidence import confidence
from flexhybrid.cascade.thresholds.fit import Fitted
from flexhybrid.core.errors import InputError

NUM, CLASSES = 300, 5


def made_logits(skill: float, seed: int) -> np.ndarray:
    """Return logits [NUM, CLASSES] of a model that is right as often as its skill says."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=(NUM, CLASSES)) + skill * 4 * np.eye(CLASSES)[labels_of()] * generator.random((NUM, 1))


def labels_of() -> np.ndarray:
    return np.random.default_rng(99).integers(0, CLASSES, NUM)


@pytest.fixture
def files(tmp_path):
    """Write three models' logits, two as .npz and one as .parquet, and labels."""
    for place, name in enumerate("abc"):
        logits = made_logits((0.5, 0.8, 1.6)[place], place)
        if name == "b":
            pd.DataFrame({"logits": list(logits)}).to_parquet(tmp_path / "b.parquet")
        else:
            np.savez(tmp_path / f"{name}.npz", logits=logits)
    np.savez(tmp_path / "labels.npz", labels=labels_of())
    return tmp_path


def fit_arguments(folder, **changes) -> list[str]:
    given = {
        "--logits": [f"a={folder}/a.npz", f"b={folder}/b.parquet", f"c={folder}/c.npz"],
        "--labels": [f"{folder}/labels.npz"], "--energy-j": ["1", "5", "20"], "-o": [f"{folder}/fitted.json"],
    }  # fmt: skip
    given.update(changes)
    return ["cascade", "fit", *(word for flag, words in given.items() if words for word in (flag, *words))]


def test_fit_and_search_from_files_of_logits(files, capsys, as_json):
    record = as_json(*fit_arguments(files))
    fitted = Fitted.load(files / "fitted.json")
    for i, (row, skill) in enumerate(zip(record["models"], (0.5, 0.8, 1.6))):
        logits = made_logits(skill, i)
        assert row["accuracy"] == (logits.argmax(axis=1) == labels_of()).mean()
        assert fitted.confidence[i] == pytest.approx(confidence(logits[:, None], None, row["temperature"]))
        assert row["ece_after"] <= row["ece_before"]
    base = ["cascade", "search", f"{files}/fitted.json", "-o", f"{files}/cascade.json", "--json"]
    costs = {}
    for name, more in {
        "ap": [], "eo": ["--mode", "eo"], "sampling": ["--method", "sampling"], "paper": ["--drop", "paper"],
        "all": ["--drop", "none", "--skips", "none", "--curve", f"{files}/curve.csv"],
    }.items():  # fmt: skip
        assert cli.main([*base, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        costs[name] = found["cost_per_request"]
        assert name == "eo" or found["accuracy"] >= found["largest_accuracy"] - 1e-12
        cascade = Cascade.load(files / "cascade.json")
        assert np.dot(cascade.expected.visited, cascade.costs) == pytest.approx(costs[name])
        assert cascade.expected.accuracy == pytest.approx(found["accuracy"])
    assert costs["ap"] <= min(costs["sampling"], costs["paper"], costs["all"]) and costs["eo"] <= costs["ap"]
    curve = pd.read_csv(files / "curve.csv")
    assert list(curve.columns) == ["threshold_a", "threshold_b", "accuracy", "cost", "chosen"]
    assert (
        curve["chosen"].sum() == 1
        and curve["accuracy"].is_monotonic_increasing
        and curve["cost"].is_monotonic_increasing
    )


def write(path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


def touched(path, content: bytes = b"") -> str:
    path.write_bytes(content)
    return str(path)


ONE, LOCAL = {"--energy-j": None}, {"--energy-j": None, "--logits": None, "--labels": None}


def labelled(folder) -> list[str]:
    return [write(folder / "d.npz", x=np.zeros((NUM, 2)), labels=labels_of())]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--labels": None}, "labels are missing: give their file with --labels"),
        ({"--labels": lambda f: [write(f / "x.npz", y=labels_of())]}, "has no labels: it needs 'labels'"),
        ({"--labels": lambda f: [write(f / "x.npz", labels=np.full(NUM, 3))]}, "one class only (3)"),
        ({"--labels": lambda f: [write(f / "x.npz", labels=labels_of() + 1)]}, "has 5 classes"),
        ({"--labels": lambda f: [write(f / "x.npz", labels=labels_of()[1:])]}, "labels for 299"),
        ({"--labels": lambda f: [write(f / "x.npz", labels=labels_of() / 2)]}, "must be whole numbers"),
        ({"--labels": ["nowhere.npz"]}, "cannot read nowhere.npz"),
        ({"--labels": lambda f: [touched(f / "x.npz")]}, "x.npz is an empty file"),
        ({"--labels": lambda f: [touched(f / "a.txt", b"0")]}, "ends in .npz or .parquet"),
        ({**ONE, "--logits": lambda f: ["a=" + write(f / "n.npz", logits=np.full((NUM, 5), np.nan))]},
         "logits of a are not numbers at request 0"),
        ({**ONE, "--logits": lambda f: ["a=" + write(f / "n.npz", x=np.zeros(3))]}, "it needs 'logits' and has x"),
        ({"--logits": ["a.npz"]}, "'a.npz' is not NAME=PATH"),
        ({"--logits": None}, "give either --logits"),
        ({"--energy-j": ["1", "2"]}, "energy_j has 2 values for 3 models"),
        ({"--energy-j": ["1", "2", "0"]}, "energy_j of c is 0; it must be above 0"),
        ({"--watts": ["30"]}, "--watts needs the seconds of each model"),
        ({**LOCAL, "--models": ["a=nothing"], "--data": labelled}, "neither a .pt2 file"),
        ({**LOCAL, "--models": ["a=json:loads"], "--data": labelled}, "json:loads failed"),
        ({**LOCAL, "--models": [f"a={__name__}:broken"], "--data": labelled},
         "model a failed at requests 0 to 63: RuntimeError: this device is gone"),
        ({**LOCAL, "--models": ["a=json:loads"], "--data": lambda f: [write(f / "d.npz", x=np.zeros((NUM, 2)))]},
         "labels are missing"),
    ],
)  # fmt: skip
def test_wrong_input_of_fit_is_reported(files, change, words, capsys):
    change = {flag: given(files) if callable(given) else given for flag, given in change.items()}
    assert cli.main(fit_arguments(files, **change)) == 2
    error = capsys.readouterr().err
    assert error.startswith("flexhybrid: ") and words in error and error.count("\n") == 1
    assert not (files / "fitted.json").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--cost", "seconds"], "seconds of a request on a is not known"),
        (["--accuracy", "0.999"], "no thresholds answer 300 of 300 requests right"),
        (["--accuracy", "1.5"], "accuracy is 1.5"),
        (["--caution", "0.5"], "caution is 0.5"),
        (
            ["--drop", "none", "--caution", "30"],
            "J with the largest model alone (79.00% and 79.00% of the answers right): ",
        ),
    ],
)
def test_wrong_input_of_search_is_reported(files, more, words, capsys):
    assert cli.main([*fit_arguments(files), "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["cascade", "search", f"{files}/fitted.json", "-o", f"{files}/cascade.json", *more]) == 2
    assert words in capsys.readouterr().err


def test_search_refuses_a_file_that_fit_did_not_write(files, capsys):
    (files / "x.json").write_text('{"version": 1}')
    assert cli.main(["cascade", "search", f"{files}/x.json", "-o", f"{files}/y.json"]) == 2
    assert "not a file of `flexhybrid cascade fit`" in capsys.readouterr().err


# ---- serving ---------------------------------------------------------------------------------------------------------


class Scripted:
    """A model that answers with its name and the confidence given in the request; a request can make it raise."""

    def __init__(self, name: str):
        self.name, self.batches = name, []

    def predict(self, batch) -> ModelOutputs:
        self.batches.append(len(batch))
        said = [request[self.name] for request in batch]
        if "raise" in said:
            raise RuntimeError("out of memory")
        if "short" in said:
            said = said[1:]
        sure = np.array([np.nan if one == "nan" else one for one in said], dtype=float)
        logits = np.log(np.stack([sure, 1 - sure], axis=-1))[:, None]
        return ModelOutputs([f"{self.name}!" for _ in said], logits, np.ones(logits.shape[:2], dtype=bool))


def of_three(**changes) -> Cascade:
    models = tuple(CascadeModel(name, energy_j=1.0) for name in "abc")
    return Cascade(**{"models": models, "thresholds": (0.9, 0.8), "skips": ((Skip(0.6, 2),), ()), **changes})


def test_each_request_takes_its_own_route():
    requests = [
        {"a": 0.95}, {"a": 0.7, "b": 0.85}, {"a": 0.7, "b": 0.7, "c": 0.5}, {"a": 0.55, "c": 0.6},
        {"a": "nan", "b": 0.9}, {"a": "raise", "b": 0.9}, {"a": 0.7, "b": "raise", "c": 0.9},
        {"a": 0.7, "b": 0.75, "c": "raise"}, {"a": 0.7, "b": 0.65, "c": "nan"}, {"a": 0.55, "c": "raise"},
        {"a": "raise", "b": "nan", "c": "raise"},
    ]  # fmt: skip
    models = [Scripted(name) for name in "abc"]
    answers = serve(of_three(), models, requests, first_index=10)
    assert [answer.index for answer in answers] == list(range(10, 21))
    assert [answer.output for answer in answers] == [
        *("a!", "b!", "c!", "c!", "b!", "b!", "c!", "b!", "a!", "a!", None),
    ]
    assert [answer.is_fallback for answer in answers] == [False] * 7 + [True] * 3 + [False]
    assert ["".join(answer.visited) for answer in answers] == [
        *("a", "ab", "abc", "ac", "ab", "ab", "abc", "abc", "abc", "ac", "abc"),
    ]
    assert ["".join(answer.failed) for answer in answers] == ["", "", "", "", "a", "a", "b", "c", "c", "c", "abc"]
    assert answers[10].failed == {
        "a": "RuntimeError: out of memory", "b": "logits that are no numbers", "c": "RuntimeError: out of memory",
    }  # fmt: skip
    assert answers[1].confidence == pytest.approx(0.85) and answers[10].model is None
    assert [(answer.model, answer.confidence) for answer in answers[7:10]] == [
        ("b", pytest.approx(0.75)), ("a", pytest.approx(0.7)), ("a", pytest.approx(0.55)),
    ]  # fmt: skip
    assert models[0].batches == [11, *[1] * 11]  # a batch that raised is tried one by one


def test_a_model_that_gives_too_few_answers_has_failed():
    answers = serve(of_three(), [Scripted(name) for name in "abc"], [{"a": "short", "b": 0.9}, {"a": 0.95}])
    assert [(answer.model, answer.failed) for answer in answers] == [
        ("b", {"a": "ValueError: 0 outputs for 1 requests"}),
        ("a", {}),
    ]


class Pixels(torch.nn.Module):
    """A model of three numbers; the label is the place of the largest number."""

    def __init__(self, sharpness: float):
        super().__init__()
        self.sharpness = sharpness

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sharpness * x + torch.sin(37 * x.sum(dim=1, keepdim=True) * torch.tensor([1.0, 2.0, 3.0]))


def small() -> Pixels:
    return Pixels(2.0)


def large() -> Pixels:
    return Pixels(8.0)


class Broken(Pixels):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this device is gone")


def broken() -> Broken:
    return Broken(1.0)


@pytest.fixture
def pixels(tmp_path):
    x = np.random.default_rng(3).normal(size=(CHUNK + 200, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=x.argmax(axis=1))
    return tmp_path


def test_torch_modules_from_fit_to_run(pixels, capsys, as_json):
    """Models have any size and the data more than one chunk; the file of answers agrees with the routes."""
    here = __name__
    batch = torch.export.Dim("batch")
    program = torch.export.export(large(), (torch.zeros(2, 3),), dynamic_shapes=({0: batch},))
    torch.export.save(program, pixels / "large.pt2")
    models = [f"small={here}:small", f"large={pixels}/large.pt2"]
    data, fitted, cascade = (f"{pixels}/{name}" for name in ("data.npz", "fitted.json", "cascade.json"))
    assert cli.main(["cascade", "fit", "--models", *models, "--data", data, "--watts", "10", "-o", fitted]) == 0
    assert cli.main(["cascade", "search", fitted, "--cost", "seconds", "--mode", "eo", "-o", cascade]) == 0
    assert "small" in capsys.readouterr().out
    record = Fitted.load(fitted)
    assert all(model.energy_j == pytest.approx(10 * model.seconds) for model in record.models)
    assert Cascade.load(cascade).x_dtype == "float32"  # what HTTP requests are turned into
    Cascade.load(cascade).save(cascade)
    routes = Cascade(record.models, (0.7,), cost="seconds")  # whatever this machine's seconds made of the search
    routes.save(cascade)
    result = as_json("cascade", "run", "--cascade", cascade, "-i", data, "-o", f"{pixels}/out.jsonl")
    answered, visited = routes.walk(record.confidence)
    assert [row["answered"] for row in result["models"]] == np.bincount(answered, minlength=2).tolist()
    assert [row["visited"] for row in result["models"]] == visited.sum(axis=1).tolist()
    right = record.correct[answered, np.arange(len(answered))]
    assert result["accuracy"] == pytest.approx(right.mean())
    lines = [json.loads(line) for line in (pixels / "out.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(CHUNK + 200))
    assert [line["model"] for line in lines] == [routes.names[place] for place in answered]
    # replicas on Ray load either kind of source: what loads it is sent to them
    loads = run_module._loads(routes, run_module.CascadeRunOptions(cascade=Path(cascade), models=tuple(models)))
    for load, module in zip(pickle.loads(pickle.dumps(loads)), (small(), large()), strict=True):
        x = np.load(data)["x"][:5]
        assert load().predict(x).logits[:, 0] == pytest.approx(module(torch.as_tensor(x)).numpy(), rel=1e-5)
    # a model that breaks at run: everything goes on to the next, and is counted
    more = ["-o", f"{pixels}/out2.jsonl", "--models", f"small={here}:broken", "--json"]
    assert cli.main(["cascade", "run", "--cascade", cascade, "-i", data, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["failed"] for row in result["models"]] == [CHUNK + 200, 0] and result["unanswered"] == 0
    # the largest breaks: what went on to it is answered by the small one, unsure, and counted; costs are not needed
    Cascade(tuple(CascadeModel(name, source=f"{here}:small") for name in ("small", "large")), (0.7,)).save(cascade)
    more = ["-o", f"{pixels}/out3.jsonl", "--models", f"large={here}:broken"]
    result = as_json("cascade", "run", "--cascade", cascade, "-i", data, *more)
    lines = [json.loads(line) for line in (pixels / "out3.jsonl").read_text().splitlines()]
    assert len(lines) == CHUNK + 200 and result["cost_per_request"] is None
    failed = [line for line in lines if line["is_fallback"]]
    assert result["unanswered"] == 0 < len(failed) == result["fallbacks"] == result["models"][1]["failed"] < len(lines)
    for line in failed:
        assert line["model"] == "small" and line["output"] is not None and line["confidence"] < 0.7
        assert line["failed"] == {"large": "RuntimeError: this device is gone"}
    kept = (pixels / "out3.jsonl").read_bytes()
    assert cli.main(["cascade", "run", "--cascade", cascade, "-i", data, *more]) == 2
    assert "out3.jsonl exists" in capsys.readouterr().err and (pixels / "out3.jsonl").read_bytes() == kept
    assert cli.main(["cascade", "run", "--cascade", cascade, "-i", data, *more, "--overwrite"]) == 0
    told = capsys.readouterr().out
    assert "first: RuntimeError: this device is gone" in told and "answered by an unsure model" in told


class Spans(torch.nn.Module):
    """A model of numbers [B, positions]: an answer begins at the largest and ends at the smallest."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 3 * x, -x


def test_an_extractive_answer_has_the_confidence_of_its_weaker_end(tmp_path, capsys):
    x = np.random.default_rng(4).normal(size=(80, 6)).astype(np.float32)
    labels = np.stack([x.argmax(axis=1), x.argmin(axis=1)], axis=1)
    labels[::4, 1] = (labels[::4, 1] + 1) % 6  # a quarter ends elsewhere
    np.savez(tmp_path / "data.npz", x=x, labels=labels)
    data, fitted, cascade = (f"{tmp_path}/{name}" for name in ("data.npz", "fitted.json", "cascade.json"))
    models = [f"a={__name__}:Spans", f"b={__name__}:Spans"]
    fit = ["cascade", "fit", "--task", "extraction", "--models", *models, "--data", data, "--money", "1", "2"]
    assert cli.main([*fit, "-o", fitted, "--json"]) == 0
    record = Fitted.load(fitted)
    assert record.correct[0].tolist() == [i % 4 > 0 for i in range(80)]
    heat = record.models[0].temperature
    ends = [np.exp(z / heat) / np.exp(z / heat).sum(axis=1, keepdims=True) for z in (3.0 * x, -1.0 * x)]
    assert record.confidence[0] == pytest.approx(np.minimum(ends[0].max(axis=1), ends[1].max(axis=1)), rel=1e-5)
    assert cli.main(["cascade", "search", fitted, "--cost", "money", "--drop", "none", "-o", cascade, "--json"]) == 0
    assert cli.main(["cascade", "run", "--cascade", cascade, "-i", data, "-o", f"{tmp_path}/out.jsonl"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["output"] for line in lines] == np.stack([x.argmax(axis=1), x.argmin(axis=1)], axis=1).tolist()
    assert cli.main([*fit, "-o", fitted, "--policies", "a=kv_only"]) == 2
    assert "policies are for language models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "the path of model a is unknown: give it with --models a=PATH"),
        (["--models", "z=x.pt2"], "has no model 'z'; it has a, b, c"),
        (["--models", "a=x.pt2", "b=x.pt2", "c=x.pt2"], "cannot read x.pt2 of model a"),
    ],
)
def test_wrong_input_of_run_is_reported_before_it_begins(pixels, more, words, capsys):
    of_three().save(pixels / "cascade.json")
    out = pixels / "out.jsonl"
    given = ["--cascade", f"{pixels}/cascade.json", "-i", f"{pixels}/data.npz", "-o", str(out)]
    assert cli.main(["cascade", "run", *given, *more]) == 2
    assert words in capsys.readouterr().err and not out.exists()


# ---- generation ------------------------------------------------------------------------------------------------------

PROMPTS = ["import os\n\ndef", "class", "for i in range("]


def test_a_generator_gives_transformers_tokens_and_logits():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shipped.CHECKPOINT
    generator = Generator("g", str(folder), max_tokens=3, top_k=4, dtype="float32", policy="hybrid(0.5)")
    found = generator.predict(PROMPTS)
    generator.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        done = model.generate(ids, max_new_tokens=3, do_sample=False)[0]
        with torch.inference_mode():
            logits = model(done[None]).logits[0, ids.shape[1] - 1 : -1]
        values, classes = logits.topk(4)
        count = len(values)
        assert found.counted[i].tolist() == [True] * count + [False] * (3 - count)
        np.testing.assert_allclose(found.logits[i, :count], values.numpy(), rtol=1e-4, atol=1e-4)
        assert found.classes[i, :count].tolist() == classes.tolist()
        assert found.outputs[i] == tokenizer.decode(done[ids.shape[1] :], skip_special_tokens=True)


def test_a_run_has_the_confidences_and_accuracy_of_fit(cpu_dtype, tmp_path, capsys):
    """Answers of one to three tokens are completed to three, since a run has no label that says where to end."""
    from transformers import AutoTokenizer

    folder = shipped.CHECKPOINT
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = shipped.HELD_OUT.read_text(encoding="utf-8")[:20_000]
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    words = [at for at in range(30, 1500, 25) if not text[offsets[at][0]].isalnum()]
    lines = []
    for i, at in enumerate(words):
        prompt, answer = (text[offsets[a][0] : offsets[b][0]] for a, b in ((at - 25, at), (at, at + 1 + i % 3)))
        lines.append({"prompt": prompt, "answer": answer} if answer.strip() else {"prompt": prompt, "answer": "x"})
    data, fitted, cascade, out = (tmp_path / name for name in ("data.jsonl", "fitted.json", "cascade.json", "o.jsonl"))
    data.write_text("\n".join(map(json.dumps, lines)))
    common = ["--max-tokens", "3", "--policies", "a=hybrid(0.5)"]
    fit = ["cascade", "fit", "--task", "generation", "--models", f"a={folder}", "--data", str(data), "-o", str(fitted)]
    assert cli.main([*fit, *common, "--energy-j", "1"]) == 0
    record = Fitted.load(fitted)
    Cascade(record.models, (), task="generation", top_k=10).save(cascade)
    capsys.readouterr()
    run = ["cascade", "run", "--cascade", str(cascade), "-i", str(data), "-o", str(out), "--json"]
    assert cli.main([*run, "--policies", "c=kv_only"]) == 2
    assert "unknown model in --policies 'c'" in capsys.readouterr().err
    assert cli.main([*run, *common]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["confidence"] for line in written] == pytest.approx(record.confidence[0].tolist(), rel=1e-4)
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"] == record.correct[0].mean() > 0
    assert result["tokens"] == sum(line["tokens"] for line in written) > len(written)


class Successor:
    """A user's language model: token t is followed by t + 1, with a confidence that grows with t."""

    def predict(self, batch) -> ModelOutputs:
        last = np.array([prompt[-1] for prompt in batch])
        logits = np.stack([last / 4, np.zeros(len(last))], axis=1)[:, None]
        classes = np.stack([last + 1, last + 2], axis=1)[:, None]
        return ModelOutputs([[token + 1] for token in last.tolist()], logits, np.ones((len(last), 1), bool), classes)

    def close(self) -> None:
        pass


def test_a_users_own_language_model(tmp_path, capsys, as_json):
    data, fitted, cascade, out = (
        str(tmp_path / name) for name in ("data.jsonl", "fit.json", "cascade.json", "o.jsonl")
    )
    rows = [{"prompt": [3, t], "answer": [t + (1 if t > 4 or t % 2 else 2)]} for t in range(1, 12)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = f"{__name__}:Successor"
    fit = ["cascade", "fit", "--task", "generation", "--data", data, "--energy-j", "1", "2", "-o", fitted, "--models"]
    assert cli.main([*fit, f"a={own}", f"b={own}"]) == 0
    record = Fitted.load(fitted)
    assert [model.name for model in record.models] == ["a", "b"]
    assert record.correct[0].tolist() == [t > 4 or t % 2 == 1 for t in range(1, 12)]
    assert cli.main(["cascade", "search", fitted, "--drop", "none", "-o", cascade]) == 0
    capsys.readouterr()
    assert as_json("cascade", "run", "--cascade", cascade, "-i", data, "-o", out)["accuracy"] == pytest.approx(9 / 11)
    for more, words in (
        ([f"a={own}", f"b={__name__}:nothing"], f"model b: {__name__}:nothing failed: AttributeError"),
        ([f"a={own}", "b=json:JSONDecoder"], "returned JSONDecoder, which lacks predict or close"),
        ([f"a={own}", "b=nowhere"], "nowhere is neither a checkpoint folder nor module:function"),
        ([f"a={own}", f"b={own}", "--policies", "a=kv_only"], "policy needs a checkpoint, which"),
    ):
        assert cli.main([*fit, *more]) == 2
        assert words in capsys.readouterr().err


def test_the_largest_model_may_be_offloaded(tmp_path, monkeypatch, capsys):
    """Its weights and caches are on the host, as profile shows; its answers are those of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv(forced_machine.FASTER_DTYPE, "float32")
    folder = shipped.CHECKPOINT
    (tmp_path / "in.txt").write_text("\n".join(["import sys", "class Name:", "for i in range(3):", "def main(argv):"]))
    given = ["--policies", "small=resident", "large=kv_only", "--device", "cpu", "--max-tokens", "4"]
    models = [f"small={folder}", f"large={folder}"]
    profile = [
        "cascade",
        "profile",
        "--task",
        "generation",
        "--data",
        f"{tmp_path}/in.txt",
        "--models",
        *models,
        *given,
    ]
    assert cli.main([*profile, "--batches", "1", "4", "--repeats", "1", "-o", f"{tmp_path}/profiles.json"]) == 0
    profiles = json.loads((tmp_path / "profiles.json").read_text())["models"]
    for (_, resident), (_, offloaded) in zip(*(profiles[name]["memory_bytes"] for name in ("small", "large"))):
        assert offloaded < 0.8 * resident
    cascade = Cascade((CascadeModel("small"), CascadeModel("large")), (1.0,), task="generation", top_k=10)
    cascade.save(tmp_path / "cascade.json")
    run = ["cascade", "run", "--cascade", f"{tmp_path}/cascade.json", "-i", f"{tmp_path}/in.txt", "--models", *models]
    assert cli.main([*run, "-o", f"{tmp_path}/out.jsonl", *given]) == 0
    told = capsys.readouterr().out
    assert " tokens, energy " in told
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for prompt, line in zip((tmp_path / "in.txt").read_text().splitlines(), lines, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        done = model.float().generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        assert (line["model"], line["visited"]) == ("large", ["small", "large"])
        assert line["output"] == tokenizer.decode(done, skip_special_tokens=True) and line["tokens"] == len(done)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}', '"answer" is missing in 1 of 2'),
        ('{"answer": "b"}', 'request 1: it needs a "prompt"'),
        ("{", "request 1: not JSON"),
        ('{"prompt": [3, "a"]}', 'request 1: it needs a "prompt"'),
        ("", "has no requests"),
    ],
)
def test_files_of_prompts_are_read_strictly(tmp_path, text, words):
    from flexhybrid.cascade.data import read_requests

    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_requests(path, "generation")
