"""Test checkpoints in packed formats: tokens of transformers on the unpacked checkpoint, bytes, and refusals."""

import json
import shutil
from functools import cache

import packing_tools
import pytest
import torch
from packing_tools import loaded, repack
from safetensors.torch import save_file
from tiny_models import greedy, save_tiny

from flexhybrid import LLM, SamplingParams
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.jobs.paths import shape_to_simulate
from flexhybrid.jobs.profile.job import model_profile_path
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.profiling.profile import ProfileRun, profile
from flexhybrid.runtime.storage.loader import Checkpoint, _say_once

pytest.importorskip("greenlet")

PROMPTS = [[5, 9, 33, 2, 17], [70, 60, 50]]
POLICIES = {
    "host": Policy("host", weights=Placement(host=1.0), cache={"kv@host": 1.0}),
    "mixed": Policy("mixed", weights=Placement(device=0.5, host=0.5), cache={"kv@device": 0.5, "act@host": 0.5}),
    "disk": Policy("disk", weights=Placement(host=0.3, disk=0.7), cache={"act@host": 1.0}),
    "resident": Policy("resident", weights=Placement(device=1.0), cache={"kv@device": 1.0}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a function that saves a tiny checkpoint once, and returns its folder and transformers' model."""

    @cache
    def save(model_type):
        return (folder := tmp_path_factory.mktemp(model_type)), save_tiny(folder, model_type)

    return save


@pytest.fixture
def packed(tiny, tmp_path):
    """Return a function that makes a packed copy of a tiny checkpoint, and returns transformers' tokens of its
    values."""

    def make(model_type, how, **more):
        folder, model = tiny(model_type)
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        values = repack(tmp_path, how, **more)
        save_file(values, tmp_path / "values.safetensors", {"format": "pt"})
        plain = tmp_path / "plain"
        plain.mkdir()
        (tmp_path / "values.safetensors").rename(plain / "model.safetensors")
        shutil.copy(folder / "config.json", plain)
        of_values = type(model).from_pretrained(plain, attn_implementation="eager", dtype=torch.float32)
        return greedy(of_values.eval(), PROMPTS, 6)

    return make


def tokens(folder, policy):
    with LLM(folder, policy, device="cpu", dtype="float32") as llm:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        return [answer.outputs[0].token_ids for answer in answers], llm.shape


DENSE = [how for how in packing_tools.FORMATS if how != "mxfp4"]


@pytest.mark.parametrize("how", DENSE)
def test_dense_models_give_the_tokens_of_their_values(packed, tmp_path, how):
    """Llama runs by our own layer functions. Formats take turns in the policies."""
    expected = packed("llama", how)
    found, shape = tokens(tmp_path, list(POLICIES.values())[DENSE.index(how) % 4])
    assert found == expected and not shape.modules
    assert shape.packed_elements == shape.layer_matrix_elements
    assert shape.weights_bytes(4) == shape_to_simulate(tmp_path).weights_bytes(4) < shape.unpacked.weights_bytes(4)


@pytest.mark.parametrize("how", [*DENSE, "mxfp4"])
def test_models_with_experts_give_the_tokens_of_their_values(packed, tmp_path, how):
    expected = packed("gpt_oss" if how == "mxfp4" else "qwen3_moe", how)
    found, shape = tokens(tmp_path, list(POLICIES.values())[(DENSE.index(how) + 1) % 4 if how != "mxfp4" else 2])
    assert found == expected and shape.modules
    experts = [t for kind in shape.modules.kinds for t in kind if t.experts]
    assert experts and all(t.stored and sum(run.elements for run in t.stored) == t.elements for t in experts)


@pytest.mark.parametrize(
    "model_type, how, policy",
    [
        ("deepseek_v3", "fp8 blocks", "host"),  # its latent projections end in partial blocks
        ("deepseek_v2", "int8 rows", "mixed"),
        ("mixtral", "fp8 rows", "resident"),  # other names of experts in the files
        ("qwen3", "gptq", "disk"),
        ("phi3", "fp8 tensor", "mixed"),  # joined matrices
        ("opt", "int4 zeros", "host"),
        ("gpt_oss", "mxfp4", "resident"),
    ],
)
def test_other_models_give_the_tokens_of_their_values(packed, tmp_path, model_type, how, policy):
    expected = packed(model_type, how)
    assert tokens(tmp_path, POLICIES[policy])[0] == expected


def test_layers_that_stay_plain_and_layers_of_another_format_are_mixed(packed, tiny, tmp_path):
    """Layer 0 is plain, layer 1 in FP8 and the rest in 4 bits: transformers' layers run them."""
    packed("llama", "int4 groups", kept=lambda name: ".layers.0." in name or ".layers.1." in name)
    file = tmp_path / "model.safetensors"
    stored, values = loaded(file), loaded(tmp_path / "plain" / "model.safetensors")
    for name in [name for name in stored if ".layers.1." in name and name.endswith("proj.weight")]:
        parts, values[name] = packing_tools.fp8_rows(stored.pop(name))
        stored |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
    save_file(stored, file)
    save_file(values, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    kind = type(tiny("llama")[1])
    model = kind.from_pretrained(tmp_path / "plain", attn_implementation="eager", dtype=torch.float32)
    expected = greedy(model.eval(), PROMPTS, 6)
    found, shape = tokens(tmp_path, POLICIES["mixed"])
    assert found == expected and shape.modules
    formats = [{run.packing.format for t in kind for run in t.stored} for kind in shape.modules.kinds]
    assert sorted(map(sorted, formats)) == [[], ["grouped"], ["scaled"]]


def spoil(folder, ending, change):
    """Change the first stored tensor whose name has this ending; None removes it."""
    file = folder / "model.safetensors"
    stored = loaded(file)
    name = next(name for name in sorted(stored) if name.endswith(ending))
    changed = change(stored.pop(name))
    save_file(stored | ({} if changed is None else {name: changed.contiguous()}), file)
    return name


def first_set(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    "model_type, how, ending, change, reason",
    [
        ("llama", "fp8 blocks", "_scale_inv", lambda t: None, "_scale_inv is missing; a matrix .* in FP8 in blocks"),
        ("llama", "fp8 blocks", "_scale_inv", lambda t: t[:, :1], "_scale_inv has shape .*16 x 32 elements needs"),
        ("llama", "fp8 rows", "_scale", lambda t: t.double(), "_scale holds F64; a matrix .* needs F32 or BF16 or F16"),
        ("llama", "gptq", ".qzeros", lambda t: None, "qzeros is missing"),
        ("llama", "gptq", ".qzeros", lambda t: t.float(), "qzeros holds F32; .* needs I32"),
        ("llama", "gptq", ".scales", lambda t: t[:3], r"weight has \d+ columns; they are not 3 groups of 16"),
        ("llama", "int4 groups", "weight_shape", lambda t: None, "weight_shape is missing"),
        ("llama", "int4 groups", "weight_shape", lambda t: t * 2, "weight_(packed|scale) has shape|columns; they are"),
        ("llama", "awq", ".scales", lambda t: t[:, :8], "scales has shape"),
        ("qwen3_moe", "fp8 blocks", "_scale_inv", lambda t: None, "_scale_inv is missing"),
        ("gpt_oss", "mxfp4", "_scales", lambda t: t[:, :, :1], "_scales has shape"),
    ],
)
def test_wrong_parts_are_refused_before_weights_are_read(packed, tmp_path, model_type, how, ending, change, reason):
    packed(model_type, how)
    name = spoil(tmp_path, ending, change)
    for read in (Checkpoint, shape_to_simulate):
        with pytest.raises(InputError, match=f"model.safetensors: tensor .*{reason}") as refused:
            read(tmp_path)
        assert name.rpartition(".")[0].rpartition("_")[0] in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "model_type, how, ending, value, reason",
    [
        ("llama", "fp8 blocks", "_scale_inv", torch.nan, "q_proj.weight|k_proj.weight|_proj.weight.*_scale_inv nan"),
        ("qwen3_moe", "fp8 rows", "_scale", torch.inf, "weight_scale inf"),
        ("gpt_oss", "mxfp4", "_scales", 255, "_scales 255, which is not a number"),
        ("llama", "gptq", "g_idx", 9, r"g_idx 9, but there are \d groups"),
        ("llama", "int8 order", "g_idx", -1, "g_idx -1, but there are"),
    ],
)
def test_wrong_scales_and_groups_are_refused_before_weights_are_read(
    packed, tmp_path, model_type, how, ending, value, reason
):
    packed(model_type, how)
    spoil(tmp_path, ending, first_set(value))
    with pytest.raises(InputError, match=f"model.safetensors: tensor .*({reason})"):
        next(Checkpoint(tmp_path).outer_tensors())


def test_four_bits_over_packed_tensors_are_refused(packed, tmp_path):
    packed("llama", "awq")
    policy = Policy("four", weights=Placement(host=1.0), cache={"kv@host": 1.0}, bits=Bits(weights=4))
    with pytest.raises(InputError, match='bits.weights 4.*packed.*"native"'):
        tokens(tmp_path, policy)


def test_activations_and_the_caches_format_are_said_once_to_be_ignored(packed, tmp_path):
    packed("llama", "fp8 rows")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _say_once.cache_clear()
    with pytest.warns(UserWarning) as said:
        Checkpoint(tmp_path)
        Checkpoint(tmp_path)
    texts = [str(warning.message) for warning in said if "tmp" in str(warning.message)]
    assert len(texts) == 2
    assert "activations stay in the compute dtype" in texts[0] and "kv_cache_scheme is ignored" in texts[1]


def test_a_profile_of_a_packed_model_leaves_out_runs_that_pack_weights(packed, tmp_path, cpu_dtype):
    """Its own weights are unpacked in the other runs, so that the verb has a line, and a record of its own."""
    packed("llama", "fp8 blocks")
    shape, run = shape_to_simulate(tmp_path), ProfileRun(2, 16, 1, {"kv@host": 1.0})
    result = profile(shape, "float32", torch.device("cpu"), runs=[run, run._replace(other={"bits": Bits(weights=4)})])
    assert result.samples["dequantize_weights"] and "dequantize_kv" not in result.samples
    here = PacedDevice(torch.device("cpu"))
    assert model_profile_path(shape, "auto", here) != model_profile_path(shape.unpacked, "auto", here)
