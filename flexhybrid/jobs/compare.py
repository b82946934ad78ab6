"""The main job: profile this machine, search a policy, run it beside the others, show predicted against measured."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from flexhybrid.core.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import gib, parse_bytes
from flexhybrid.core.plan import admit, stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.shape import DTYPE_BYTES, ModelShape
from flexhybrid.core.trace import check_trace, save_chrome_trace
from flexhybrid.core.waves import check_least
from flexhybrid.core.workload import Workload
from flexhybrid.jobs import shipped
from flexhybrid.jobs.exactness import Reference, compare_tokens
from flexhybrid.jobs.measure import PROFILE_STEPS, TIMING_SHAPE, device_name, fastest_dtype, measure_hardware
from flexhybrid.jobs.speed import Bench, Contender, Measured, others_cpu_share, window_bytes
from flexhybrid.llm import LLM, SamplingParams
from flexhybrid.machine import pick_device
from flexhybrid.runtime.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.weights import Weights
from policy_search.algorithm1 import BALANCES, host_blocks, layer_times, share_for_batch
from policy_search.fit import fit_report
from policy_search.search import SearchResult, search
from sim import virtual_clock
from sim.closed_form import Candidates, predict
from sim.presets import act_only, hybrid, hybrid_static, kv_only

#: A clock-resolution allowance for traces of a device, whose events resolve half a microsecond.
CUDA_TRACE_TOLERANCE_S = 5e-5


#: Link rates for a CPU, GB/s. At 0.4 a machine of two ordinary cores mixes KV and ACT. One that multiplies faster would
#: recompute everything there, and the comparison would show nothing: it gets the next rate at which it does not.
LINK_LADDER = (0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
INSIDE = (0.05, 0.9)  #: an ACT share between these is a mix


@dataclass(frozen=True)
class CompareOptions:
    """What the command line can change; defaults are the README's run on two cores."""

    model: Path | None = None  #: None: the shipped checkpoint for exactness, a random model for speed
    device: str = "auto"
    link_gb_per_s: float | None = None  #: on a CPU; None: the slowest of LINK_LADDER with the best share inside (0, 1)
    device_memory: str | None = None
    host_memory: str | None = "8GiB"
    policy: Path | None = None
    out: Path = Path("results")
    batch: int = 32
    context: int = 512
    max_tokens: int = 6
    mini_batch: int = 8  #: requests a mini-batch in the speed runs
    rounds: int = 3
    exact_tokens: int = 24
    num_prompts: int | None = None
    shape: ModelShape = field(default=TIMING_SHAPE)

    @property
    def max_mini_batch_tokens(self) -> int:
        """The bound that makes mini-batches of ``mini_batch`` requests at every KV:ACT mix (one block of padding)."""
        blocks = -(-(self.context + self.max_tokens) // BLOCK_TOKENS) + 1
        return self.mini_batch * (blocks * BLOCK_TOKENS + 1)


def compare(options: CompareOptions, quiet: bool = False) -> dict:
    """Run the whole job; returns what is also written to ``out``: tables, predictions, figures' data.

    Raises InputError for anything that cannot work, before the first measurement.
    """
    began = time.perf_counter()
    device = pick_device(options.device, options.link_gb_per_s)
    link = (options.link_gb_per_s or LINK_LADDER[0]) if device.type == "cpu" else None
    budgets = {"device": parse_bytes(options.device_memory), "host": parse_bytes(options.host_memory)}
    extra = [Policy.load(options.policy)] if options.policy else []
    checkpoint = Checkpoint(options.model or shipped("checkpoints/opt-stdlib-4m"))
    shape = checkpoint.shape if options.model else options.shape
    if options.context + options.max_tokens > shape.max_positions:
        options = replace(options, context=shape.max_positions - options.max_tokens)
    dtype = fastest_dtype(shape, device)
    template = kv_only(options.max_mini_batch_tokens)
    for policy in (template, *extra):
        check_least(shape, policy, DTYPE_BYTES[dtype], budgets, device.type, options.context)
    options.out.mkdir(parents=True, exist_ok=True)
    report = _Report(quiet)
    num_policies = 11 + len(extra)
    with tqdm(
        total=PROFILE_STEPS + 7 + num_policies * (1 + options.rounds) + 4 + len(extra),
        disable=quiet or None, file=sys.stderr, desc="profile", unit="step", leave=False,
    ) as bar:  # fmt: skip
        report.bar = bar
        hardware, disagreements = measure_hardware(
            shape, dtype, device, link, options.out / f"hardware-{device.type}.json", lambda: bar.update()
        )
        _keep_for_auto(hardware, device)
        report.profile(hardware, disagreements)

        bar.set_description("search")
        workload = Workload.uniform(options.batch, options.context, options.max_tokens)

        def best(hardware: Hardware) -> SearchResult:
            return search(
                shape, hardware, DTYPE_BYTES[dtype], workload, max_mini_batch_tokens=options.max_mini_batch_tokens,
                weights_device=0.0, device_memory=budgets["device"], host_memory=budgets["host"], batch=options.batch,
                objective="decode_tokens_per_s",
            )  # fmt: skip

        found = best(hardware)
        if link and options.link_gb_per_s is None and not INSIDE[0] < found.act_share < INSIDE[1]:
            link, hardware, found = _faster_link(link, hardware, found, best)
            report.faster_link(link, found)
        searched = replace(found.policy, name="hybrid")
        algorithm1 = _algorithm1_shares(shape, hardware, DTYPE_BYTES[dtype], options)
        report.search(found, algorithm1)

        exact = _exactness(checkpoint, device, searched, extra, options, bar)
        report.exactness(exact)

        bound = options.max_mini_batch_tokens
        named = [kv_only(bound), act_only(bound), hybrid_static(shape, bound), searched, *extra]
        sweep = [hybrid(i / 8, bound) for i in range(1, 8)]
        weights = Weights(
            shape, checkpoint if options.model else RandomWeights(shape, device=device.type), dtype, device, 0.0
        )
        prompts = _random_prompts(shape, options)
        bench = Bench(weights, prompts, options.max_tokens, link, budgets)
        idle_before = others_cpu_share()
        names = {policy.name for policy in named}

        def advance(what: str) -> None:
            bar.set_description(what)
            bar.update()

        if device.type == "cuda":
            bench.shared_engine = bench.make_engine(named + sweep)
        contenders = []
        for policy in named + sweep:
            advance(f"prefill {policy.name}")
            contenders.append(Contender(bench, policy))
        measured = bench.measure(contenders, options.rounds, lambda policy: policy.name in names, advance)
        idle_after = others_cpu_share()
    rate = link * 1e9 if link else 1 / hardware.lines["h2d"].s_per_byte
    rows = [_row(m, shape, hardware, weights.bytes_per_element, workload, rate, measured[0].tokens) for m in measured]
    tolerance = CUDA_TRACE_TOLERANCE_S if device.type == "cuda" else 0.0
    violations = [v for m in measured for trace in (m.prefill_trace, *m.traces) for v in check_trace(trace, tolerance)]
    report.speed(rows, len(named), violations, (idle_before, idle_after))
    result = {
        "machine": device_name(device),
        "dtype": dtype,
        "link_gb_per_s": link,
        "batch": options.batch,
        "context": options.context,
        "max_tokens": options.max_tokens,
        "model": str(options.model.name) if options.model else shape.name,
        "profile": fit_report(hardware),
        "disagreements": disagreements,
        "search": _search_json(found, algorithm1),
        "exactness": exact["rows"],
        "completions": exact["completions"],
        "speed": rows[: len(named)],
        "sweep": _sweep_rows(rows, len(named)),
        "others_cpu_share": [idle_before, idle_after],
        "trace_violations": violations[:10],
        "seconds": time.perf_counter() - began,
    }
    _write(result, measured, named, hardware, weights.bytes_per_element, workload, shape, options)
    report.end(result, options.out)
    return result


# ---- parts ------------------------------------------------------------------------------------------------------------


def _keep_for_auto(hardware: Hardware, device: torch.device) -> None:
    """policy="auto" reads the saved profile; a cache folder that cannot be written is no reason to fail."""
    from flexhybrid.machine import profile_path

    try:
        hardware.save(profile_path(device))
    except OSError as error:
        print(f"note: the profile could not be kept for policy auto: {error}", file=sys.stderr)


def _faster_link(link: float, hardware: Hardware, found: SearchResult, best):
    """The first rate of the ladder at which KV and ACT are mixed; the first rate of all when there is none."""
    for rate in LINK_LADDER[1:]:
        faster = hardware.with_link_rate(rate)
        there = best(faster)
        if INSIDE[0] < there.act_share < INSIDE[1]:
            return rate, faster, there
    return link, hardware, found


def _algorithm1_shares(shape: ModelShape, hardware: Hardware, p: int, options: CompareOptions) -> dict[str, float]:
    """ACT share by tokens under Algorithm 1's two balances, for this batch at the middle of its decode."""
    context = options.context + options.max_tokens // 2
    times = layer_times(shape, hardware, p, options.batch, context, -(-options.batch // options.mini_batch))
    blocks = host_blocks(options.batch, context)
    return {balance: share_for_batch(times, blocks, balance).act_share for balance in BALANCES}


def _read_prompts(options: CompareOptions) -> list[str]:
    lines = shipped("prompts.txt").read_text(encoding="utf-8").splitlines()
    prompts = [line for line in lines if line.strip()]
    return prompts[: options.num_prompts]


def _exactness(checkpoint: Checkpoint, device: torch.device, searched: Policy, extra, options, bar) -> dict:
    """Tokens of every policy on the checkpoint in float32 against transformers'; and the text of a few completions."""
    bar.set_description("exactness: transformers")
    threads = torch.get_num_threads()
    if checkpoint.shape.hidden < 512 and device.type == "cpu":
        torch.set_num_threads(1)  # tiny products: a second thread only spins
    try:
        texts = _read_prompts(options)
        probe = LLM(checkpoint.path, kv_only(512), device=device.type, dtype="float32")
        tokenizer = probe.tokenizer
        if tokenizer is None:
            generator = np.random.default_rng(0)
            prompts = [generator.integers(3, checkpoint.shape.vocab, n).tolist() for n in (1, 5, 17, 40, 100)]
        else:
            prompts = [tokenizer(text)["input_ids"] for text in texts]
        limit = checkpoint.shape.max_positions - options.exact_tokens
        kept = [i for i, prompt in enumerate(prompts) if len(prompt) <= limit]
        prompts = [prompts[i] for i in kept]
        reference = Reference(checkpoint.path)
        expected = reference.generate(prompts, options.exact_tokens)
        bar.update()
        rows, completions = [], []
        shape = checkpoint.shape
        policies = [kv_only(1024), act_only(1024), hybrid_static(shape, 1024)]
        policies += [replace(searched, max_mini_batch_tokens=1024), hybrid(0.25, 1024), hybrid(0.75, 1024), *extra]
        for policy in policies:
            bar.set_description(f"exactness: {policy.name}")
            llm = LLM(checkpoint.path, policy, device=device.type, dtype="float32")
            answers = llm.generate(prompts, SamplingParams(max_tokens=options.exact_tokens, temperature=0.0))
            ours = [answer.outputs[0].token_ids for answer in answers]
            outcome = compare_tokens(reference, prompts, expected, ours)
            rows.append(
                {"policy": policy.name, "tokens": outcome.num_tokens, "equal": outcome.num_equal,
                 "excused": outcome.num_excused, "exact": outcome.exact, "first_wrong": outcome.first_wrong}
            )  # fmt: skip
            if policy is policies[3] and tokenizer is not None:
                completions = [(texts[i], answer.outputs[0].text) for i, answer in zip(kept, answers, strict=True)]
            bar.update()
        return {"rows": rows, "completions": completions[:4], "num_prompts": len(prompts)}
    finally:
        torch.set_num_threads(threads)


def _random_prompts(shape: ModelShape, options: CompareOptions) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, shape.vocab, options.context).tolist() for _ in range(options.batch)]


def _row(m: Measured, shape, hardware, p: int, workload: Workload, rate: float, kv_only_tokens) -> dict:
    """One line of the speed table."""
    closed, virtual = predictions(shape, hardware, p, m.policy, workload)
    median = m.median_tokens_per_s
    summary = m.summaries[m.median_round]
    equal = sum(a == b for mine, theirs in zip(m.tokens, kv_only_tokens, strict=True)
                for a, b in zip(mine, theirs, strict=True))  # fmt: skip
    return {
        "policy": m.policy.name,
        "act_share": m.policy.share("act"),
        "closed_form_tokens_per_s": closed,
        "virtual_clock_tokens_per_s": virtual,
        "measured_tokens_per_s": median,
        "measured_min": min(m.decode_tokens_per_s),
        "measured_max": max(m.decode_tokens_per_s),
        "error_virtual": virtual / median - 1,
        "error_closed": closed / median - 1,
        "h2d_bytes_per_iteration": window_bytes(m.traces[0], "h2d") / (summary.num_iterations - 1),
        "overlap": m.overlap(rate),
        "balance": m.balance(rate),
        "busy_compute": summary.busy.get("compute", 0.0),
        "busy_h2d": summary.busy.get("h2d", 0.0),
        "tokens_equal_to_kv_only": equal,
        "tokens_compared": sum(map(len, m.tokens)),
        "prefill_s": virtual_clock.summarize(m.prefill_trace).prefill_s,
    }


def predictions(shape, hardware, p: int, policy: Policy, workload: Workload) -> tuple[float, float]:
    """(closed form, virtual clock): decode tokens/s over the iterations after the first decode iteration."""
    closed = predict(
        shape, hardware, p,
        Candidates(
            batch=workload.num_requests, prompt_tokens=int(workload.prompt_tokens[0]),
            max_tokens=int(workload.max_tokens[0]), max_mini_batch_tokens=policy.max_mini_batch_tokens,
            act_host=policy.cache.get("act@host", 0.0), act_device=policy.cache.get("act@device", 0.0),
            kv_device=policy.cache.get("kv@device", 0.0), weights_device=policy.weights.device,
        ),
    )  # fmt: skip
    summary = virtual_clock.summarize(virtual_decode(shape, hardware, p, policy, workload))
    return float(np.ravel(closed.decode_tokens_per_s)[0]), summary.decode_tokens_per_s


def virtual_decode(shape, hardware, p: int, policy: Policy, workload: Workload):
    """The virtual clock's trace of the decode iterations: the very tasks that are measured."""
    wave = admit(shape, policy, workload, p)
    return virtual_clock.run(stream(wave, first_iteration=1), hardware)


def _sweep_rows(rows: list[dict], num_named: int) -> list[dict]:
    """The sweep over ACT shares: its ends are kv_only and act_only."""
    ends = [row for row in rows[:num_named] if row["policy"] in ("kv_only", "act_only")]
    return sorted(ends + rows[num_named:], key=lambda row: row["act_share"])


def _search_json(found: SearchResult, algorithm1: dict[str, float]) -> dict:
    return {
        "act_share": found.act_share,
        "kv_act_bytes_ratio": found.kv_act_bytes_ratio,
        "predicted": found.prediction,
        "binding": found.binding,
        "num_candidates": found.num_candidates,
        "search_s": found.search_s,
        "algorithm1_paper": algorithm1["paper"],
        "algorithm1_full": algorithm1["full"],
        "policy": found.policy.to_dict(),
    }


def _write(result, measured: list[Measured], named, hardware, p: int, workload, shape, options) -> None:
    """JSON, CSV, trace and figures."""
    out = options.out
    (out / "compare.json").write_text(json.dumps(result, indent=1, default=float), encoding="utf-8")
    pd.DataFrame(result["exactness"]).to_csv(out / "exactness.csv", index=False)
    pd.DataFrame(result["speed"]).to_csv(out / "speed.csv", index=False)
    pd.DataFrame(result["sweep"]).to_csv(out / "sweep.csv", index=False)
    chosen = next(m for m in measured if m.policy.name == "hybrid")
    virtual = virtual_decode(shape, hardware, p, chosen.policy, workload)
    real = chosen.traces[chosen.median_round]
    save_chrome_trace(out / "trace.json", {"predicted": virtual, "measured": real})
    from figures import compare as draw

    shares = np.linspace(0, 1, 65)
    curve = predict(
        shape, hardware, p,
        Candidates(
            batch=options.batch, prompt_tokens=options.context, max_tokens=options.max_tokens,
            max_mini_batch_tokens=options.max_mini_batch_tokens, act_host=shares,
        ),
    )  # fmt: skip
    draw.throughput(
        out / "throughput.png", result["sweep"], shares.tolist(), curve.decode_tokens_per_s.tolist(),
        result["search"]["act_share"], next(r for r in result["speed"] if r["policy"] == "hybrid"),
    )  # fmt: skip
    draw.timeline(out / "timeline.png", {"predicted": virtual, "measured": real}, iteration=3)


class _Report:
    """Prints the job's findings as they come, above the progress bar."""

    def __init__(self, quiet: bool):
        self.quiet, self.bar = quiet, None

    def say(self, text: str = "") -> None:
        if not self.quiet:
            tqdm.write(text, file=sys.stdout)

    def table(self, rows: list[dict]) -> None:
        self.say(pd.DataFrame(rows).to_string(index=False))

    def profile(self, hardware: Hardware, disagreements: list[str]) -> None:
        self.say(f"1. Profile: {hardware.source}, {hardware.dtype}\n")
        rows = [
            {
                "line": row["key"],
                "GFLOP/s": _number(row["gflop_per_s"]),
                "GB/s": _number(row["gb_per_s"]),
                "intercept µs": f"{row['overhead_us']:.0f}",
                "R²": f"{row['r2']:.4f}" + (" <0.99" if row["worse_than_papers"] else ""),
                "points": row["num_samples"],
            }
            for row in fit_report(hardware)
        ]
        self.table(rows)
        if disagreements:
            self.say(f"\nTwo passes disagreed by more than 15 % on {len(disagreements)} sizes: this machine is not quiet.")

    def faster_link(self, link: float, found: SearchResult) -> None:
        if link != LINK_LADDER[0]:
            self.say(
                f"\nAt {LINK_LADDER[0]} GB/s this machine recomputes faster than the link brings KV, and the best mix is "
                f"all of one kind: the link is set to {link} GB/s. --link-gb-per-s {LINK_LADDER[0]} keeps it."
            )

    def search(self, found: SearchResult, algorithm1: dict[str, float]) -> None:
        p = found.prediction
        self.say(
            f"\n2. Search: {found.num_candidates} candidates in {found.search_s * 1e3:.1f} ms\n\n"
            f"ACT share by tokens: {found.act_share:.3f} (KV:ACT by bytes {_ratio(found.kv_act_bytes_ratio)}); "
            f"Algorithm 1 says {algorithm1['paper']:.3f} by the papers' balance, {algorithm1['full']:.3f} by the full one\n"
            f"predicted {p['decode_tokens_per_s']:.1f} tokens/s; {gib(p['h2d_bytes'])} over the link from the host in all; "
            f"busy: compute {p['busy_compute']:.0%}, link {p['busy_h2d']:.0%}; {found.binding} binds"
        )

    def exactness(self, exact: dict) -> None:
        self.say(f"\n3. Exactness: float32, {exact['num_prompts']} prompts, against transformers\n")
        self.table(
            [
                {"policy": r["policy"], "tokens equal": f"{r['equal']} of {r['tokens']}", "excused": r["excused"],
                 "exact": "yes" if r["exact"] else f"NO: {r['first_wrong']}"}
                for r in exact["rows"]
            ]
        )  # fmt: skip
        for prompt, text in exact["completions"]:
            self.say(f"\n  {prompt!r}\n    → {text!r}")

    def speed(self, rows: list[dict], num_named: int, violations: list[str], idle) -> None:
        self.say("\n4. Speed: decode tokens/s, median of interleaved rounds\n")
        self.table([_speed_line(row) for row in rows[:num_named]])
        self.say("\nSweep over ACT shares\n")
        self.table([_speed_line(row) for row in _sweep_rows(rows, num_named)])
        self.say(
            "\nTraces: every read saw its version." if not violations else f"\nTRACE VIOLATIONS: {violations[:3]}"
        )
        busiest = max((share for share in idle if share is not None), default=None)
        if busiest is not None and busiest > 0.05:
            self.say(f"Other processes used {busiest:.0%} of the cores beside these runs: the figures are not clean.")

    def end(self, result: dict, out: Path) -> None:
        self.say(
            f"\nWritten to {out}: compare.json, exactness.csv, speed.csv, sweep.csv, throughput.png, timeline.png, "
            f"trace.json (open it at ui.perfetto.dev). {result['seconds']:.0f} s."
        )


def _speed_line(row: dict) -> dict:
    def share(value):
        return "" if value is None else f"{value:.2f}"

    return {
        "policy": row["policy"],
        "ACT": f"{row['act_share']:.3f}",
        "closed form": f"{row['closed_form_tokens_per_s']:.1f}",
        "virtual": f"{row['virtual_clock_tokens_per_s']:.1f}",
        "measured": f"{row['measured_tokens_per_s']:.1f}",
        "error": f"{row['error_virtual']:+.1%}",
        "MB/iter": f"{row['h2d_bytes_per_iteration'] / 1e6:.0f}",
        "overlap": share(row["overlap"]),
        "compute": share(row["busy_compute"]),
        "link": share(row["busy_h2d"]),
        "= kv_only": f"{row['tokens_equal_to_kv_only']} of {row['tokens_compared']}",
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "no ACT" if value is None or np.isinf(value) else f"{value:.2f}:1"


def options_from(args) -> CompareOptions:
    """Command-line arguments to options. Raises InputError for values that make no sense."""
    if args.link_gb_per_s is not None and args.device == "cuda":
        raise InputError("--link-gb-per-s paces the copies of a CPU; a CUDA device runs at the rate of its own link")
    return CompareOptions(
        model=args.model, device=args.device, link_gb_per_s=args.link_gb_per_s,
        device_memory=args.device_memory, host_memory=args.host_memory, policy=args.policy, out=args.out,
    )  # fmt: skip
