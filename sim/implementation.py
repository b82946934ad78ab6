"""How well a system's own code uses a machine: named parameters, each with its source, apart from every formula.

A policy says what a system does; this says at what part of the machine's rates. ``on`` turns a hardware record
into the machine as that implementation sees it. Nothing here is hidden in a cost formula: the neutral record changes
nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.verbs import VERBS, Verb


@dataclass(frozen=True)
class Implementation:
    """Shares of the machine's rates, 0..1, and seconds added. The source says where each comes from."""

    name: str = "neutral"
    cache_link: float = 1.0  #: of the link's rate, for keys, values and activations (pageable or strided copies)
    weights_link: float = 1.0  #: of the link's rate, for weights
    step_s: float = 0.0  #: the host's time a mini-batch and layer: a device-wide barrier, launches
    conversion: float = 1.0  #: of the memory's rate, for (de)quantising
    gemm: float = 1.0  #: of the machine's rate, for matrix products
    sharers: int = 1  #: GPUs that share the host's cores and memory
    source: str = ""

    def __post_init__(self):
        for name in ("cache_link", "weights_link", "conversion", "gemm"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"implementation {self.name}: {name} is {getattr(self, name)!r}; it must be in (0, 1]")
        if self.step_s < 0 or self.sharers < 1:
            raise InputError(f"implementation {self.name}: step_s must be >= 0 and sharers at least 1")


_T4 = "{} of the published T4 runs (FlexGen's Table 2 and its batch_size_table.md): experiments.reproduce.published"

#: Systems whose code is known to reach less of a machine than ours: taken by name, and no part of their policies.
MEASURED = {
    "deepspeed": Implementation("deepspeed", weights_link=0.612, source=_T4.format("rows pb005 and pb006")),
    "accelerate": Implementation("accelerate", weights_link=0.35, source=_T4.format("row pb009")),
}


def eager_bytes(shape: ModelShape, prompt_tokens: int, max_tokens: int, element_bytes: int = 2) -> int:
    """Bytes a request that ``transformers``' code of 2022 and 2023 holds on the device beside cache, weights and rows.

    In the prefill a layer's attention, written as single operations, keeps the scores of all pairs of tokens in
    float16, their softmax in float32 and that in float16 again, 8 bytes a score, or the head the logits of all tokens
    in float32. In a decode step the new token is concatenated to each layer's keys and values, while the tuple of the
    old ones lives on until the step's end: all of the cache twice. What is most counts. DeepSpeed ZeRO-Inference runs
    that code.
    """
    scores, logits = 8 * shape.num_heads * prompt_tokens**2, 4 * shape.vocab * prompt_tokens
    cached = shape.num_layers * (prompt_tokens + max_tokens - 1) * shape.kv_token_bytes(element_bytes)
    return int(max(scores, logits, cached))


def on(implementation: Implementation, hardware: Hardware) -> Hardware:
    """The machine as this implementation sees it."""
    i, lines = implementation, dict(hardware.lines)

    def change(verbs: Iterable[Verb], make: Callable[[Line], Line]) -> None:
        for verb in verbs:
            try:
                line = hardware.line(verb.name, verb.resource)
            except InputError:  # a machine without this resource
                continue
            lines[verb.name] = make(line)

    def of_group(group: str) -> list[Verb]:
        return [verb for verb in VERBS.values() if verb.group == group]

    def at(share: float):
        return lambda line: replace(line, s_per_byte=line.s_per_byte / share, samples=(), r2=None)

    weights, copies, conversions = [VERBS["load_weights"]], of_group("cache copy"), of_group("conversion")
    for share, verbs in ((i.cache_link, copies), (i.weights_link, weights), (i.conversion, conversions)):
        if share != 1:
            change(verbs, at(share))
    if i.gemm != 1:
        change(of_group("gemm"), lambda line: replace(line, s_per_flop=line.s_per_flop / i.gemm, samples=(), r2=None))
    if i.sharers > 1:
        on_host = [verb for verb in VERBS.values() if verb.resource == "host_compute"]
        change(on_host, lambda line: _slower(line, i.sharers))
        if hardware.host_memory is not None:
            hardware = replace(hardware, host_memory=hardware.host_memory // i.sharers)
    if i.step_s:
        finish = lines.get("finish") or hardware.line("finish", "compute")
        lines["finish"] = replace(finish, overhead_s=finish.overhead_s + i.step_s, samples=(), r2=None)
    return replace(hardware, lines=lines)


def _slower(line: Line, times: float) -> Line:
    return Line(line.overhead_s, line.s_per_flop * times, line.s_per_byte * times)
