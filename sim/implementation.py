"""How well a system's own code uses a machine: named parameters, each with its source, apart from every formula.

A policy says what a system does; this says at what part of the machine's rates. ``on`` turns a hardware record
into the machine as that implementation sees it. Nothing here is hidden in a cost formula: the neutral record changes
nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import CACHED_DISK, PAGE_CACHE, Hardware, Line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.verbs import VERBS, Verb

#: Fields that are seconds, added to a task's.
ADDED = ("step_s", "weights_wait_s", "cache_wait_s", "evict_s", "evict_head_s")


@dataclass(frozen=True)
class Implementation:
    """Shares of the machine's rates, 0..1, and what is added to its times. The source says where each comes from."""

    name: str = "neutral"
    cache_link: float = 1.0  #: of the link's rate, for keys, values and activations (pageable or strided copies)
    weights_link: float = 1.0  #: of the link's rate, for weights
    step_s: float = 0.0  #: the host's time a mini-batch and layer: a device-wide barrier, launches
    #: for which the host holds up the link before each load of weights, or of keys and values: it synchronises,
    #: launches, writes new keys and values to their place. As ``step_s`` the next copies would hide it
    weights_wait_s: float = 0.0
    cache_wait_s: float = 0.0
    #: in which new keys and values take the places of others, a mini-batch and layer of a decode step; and, where the
    #: host attends, a head of a request besides
    evict_s: float = 0.0
    evict_head_s: float = 0.0
    conversion: float = 1.0  #: of the memory's rate, for (de)quantising
    gemm: float = 1.0  #: of the machine's rate, for matrix products
    gemm_of_peak: float = 1.0  #: of the device's peak, for matrix products, where the machine reaches more
    relay_gb_per_s: float = inf  #: at which the host copies what crosses as ``cache_link``, before the link does
    #: of the memory's peak, for in-place attention in decode steps; None: the machine's own
    attention: float | None = None
    undoes_bits_again: bool = False  #: of a layer's weights, for each mini-batch
    assembles: bool = False  #: it lays keys and values side by side in each decode step, where ours attends in place
    page_cache: bool = False  #: it reads the disk through the host's page cache, which ours passes by
    sharers: int = 1  #: GPUs that share the host's cores and memory
    source: str = ""

    def __post_init__(self):
        for name in ("cache_link", "weights_link", "conversion", "gemm", "gemm_of_peak"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"implementation {self.name}: {name} is {getattr(self, name)!r}; it must be in (0, 1]")
        if min(getattr(self, name) for name in ADDED) < 0 or self.sharers < 1:
            raise InputError(f"implementation {self.name}: {', '.join(ADDED)} must be >= 0 and sharers at least 1")


_T4 = "{} of the published T4 runs (FlexGen's Table 2 and its batch_size_table.md): experiments.reproduce.published"
_FLEXGEN = (
    "pageable keys and values go through page-locked memory (pytorch_backend.py of github.com/FMInference/FlexLLMGen), "
    "as fast as KVPR's Table 5 has it (experiments.reproduce.capture.setup.refit_relay); matrix products and "
    "attention by its authors' fit of a T4, 21.24 of 65 TFLOP/s and 0.079 TFLOP/s at 320 GB/s "
    "(experimental/cost_model.py); 4 bits by " + _T4.format("rows pb002, pb003 and pb004")
)

#: Systems whose code is known to reach less of a machine than ours, by name; apart from their policies.
MEASURED = {
    "flexgen": Implementation(
        "flexgen",
        relay_gb_per_s=33.7,
        gemm_of_peak=0.33,
        attention=0.247,
        conversion=0.112,
        undoes_bits_again=True,
        assembles=True,
        page_cache=True,
        source=_FLEXGEN,
    ),
    "deepspeed": Implementation("deepspeed", weights_link=0.612, assembles=True, source=_T4.format("pb005 and pb006")),
    "accelerate": Implementation(
        "accelerate", weights_link=0.35, assembles=True, page_cache=True, source=_T4.format("row pb009")
    ),
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


def known_code(name: str, hardware: Hardware) -> Implementation:
    """What is known of a system's own code, neutral where nothing is. A machine whose rates were fitted to that very
    code (its notes name the engine) has it, but for what depends on the mini-batches."""
    code = MEASURED.get(name, Implementation(name))
    if hardware.notes.get("rates", {}).get("engine") != name:
        return code
    return Implementation(name, undoes_bits_again=code.undoes_bits_again)


def on(implementation: Implementation, hardware: Hardware, num_mini_batches=1, host_heads: float = 0.0) -> Hardware:
    """Return the machine as this implementation sees it, with a batch of so many mini-batches, for each of which the
    host attends with ``host_heads`` heads of requests."""
    i, lines, notes = implementation, {}, hardware.notes

    def change(verbs: Iterable[Verb], make: Callable[[Line], Line]) -> None:
        for verb in verbs:
            try:
                line = lines.get(verb.name) or hardware.line(verb.name, verb.resource)
            except InputError:  # a machine without this resource
                continue
            lines[verb.name] = replace(make(line), samples=(), r2=None)

    def of_group(group: str) -> list[Verb]:
        return [verb for verb in VERBS.values() if verb.group == group]

    def slow(verbs: Iterable[Verb], share: float = 1.0, byte_s: float = 0.0, wait_s: float = 0.0) -> None:
        if (share, byte_s, wait_s) != (1.0, 0.0, 0.0):
            change(verbs, lambda of: Line(of.overhead_s + wait_s, of.s_per_flop, of.s_per_byte / share + byte_s))

    slow(of_group("cache copy"), i.cache_link, 1e-9 / i.relay_gb_per_s)
    slow([VERBS["load_kv"]], wait_s=i.cache_wait_s)
    slow([VERBS["load_weights"]], i.weights_link, wait_s=i.weights_wait_s)
    slow(of_group("conversion"), i.conversion)
    slow([VERBS["finish"]], wait_s=i.step_s)
    slow([VERBS["attend"]], wait_s=i.evict_s)
    slow([VERBS["attend_host"]], wait_s=i.evict_s + host_heads * i.evict_head_s)
    if i.undoes_bits_again:
        slow([VERBS["dequantize_weights"]], 1 / num_mini_batches)
    least_s = 1 / (i.gemm_of_peak * notes.get("peak_flops", inf)) if i.gemm_of_peak != 1 else 0.0
    if i.gemm != 1 or least_s:
        change(of_group("gemm"), lambda line: replace(line, s_per_flop=max(line.s_per_flop / i.gemm, least_s)))
    if i.attention and "memory_bytes_per_s" in notes:
        read_s = 1 / (i.attention * notes["memory_bytes_per_s"])
        change([VERBS["attend"]], lambda line: Line(line.overhead_s, s_per_byte=read_s))
        lines["assemble"] = Line()
    if i.sharers > 1:
        on_host = [verb for verb in VERBS.values() if verb.resource == "host_compute"]
        change(on_host, lambda line: Line(line.overhead_s, line.s_per_flop * i.sharers, line.s_per_byte * i.sharers))
    memory = None if hardware.host_memory is None else hardware.host_memory // i.sharers
    if i.page_cache and CACHED_DISK in notes:
        notes = {**notes, PAGE_CACHE: notes[CACHED_DISK]}
    in_place, lines = hardware.attends_in_place and not i.assembles, {**hardware.lines, **lines}
    return replace(hardware, lines=lines, host_memory=memory, attends_in_place=in_place, notes=notes)
