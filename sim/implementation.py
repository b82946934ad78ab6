"""Implementations: the share of a machine's rates that a system's own code reaches, each with its source.

A policy says what a system does; an implementation says how fast. ``on`` applies an implementation to a hardware
record, so cost formulas need no special cases. The neutral implementation changes nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import CACHED_DISK, PAGE_CACHE, Hardware, Line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.verbs import VERBS, Verb

#: Fields in seconds that are added to the time of a task.
ADDED = ("step_s", "weights_wait_s", "cache_wait_s", "evict_s", "evict_head_s")


@dataclass(frozen=True)
class Implementation:
    """Shares of the machine's rates, 0..1, and seconds that are added to its tasks."""

    name: str = "neutral"
    cache_link: float = 1.0  #: share of the link's rate for keys, values and activations (pageable, strided copies)
    weights_link: float = 1.0  #: share of the link's rate for weights
    step_s: float = 0.0  #: host time for each mini-batch and layer: a device-wide barrier and launches
    #: time for which the host delays each load of weights, or of keys and values: it synchronizes, launches and stores
    #: new keys and values. Unlike ``step_s``, later copies cannot hide it
    weights_wait_s: float = 0.0
    cache_wait_s: float = 0.0
    #: time in a decode step, for each mini-batch and layer, in which new keys and values replace dropped ones. With
    #: attention on the host, ``evict_head_s`` is added for each head of each request
    evict_s: float = 0.0
    evict_head_s: float = 0.0
    conversion: float = 1.0  #: share of the memory's rate for quantizing and dequantizing
    gemm: float = 1.0  #: share of the machine's rate for matrix products
    gemm_of_peak: float = 1.0  #: upper limit of matrix products, as a share of the device's peak
    relay_gb_per_s: float = inf  #: rate at which the host copies keys, values and activations before they cross
    #: share of the memory's peak for in-place attention in decode steps; None: the machine's own rate
    attention: float | None = None
    undoes_bits_again: bool = False  #: dequantizes a layer's weights again for each mini-batch
    assembles: bool = False  #: copies keys and values side by side in each decode step; ours attends in place
    page_cache: bool = False  #: reads the disk through the host's page cache; ours bypasses it
    sharers: int = 1  #: GPUs that share the host's cores and memory
    source: str = ""  #: origin of the numbers

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

#: System -> implementation, for code that is known to reach less of a machine than ours.
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
    """Return the most temporary bytes that a request has on the device in ``transformers``' code of 2022 and 2023.

    DeepSpeed ZeRO-Inference runs this code. The result is the largest of three:

    - attention in the prefill: the scores of all token pairs in float16, float32 and float16 again, 8 bytes each;
    - the logits of all prompt tokens in float32;
    - a decode step: a second copy of the whole cache, because the new token is concatenated to each layer's keys and
      values and the old tensors live until the step ends.
    """
    scores, logits = 8 * shape.num_heads * prompt_tokens**2, 4 * shape.vocab * prompt_tokens
    cached = shape.num_layers * (prompt_tokens + max_tokens - 1) * shape.kv_token_bytes(element_bytes)
    return int(max(scores, logits, cached))


def known_code(name: str, hardware: Hardware) -> Implementation:
    """Return the known implementation of a system, or the neutral one. If the machine's rates were fitted to this
    system's code (its notes name the engine), keep only what depends on the number of mini-batches."""
    code = MEASURED.get(name, Implementation(name))
    if hardware.notes.get("rates", {}).get("engine") != name:
        return code
    return Implementation(name, undoes_bits_again=code.undoes_bits_again)


def on(implementation: Implementation, hardware: Hardware, num_mini_batches=1, host_heads: float = 0.0) -> Hardware:
    """Return the machine with the rates that this implementation reaches. ``host_heads``: number of heads, over all
    requests of a mini-batch, with attention on the host."""
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
