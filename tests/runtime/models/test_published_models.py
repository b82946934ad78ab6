"""Test that run, search, simulate and doctor agree on bytes, and on which models run, for 31 published models.

``published_models.json`` has their configurations with independent figures: published parameters, or for packed models
the published size in GB (DeepSeek-V3: by arithmetic, without its layer for further tokens). Models that run through
transformers' layers are cut to CUT layers; ``layer`` and ``layer_bytes`` are the size of each other layer, by hand.
"""

import json
from pathlib import Path

import pytest
import torch

from flexhybrid import cli
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import DTYPE_BYTES
from flexhybrid.jobs import doctor as doctor_job
from flexhybrid.jobs import search as search_job
from flexhybrid.jobs.simulate import setting_of
from flexhybrid.resolve import pick_dtype
from flexhybrid.runtime.storage import loader

pytest.importorskip("greenlet")

MODELS = json.loads((Path(__file__).parent / "published_models.json").read_text())
CUT = 4
REFUSED = {"tiiuae/falcon-7b": "attends by code of its own"}
POINT = {"hardware": "rtx4090", "prompt_len": 16, "gen_len": 8}
CPU = torch.device("cpu")


class Seen(Exception):
    """Raised with the problem of a search when it begins."""


def written(name, folder) -> float:
    """Write a model's config.json; return how many layers are cut off."""
    model = MODELS[name]
    config = model["config"]
    text = config.get("text_config", config)
    key = "n_layer" if "n_layer" in text else "num_hidden_layers"
    gone = text[key] - CUT if "layer" in model else 0
    cut = {key: text[key] - gone} | ({"layer_types": text["layer_types"][:CUT]} if "layer_types" in text else {})
    config = config | cut if text is config else config | {"text_config": text | cut}
    (folder / "config.json").write_text(json.dumps(config))
    return gone


def simulated(folder):
    problem = setting_of({**POINT, "model": str(folder), "batch": 1}).problem
    return problem.shape.weights_bytes(problem.bytes_per_element)


def searched(folder):
    try:
        search_job.run_search(search_job.PolicySearchOptions({**POINT, "model": str(folder)}))
    except Seen as seen:
        (problem,) = seen.args
        return problem.shape.weights_bytes(problem.bytes_per_element)


def diagnosed(folder):
    (row,) = doctor_job.doctor(CPU, [str(folder)], 16, 8)["models"]
    return row["weights_bytes"]


def run(folder):
    shape = loader.Checkpoint(folder).shape
    return shape.weights_bytes(DTYPE_BYTES[pick_dtype("auto", shape, torch.device("cuda"), None)])


def no_policy(*_, **more):
    raise InputError("searched for elsewhere")


@pytest.fixture
def without_weights(monkeypatch):
    """Read only configurations, and refuse what is refused before weights are read. No policy is searched for."""

    def seen(name, setting):
        raise Seen(setting.problem)

    monkeypatch.setattr(search_job, "system", seen)
    monkeypatch.setattr(doctor_job, "fastest_dtype", lambda *_: "bfloat16")
    monkeypatch.setattr(doctor_job, "best_policy", no_policy)
    monkeypatch.setattr(loader, "_stored_tensors", lambda path: {})
    monkeypatch.setattr(loader, "_with_packed", lambda path, stored: (stored, {}))
    monkeypatch.setattr(loader.ModuleTensors, "_check", lambda self: None)
    monkeypatch.setattr(loader.Checkpoint, "_find_prefix", lambda self: "")
    monkeypatch.setattr(loader.Checkpoint, "_check_shapes", lambda self: None)


@pytest.mark.parametrize("name", MODELS)
def test_four_commands_agree_on_bytes_and_on_which_models_run(name, tmp_path, without_weights):
    model, gone, answers = MODELS[name], written(name, tmp_path), []
    for reader in (run, simulated, searched, diagnosed):
        try:
            answers.append(reader(tmp_path))
        except InputError as error:
            answers.append((str(error), getattr(error, "stored_bytes", None)))
    assert len(set(answers)) == 1, answers
    if name in REFUSED:
        assert REFUSED[name] in answers[0][0]
    elif "stored_gb" in model:
        size = answers[0]
        if isinstance(size, tuple):
            text, size = size
            assert "the weights are packed as" in text and "remove quantization_config of config.json" in text
            assert "bnb" in name
        assert size == pytest.approx(1e9 * model["stored_gb"] - gone * model.get("layer_bytes", 0), rel=0.005)
    else:
        width = 4 if model["config"].get("torch_dtype", "float32") == "float32" else 2
        elements = model["parameters"] - gone * model.get("layer", 0)
        assert answers[0] == pytest.approx(width * elements, rel=0.005)


@pytest.mark.parametrize("name", ["unsloth/Meta-Llama-3.1-8B-bnb-4bit"])
def test_four_commands_refuse_packed_weights_in_the_same_line(name, tmp_path, capsys, cpu_dtype, monkeypatch):
    monkeypatch.setattr(doctor_job, "best_policy", no_policy)
    written(name, tmp_path)
    prompts, where = tmp_path / "prompts.txt", ["--model", str(tmp_path)]
    prompts.write_text("one\n")
    lengths = ["--hardware", "rtx4090", "--input-len", "16", "--output-len", "8"]
    commands = [["run", "-i", str(prompts), "-o", str(tmp_path / "out.jsonl"), *where], ["search", *where, *lengths]]
    commands += [["simulate", *where, *lengths, "--batch", "1"], ["doctor", "--models", str(tmp_path)]]
    told = [(cli.main(command), capsys.readouterr().err) for command in commands]
    assert len(set(told)) == 1 and told[0][0] == 2 and told[0][1].count("\n") == 1, told
    row, plain = doctor_job.doctor(CPU, [str(tmp_path), "qwen2.5-7b"], 16, 8)["models"]
    assert row["weights_bytes"] and row["weights_bytes"] < plain["weights_bytes"] and row["how"].startswith("refused")
