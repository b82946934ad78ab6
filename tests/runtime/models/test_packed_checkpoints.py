"""Test that packed checkpoints are refused before weights are read. Tiny ones have the names and dtypes of each
tool."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import greedy, save_tiny

from flexhybrid import LLM, SamplingParams
from flexhybrid.core.errors import InputError
from flexhybrid.jobs.paths import shape_to_simulate
from flexhybrid.runtime.storage.loader import Checkpoint

pytest.importorskip("greenlet")

FP8, PROMPT = torch.float8_e4m3fn, [5, 9, 33, 2, 17]


def by_rows(dtype, scale="_scale"):
    """Return a function that packs weights with a scale per row, as compressed-tensors and ModelOpt store FP8 and
    int8."""

    def pack(name, tensor):
        scales = tensor.abs().amax(-1, keepdim=True) / (127 if dtype == torch.int8 else 448)
        return {name: (tensor / scales).to(dtype), name + scale: scales}

    return pack


def gptq(name, tensor):
    rows, cols = tensor.shape
    numbers = {"qweight": (cols // 8, rows), "qzeros": (1, rows // 8), "g_idx": (cols,)}
    parts = {part: torch.zeros(size, dtype=torch.int32) for part, size in numbers.items()}
    return {name.removesuffix("weight") + part: of for part, of in (parts | {"scales": torch.ones(1, rows)}).items()}


#: What is done to a matrix -> what the refusal names.
PACKED = {
    "FP8 alone": (lambda name, tensor: {name: tensor.to(FP8)}, "weight holds .*(F8_E4M3|float8_e4m3fn); weights must"),
    "FP8 of another kind": (lambda name, tensor: {name: tensor.to(torch.float8_e5m2)}, "weight holds .*(E5M2|e5m2);"),
    "FP8 with scales": (by_rows(FP8, "_scale_inv"), "weight (holds|_scale_inv is)"),
    "int8 with scales": (by_rows(torch.int8), "weight holds .*(I8|int8);"),
    "int32": (lambda name, tensor: {name: tensor.to(torch.int32)}, "weight holds .*(I32|int32);"),
    "int64": (lambda name, tensor: {name: tensor.to(torch.int64)}, "weight holds .*(I64|int64);"),
    "bool": (lambda name, tensor: {name: tensor > 0}, "weight holds .*(BOOL|bool);"),
    "GPTQ": (gptq, r"(qweight|qzeros|g_idx|scales) is a part of packed weights \(GPTQ or AWQ\)"),
    "scales beside floats": (
        lambda name, tensor: {name: tensor, name + "_scale": torch.ones(len(tensor), 1)},
        r"weight_scale is a part of packed weights \(FP8, int8",
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    save_tiny(folder := tmp_path_factory.mktemp("plain"), "qwen3")
    assert Checkpoint(folder) and Checkpoint(folder, modules=True)
    (folder / "alone").mkdir()
    shutil.copy(folder / "config.json", folder / "alone")
    assert shape_to_simulate(folder / "alone")  # without weights, what they are like is not asked
    return folder


def repack(folder, pack, suffix):
    """Pack the key projections of a checkpoint, in a file with this suffix."""
    file, stored = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        stored |= pack(name, tensor) if name.endswith("k_proj.weight") else {name: tensor}
    file.unlink()
    if suffix == ".safetensors":
        save_file(stored, file, {"format": "pt"})
    else:
        torch.save(stored, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "how, suffix", [*((how, ".safetensors") for how in PACKED), *((how, ".bin") for how in ("FP8 alone", "GPTQ"))]
)
def test_weights_other_than_plain_floats_are_refused_on_both_paths(plain, tmp_path, how, suffix):
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    pack, reason = PACKED[how]
    repack(tmp_path, pack, suffix)
    for modules in (False, True):
        with pytest.raises(InputError, match=f"{suffix}: tensor .*{reason}"):
            Checkpoint(tmp_path, modules)
    with pytest.raises(InputError, match=f"{suffix}: tensor .*{reason}"):  # doctor, simulate and search
        shape_to_simulate(tmp_path)


@pytest.mark.parametrize("model_type", ["mixtral", "gemma3"])
def test_packed_experts_and_text_parts_are_refused_by_their_tensors(tmp_path, model_type):
    """config.json does not mention them. Experts are stacked on loading, and a text part has other names."""
    save_tiny(tmp_path, model_type)
    file, stored = tmp_path / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        packed = ".experts." in name if model_type == "mixtral" else "language_model" in name and "proj" in name
        stored |= by_rows(FP8)(name, tensor) if packed else {name: tensor}
    save_file(stored, file)
    with pytest.raises(InputError, match="weight (holds F8_E4M3|_scale is a part)"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_a_packed_format_in_the_configuration_is_refused(tmp_path, nested):
    save_tiny(tmp_path, "gemma3" if nested else "gpt_oss")
    config = json.loads((tmp_path / "config.json").read_text())
    empty = config["text_config"] if nested else config
    empty["quantization_config"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Checkpoint(tmp_path)  # it says nothing
    empty["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match="quantization_config of (text_config of )?config.json says mxfp4, but no tensor"
    ):
        Checkpoint(tmp_path)
    del empty["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Checkpoint(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(InputError, match="hf_quant_config.json says modelopt fp8, but no tensor"):
        Checkpoint(tmp_path)


def test_integer_buffers_and_unused_tensors_are_not_taken_for_packed_weights(tmp_path):
    expected = greedy(save_tiny(tmp_path, "gpt2"), [PROMPT], 6)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    layer = next(name for name in tensors if name.endswith("c_attn.weight")).removesuffix("c_attn.weight")
    old = {f"{layer}bias": torch.ones(1, 1, 128, 128, dtype=torch.uint8), f"{layer}masked_bias": torch.tensor(-1e4)}
    save_file(tensors | old | {"position_ids": torch.arange(128), "logit_scale": torch.ones(())}, file)
    with LLM(tmp_path, "kv_only", device="cpu", dtype="float32") as llm:
        answers = llm.generate([PROMPT], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    assert [answer.outputs[0].token_ids for answer in answers] == expected
