"""The main job: profile this machine, search a policy, run it beside the others, show predicted against measured.

With systems by name it runs those side by side instead, and shows where a decode step of each goes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from flexhybrid import shipped
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, write_by_rename
from flexhybrid.core.memory import total_bytes
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import problem_of
from flexhybrid.core.trace import TraceEvent, check_trace, save_chrome_trace
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.breakdown import breakdown, flat_rows
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.jobs.compare.report import Report, is_disturbed
from flexhybrid.jobs.compare.setting import MIXES, SWEEP, CompareOptions, Setting, is_lossless, split_names, uses_disk
from flexhybrid.jobs.compare.speed import Bench, Contender, Measured
from flexhybrid.jobs.machine import device_name
from flexhybrid.jobs.profile.disk import measure_disk, with_disk, with_earlier_disk
from flexhybrid.jobs.profile.job import PROFILE_STEPS, measure_hardware
from flexhybrid.llm import LLM
from flexhybrid.requests import load_tokenizer
from flexhybrid.resolve import profile_path
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.threads import threads_for, torch_threads
from flexhybrid.sampling_params import SamplingParams
from policy_search.fit import fit_report
from policy_search.papers.algorithm1 import BALANCES, host_blocks, layer_times, share_for_batch
from policy_search.search import SearchResult
from sim import virtual_clock
from sim.array_clock import predict
from sim.candidates import Candidates, candidates_of
from sim.presets import act_only, hybrid, hybrid_static, kv_only

__all__ = ["INSIDE", "LINK_LADDER", "MIXES", "CompareOptions", "compare", "virtual_decode"]

#: A clock-resolution allowance for traces of a device: an event is placed on the host's clock to about this much.
CUDA_TRACE_TOLERANCE_S = 5e-5

#: Link rates for a CPU, GB/s. At 0.4 a machine of two ordinary cores mixes KV and ACT. One that multiplies faster would
#: recompute everything there, and the comparison would show nothing: it gets the next rate at which it does not.
LINK_LADDER = (0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
INSIDE = (0.05, 0.9)  #: an ACT share between these is a mix

RESULT_FILES = (
    *("compare.json", "exactness.csv", "speed.csv", "sweep.csv", "breakdown.csv"),
    *("throughput.png", "timeline.png", "breakdown.png", "traffic.png", "trace.json"),
    *("hardware-cpu.json", "hardware-cuda.json"),
)

SMALLEST_KEPT_HIDDEN = 512  #: lines fitted on a tiny model say nothing about this machine at real sizes
EXACT_MINI_BATCH_TOKENS = 1024
EXACT_POLICIES = 6


def _num_steps(options: CompareOptions) -> int:
    """Of the progress bar, for one profile."""
    extra = options.policy is not None
    if options.systems:
        num = len(options.systems) + extra
        return PROFILE_STEPS + 1 + num + num * (2 + options.rounds)
    contenders = 4 + extra + len(SWEEP)
    return PROFILE_STEPS + 1 + EXACT_POLICIES + extra + contenders * (1 + options.rounds) + 4 + extra


def compare(options: CompareOptions, quiet: bool = False) -> dict:
    """Run the whole job; returns what is also written to ``options.out``: tables, predictions, the figures' data.

    Raises InputError for anything that cannot work, before the first measurement and before anything is written.
    """
    began = time.perf_counter()
    setting, report = Setting(options), Report(quiet)
    check_writable(options.out)
    algorithm1 = None
    with tqdm(total=_num_steps(options), disable=quiet or None, file=sys.stderr, unit="step", leave=False) as bar:

        def advance(what: str) -> None:
            bar.set_description(what)
            bar.update()

        setting, link, hardware, disagreements, found = _profile_and_search(setting, report, bar)
        if found is None:
            named, sweep, shown = setting.systems(hardware), [], None
            report.systems(named)
            exact = _exactness(
                setting, [(p.name, setting.asked_as(p), is_lossless(p)) for p in named], hardware, advance
            )
        else:
            searched = replace(found.policy, name="hybrid")
            algorithm1 = _algorithm1_shares(setting, hardware)
            report.search(replace(found, prediction=_flat(found.prediction)), algorithm1)
            (named, sweep), shown = setting.mixes(searched), "hybrid"
            exact = _exactness(setting, _exact_mixes(setting, searched), hardware, advance, shown)
        report.exactness(exact)
        _save_table(options.out, "exactness", exact["rows"])
        report.about_to_measure(
            setting.workload, setting.shape, len(named) + len(sweep), setting.table_seconds(hardware)
        )
        measured = _measure(setting, named, sweep, link, hardware, advance)
    rate = link * 1e9 if link else 1 / hardware.lines["h2d"].s_per_byte
    reference = next((m for m in measured if is_lossless(m.policy)), measured[0])
    virtual = {
        m.policy.name: virtual_decode(setting.shape, hardware, setting.bytes_per_element, m.policy, setting.workload)
        for m in measured
    }
    rows = [_row(m, virtual[m.policy.name], setting, hardware, rate, reference) for m in measured]
    tolerance = CUDA_TRACE_TOLERANCE_S if setting.device.type == "cuda" else 0.0
    violations = [v for m in measured for trace in (m.prefill_trace, *m.traces) for v in check_trace(trace, tolerance)]
    ends = [row for row in rows[: len(named)] if row["policy"] in ("kv_only", "act_only")]
    result = {
        "machine": device_name(setting.device),
        "device": setting.device.type,
        "model": setting.shape.name,
        "dtype": setting.dtype,
        "link_gb_per_s": link,
        "disk_gb_per_s": options.disk_gb_per_s,
        "batch": setting.workload.num_requests,
        "context": int(setting.workload.prompt_tokens[0]),
        "max_tokens": options.max_tokens,
        "profile": fit_report(hardware),
        "disagreements": disagreements,
        "search": _search_json(found, algorithm1) if found else None,
        "exactness": exact["rows"],
        "completions": exact["completions"],
        "speed": rows[: len(named)],
        "sweep": sorted(ends + rows[len(named) :], key=lambda row: row["act_share"]) if sweep else [],
        "breakdown": [_breakdown(m, virtual[m.policy.name]) for m in measured[: len(named)]],
        "policies": {policy.name: policy.to_dict() for policy in named},
        "trace_violations": violations[:10],
        "seconds": time.perf_counter() - began,
    }
    for row in result["speed"] + result["sweep"]:
        row["disturbed"] = is_disturbed(row)
    report.speed(result)
    if found is None:
        report.breakdown(result["breakdown"])
    chosen = next((m for m in measured if m.policy.name == shown), measured[0])
    _write(result, chosen, virtual[chosen.policy.name], setting, hardware)
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


def _profile_and_search(setting: Setting, report: Report, bar: tqdm):
    """(setting sized for this machine, link rate, hardware, sizes that passes disagreed on, search result or None where
    systems are named); climbs the link ladder where it may."""
    options, device = setting.options, setting.device

    report.say("Profiling under load: one to three minutes a link rate.\n")
    disk = measure_disk(options.disk_dir, options.disk_gb_per_s) if options.disk_dir else None

    def profiled(link: float | None, heading: str = "Profile") -> tuple[Hardware, list[str]]:
        bar.set_description("profile" if link is None else f"profile at {link} GB/s")
        path = options.out / f"hardware-{device.type}.json"
        hardware, disagreements = measure_hardware(setting.shape, setting.dtype, device, link, path, bar.update)
        if disk:
            hardware, disagreements = with_disk(hardware, disk[0]), disagreements + disk[1]
            hardware.save(path)
        report.profile(hardware, disagreements, heading)
        return hardware, disagreements

    def mixes(found: SearchResult) -> bool:
        return INSIDE[0] < found.act_share < INSIDE[1]

    link = None if device.type == "cuda" else options.link_gb_per_s or LINK_LADDER[0]
    hardware, disagreements = profiled(link)
    setting = setting.sized(hardware)
    found = None if options.systems else setting.search(hardware)
    if found and link and options.link_gb_per_s is None and not mixes(found):
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
    return setting, link, hardware, disagreements, found


def _algorithm1_shares(setting: Setting, hardware: Hardware) -> dict[str, float]:
    """ACT share by tokens under Algorithm 1's two balances, for this batch at the middle of its decode."""
    batch = setting.workload.num_requests
    context = int(setting.workload.prompt_tokens[0]) + setting.options.max_tokens // 2
    num_mini_batches = -(-batch // setting.options.mini_batch)
    times = layer_times(setting.problem(hardware), batch, context, num_mini_batches)
    return {b: share_for_batch(times, host_blocks(batch, context), b).act_share for b in BALANCES}


def _exact_mixes(setting: Setting, searched: Policy) -> list[tuple[str, Policy, bool]]:
    bound = EXACT_MINI_BATCH_TOKENS
    policies = [kv_only(bound), act_only(bound), hybrid_static(setting.checkpoint.shape, bound)]
    policies += [replace(searched, max_mini_batch_tokens=bound), hybrid(0.25, bound), hybrid(0.75, bound)]
    return [(policy.name, policy, is_lossless(policy)) for policy in policies + setting.extra]


def _exactness(
    setting: Setting,
    policies: list[tuple[str, Policy | str, bool]],
    hardware: Hardware,
    advance: Callable[[str], None],
    shown: str | None = None,
) -> dict:
    """Tokens of every policy (name, as ``LLM`` takes it, lossless) on the checkpoint in float32 against transformers';
    and the text of a few completions, ``shown``'s or the first policy's."""
    checkpoint, device, num_tokens = setting.checkpoint, setting.device.type, setting.options.exact_tokens
    with torch_threads(threads_for(device, checkpoint.shape.hidden)):
        prompts, texts = _exactness_prompts(checkpoint, num_tokens, setting.options.exact_prompts)
        advance("exactness: transformers")
        reference = Reference(checkpoint.path)
        expected = reference.generate(prompts, num_tokens)
        shown, rows, completions = shown or policies[0][0], [], []
        budgets = {f"{tier}_memory": size for tier, size in setting.budgets.items()}
        for name, policy, lossless in policies:
            advance(f"exactness: {name}")
            with LLM(
                checkpoint.path, policy, device=device, dtype="float32", hardware=hardware,
                disk_dir=setting.disk.directory, **budgets,
            ) as llm:  # fmt: skip
                answers = llm.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0.0))
            outcome = compare_tokens(reference, prompts, expected, [a.outputs[0].token_ids for a in answers])
            rows.append(
                {"policy": name, "lossless": lossless, "tokens": outcome.num_tokens, "equal": outcome.num_equal,
                 "excused": outcome.num_excused, "exact": outcome.exact, "first_wrong": outcome.first_wrong}
            )  # fmt: skip
            if texts and name == shown:
                completions = [(text, a.outputs[0].text) for text, a in zip(texts, answers, strict=True)]
        short = sorted(completions, key=lambda pair: len(pair[0]))
        return {"rows": rows, "completions": short[len(short) // 4 :][:4], "num_prompts": len(prompts)}


def _exactness_prompts(checkpoint: Checkpoint, num_tokens: int, most: int) -> tuple[list[list[int]], list[str]]:
    """(token ids, texts) of the shipped prompts that fit; random ids, and no texts, without a tokenizer."""
    limit = checkpoint.shape.max_context - num_tokens
    tokenizer = load_tokenizer(checkpoint.path)
    if tokenizer is None:
        generator = np.random.default_rng(0)
        lengths = [n for n in (1, 5, 17, 40, 100) if n <= limit]
        return [generator.integers(3, checkpoint.shape.vocab, n).tolist() for n in lengths], []
    pairs = [(ids, text) for text in shipped.prompts() if len(ids := tokenizer(text)["input_ids"]) <= limit]
    pairs = pairs[:: -(-len(pairs) // most)]
    return [ids for ids, _ in pairs], [text for _, text in pairs]


def _measure(
    setting: Setting, named: list[Policy], sweep: list[Policy], link: float | None, hardware: Hardware, advance
) -> list[Measured]:  # fmt: skip
    """Run the table's policies and the sweep side by side; the ideal compute is measured for the table's."""
    device, shape, policies = setting.device, setting.shape, named + sweep
    source = setting.checkpoint if setting.options.model else RandomWeights(shape, device=device.type)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, shape.vocab, n).tolist() for n in setting.workload.prompt_tokens]
    names = {policy.name for policy in named}

    def judged(policy: Policy) -> bool:
        """Whether overlap means something: link and device are all that works, and they may work at once."""
        alone = policy.attention == "device" and not uses_disk(policy) and policy.overlap == "full"
        return policy.name in names and alone

    together = {"device": 0, "host": 0}
    for policy in policies:
        needed = total_bytes(setting.memory_plan(policy, hardware))
        for tier in together:
            together[tier] += needed[tier]
    limits = {tier: setting.budgets.of(tier) for tier in together}
    within = all(limits[tier] is None or size <= limits[tier] for tier, size in together.items())
    with Bench(
        lambda policy: Weights(shape, source, setting.dtype, device, policy, setting.disk),
        prompts, setting.options.max_tokens, link, setting.budgets, hardware, setting.disk,
    ) as bench:  # fmt: skip
        if device.type == "cuda" or not within:
            return bench.measure_in_turn(policies, setting.options.rounds, judged, advance)
        contenders = []
        for policy in policies:
            advance(f"prefill {policy.name}")
            contenders.append(Contender(bench, policy))
        return bench.measure(contenders, setting.options.rounds, judged, advance)


def _row(
    m: Measured, virtual: list[TraceEvent], setting: Setting, hardware: Hardware, rate: float, reference: Measured
) -> dict:  # fmt: skip
    """One line of the speed table."""
    closed = predict(setting.shape, hardware, setting.bytes_per_element, candidates_of(m.policy, setting.workload))
    closed_form = float(np.ravel(closed.decode_tokens_per_s)[0])
    predicted = virtual_clock.summarize(virtual).decode_tokens_per_s
    median = m.median_tokens_per_s
    summary = m.summaries[m.median_round]
    pairs = [
        (a, b)
        for mine, theirs in zip(m.tokens, reference.tokens, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return {
        "policy": m.policy.name,
        "act_share": m.policy.share("act"),
        "closed_form_tokens_per_s": closed_form,
        "virtual_clock_tokens_per_s": predicted,
        "measured_tokens_per_s": median,
        "measured_rounds": m.decode_tokens_per_s,
        "error_virtual": predicted / median - 1,
        "error_closed": closed_form / median - 1,
        "h2d_bytes_per_iteration": sum(summary.decode_link_bytes["h2d"].values()) / summary.num_iterations,
        "overlap": m.overlap(rate),
        "balance": m.balance(rate),
        "others_cpu_share": [round(share, 3) for share in m.others_cpu_share if share is not None],
        "busy_compute": summary.busy.get("compute", 0.0),
        "busy_h2d": summary.busy.get("h2d", 0.0),
        "lossless": is_lossless(m.policy),
        "reference": reference.policy.name,
        "tokens_equal": sum(a == b for a, b in pairs),
        "tokens_compared": len(pairs),
        "prefill_s": virtual_clock.summarize(m.prefill_trace).prefill_s,
    }


def _breakdown(m: Measured, virtual: list[TraceEvent]) -> dict:
    """Where a decode step goes, on either clock; measured in the round nearest to the median."""
    measured = breakdown(m.traces[m.median_round], m.summaries[m.median_round])
    return {"policy": m.policy.name, "predicted": breakdown(virtual), "measured": measured}


def virtual_decode(shape, hardware: Hardware, p: int, policy: Policy, workload: Workload) -> list[TraceEvent]:
    """The virtual clock's trace of the decode iterations: the very tasks that are measured."""
    wave = admit(problem_of(shape, p, hardware), policy, workload)
    return virtual_clock.run(stream(wave, first_iteration=1), hardware)


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
        "num_candidates": found.num_choices,
        "search_s": found.search_s,
        "algorithm1_paper": algorithm1["paper"],
        "algorithm1_full": algorithm1["full"],
        "policy": found.policy.to_dict(),
    }


def _save_table(out: Path, name: str, rows: list[dict]) -> None:
    write_by_rename(out / f"{name}.csv", pd.DataFrame(rows).to_csv(index=False))


def _write(result: dict, chosen: Measured, virtual: list[TraceEvent], setting: Setting, hardware: Hardware) -> None:
    """JSON, CSV, trace and figures."""
    out, shape, p = setting.options.out, setting.shape, setting.bytes_per_element
    write_by_rename(out / "compare.json", json.dumps(result, indent=1, default=float))
    tables = {name: result[name] for name in ("speed", "sweep") if result[name]}
    for name, rows in (tables | {"breakdown": flat_rows(result["breakdown"])}).items():
        _save_table(out, name, rows)
    from figures import compare as draw  # last: a run is not lost where there is nothing to draw with

    traces = {"predicted": virtual, "measured": chosen.traces[chosen.median_round]}
    save_chrome_trace(out / "trace.json", traces)
    draw.timeline(out / "timeline.png", traces, iteration=3)
    draw.breakdown(out / "breakdown.png", result["breakdown"])
    draw.traffic(out / "traffic.png", result["breakdown"])
    if not result["sweep"]:
        return
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
        host_memory=args.host_memory, disk_memory=args.disk_memory, disk_dir=args.disk_dir,
        disk_gb_per_s=args.disk_gb_per_s, systems=split_names(args.systems or []), policy=args.policy, out=args.out,
        batch=args.batch, context=args.prompt_len, max_tokens=args.gen_len, mini_batch=args.mini_batch,
    )  # fmt: skip
