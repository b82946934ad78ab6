"""Packed checkpoints: the signs by which one is known, so that its bytes are never taken for plain weights."""

import re

GIVE_PLAIN = (
    "Packed weights are not read: give the plain checkpoint (float32, bfloat16 or float16) from which they were made; "
    "a policy's bits.weights packs it while loading"
)
#: Endings of the names of tensors that lie beside packed weights, or in their place -> the method that has them.
PARTS = {
    r"\.(qweight|qzeros|g_idx)": "GPTQ or AWQ",
    r"_(blocks|scales)": "MXFP4",
    r"\.weight_(packed|shape|zero_point|global_scale|g_idx)": "compressed-tensors",
    r"\.weight_scale_2": "NVFP4",
    r"(weight|proj|input)_scale|_scale_inv": "FP8 or int8",
    r"\.weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+)|\.SCB": "bitsandbytes",
    r"\.weight\._(data|scale|shift)": "quanto",
    r"\.W_q": "HQQ",
    r"\.(codes|codebooks)": "AQLM",
    r"\.(q_weight|q_invperm|q_scale|trellis)": "ExLlama",
    r"\.scales": "an unknown method",
}


def method_of_part(name: str) -> str | None:
    """Return the method whose packed weights have a part of this name; None for other tensors."""
    return next((method for ending, method in PARTS.items() if re.search(f"({ending})$", name)), None)
