"""Pack tiny checkpoints as other tools do, in their names and dtypes, with the values that the codes represent.

Each tool takes a matrix, and returns ({ending of a part's name: tensor}, the values of the codes, float32). Values are
computed from codes and scales as chosen here, before codes are packed to words: nothing is unpacked.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn


def fp8_blocks(matrix, block=(16, 32), scales=torch.float32):
    """DeepSeek's and Qwen3's: a scale a block, in the files' config as weight_block_size."""
    rows, cols = matrix.shape
    grid = -(-rows // block[0]), -(-cols // block[1])
    scale, codes, values = torch.zeros(grid), torch.zeros(rows, cols, dtype=FP8), torch.zeros(rows, cols)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = (matrix[at].abs().max() / 448).to(scales).float()
            codes[at] = (matrix[at] / scale[i, j]).to(FP8)
            values[at] = codes[at].float() * scale[i, j]
    return {".weight": codes, ".weight_scale_inv": scale.to(scales)}, values


def fp8_rows(matrix, kind=FP8, scales=torch.bfloat16):
    """compressed-tensors' float-quantized or int-quantized: a scale a row."""
    scale = (matrix.abs().amax(1, keepdim=True) / (448 if kind == FP8 else 127)).to(scales)
    codes = (matrix / scale.float()).round() if kind == torch.int8 else matrix / scale.float()
    codes = codes.clamp(-127 if kind == torch.int8 else -448, 127 if kind == torch.int8 else 448).to(kind)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def fp8_tensor(matrix):
    """ModelOpt's: a scale a tensor, of no dimension, and a scale for activations."""
    scale = matrix.abs().max() / 448
    codes = (matrix / scale).to(FP8)
    return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}, codes.float() * scale


def _groups(matrix, bits, group, symmetric):
    """Return (codes 0 … 2**bits - 1, zero points by group, scales by group, values)."""
    rows, cols = matrix.shape
    parts, top = matrix.view(rows, cols // group, group), 2**bits - 1
    low, high = parts.amin(-1), parts.amax(-1)
    if symmetric:
        scale = (torch.maximum(low.abs(), high.abs()) / (top // 2)).half()
        zero = torch.full(scale.shape, top // 2 + 1)
    else:
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(1, top).long()
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    values = (codes - zero[..., None]) * scale.float()[..., None]
    return codes.view(rows, cols).long(), zero, scale, values.view(rows, cols)


def words(codes, bits, order=None):
    """Return codes [rows, n] in 32-bit words [rows, n · bits / 32]; a word's codes are in ``order``, low bits first."""
    per = 32 // bits
    pad = -codes.shape[1] % per
    spread = torch.nn.functional.pad(codes, (0, pad)).view(len(codes), -1, per)
    spread = spread if order is None else spread[..., order]
    total = (spread << (torch.arange(per) * bits)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def grouped(matrix, bits=4, group=16, symmetric=True, order=False):
    """compressed-tensors' pack-quantized, with the zero points along the rows, and the groups of columns."""
    index = torch.arange(matrix.shape[1]) // group
    if order:
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(3))]
    sorted_by = index.argsort(stable=True)
    codes, zero, scale, values = _groups(matrix[:, sorted_by], bits, group, symmetric)
    back = sorted_by.argsort()
    parts = {
        ".weight_packed": words(codes[:, back], bits),
        ".weight_scale": scale.bfloat16().half().bfloat16(),
        ".weight_shape": torch.tensor(matrix.shape),
    }
    real = parts[".weight_scale"].float().repeat_interleave(group, 1)
    values = (codes - zero.repeat_interleave(group, 1)) * real
    if not symmetric:
        parts[".weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    if order:
        parts[".weight_g_idx"] = index.int()
    return parts, values[:, back]


def gptq(matrix, bits=4, group=16, symmetric=True, order=True):
    """GPTQ: words along the columns, zero points less 1, and ``g_idx`` in the order of activations."""
    rows, cols = matrix.shape
    index = torch.arange(cols) // group
    if order:
        index = index[torch.randperm(cols, generator=torch.Generator().manual_seed(3))]
    sorted_by = index.argsort(stable=True)
    codes, zero, scale, values = _groups(matrix[:, sorted_by], bits, group, symmetric)
    back = sorted_by.argsort()
    parts = {
        ".qweight": words(codes[:, back], bits).t().contiguous(),
        ".qzeros": words(zero.t() - 1, bits),
        ".scales": scale.t().contiguous(),
        ".g_idx": index.int(),
    }
    return parts, values[:, back]


def awq(matrix, group=16):
    """AWQ's gemm: words along the rows, in its order."""
    codes, zero, scale, values = _groups(matrix, 4, group, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {
        ".qweight": words(codes.t(), 4, order),
        ".qzeros": words(zero.t(), 4, order),
        ".scales": scale.t().contiguous(),
    }
    return parts, values


def mxfp4(stack):
    """gpt-oss' experts [E, columns, rows]: stored row by row, 32 elements a scale, the lower half of a byte first."""
    stack = stack.transpose(1, 2)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(values + [-v for v in values])
    parts = stack.reshape(*stack.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(parts.abs().amax(-1) / 6)) + 1
    codes = ((parts / 2.0 ** exponent[..., None])[..., None] - table).abs().argmin(-1)
    real = (table[codes] * 2.0 ** exponent[..., None]).view(stack.shape)
    pairs = codes.view(*codes.shape[:-1], 16, 2)
    blocks = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    scales = (exponent + 127).to(torch.uint8)
    return {"_blocks": blocks, "_scales": scales}, real.transpose(1, 2).contiguous()


CT = dict(quant_method="compressed-tensors", ignore=["lm_head"])


def ct(form, **weights):
    return CT | dict(format=form, config_groups=dict(group_0=dict(targets=["Linear"], weights=weights)))


#: Format -> (settings in config.json, packing function).
FORMATS = {
    "fp8 blocks": (dict(quant_method="fp8", fmt="e4m3", weight_block_size=[16, 32]), fp8_blocks),
    "fp8 blocks, bf16 scales": (
        dict(quant_method="fp8", weight_block_size=[16, 32]),
        lambda m: fp8_blocks(m, scales=torch.bfloat16),
    ),
    "fp8 rows": (ct("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_rows),
    "int8 rows": (ct("int-quantized", num_bits=8, type="int", strategy="channel"), lambda m: fp8_rows(m, torch.int8)),
    "fp8 tensor": (dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"]), fp8_tensor),
    "int4 groups": (ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16), grouped),
    "int4 zeros": (
        ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False),
        lambda m: grouped(m, symmetric=False),
    ),
    "int8 order": (
        ct("pack-quantized", num_bits=8, type="int", group_size=16, symmetric=False, actorder="group"),
        lambda m: grouped(m, 8, symmetric=False, order=True),
    ),
    "gptq": (dict(quant_method="gptq", bits=4, group_size=16, desc_act=True, sym=True), gptq),
    "gptq 8 bits": (
        dict(quant_method="gptq", bits=8, group_size=16, desc_act=False, sym=False),
        lambda m: gptq(m, 8, symmetric=False, order=False),
    ),
    "awq": (dict(quant_method="awq", bits=4, group_size=16, zero_point=True, version="gemm"), awq),
    "mxfp4": (dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]), mxfp4),
}


def loaded(file: Path) -> dict[str, torch.Tensor]:
    """Return a file's tensors, copied: the file may be written while they are in use."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def repack(folder: Path, how: str, kept=lambda name: False, scales_of=None) -> dict[str, torch.Tensor]:
    """Pack the linear layers of a checkpoint (MXFP4: experts), except those ``kept``. Return the values of all tensors.

    Routers, embedding and head stay plain.
    """
    settings, pack = FORMATS[how]
    file, stored, values = folder / "model.safetensors", {}, {}
    for name, tensor in loaded(file).items():
        experts = how == "mxfp4" and "experts" in name and tensor.dim() == 3
        plain = any(part in name for part in ("embed", "lm_head", "router", "mlp.gate.weight", "norm")) or kept(name)
        if not (experts if how == "mxfp4" else tensor.dim() == 2 and name.endswith(".weight")) or plain:
            stored[name] = values[name] = tensor
            continue
        parts, values[name] = pack(tensor)
        stem = name if experts else name.removesuffix(".weight")
        stored |= {stem + ending: part.contiguous() for ending, part in parts.items()}
    save_file(stored, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return values
