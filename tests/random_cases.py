"""Random models, policies and machines, and the comparison of the closed form with the virtual clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.attention import PLAIN, AttentionKind
from flexhybrid.core.model.layers import LayerTensor, ModuleLayers
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from sim.array_clock import predict
from sim.candidates import Candidates, num_mini_batches
from sim.virtual_clock import run, summarize

MOST_STEPS = 1500  #: layer x mini-batch x iteration of a random case, so that 600 cases take less than a minute

#: What a random case can be. column and row: every policy of that schedule. serial: chains in which every task waits
#: for another resource, so that nothing hides a wrong account of waiting: attention on the host or both(…) with one
#: mini-batch, and caches or weights that come from the disk by way of the host.
KINDS = ("column", "row", "serial")

_ENTRIES = (
    "kv@host", "act@host", "kv@device", "act@device", "both(kv@host,act@host)", "both(kv@host,act@device)", "kv@disk",
    "act@disk", "both(kv@disk,act@host)", "both(kv@disk,act@disk)", "both(kv@device,act@host)",
)  # fmt: skip
_ENTRY_ODDS = np.array([5, 4, 2, 2, 1.5, 1, 0.7, 0.7, 0.4, 0.3, 0.4])


@dataclass(frozen=True)
class UniformCase:
    """A run: a model, a machine, a policy, and requests of equal lengths."""

    shape: ModelShape
    hardware: Hardware
    bytes_per_element: int
    policy: Policy
    batch: int
    prompt_tokens: int
    max_tokens: int

    @property
    def problem(self) -> Problem:
        return Problem(
            shape=self.shape, dtype={4: "float32", 2: "float16"}[self.bytes_per_element], hardware=self.hardware
        )

    @property
    def candidate(self) -> Candidates:
        """Return the run for the closed form."""
        return Candidates(self.policy, self.batch, self.prompt_tokens, self.max_tokens)

    def wave(self) -> Wave:
        """Return the run for the plan."""
        workload = Workload.uniform(self.batch, self.prompt_tokens, self.max_tokens)
        return admit(self.problem, self.policy, workload)


def random_case(rng: np.random.Generator, kind: str = "column") -> UniformCase:
    """Draw a model (1-24 layers, hidden 128-4096), a batch, a policy of one of KINDS, and a machine. Rates span two to
    three decades, so that each resource limits some cases. In 1/3 of the cases one resource is within 25 % of the
    balance with compute, where errors in waiting show. Overheads are 0-50 µs."""
    shape = _shape(rng)
    policy = _policy(rng, kind, shape.num_layers)
    generated = int(rng.choice(np.array([1, 2, rng.integers(3, 9), rng.integers(9, 65)]), p=[0.08, 0.07, 0.35, 0.5]))
    most = max(1, MOST_STEPS // (shape.num_layers * generated))
    alone = kind == "serial" and not any("disk" in key for key in policy.cache) and not policy.weights.disk
    num_mini_batches = 1 if alone else min(most, round(_log_uniform(rng, 1, 24)))
    size = round(_log_uniform(rng, 1, 24))
    batch = max(1, num_mini_batches * size - int(rng.integers(0, size)))
    prompt = round(_log_uniform(rng, 8, 1024))
    padded = math.ceil((prompt + generated - 1) / 16) * 16 + 1
    policy = replace(policy, max_mini_batch_tokens=int(padded * (size + 0.9 * rng.random())))
    p = int(rng.choice([2, 4]))
    case = UniformCase(shape, _machine(rng, batch / num_mini_batches), p, policy, batch, prompt, generated)
    return _balance(case, rng) if rng.random() < 1 / 3 else case


def num_steps(case: UniformCase) -> int:
    """Return the layer steps of a case: layers x mini-batches x iterations."""
    bound, packing = case.policy.max_mini_batch_tokens, case.policy.packing
    count, _ = num_mini_batches(case.batch, case.prompt_tokens, case.max_tokens, bound, packing)
    return case.shape.num_layers * int(count) * case.max_tokens


def small_cases(count: int, seed: int, most_steps: int) -> list[UniformCase]:
    """Return random cases of all KINDS in turn, each of at most ``most_steps`` layer steps."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        case = random_case(rng, KINDS[len(found) % len(KINDS)])
        if num_steps(case) <= most_steps:
            found.append(case)
    return found


def of_mixed_layers(case: UniformCase, rng: np.random.Generator) -> UniformCase:
    """Return the case with layers of several kinds: windows in some or all layers. Half of the cases also have a few
    large experts in some layers and another feed-forward size in the others."""
    shape = case.shape
    window = AttentionKind(int(rng.choice([16, 64, 200])))
    attention = [(window,), (window, PLAIN), (window,) * 5 + (PLAIN,)][int(rng.integers(3))]
    modules = None
    if rng.random() < 0.5:
        starts = ((0,), (0, 1, 0, 1), (0, 0, 0, 1))[int(rng.integers(3))]
        of_layers = (*starts, *[1] * shape.num_layers)[: shape.num_layers]
        kinds = (_module(shape, (2 * shape.hidden,)), _module(shape, (8, shape.hidden // 4)))
        modules = ModuleLayers("none", kinds, of_layers, shape.vocab * shape.hidden, 0.25)
    return replace(case, shape=replace(shape, attention=attention, modules=modules))


def _module(shape: ModelShape, feed_forward: tuple[int, ...]) -> tuple[LayerTensor, ...]:
    """Return the tensors of a layer; ``feed_forward`` gives the sizes of its feed-forward matrix but the last."""
    return (
        LayerTensor("norm", (shape.hidden,), True),
        LayerTensor("qkv", (shape.query_width + shape.kv_width, shape.hidden), True),
        LayerTensor("o", (shape.hidden, shape.query_width), False),
        LayerTensor("up", (*feed_forward, shape.hidden), False, experts=len(feed_forward) > 1),
    )


def _log_uniform(rng, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _shape(rng) -> ModelShape:
    heads, head_dim = int(rng.choice([2, 4, 8, 16, 32])), int(rng.choice([64, 128]))
    hidden = heads * head_dim
    kv_heads = max(1, heads // int(rng.choice([1, 1, 1, 2, 4])))
    gated = bool(rng.random() < 0.25)
    return ModelShape(
        "random", "llama" if gated else "opt", round(_log_uniform(rng, 1, 24)), hidden, heads, kv_heads, head_dim,
        int(rng.choice([2, 4])) * hidden, int(rng.choice([512, 2048, 8192, 50272])), 4096,
        gated_mlp=gated, rotary=gated, bias=not gated,
    )  # fmt: skip


def _policy(rng, kind: str, num_layers: int) -> Policy:
    """Draw all fields of a policy except the bound of its mini-batches."""

    def bits():
        return [("native", 8, 4)[i] for i in rng.choice(3, 3, p=[0.6, 0.2, 0.2])]

    def weights(disk_odds: float) -> Placement:
        device = float(rng.choice([0.0, 1.0, rng.random()], p=[0.4, 0.15, 0.45]))
        disk = (1.0 - device) * float(rng.choice([1.0, rng.random()])) if rng.random() < disk_odds else 0.0
        return Placement(device=device, host=max(0.0, 1.0 - device - disk), disk=disk)

    policy = Policy(
        "random", weights(0.12), cache={"kv@host": 1.0}, bits=Bits(*bits()),
        schedule="row" if kind == "row" or kind == "serial" and rng.random() < 0.5 else "column",
        hidden="host" if rng.random() < 0.15 else "device",
        weight_order=_drawn(rng, {"natural": 0.2, "kv_act_first": 0.5, "kv_first": 1.0}),
        split=_drawn(rng, {"paper_prompt": 0.15, "paper": 0.5, "pipeline": 1.0}),
        packing="fifo" if rng.random() < 0.2 else "balanced",
        overlap=("full", "none", "step")[int(rng.choice(3, p=[0.75, 0.08, 0.17]))],
    )  # fmt: skip
    form = rng.choice(["mix", "attention", "heavy_hitter", "speculative"], p=[0.7, 0.1, 0.1, 0.1])
    if kind == "serial":
        form = rng.choice(["attention", "both", "disk", "disk weights"])
    if form == "attention":
        own = np.random.default_rng(int(1e6 * policy.weights.host) + num_layers)  # the other cases stay what they are
        cache = ({"kv@host": 1.0}, {"kv@host": 0.7, "kv@disk": 0.3}, {"kv@disk": 1.0})[int(own.integers(3))]
        return replace(policy, cache=cache, attention="host", bits=replace(policy.bits, act="native"))
    if form == "both":
        places = ("kv@host,act@host", "kv@host,act@device", "kv@disk,act@host")
        return replace(policy, cache={f"both({rng.choice(places)})": 1.0}, weights=weights(0.0))
    if form == "disk":
        return replace(policy, cache={str(rng.choice(["kv@disk", "act@disk", "both(kv@disk,act@disk)"])): 1.0})
    if form == "disk weights":
        device = rng.uniform(0, 0.5)
        return replace(policy, weights=Placement(device=device, disk=1.0 - device))
    if form == "speculative":
        selection = Selection(
            "speculative", alpha=4.0, partial_ratio=float(rng.uniform(0.1, 0.5)), pool=float(rng.uniform(0.5, 1)),
            max_fraction=float(rng.uniform(0.05, 0.5)), victim="lru", partial_keys=str(rng.choice(["device", "host"])),
        )  # fmt: skip
        own = np.random.default_rng(int(1e9 * 4.0 * (selection.pool or 0.0)))  # the other cases stay what they are
        kinds = (("kv@host",), ("kv@host",), ("act@host",), ("act@host", "kv@host"))[int(own.integers(4))]
        if "act@host" in kinds:  # its rows serve all heads: nobody's place is taken
            selection = replace(selection, pool=1.0)
        return replace(policy, selection=selection, cache=_shares(own, kinds))
    if form == "heavy_hitter":
        kinds = tuple(rng.choice(["kv@host", "kv@device", "kv@disk"], int(rng.integers(1, 3)), False, [0.6, 0.3, 0.1]))
        budget = float(rng.uniform(0.1, 0.8))
        own = np.random.default_rng(int(1e9 * budget))
        whole = min(num_layers, int(own.choice([0, 1, 2, 3, num_layers], p=[0.25, 0.2, 0.3, 0.15, 0.1])))
        if "kv@disk" in kinds:  # what layers of few tokens do not read, the template run reads one layer ahead
            whole = 0
        selection = Selection("heavy_hitter", budget=budget, whole_layers=whole)
        return replace(policy, selection=selection, cache=_shares(rng, kinds))
    count = int(rng.choice([1, 2, 3, 4], p=[0.3, 0.4, 0.2, 0.1]))
    kinds = tuple(rng.choice(_ENTRIES, count, False, _ENTRY_ODDS / _ENTRY_ODDS.sum()))
    policy = replace(policy, cache=_shares(rng, (*kinds, "tok") if rng.random() < 0.15 else kinds))
    return replace(policy, static_cache=bool(rng.random() < 0.1) and not policy.share("both"))


def _drawn(rng, until: dict[str, float]) -> str:
    """Draw a word; ``until`` maps a word to the odds of it and the words before it."""
    place = rng.random()
    return next(word for word, odds in until.items() if place < odds)


def _shares(rng, kinds) -> dict[str, float]:
    shares = rng.dirichlet([1.0] * len(kinds))
    return {str(kind): float(share) for kind, share in zip(kinds, shares)}


def _machine(rng, batch: float) -> Hardware:
    link = _log_uniform(rng, 1e8, 3e10)
    flops_rate = link * batch * _log_uniform(rng, 3, 3000)
    memory_rate = link * _log_uniform(rng, 2, 200)

    def compute_line() -> Line:
        return Line(rng.uniform(0, 50e-6), rng.uniform(0.5, 2) / flops_rate, rng.uniform(0.5, 2) / memory_rate)

    def link_line(slower: float) -> Line:
        return Line(rng.uniform(0, 50e-6), 0.0, slower / link)

    host = _log_uniform(rng, 2, 100)
    lines = {
        "compute": compute_line(),
        "host_compute": Line(rng.uniform(0, 50e-6), host / flops_rate, 1 / (link * _log_uniform(rng, 0.5, 100))),
        "h2d": link_line(1.0),
        "d2h": link_line(_log_uniform(rng, 0.5, 10)),
        "disk_read": link_line(_log_uniform(rng, 0.5, 20)),
        "disk_write": link_line(_log_uniform(rng, 0.5, 20)),
    }
    for verb in ("kv_gen", "project", "assemble", "attend", "attend_prefill", "finish", "head"):
        lines[verb] = compute_line()
    return Hardware("random", "cpu", lines)


def _balance(case: UniformCase, rng) -> UniformCase:
    """Return the case with one resource scaled to be about as busy as compute."""
    busy = predict(case.problem, case.candidate, walk=False).row()["busy"]
    others = [r for r in ("h2d", "h2d", "disk_read", "disk_write", "d2h", "host_compute") if busy[r] > 0]
    if not others or busy["compute"] <= 0:
        return case
    chosen = str(rng.choice(others))
    factor = rng.uniform(0.8, 1.25) * busy["compute"] / busy[chosen]
    line = case.hardware.lines[chosen]
    scaled = Line(line.overhead_s * factor, line.s_per_flop * factor, line.s_per_byte * factor)
    return replace(case, hardware=replace(case.hardware, lines={**case.hardware.lines, chosen: scaled}))


def compare(case: UniformCase) -> tuple[float, float]:
    """Return the total seconds of the whole run by the closed form and by the virtual clock."""
    closed = predict(case.problem, case.candidate)
    virtual = summarize(run(stream(case.wave()), case.hardware))
    return float(closed.total_s[0]), virtual.total_s
