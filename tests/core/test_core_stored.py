"""Test that formats of packed weights are found wherever tools write them, with their bits, and which are read."""

import json
import re

import pytest

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import checkpoint_folder, shape_from_config
from flexhybrid.core.model.stored import PackedWeights, packed_format

SIZES = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8, vocab_size=1000)
LLAMA = {"model_type": "llama", "max_position_embeddings": 128, **SIZES}
LINEAR = 2 * (4 * 1024**2 + 3 * 1024 * 4096)  #: elements of the matrices in its layers
OTHERS = 2 * 1024 * 1000 + 5 * 1024  #: of embedding, head and norms
WEIGHTS = dict(num_bits=4, type="int", strategy="group", group_size=128, symmetric=True)
CT = dict(quant_method="compressed-tensors", ignore=["lm_head"])
HQQ = dict(weight_quant_params=dict(nbits=4, group_size=64), scale_quant_params=None)


def ct(weights, form):
    group = dict(targets=["Linear"], input_activations=dict(num_bits=8, type="float"), weights=weights)
    return CT | dict(config_groups=dict(group_0=group), format=form)


#: Settings as the methods write them, what their name says, and bits of an element with scales and zero points by the
#: methods' documentation (None: the settings do not say).
FORMATS = [
    (
        dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True),
        "gptq, 4 bits in groups of 128",
        4.156,
    ),
    (dict(quant_method="gptq", bits=8, group_size=-1), "gptq, 8 bits", 8),
    (dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm"), "awq, 4 bits", 4.156),
    (dict(zero_point=True, q_group_size=64, w_bit=4, version="GEMM"), "a method without a name, 4 bits in", 4.3125),
    (dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]), "mxfp4", None),  # of experts, of which it has none
    (dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128]), "fp8", 8),
    (dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0), "fbgemm_fp8", 8),
    (ct(WEIGHTS, "pack-quantized"), "compressed-tensors pack-quantized, 4 bits in groups of 128", 4.125),
    (ct(WEIGHTS | {"symmetric": False}, "pack-quantized"), "compressed-tensors pack-quantized, 4 bits", 4.156),
    (ct(dict(num_bits=8, type="float", strategy="channel"), "float-quantized"), "float-quantized, 8 bits", 8),
    (ct(dict(num_bits=8, type="int", strategy="channel"), "int-quantized"), "int-quantized, 8 bits", 8),
    (ct(dict(num_bits=4, type="float", group_size=16), "nvfp4-pack-quantized"), "nvfp4-pack-quantized", 4.5),
    (dict(load_in_8bit=True, load_in_4bit=False), "bitsandbytes, 8 bits", 8),
    (
        dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_use_double_quant=True),
        "bitsandbytes, 4 bits",
        4.125,
    ),
    (dict(load_in_4bit=True, bnb_4bit_use_double_quant=False), "bitsandbytes, 4 bits", 4.5),
    (dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"]), "modelopt fp8", 8),
    (dict(producer={"name": "modelopt"}, quantization=dict(quant_algo="NVFP4", group_size=16)), "modelopt nvfp4", 4.5),
    (dict(quant_method="hqq", quant_config=HQQ), "hqq, 4 bits in groups of 64", 4.3125),
    (dict(quant_method="aqlm", nbits_per_codebook=16, num_codebooks=1), "aqlm", None),
    (dict(quant_method="quanto", weights="int8"), "quanto int8", 8),
    (dict(quant_method="a_new_one"), "a_new_one", None),
]


def write(folder, **fields):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16"} | fields))
    return folder


READ = ("gptq", "awq", "mxfp4", "fp8", "fbgemm_fp8", "compressed-tensors", "pack-", "float-q", "int-q", "modelopt fp8")


@pytest.mark.parametrize("settings, name, bits", FORMATS)
def test_each_format_is_named_with_its_bytes(settings, name, bits, tmp_path):
    """A format that is read counts as stored, with the groups of columns (GPTQ); the others are refused by name."""
    write(tmp_path, quantization_config=settings)
    if name.startswith(READ):
        found = packed_format({"quantization_config": settings}, tmp_path / "config.json")
        size = shape_from_config(tmp_path).weights_bytes(2)
        assert found and name in found.name and found.form
    else:
        with pytest.raises(PackedWeights, match=f"packed as .*{name}.* .quantization_config of config.json") as refused:
            shape_from_config(tmp_path)
        size = refused.value.stored_bytes
    assert bits is None or size == pytest.approx(LINEAR * bits / 8 + OTHERS * 2, rel=0.008 if "gptq" in name else 0.003)


NVFP4 = ct(dict(num_bits=4, type="float", group_size=16), "nvfp4-pack-quantized")


@pytest.mark.parametrize(
    "settings, name",
    [
        (dict(quant_method="gptq", bits=3, group_size=128), "gptq, 3 bits"),
        (dict(quant_method="gptq", bits=2, group_size=128), "gptq, 2 bits"),
        (dict(quant_method="gptq", bits=4, checkpoint_format="marlin"), "gptq, 4 bits marlin"),
        (dict(quant_method="awq", bits=4, group_size=128, version="gemv"), "awq, 4 bits in groups of 128 gemv"),
        (ct(WEIGHTS | {"num_bits": 3}, "pack-quantized"), "pack-quantized, 3 bits"),
        (ct(WEIGHTS, "pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (NVFP4, "nvfp4-pack-quantized"),
        (dict(quant_method="aqlm"), "aqlm"),
        (dict(load_in_4bit=True), "bitsandbytes"),
    ],
)
def test_variants_that_are_not_read_are_refused_with_those_that_are(settings, name, tmp_path):
    write(tmp_path, quantization_config=settings)
    with pytest.raises(PackedWeights, match=f"config.json: .*{name}.*give plain ones.*MXFP4, FP8.*GPTQ, AWQ gemm"):
        shape_from_config(tmp_path)


FP8 = {"quant_method": "fp8"}
ALGORITHM = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    "fields, files, said_by",
    [
        ({"compression_config": FP8}, {}, "compression_config of config.json"),
        ({"llm_config": {"quantization_config": FP8}}, {}, "quantization_config of llm_config of config.json"),
        ({"a": {"b_config": {"quantization_config": FP8}}}, {}, "quantization_config of b_config of a of config.json"),
        ({}, {"quantize_config.json": {"bits": 4, "group_size": 128}}, "gptq, 4 bits.* .quantize_config.json"),
        ({}, {"quant_config.json": {"w_bit": 4, "q_group_size": 128}}, "awq, 4 bits in .* .quant_config.json"),
        ({}, {"hf_quant_config.json": ALGORITHM}, "modelopt fp8.* .hf_quant_config.json"),
        ({"quantization_config": None}, {"hf_quant_config.json": ALGORITHM}, "hf_quant_config.json"),
        ({"quantization_config": "gptq"}, {}, "quantization_config of config.json is 'gptq'; it must be a JSON object"),
        ({}, {"quantize_config.json": [4]}, r"quantize_config.json is \[4\]; it must be a JSON object"),
        ({"quantization_config": FP8 | {"ignore": ["re:("]}}, {}, r"'\('\] are no patterns of modules"),
    ],
)
def test_the_format_is_found_in_every_place(fields, files, said_by, tmp_path):
    for name, settings in files.items():
        (tmp_path / name).write_text(json.dumps(settings))
    file = write(tmp_path, **fields) / "config.json"
    if "must be" in said_by or "patterns" in said_by:
        with pytest.raises(InputError, match=said_by):
            shape_from_config(tmp_path)
        return
    found = packed_format(json.loads(file.read_text()), file)
    assert found and re.search(said_by, f"{found.name} ({found.said_by})")
    assert shape_from_config(tmp_path).packed_elements == LINEAR / 2


@pytest.mark.parametrize("nothing", [None, {}, {"quant_method": "bitsandbytes", "load_in_4bit": False}])
def test_a_configuration_without_a_format_means_plain_weights(nothing, tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert shape_from_config(write(tmp_path, quantization_config=nothing, llm_config={"quantization_config": None}))


def test_unpacked_modules_are_matched_as_each_method_names_them(tmp_path):
    """Names are matched exactly, with * or as regular expressions; routers and biases are never packed."""
    kept = ["model.layers.0.mlp.down_proj", "self_attn", "re:.*shared_experts.*", "model.layers.*.mtp"]
    packed = packed_format({"quantization_config": FP8 | {"modules_to_not_convert": kept}}, tmp_path / "config.json")
    assert packed
    matrix = {"mlp.up_proj.weight": True, "mlp.down_proj.weight": False, "self_attn.q_proj.weight": False}
    matrix |= {"mlp.shared_experts.up_proj.weight": False, "mtp.weight": False, "mlp.gate.weight": False}
    matrix |= {"mlp.gate_proj.weight": True, "mlp.experts.gate_up_proj": True, "mlp.experts.up_proj_bias": False}
    assert {name: packed.packs(f"model.layers.0.{name}", (8, 8)) for name in matrix} == matrix
    assert packed.packs("model.layers.1.mlp.down_proj.weight", (8, 8)) and not packed.packs(
        "model.layers.1.norm.weight", (8,)
    )


def test_gguf_is_named(tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF\3" + bytes(64))
    for ask, model in ((shape_from_config, file), (shape_from_config, tmp_path), (checkpoint_folder, file)):
        with pytest.raises(InputError, match=f"{file.name} is a GGUF file. Such weights are not read"):
            ask(model)
    with pytest.raises(InputError, match="GGUF"):
        shape_from_config(write(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert shape_from_config(tmp_path)


@pytest.mark.parametrize("fields, dtype", [({}, "float32"), ({"quantization_config": FP8}, "bfloat16")])
def test_the_dtype_of_a_configuration_without_one(fields, dtype, tmp_path):
    """It is transformers' default, or with packed weights the dtype that the quantiser uses for the rest."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | fields))
    if not fields:
        assert shape_from_config(tmp_path).dtype == dtype
    else:
        assert shape_from_config(tmp_path).dtype == dtype
