"""Closed form against virtual clock on whole runs: random cases and the comparison, for the test and the bench."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.plan import Wave, admit
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.stream import stream
from flexhybrid.core.workload import Workload
from sim.closed_form import Candidates, num_mini_batches, predict
from sim.virtual_clock import run, summarize

MOST_STEPS = 2500  #: layer x mini-batch x iteration of a random case, so that 300 cases take seconds


@dataclass(frozen=True)
class Case:
    """One run: a model, a machine, and one candidate."""

    shape: ModelShape
    hardware: Hardware
    bytes_per_element: int
    candidate: Candidates

    def wave(self) -> Wave:
        """The same run as the plan maker sees it."""
        c = self.candidate
        return admit(self.shape, policy_of(c), Workload.uniform(c.batch, c.prompt_tokens, c.max_tokens),
                     self.bytes_per_element)  # fmt: skip


def policy_of(candidate: Candidates, name: str = "candidate") -> Policy:
    """The policy that a single candidate (plain numbers) stands for."""
    c = candidate
    kv_host = max(0.0, 1.0 - c.act_host - c.act_device - c.kv_device)
    shares = {"act@device": c.act_device, "act@host": c.act_host, "kv@device": c.kv_device, "kv@host": kv_host}
    cache = {kind: float(share) for kind, share in shares.items() if share > 1e-12}
    weights = Placement(device=float(c.weights_device), host=1.0 - float(c.weights_device))
    return Policy(name, weights, cache=cache, max_mini_batch_tokens=int(c.max_mini_batch_tokens))


def random_case(rng: np.random.Generator) -> Case:
    """A random model (2-12 layers, hidden 128-4096), batch, policy and machine.

    The machine's rates are drawn two to three decades wide, so that link-bound and compute-bound runs both occur, and
    for a third of the cases the link is then set to within a quarter of the rate that balances them: there a wrong
    account of waiting shows. Overheads are 0-50 µs.
    """
    while True:
        case = _draw(rng)
        c = case.candidate
        K, _ = num_mini_batches(c.batch, c.prompt_tokens, c.max_tokens, c.max_mini_batch_tokens)
        if K * c.max_tokens * case.shape.num_layers <= MOST_STEPS:
            return _balance(case, rng.uniform(0.8, 1.25)) if rng.random() < 1 / 3 else case


def _balance(case: Case, ratio: float) -> Case:
    """The same case with the link's rate such that link time is about ``ratio`` times compute time in the decode."""
    busy = predict(case.shape, case.hardware, case.bytes_per_element, case.candidate)
    if busy.busy_h2d[0] <= 0:
        return case
    factor = ratio * float(busy.busy_compute[0] / busy.busy_h2d[0])
    lines = dict(case.hardware.lines)
    for key in ("h2d", "d2h"):
        lines[key] = replace(lines[key], s_per_byte=lines[key].s_per_byte * factor)
    return replace(case, hardware=replace(case.hardware, lines=lines))


def _draw(rng: np.random.Generator) -> Case:
    def log_uniform(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))

    heads = int(rng.choice([2, 4, 8, 16, 32]))
    head_dim = int(rng.choice([64, 128]))
    hidden = heads * head_dim
    group = int(rng.choice([1, 1, 1, 2, 4]))
    kv_heads = max(1, heads // group)
    shape = ModelShape(
        "random", "opt", int(rng.integers(2, 13)), hidden, heads, kv_heads, head_dim, 4 * hidden,
        int(rng.choice([512, 2048, 8192, 50272])), 4096,
    )  # fmt: skip
    batch = int(round(log_uniform(1, 64)))
    prompt, generated = int(round(log_uniform(16, 1024))), int(round(log_uniform(2, 64)))
    padded = -(-(prompt + generated - 1) // 16) * 16 + 1
    bound = int(padded * rng.uniform(1, max(1, batch)) * rng.choice([0.5, 1.0, 2.0]))
    shares = rng.dirichlet([0.7] * 4)  # act@host, act@device, kv@device, kv@host
    shares = np.where(rng.random(4) < [0.2, 0.7, 0.7, 0.2], 0.0, shares)
    shares = shares / shares.sum() if shares.sum() else np.array([0.5, 0, 0, 0.5])
    candidate = Candidates(
        batch, prompt, generated, max(1, bound), float(shares[0]), float(shares[1]), float(shares[2]),
        float(rng.choice([0.0, 0.0, 1.0, rng.random()])),
    )  # fmt: skip
    p = int(rng.choice([2, 4]))
    link = log_uniform(1e8, 3e10)
    flops_rate = link * batch * log_uniform(3, 3000)
    memory_rate = link * log_uniform(2, 200)

    def compute_line() -> Line:
        return Line(rng.uniform(0, 50e-6), rng.uniform(0.5, 2) / flops_rate, rng.uniform(0.5, 2) / memory_rate)

    lines = {
        "compute": compute_line(),
        "host_compute": Line(rng.uniform(0, 50e-6), 0.0, 1 / (link * log_uniform(0.5, 100))),
        "h2d": Line(rng.uniform(0, 50e-6), 0.0, 1 / link),
        "d2h": Line(rng.uniform(0, 50e-6), 0.0, 1 / (link * log_uniform(0.1, 2))),
    }
    for verb in ("kv_gen", "project", "assemble", "attend", "attend_prefill", "finish", "head"):
        lines[verb] = compute_line()
    return Case(shape, Hardware("random", "cpu", lines), p, candidate)


def compare(case: Case) -> tuple[float, float]:
    """(closed form, virtual clock): total seconds of the whole run."""
    closed = predict(case.shape, case.hardware, case.bytes_per_element, case.candidate)
    virtual = summarize(run(stream(case.wave()), case.hardware))
    return float(closed.total_s[0]), virtual.total_s


def errors(num_cases: int = 300, seed: int = 0) -> np.ndarray:
    """|closed form / virtual clock − 1| of random cases, [num_cases]."""
    rng = np.random.default_rng(seed)
    pairs = np.array([compare(random_case(rng)) for _ in range(num_cases)])
    return np.abs(pairs[:, 0] / pairs[:, 1] - 1)
