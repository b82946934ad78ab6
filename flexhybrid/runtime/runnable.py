"""Check whether the executor can run a policy. (The simulator can run all systems of the papers.)"""

from flexhybrid.core.context.selection import limits_cache
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.attention import PLAIN
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import GROUP_ELEMENTS, Policy
from flexhybrid.core.wave import check_weights_bits
from flexhybrid.runtime.kernels.quantize import row_unit


def check_runnable(shape: ModelShape, policy: Policy) -> None:
    """Raise InputError if the executor cannot run a policy for a model; the error names the feature."""
    check_weights_bits(policy, shape)
    weight_rows = (shape.hidden, shape.query_width, shape.ffn)
    if shape.modules:
        weight_rows = tuple(t.cols for kind in shape.modules.kinds for t in kind if t.cols)
    if not shape.attending and {policy.bits.kv, policy.bits.act} != {"native"}:
        raise InputError(
            f"policy {policy.name}: bits.kv is {policy.bits.kv} and bits.act {policy.bits.act}; model {shape.name} "
            'keeps no keys and values: both must be "native"'
        )
    kv, act = ((shape.kv_width,), shape.kv_group), ((shape.act_width,), shape.act_group)
    for name, (sizes, group) in {"weights": (weight_rows, GROUP_ELEMENTS), "kv": kv, "act": act}.items():
        bits = getattr(policy.bits, name)
        unit = 1 if bits == "native" else row_unit(bits, group)
        if odd := [size for size in sizes if size % unit]:
            raise InputError(
                f"policy {policy.name}: bits.{name} {bits} needs rows of a multiple of {unit} elements; model "
                f"{shape.name} has rows of {odd[0]}"
            )
    speculative = policy.selection.method == "speculative"
    ranked = policy.selection.method == "heavy_hitter"
    peculiar = any(kind != PLAIN for kind in shape.attention_kinds)
    refusals = (
        (shape.modules and (speculative or ranked), f"a selection of tokens in {shape.name}'s own layers"),
        (
            peculiar and policy.selection.method != "none",
            "a selection of tokens for a model whose layers have windows that prompts may outgrow (max_model_len keeps "
            "them within), or scores of another kind,",
        ),
        (policy.embedding.device < 1, "embedding and head off the device"),
        (policy.hidden == "disk", "hidden states on the disk"),
        (speculative and policy.selection.partial_keys == "host", "partial keys on the host"),
        (
            speculative and limits_cache(policy.selection) and policy.bits.kv != "native",
            f"a limited pool of a speculative selection over {policy.bits.kv}-bit KV, whose heads share a row,",
        ),
        (speculative and policy.attention == "host", "a speculative selection with attention on the host"),
        (ranked and policy.attention == "host", "heavy hitters with attention on the host"),
        (ranked and policy.bits.kv != "native", f"heavy hitters of {policy.bits.kv}-bit KV, whose heads share a row,"),
        (ranked and any("disk" in key for key in policy.cache_entries), "heavy hitters on the disk"),
        (
            policy.host_attends and policy.bits.kv != "native",
            f"attention on the host over {policy.bits.kv}-bit KV",
        ),
        (
            policy.attends_from_disk and any(map(shape.borrows, range(shape.num_layers))),
            "attention on the host over the disk, for a model whose layers borrow keys and values,",
        ),
    )
    for refused, feature in refusals:
        if refused:
            raise InputError(
                f"policy {policy.name}: {feature} cannot be run by this version; `flexhybrid simulate` can"
            )
