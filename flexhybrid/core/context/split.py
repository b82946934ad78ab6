"""How many leading tokens of a both(…) context are recomputed from ACT: KVPR's split point (Sec. 3.2, eq. 10 and 11).

Both copies of a token exist; each iteration decides anew. Costs are linear in the tokens l of each request that are
recomputed, so the best l of either rule is where two lines cross, or an end:

- paper: M_X(l)/v + max(recompute(l), M_KV(s − l)/v). ACT crosses the link first; KV crosses while the GPU recomputes.
  With ACT on the device the first term is gone (the paper's row schedule).
- pipeline: max(weights + M_X(l)/v + M_KV(s − l)/v, forward + recompute(l)). In a stream without an edge between
  mini-batches, the link and the GPU are what binds, and each is as long as all its work.

Where loading ACT costs at least as much as loading KV (grouped queries), both rules give 0.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import stored_copies
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem


@dataclass(frozen=True)
class SplitLines:
    """Seconds of one layer: per token of one request, and what a mini-batch of the layer costs besides."""

    rule: str
    gen_s: float  #: recompute a token
    load_act_s: float  #: 0 where ACT lies on the device
    load_kv_s: float
    weights_s: float  #: the layer's streamed weights
    forward_s: float  #: a mini-batch's projections and feed-forward, whatever its size
    forward_request_s: float  #: more for each request
    attend_s: float  #: more for each token of context of each request


def split_lines(problem: Problem, policy: Policy, entry: str) -> SplitLines:
    """The lines of a both(…) entry on a machine. Verbs cost what ``core.work`` and the machine's lines say.

    Raises InputError where the problem has no hardware record.
    """
    shape, hardware, p = problem.shape, problem.hardware, problem.bytes_per_element
    if hardware is None:
        raise InputError(
            f"policy {policy.name} splits the tokens of {entry} by how fast this machine is, which is not known: run "
            "`flexhybrid profile` once, or name a machine (--hardware)"
        )
    stored = problem.stored(policy.bits)
    tier = {part.representation: part.tier for part in stored_copies(entry)}

    def slope(verb: str, resource: str, make) -> tuple[float, float]:
        line, many = hardware.line(verb, resource), make(1 << 20)
        moved = many.link_bytes or many.memory_bytes
        zero = make(0)
        least = line.seconds(zero.flops, zero.link_bytes or zero.memory_bytes)
        return least, (line.seconds(many.flops, moved) - least) / (1 << 20)

    def load(representation: str, element_bytes: float) -> float:
        if tier[representation] == "device":
            return 0.0
        one = work.load_blocks(shape, element_bytes, representation, 1, 1).link_bytes / BLOCK_TOKENS
        seconds = one * hardware.line(f"load_{representation}", "h2d").s_per_byte
        if tier[representation] == "disk":
            seconds = max(seconds, one * hardware.line(f"read_{representation}", "disk_read").s_per_byte)
        return seconds

    project, finish = (
        slope(verb, "compute", lambda rows, make=make: make(shape, p, rows))
        for verb, make in (("project", work.project), ("finish", work.finish))
    )
    attend = slope("attend", "compute", lambda tokens: work.attend_decode(shape, p, tokens, 1))
    assemble = slope("assemble", "compute", lambda tokens: work.assemble(shape, p, tokens))
    if problem.attends_in_place:
        assemble = 0.0, 0.0
    streamed = shape.layers_bytes(stored.weights, p) / shape.num_layers * (1 - policy.weights.device)
    return SplitLines(
        policy.split,
        gen_s=slope("kv_gen", "compute", lambda rows: work.kv_gen(shape, p, rows))[1],
        load_act_s=load("act", stored.act),
        load_kv_s=load("kv", stored.kv),
        weights_s=streamed * hardware.line("load_weights", "h2d").s_per_byte if streamed else 0.0,
        forward_s=project[0] + finish[0] + attend[0] + assemble[0],
        forward_request_s=project[1] + finish[1],
        attend_s=attend[1] + assemble[1],
    )


def split_point(lines: SplitLines, batch, context, num_mini_batches: Any = 1, whole_blocks: bool = True):
    """Tokens l of each request to recompute, in whole blocks; ``context`` s and ``batch`` may be arrays.

    ``num_mini_batches`` share a layer's weights. Without ``whole_blocks`` it is the mean over like contexts.
    """
    act, kv, gen = lines.load_act_s, lines.load_kv_s, lines.gen_s
    context = np.asarray(context, dtype=np.float64)
    if act >= kv:
        return np.zeros_like(context)
    if lines.rule == "paper":
        best = kv * context / (gen + kv)
    else:
        link = lines.weights_s / num_mini_batches / batch + kv * context
        compute = lines.forward_s / batch + lines.forward_request_s + lines.attend_s * context
        best = (link - compute) / (gen + kv - act)
    if not whole_blocks:
        return np.clip(best, 0, context)
    return np.clip(np.floor(best / BLOCK_TOKENS + 0.5), 0, np.floor(context / BLOCK_TOKENS)) * BLOCK_TOKENS


def split_seconds(lines: SplitLines, batch, context, tokens):
    """What the rule minimises, for ``tokens`` recomputed of each of ``batch`` requests: seconds of one layer."""
    act, kv, gen = (
        batch * x for x in (lines.load_act_s * tokens, lines.load_kv_s * (context - tokens), lines.gen_s * tokens)
    )
    if lines.rule == "paper":
        return act + np.maximum(gen, kv)
    forward = lines.forward_s + batch * (lines.forward_request_s + lines.attend_s * context)
    return np.maximum(lines.weights_s + act + kv, forward + gen)
