"""KVPR's split point: the number of leading tokens of a both(…) context that are recomputed from ACT (Sec. 3.2).

Both copies of a token are kept, and each iteration chooses the split point l again. s is the context length, v the
link's rate, M_X(l) the bytes of l tokens' ACT, and M_KV of keys and values. Costs are linear in l, apart from fixed
costs. So the best l is where two lines cross, or 0 or s. The rules minimize:

- paper (eq. 10): M_X(l)/v + max(recompute(l), M_KV(s − l)/v). ACT crosses the link first; KV crosses while the GPU
  recomputes. With ACT on the device, the first term is 0 (the paper's row schedule).
- paper_prompt (eq. 11): the same, with l at most the prompt's length.
- pipeline: max(weights + M_X(l)/v + M_KV(s − l)/v, forward + recompute(l)). Mini-batches follow each other without
  gaps, so the busier of link and GPU decides. recompute(l) and M_X(l)/v have fixed costs here, so l is 0 if recomputing
  is not worth its launches.

If loading ACT takes at least as long as loading KV (grouped queries, KV in 4 bits), all rules give 0.
"""

from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import representation_of, stored_copies
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import MEASURE, task_seconds
from flexhybrid.core.model.layout import placed_layers
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.task import Count, Work


@dataclass(frozen=True)
class SplitLines:
    """Seconds of one layer from which a split point follows."""

    rule: str
    gen_s: float  #: recompute a token
    load_act_s: float  #: load a token's ACT; 0 if it is on the device
    load_kv_s: float  #: load a token's keys and values
    weights_s: float  #: load the layer's streamed weights
    forward_s: float  #: fixed time of a mini-batch's projections, attention and feed-forward
    forward_request_s: float  #: additional time for each request
    attend_s: float  #: additional time for each token of each request's context
    gen_fixed_s: float = 0.0  #: fixed time of recomputing for a mini-batch: launches, reading W_K and W_V
    act_fixed_s: float = 0.0  #: fixed time of loading ACT for a mini-batch
    unpack_s: float = 0.0  #: dequantize a loaded token's keys and values


def split_lines(problem: Problem, policy: Policy, entry: str) -> SplitLines:
    """Return the lines of a both(…) entry on the problem's machine. Raise InputError without a hardware record."""
    shape, hardware, p = problem.shape, problem.hardware, problem.bytes_per_element
    if hardware is None:
        raise InputError(
            f"policy {policy.name} splits tokens of {entry}, or packs requests, by how fast this machine is, which is "
            f"not known: {MEASURE}"
        )
    stored = problem.stored(policy.bits)
    tier = {part.representation: part.tier for part in stored_copies(entry)}

    def slope(verb: str, make) -> tuple[float, float]:
        line = hardware.line(verb, "compute")
        least = task_seconds(line, "compute", make(0))
        return least, (task_seconds(line, "compute", make(1 << 20)) - least) / (1 << 20)

    def crossing(verb: str, resource: str, num_bytes: float) -> float:
        line = replace(hardware.line(verb, resource), overhead_s=0.0)
        return task_seconds(line, resource, Work(link_bytes=num_bytes))

    def load(representation: str, element_bytes: float) -> float:
        if tier[representation] == "device":
            return 0.0
        one = work.load_blocks(shape, element_bytes, representation, 1, 1).link_bytes / BLOCK_TOKENS
        seconds = crossing(f"load_{representation}", "h2d", one)
        if tier[representation] == "disk":
            seconds = max(seconds, crossing(f"read_{representation}", "disk_read", one))
        return seconds

    def unpack(representation: str, width: float) -> tuple[float, float]:
        if getattr(policy.bits, representation) == "native":
            return 0.0, 0.0
        element_bytes = getattr(stored, representation)
        return slope(f"dequantize_{representation}", lambda n: work.convert(n * width, p, element_bytes))

    project, finish = (
        slope(verb, lambda rows, make=make: make(shape, p, rows))
        for verb, make in (("project", work.project), ("finish", work.finish))
    )
    attend = slope("attend", lambda tokens: work.attend_decode(shape, p, tokens, 1))
    assemble = slope("assemble", lambda tokens: work.assemble(shape, p, tokens))
    if problem.attends_in_place:
        assemble = 0.0, 0.0
    generate = slope("kv_gen", lambda rows: work.kv_gen(shape, p, rows))
    unpack_act, unpack_kv = unpack("act", shape.act_width), unpack("kv", shape.kv_width)
    placed = zip(shape.weights_counts, placed_layers(shape, policy.weights, stored.weights, p), strict=True)
    streamed = sum(count * kind.streamed_bytes for count, kind in placed) / shape.num_layers
    return SplitLines(
        policy.split,
        gen_s=generate[1] + unpack_act[1],
        load_act_s=load("act", stored.act),
        load_kv_s=load("kv", stored.kv),
        weights_s=crossing("load_weights", "h2d", streamed) if streamed else 0.0,
        forward_s=project[0] + finish[0] + attend[0] + assemble[0],
        forward_request_s=project[1] + finish[1],
        attend_s=attend[1] + assemble[1],
        gen_fixed_s=generate[0] + unpack_act[0],
        act_fixed_s=0.0 if tier["act"] == "device" else hardware.line("load_act", "h2d").overhead_s,
        unpack_s=unpack_kv[1],
    )


def split_point(
    lines: SplitLines, batch, context, num_mini_batches: Count = 1, whole_blocks: bool = True, prompt: Count = np.inf
):
    """Return the split point l in whole blocks; numbers or arrays.

    ``batch``: requests of a mini-batch; ``context``: tokens s of each; ``num_mini_batches``: mini-batches that share a
    layer's weights; ``whole_blocks``: False does not round l to blocks; ``prompt``: tokens of the mini-batch's longest
    prompt, for the rule ``paper_prompt``.
    """
    act, kv, gen = lines.load_act_s, lines.load_kv_s, lines.gen_s
    context = np.asarray(context, dtype=np.float64)
    if act >= kv:
        return np.zeros_like(context)
    most = np.minimum(context, prompt) if lines.rule == "paper_prompt" else context
    if lines.rule != "pipeline":
        best = kv * context / (gen + kv)
    else:
        link = (lines.weights_s / num_mini_batches + lines.act_fixed_s) / batch + kv * context
        compute = (lines.forward_s + lines.gen_fixed_s) / batch + lines.forward_request_s
        compute = compute + (lines.attend_s + lines.unpack_s) * context
        slower = gen - lines.unpack_s  # additional device time for each token that is recomputed instead of loaded
        best = (link - compute) / (slower + kv - act) if slower > 0 else most
    if whole_blocks:
        most = np.floor(most / BLOCK_TOKENS) * BLOCK_TOKENS
        if lines.rule != "pipeline":
            best = np.floor(best / BLOCK_TOKENS + 0.5) * BLOCK_TOKENS
    best = np.clip(best, 0, most)
    if lines.rule == "pipeline":  # take the faster neighbouring block count, or 0 if fixed costs are not worth it
        below = np.floor(best / BLOCK_TOKENS) * BLOCK_TOKENS
        choices = [below, np.minimum(below + BLOCK_TOKENS, most)] if whole_blocks else [best]
        choices = np.stack(np.broadcast_arrays(np.zeros_like(best), *choices))
        seconds = split_seconds(lines, batch, context, choices, num_mini_batches)
        best = np.take_along_axis(choices, seconds.argmin(axis=0)[None], axis=0)[0]
    return best


def recomputed_tokens(problem: Problem, policy: Policy, requests: int, mini_batches: int, prompt: int, last: int):
    """Return both(…) entry -> recomputed tokens of each request at contexts of ``prompt`` and ``last`` tokens, for the
    largest mini-batch of a wave of equal requests."""
    size, tokens = -(-requests // mini_batches), {}
    for entry, share in policy.cache.items():
        if representation_of(entry) == "both" and share > 0:
            contexts, lines = share * np.array([prompt, last]), split_lines(problem, policy, entry)
            tokens[entry] = split_point(lines, size, contexts, mini_batches, prompt=prompt).astype(int).tolist()
    return tokens


def split_seconds(lines: SplitLines, batch, context, tokens, num_mini_batches: Count = 1):
    """Return the seconds of a mini-batch in a layer that the rule minimizes, if ``tokens`` of each request are
    recomputed. The layer's weights count 1 / ``num_mini_batches``."""
    act, gen = batch * (lines.load_act_s * tokens), batch * (lines.gen_s * tokens)
    kv = batch * (lines.load_kv_s * (context - tokens))
    if lines.rule != "pipeline":
        return act + np.maximum(gen, kv)
    some = np.asarray(tokens) > 0
    forward = lines.forward_s + batch * (lines.forward_request_s + lines.attend_s * context)
    compute = forward + batch * lines.unpack_s * (context - tokens) + gen + some * lines.gen_fixed_s
    return np.maximum(lines.weights_s / num_mini_batches + some * lines.act_fixed_s + act + kv, compute)
