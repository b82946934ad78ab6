"""The main job: profile this machine, search a policy, run it beside the others, show predicted against measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from flexhybrid.core.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, write_by_rename
from flexhybrid.core.memory import check_budget, parse_bytes, total_bytes
from flexhybrid.core.plan import admit
from flexhybrid.core.policy import Policy
from flexhybrid.core.shape import DTYPE_BYTES, ModelShape
from flexhybrid.core.stream import stream
from flexhybrid.core.trace import TraceEvent, check_trace, save_chrome_trace
from flexhybrid.core.waves import wave_plan
from flexhybrid.core.workload import Workload
from flexhybrid.jobs import shipped, shipped_prompts
from flexhybrid.jobs.exactness import Reference, compare_tokens
from flexhybrid.jobs.measure import PROFILE_STEPS, TIMING_SHAPE, device_name, fastest_dtype, measure_hardware
from flexhybrid.jobs.measure_disk import with_earlier_disk
from flexhybrid.jobs.report import Report, is_disturbed
from flexhybrid.jobs.speed import Bench, Contender, Measured
from flexhybrid.llm import LLM, SamplingParams, load_tokenizer
from flexhybrid.machine import pick_device, profile_path
from flexhybrid.runtime.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.weights import Weights
from policy_search.algorithm1 import BALANCES, host_blocks, layer_times, share_for_batch
from policy_search.fit import fit_report
from policy_search.search import PLAIN, SearchResult, search
from sim import virtual_clock
from sim.closed_form import Candidates, candidates_of, predict
from sim.presets import act_only, hybrid, hybrid_static, kv_only

#: A clock-resolution allowance for traces of a device: an event is placed on the host's clock to about this much.
CUDA_TRACE_TOLERANCE_S = 5e-5

#: Link rates for a CPU, GB/s. At 0.4 a machine of two ordinary cores mixes KV and ACT. One that multiplies faster would
#: recompute everything there, and the comparison would show nothing: it gets the next rate at which it does not.
LINK_LADDER = (0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
INSIDE = (0.05, 0.9)  #: an ACT share between these is a mix

RESULT_FILES = (
    *("compare.json", "exactness.csv", "speed.csv", "sweep.csv", "throughput.png", "timeline.png", "trace.json"),
    *("hardware-cpu.json", "hardware-cuda.json"),
)

#: What the comparison is about: KV and ACT on the host, weights streamed.
MIXES = replace(PLAIN, entries=("act@host", "kv@host"))

SWEEP = tuple(i / 8 for i in range(1, 8))  #: its ends are kv_only and act_only
SMALLEST_KEPT_HIDDEN = 512  #: lines fitted on a tiny model say nothing about this machine at real sizes
EXACT_MINI_BATCH_TOKENS = 1024
EXACT_POLICIES = 6


@dataclass(frozen=True)
class CompareOptions:
    """What the command line can change; the other defaults are the README's run on two cores."""

    model: Path | None = None  #: None: the shipped checkpoint for exactness, a random model for speed
    device: str = "auto"
    link_gb_per_s: float | None = None  #: on a CPU; None: the slowest of LINK_LADDER with the best share INSIDE
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
    shape: ModelShape = TIMING_SHAPE


class _Setting:
    """Everything that is known before the first measurement. Raises InputError for whatever cannot work."""

    def __init__(self, options: CompareOptions):
        self.options = options
        self.device = pick_device(options.device, options.link_gb_per_s)
        self.budgets = {"device": parse_bytes(options.device_memory), "host": parse_bytes(options.host_memory)}
        self.extra = [Policy.load(options.policy)] if options.policy else []
        self.checkpoint = Checkpoint(options.model or shipped("checkpoints/opt-stdlib-4m"))
        self.shape = self.checkpoint.shape if options.model else options.shape
        for policy in self.extra:
            check_runnable(self.shape, policy)
            if policy.name in ("kv_only", "act_only", "hybrid_static", "hybrid"):
                raise InputError(
                    f"{options.policy}: the name {policy.name!r} is one of the comparison's own; rename it"
                )
            if policy.max_batch is not None and policy.max_batch < options.batch:
                raise InputError(
                    f"{options.policy}: max_batch {policy.max_batch} is below the comparison's batch of {options.batch}"
                )
        context = min(options.context, self.shape.max_context - options.max_tokens)
        self.workload = Workload.uniform(options.batch, context, options.max_tokens)
        self.dtype = fastest_dtype(self.shape, self.device)
        self.bytes_per_element = DTYPE_BYTES[self.dtype]
        # The bound that makes mini-batches of ``mini_batch`` requests at every mix (one block of padding).
        blocks = -(-(context + options.max_tokens) // BLOCK_TOKENS) + 1
        self.bound = options.mini_batch * (blocks * BLOCK_TOKENS + 1)
        for policy in sum(self.policies(kv_only(self.bound)), start=[]):
            check_budget(self.memory_plan(policy), self.budgets, f"policy {policy.name} with {options.batch} requests")

    def memory_plan(self, policy: Policy) -> dict[str, dict[str, int]]:
        return wave_plan(self.shape, policy, self.workload, self.bytes_per_element, self.device.type)

    def policies(self, searched: Policy) -> tuple[list[Policy], list[Policy]]:
        """(those of the table, those of the sweep)."""
        bound = self.bound
        named = [kv_only(bound), act_only(bound), hybrid_static(self.shape, bound), searched, *self.extra]
        return named, [hybrid(share, bound) for share in SWEEP]

    def search(self, hardware: Hardware) -> SearchResult:
        return search(
            self.shape, hardware, self.bytes_per_element, self.workload, max_mini_batch_tokens=self.bound,
            weights_device=0.0, budgets=self.budgets, batch=self.workload.num_requests,
            objective="decode_throughput", space=MIXES,
        )  # fmt: skip

    def num_steps(self) -> int:
        """Of the progress bar, for one profile."""
        contenders = 4 + len(self.extra) + len(SWEEP)
        exact = 1 + EXACT_POLICIES + len(self.extra)
        return PROFILE_STEPS + exact + contenders * (1 + self.options.rounds) + 4 + len(self.extra)


def compare(options: CompareOptions, quiet: bool = False) -> dict:
    """Run the whole job; returns what is also written to ``options.out``: tables, predictions, the figures' data.

    Raises InputError for anything that cannot work, before the first measurement and before anything is written.
    """
    began = time.perf_counter()
    setting, report = _Setting(options), Report(quiet)
    check_writable(options.out)
    with tqdm(total=setting.num_steps(), disable=quiet or None, file=sys.stderr, unit="step", leave=False) as bar:

        def advance(what: str) -> None:
            bar.set_description(what)
            bar.update()

        link, hardware, disagreements, found = _profile_and_search(setting, report, bar)
        searched = replace(found.policy, name="hybrid")
        algorithm1 = _algorithm1_shares(setting, hardware)
        report.search(replace(found, prediction=_flat(found.prediction)), algorithm1)
        exact = _exactness(setting, searched, advance)
        report.exactness(exact)
        named, sweep = setting.policies(searched)
        measured = _measure(setting, named, sweep, link, advance)
    rate = link * 1e9 if link else 1 / hardware.lines["h2d"].s_per_byte
    rows = [_row(m, setting, hardware, rate, measured[0].tokens) for m in measured]
    tolerance = CUDA_TRACE_TOLERANCE_S if setting.device.type == "cuda" else 0.0
    violations = [v for m in measured for trace in (m.prefill_trace, *m.traces) for v in check_trace(trace, tolerance)]
    ends = [row for row in rows[: len(named)] if row["policy"] in ("kv_only", "act_only")]
    result = {
        "machine": device_name(setting.device),
        "model": setting.shape.name,
        "dtype": setting.dtype,
        "link_gb_per_s": link,
        "batch": setting.workload.num_requests,
        "context": int(setting.workload.prompt_tokens[0]),
        "max_tokens": options.max_tokens,
        "profile": fit_report(hardware),
        "disagreements": disagreements,
        "search": _search_json(found, algorithm1),
        "exactness": exact["rows"],
        "completions": exact["completions"],
        "speed": rows[: len(named)],
        "sweep": sorted(ends + rows[len(named) :], key=lambda row: row["act_share"]),
        "trace_violations": violations[:10],
        "seconds": time.perf_counter() - began,
    }
    for row in result["speed"] + result["sweep"]:
        row["disturbed"] = is_disturbed(row)
    report.speed(result)
    chosen = next(m for m in measured if m.policy.name == "hybrid")
    _write(result, chosen, setting, hardware)
    report.end(result, options.out)
    return result


def check_writable(folder: Path) -> None:
    """Make the folder and try it, before an hour's work is to be written there. Raises InputError."""
    probe = folder / ".flexhybrid-probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
        if taken := next((path for path in folder.glob("*.*") if path.name in RESULT_FILES and path.is_dir()), None):
            raise InputError(f"cannot write results to {folder}: {taken.name} is a folder there; choose another --out")
    except OSError as error:
        raise InputError(f"cannot write results to {folder}: {error.strerror}; choose another folder") from None


def _profile_and_search(setting: _Setting, report: Report, bar: tqdm):
    """(link rate, hardware, sizes that passes disagreed on, search result); climbs the link ladder where it may."""
    options, device = setting.options, setting.device

    report.say("Profiling under load: about 20 s a link rate.\n")

    def profiled(link: float | None, heading: str = "Profile") -> tuple[Hardware, list[str]]:
        bar.set_description("profile" if link is None else f"profile at {link} GB/s")
        path = options.out / f"hardware-{device.type}.json"
        hardware, disagreements = measure_hardware(setting.shape, setting.dtype, device, link, path, bar.update)
        report.profile(hardware, disagreements, heading)
        return hardware, disagreements

    def mixes(found: SearchResult) -> bool:
        return INSIDE[0] < found.act_share < INSIDE[1]

    link = None if device.type == "cuda" else options.link_gb_per_s or LINK_LADDER[0]
    hardware, disagreements = profiled(link)
    found = setting.search(hardware)
    if link and options.link_gb_per_s is None and not mixes(found):
        rates = (rate for rate in LINK_LADDER[1:] if mixes(setting.search(hardware.with_link_rate(rate))))
        if rate := next(rates, None):
            report.faster_link(link, rate)
            bar.total += PROFILE_STEPS
            link = rate
            hardware, disagreements = profiled(link, "Profile anew")
            found = setting.search(hardware)
    try:
        if setting.shape.hidden >= SMALLEST_KEPT_HIDDEN:
            path = profile_path(device)  # where policy auto looks
            with_earlier_disk(hardware, path).save(path)
    except OSError as error:
        print(f"note: the profile could not be kept for policy auto: {error}", file=sys.stderr)
    return link, hardware, disagreements, found


def _algorithm1_shares(setting: _Setting, hardware: Hardware) -> dict[str, float]:
    """ACT share by tokens under Algorithm 1's two balances, for this batch at the middle of its decode."""
    batch = setting.workload.num_requests
    context = int(setting.workload.prompt_tokens[0]) + setting.options.max_tokens // 2
    num_mini_batches = -(-batch // setting.options.mini_batch)
    times = layer_times(setting.shape, hardware, setting.bytes_per_element, batch, context, num_mini_batches)
    return {b: share_for_batch(times, host_blocks(batch, context), b).act_share for b in BALANCES}


def _exactness(setting: _Setting, searched: Policy, advance: Callable[[str], None]) -> dict:
    """Tokens of every policy on the checkpoint in float32 against transformers'; and the text of a few completions."""
    checkpoint, device, num_tokens = setting.checkpoint, setting.device.type, setting.options.exact_tokens
    threads = torch.get_num_threads()
    if checkpoint.shape.hidden < 512 and device == "cpu":
        torch.set_num_threads(1)  # tiny products: a second thread only waits for the first
    try:
        prompts, texts = _exactness_prompts(checkpoint, num_tokens)
        advance("exactness: transformers")
        reference = Reference(checkpoint.path)
        expected = reference.generate(prompts, num_tokens)
        bound = EXACT_MINI_BATCH_TOKENS
        policies = [kv_only(bound), act_only(bound), hybrid_static(checkpoint.shape, bound)]
        policies += [replace(searched, max_mini_batch_tokens=bound), hybrid(0.25, bound), hybrid(0.75, bound)]
        rows, completions = [], []
        for policy in policies + setting.extra:
            advance(f"exactness: {policy.name}")
            llm = LLM(checkpoint.path, policy, device=device, dtype="float32")
            answers = llm.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0.0))
            outcome = compare_tokens(reference, prompts, expected, [a.outputs[0].token_ids for a in answers])
            rows.append(
                {"policy": policy.name, "tokens": outcome.num_tokens, "equal": outcome.num_equal,
                 "excused": outcome.num_excused, "exact": outcome.exact, "first_wrong": outcome.first_wrong}
            )  # fmt: skip
            if texts and policy.name == searched.name:
                completions = [(text, a.outputs[0].text) for text, a in zip(texts, answers, strict=True)]
        short = sorted(completions, key=lambda pair: len(pair[0]))
        return {"rows": rows, "completions": short[len(short) // 4 :][:4], "num_prompts": len(prompts)}
    finally:
        torch.set_num_threads(threads)


def _exactness_prompts(checkpoint: Checkpoint, num_tokens: int) -> tuple[list[list[int]], list[str]]:
    """(token ids, texts) of the shipped prompts that fit; random ids, and no texts, without a tokenizer."""
    limit = checkpoint.shape.max_context - num_tokens
    tokenizer = load_tokenizer(checkpoint.path)
    if tokenizer is None:
        generator = np.random.default_rng(0)
        lengths = [n for n in (1, 5, 17, 40, 100) if n <= limit]
        return [generator.integers(3, checkpoint.shape.vocab, n).tolist() for n in lengths], []
    pairs = [(ids, text) for text in shipped_prompts() if len(ids := tokenizer(text)["input_ids"]) <= limit]
    return [ids for ids, _ in pairs], [text for _, text in pairs]


def _measure(setting: _Setting, named, sweep, link: float | None, advance) -> list[Measured]:
    """Run the table's policies and the sweep side by side; the ideal compute is measured for the table's."""
    device, shape, policies = setting.device, setting.shape, named + sweep
    source = setting.checkpoint if setting.options.model else RandomWeights(shape, device=device.type)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, shape.vocab, n).tolist() for n in setting.workload.prompt_tokens]
    bench = Bench(
        lambda policy: Weights(shape, source, setting.dtype, device, policy),
        prompts, setting.options.max_tokens, link, setting.budgets,
    )  # fmt: skip
    names = {policy.name for policy in named}

    def in_table(policy: Policy) -> bool:
        return policy.name in names

    together = {"device": 0, "host": 0}
    for policy in policies:
        needed = total_bytes(setting.memory_plan(policy))
        for tier in together:
            together[tier] += needed[tier]
    within = all(setting.budgets[tier] is None or size <= setting.budgets[tier] for tier, size in together.items())
    if device.type == "cuda" or not within:
        return bench.measure_in_turn(policies, setting.options.rounds, in_table, advance)
    contenders = []
    for policy in policies:
        advance(f"prefill {policy.name}")
        contenders.append(Contender(bench, policy))
    return bench.measure(contenders, setting.options.rounds, in_table, advance)


def _row(m: Measured, setting: _Setting, hardware: Hardware, rate: float, kv_only_tokens) -> dict:
    """One line of the speed table."""
    closed, virtual = predictions(setting.shape, hardware, setting.bytes_per_element, m.policy, setting.workload)
    median = m.median_tokens_per_s
    summary = m.summaries[m.median_round]
    pairs = [
        (a, b) for mine, theirs in zip(m.tokens, kv_only_tokens, strict=True) for a, b in zip(mine, theirs, strict=True)
    ]
    return {
        "policy": m.policy.name,
        "act_share": m.policy.share("act"),
        "closed_form_tokens_per_s": closed,
        "virtual_clock_tokens_per_s": virtual,
        "measured_tokens_per_s": median,
        "measured_rounds": m.decode_tokens_per_s,
        "error_virtual": virtual / median - 1,
        "error_closed": closed / median - 1,
        "h2d_bytes_per_iteration": sum(summary.decode_link_bytes["h2d"].values()) / summary.num_iterations,
        "overlap": m.overlap(rate),
        "balance": m.balance(rate),
        "others_cpu_share": [round(share, 3) for share in m.others_cpu_share if share is not None],
        "busy_compute": summary.busy.get("compute", 0.0),
        "busy_h2d": summary.busy.get("h2d", 0.0),
        "tokens_equal_to_kv_only": sum(a == b for a, b in pairs),
        "tokens_compared": len(pairs),
        "prefill_s": virtual_clock.summarize(m.prefill_trace).prefill_s,
    }


def predictions(shape, hardware: Hardware, p: int, policy: Policy, workload: Workload) -> tuple[float, float]:
    """(closed form, virtual clock): decode tokens/s over the iterations that are measured."""
    closed = predict(shape, hardware, p, candidates_of(policy, workload))
    summary = virtual_clock.summarize(virtual_decode(shape, hardware, p, policy, workload))
    return float(np.ravel(closed.decode_tokens_per_s)[0]), summary.decode_tokens_per_s


def virtual_decode(shape, hardware: Hardware, p: int, policy: Policy, workload: Workload) -> list[TraceEvent]:
    """The virtual clock's trace of the decode iterations: the very tasks that are measured."""
    return virtual_clock.run(stream(admit(shape, policy, workload, p), first_iteration=1), hardware)


def _flat(prediction: dict) -> dict:
    """A closed form's row with each link's bytes and each resource's busy share by a name of its own."""
    traffic = {f"{link}_bytes": sum(kinds.values()) for link, kinds in prediction["traffic_bytes"].items()}
    return {**prediction, **traffic, **{f"busy_{resource}": share for resource, share in prediction["busy"].items()}}


def _search_json(found: SearchResult, algorithm1: dict[str, float]) -> dict:
    return {
        "act_share": found.act_share,
        "kv_act_bytes_ratio": found.kv_act_bytes_ratio if np.isfinite(found.kv_act_bytes_ratio) else None,
        "predicted": found.prediction,
        "binding": found.binding,
        "num_candidates": found.num_candidates,
        "search_s": found.search_s,
        "algorithm1_paper": algorithm1["paper"],
        "algorithm1_full": algorithm1["full"],
        "policy": found.policy.to_dict(),
    }


def _write(result: dict, chosen: Measured, setting: _Setting, hardware: Hardware) -> None:
    """JSON, CSV, trace and figures."""
    out, shape, p = setting.options.out, setting.shape, setting.bytes_per_element
    write_by_rename(out / "compare.json", json.dumps(result, indent=1, default=float))
    for table in ("exactness", "speed", "sweep"):
        write_by_rename(out / f"{table}.csv", pd.DataFrame(result[table]).to_csv(index=False))
    virtual = virtual_decode(shape, hardware, p, chosen.policy, setting.workload)
    from figures import compare as draw  # last: a run is not lost where there is nothing to draw with

    traces = {"predicted": virtual, "measured": chosen.traces[chosen.median_round]}
    save_chrome_trace(out / "trace.json", traces)
    draw.timeline(out / "timeline.png", traces, iteration=3)
    shares = np.linspace(0, 1, 65)
    curve = predict(
        shape, hardware, p,
        Candidates(
            hybrid(0.5, setting.bound), setting.workload.num_requests, int(setting.workload.prompt_tokens[0]),
            setting.options.max_tokens, cache={"act@host": shares, "kv@host": 1.0 - shares},
        ),
    )  # fmt: skip
    searched = next(row for row in result["speed"] if row["policy"] == "hybrid")
    draw.throughput(
        out / "throughput.png", result["sweep"], shares.tolist(), curve.decode_tokens_per_s.tolist(), searched
    )


def options_from(args) -> CompareOptions:
    """Command-line arguments to options. Raises InputError for values that make no sense together."""
    if args.link_gb_per_s is not None and args.device == "cuda":
        raise InputError("--link-gb-per-s paces the copies of a CPU; a CUDA device runs at the rate of its own link")
    return CompareOptions(
        model=args.model, device=args.device, link_gb_per_s=args.link_gb_per_s, device_memory=args.device_memory,
        host_memory=args.host_memory, policy=args.policy, out=args.out,
    )  # fmt: skip
