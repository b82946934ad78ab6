"""The main job: profile this machine, search a policy, run it against others, show predicted against measured.

With named systems it runs those instead, and shows the parts of each one's decode step.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from operator import eq
from pathlib import Path

import numpy as np
import pandas as pd

from flexhybrid import shipped
from flexhybrid.arguments import LLMArguments
from flexhybrid.core.admission import wave_plan
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import profile_file, write_by_rename
from flexhybrid.core.hardware import PACE, Hardware, is_of_disk, load_hardware
from flexhybrid.core.memory import total_bytes
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.trace import TraceEvent, check_trace, save_chrome_trace
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.breakdown import breakdown, flat_rows
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.jobs.compare.predicted import closed_decode, virtual_decode
from flexhybrid.jobs.compare.report import Report, is_disturbed
from flexhybrid.jobs.compare.setting import SWEEP, CompareOptions, ComparisonSetting, settle, uses_disk
from flexhybrid.jobs.compare.speed import LAST, Bench, MeasuredPolicy
from flexhybrid.jobs.compare.trials import MOST_ROUNDS, MOST_TRIED, TRIAL_ITERATIONS, Priced, Trials, run_trials
from flexhybrid.jobs.machine import device_name, notes_on
from flexhybrid.jobs.paths import check_writable
from flexhybrid.jobs.profile.disk import with_earlier_disk
from flexhybrid.jobs.profile.job import PARTS, measure_hardware, profile_steps
from flexhybrid.jobs.progress import Progress
from flexhybrid.llm import LLM
from flexhybrid.requests import load_tokenizer
from flexhybrid.runtime.process_settings import threads_for, torch_threads
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.sampling_params import SamplingParams
from policy_search.fit import fit_report
from policy_search.papers.algorithm1 import BALANCES, host_blocks, layer_times, share_for_batch
from policy_search.search import SearchResult
from sim import virtual_clock
from sim.correction import TRIALS, in_words
from sim.presets import act_only, hybrid, hybrid_static, kv_only

#: Allowance for a CUDA device's traces: its events are placed on the host's clock to about this precision.
CUDA_TRACE_TOLERANCE_S = 5e-5

#: Link rates for a CPU, GB/s. At 0.4 a machine of two ordinary cores mixes KV and ACT. A faster machine would recompute
#: everything at that rate, and the comparison would show nothing: it gets the next rate that gives a mix.
LINK_LADDER = (0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
INSIDE = (0.05, 0.9)  #: an ACT share between these is a mix

RESULT_FILES = (
    *("compare.json", "exactness.csv", "speed.csv", "sweep.csv", "breakdown.csv"),
    *(
        f"{name}.{ending}"
        for name in ("throughput", "timeline", "breakdown", "traffic")
        for ending in ("png", "pdf", "svg")
    ),
    "trace.json",
    *("hardware-cpu.json", "hardware-cuda.json"),
)

SMALLEST_KEPT_HIDDEN = 512  #: lines fitted on a tiny model say nothing about this machine at real sizes
EXACT_MINI_BATCH_TOKENS = 1024
EXACT_POLICIES = 6


def _num_steps(options: CompareOptions, profiling: int) -> int:
    """Return the steps of the progress bar, with one profile of ``profiling`` steps."""
    extra = options.policy is not None
    if options.systems:
        num = len(options.systems) + extra
        return profiling + 1 + num + num * (2 + options.rounds)
    runs = 4 + extra + len(SWEEP)
    tried = MOST_TRIED if options.trials else 0
    return profiling + 1 + EXACT_POLICIES + extra + runs * (1 + options.rounds) + 4 + extra + tried


def compare(options: CompareOptions, quiet: bool = False) -> dict:
    """Do the whole job; return what is also written to ``options.out``: tables, predictions, the figures' data.

    Raise InputError for anything that cannot work, before the first measurement and before anything is written.
    """
    began = time.perf_counter()
    setting, report = settle(options), Report(quiet)
    for note in notes_on(setting.paced.device, setting.problem.budgets, None):
        print(f"flexhybrid: {note}", file=sys.stderr)
    check_writable(options.out, RESULT_FILES)
    algorithm1 = tried = None
    with ExitStack() as stack:
        steps = _num_steps(options, profile_steps(setting.paced.device, profiled_parts(options)))
        progress = stack.enter_context(Progress(steps, "profile", "step", quiet))

        def advance(label: str) -> None:
            progress.turn_to(label)
            progress.advance()

        setting, disagreements, searched = _profile_and_search(setting, report, progress)
        before, bench = setting.problem, stack.enter_context(_bench(setting))
        if searched is None:
            named, sweep, shown = setting.systems(), [], None
            report.systems(named, setting.problem)
            # a system is resolved again for the checkpoint's model
            subjects = [(policy, policy.name if policy.name in options.systems else policy) for policy in named]
        else:
            mix = replace(searched.policy, name="hybrid")
            algorithm1 = _algorithm1_shares(setting)
            report.search(searched, algorithm1, float(closed_decode(setting.problem, mix, setting.workload)[0][0]))
            if options.trials:
                setting, tried = _try(setting, mix, bench, advance)
                report.trials(mix, tried)
                mix, searched = tried.policy, setting.priced(searched, tried.policy)
            (named, sweep), shown = setting.mixes(mix), "hybrid"
            bound = EXACT_MINI_BATCH_TOKENS
            mixes = [kv_only(bound), act_only(bound), hybrid_static(setting.checkpoint.shape, bound)]
            mixes += [replace(mix, max_mini_batch_tokens=bound), hybrid(0.25, bound), hybrid(0.75, bound)]
            subjects = [(policy, policy) for policy in mixes + setting.extra]
        exact = _exactness(setting, subjects, advance, shown)
        report.exactness(exact)
        _save_table(options.out, "exactness", exact["rows"])
        num_policies = len(named) + len(sweep)
        report.about_to_measure(setting.workload, setting.problem.shape, num_policies, setting.table_seconds())
        if setting.problem.shape.hidden >= SMALLEST_KEPT_HIDDEN:
            report.say(f"{_keep_for_auto(setting)}\n")
        measured = _measure(setting, bench, named, sweep, advance)
    reference = next((m for m in measured if m.policy.lossless), measured[0])
    virtual = {m.policy.name: virtual_decode(setting.problem, m.policy, setting.workload) for m in measured}
    rows = [_row(m, virtual[m.policy.name], setting, reference) for m in measured]
    for row, m in zip(rows, measured, strict=True) if tried else ():
        row["virtual_clock_before_trials_tokens_per_s"] = _priced(before, m.policy, setting.workload).tokens_per_s
    tolerance = CUDA_TRACE_TOLERANCE_S if setting.paced.device.type == "cuda" else 0.0
    violations = [v for m in measured for trace in (m.prefill_trace, *m.traces) for v in check_trace(trace, tolerance)]
    ends = [row for row in rows[: len(named)] if row["policy"] in ("kv_only", "act_only")]
    result = {
        "machine": device_name(setting.paced.device),
        "device": setting.paced.device.type,
        "model": setting.problem.shape.name,
        "dtype": setting.problem.dtype,
        "link_gb_per_s": setting.paced.link_gb_per_s,
        "disk_gb_per_s": options.disk_gb_per_s,
        "batch": setting.workload.num_requests,
        "context": int(setting.workload.prompt_tokens[0]),
        "max_tokens": options.gen_len,
        "profile": fit_report(setting.machine),
        "disagreements": disagreements,
        "search": _search_json(searched, algorithm1) if searched and algorithm1 else None,
        "trials": tried and {"rounds": tried.rounds, "told": in_words(tried.hardware), **tried.hardware.notes[TRIALS]},
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
    if searched is None:
        report.breakdown(result["breakdown"])
    chosen = next((m for m in measured if m.policy.name == shown), measured[0])
    _write(result, chosen, virtual[chosen.policy.name], setting)
    report.end(result, options.out)
    return result


def profiled_parts(options: CompareOptions) -> frozenset[str]:
    """Return the parts of a profile that the policies to compare can use: the mixes use none."""
    return PARTS if options.systems or options.policy else frozenset()


def _profile_and_search(
    setting: ComparisonSetting, report: Report, progress: Progress
) -> tuple[ComparisonSetting, list[str], SearchResult | None]:
    """Measure the machine; return the setting sized for it, the sizes on which passes disagreed, and the search's
    result (None for ``options.systems``). Without a given link rate, take the first that gives a mix."""
    options, device = setting.options, setting.paced.device

    report.say("Profiling under load: about a minute.\n")

    def mixes(result: SearchResult) -> bool:
        return INSIDE[0] < result.act_share < INSIDE[1]

    link = None if device.type == "cuda" else options.link_gb_per_s or LINK_LADDER[0]
    progress.turn_to("profile" if link is None else f"profile at {link} GB/s")
    path, paced = options.out / f"hardware-{device.type}.json", replace(setting.paced, link_gb_per_s=link)
    shape, dtype = setting.problem.shape, setting.problem.dtype
    disk, parts = options.disk_dir is not None, profiled_parts(options)
    hardware, disagreements = measure_hardware(
        shape, dtype, paced, path, progress.advance, parts=parts, with_disk_too=disk
    )
    report.profile(hardware, disagreements)
    setting = replace(setting.measured(hardware), paced=paced).sized()
    result = None if options.systems else setting.search(hardware)
    if result and link and options.link_gb_per_s is None and not mixes(result):
        paces = ((rate, hardware.with_link_rate(rate)) for rate in LINK_LADDER[1:])
        if pace := next(((rate, faster) for rate, faster in paces if mixes(setting.search(faster))), None):
            report.faster_link(link, pace[0])
            setting = replace(setting.measured(pace[1]), paced=replace(paced, link_gb_per_s=pace[0]))
            setting.machine.save(path)
            result = setting.search(setting.machine)
    return setting, disagreements, result


def _keep_for_auto(setting: ComparisonSetting) -> str:
    """Keep the machine's record for policy auto and the name local; return in words what was done. A record without a
    pace is never replaced by one with a pace."""
    path, machine, pace = profile_file(setting.paced.device.type), setting.machine, setting.machine.notes.get(PACE)
    with suppress(InputError):  # none yet, or none that can be read
        earlier = load_hardware(path)
        if pace and not earlier.notes.get(PACE):
            return f"The profile at {path} stays as it is: it was measured without a pace, this one at {pace:g} GB/s"
        if set(machine.lines) < {key for key in earlier.lines if not is_of_disk(key) or key in machine.lines}:
            return f"The profile at {path} stays as it is: it has more lines"
    before = ", in place of an earlier profile" if path.is_file() else ""
    try:
        with_earlier_disk(machine, path).save(path)
    except OSError as error:
        print(f"note: the profile could not be kept for policy auto: {error}", file=sys.stderr)
        return "Not kept for policy auto."
    lifted = f"; without --link-gb-per-s its pace of {pace:g} GB/s is left out there" if pace else ""
    return f"Kept for policy auto, and as the machine named local, at {path}{before}{lifted}"


def _algorithm1_shares(setting: ComparisonSetting) -> dict[str, float]:
    """Return the ACT share by tokens under Algorithm 1's two balances, for this batch at the middle of its decode."""
    batch = setting.workload.num_requests
    context = int(setting.workload.prompt_tokens[0]) + setting.options.gen_len // 2
    num_mini_batches = -(-batch // setting.options.mini_batch)
    times = layer_times(setting.problem, batch, context, num_mini_batches)
    return {b: share_for_batch(times, host_blocks(batch, context), b).act_share for b in BALANCES}


def _exactness(
    setting: ComparisonSetting,
    policies: Sequence[tuple[Policy, Policy | str]],
    advance: Callable[[str], None],
    shown: str | None = None,
) -> dict:
    """Compare the tokens of every policy (itself, and as ``LLM`` takes it) on the checkpoint in float32 with
    transformers'; return a row a policy, and the text of a few completions of ``shown``, or of the first policy."""
    checkpoint, options = setting.checkpoint, setting.options
    params = SamplingParams(max_tokens=options.exact_tokens, temperature=0.0)
    arguments = LLMArguments(
        checkpoint.path,
        device=setting.paced.device.type,
        dtype="float32",
        hardware=setting.machine,
        budgets=dict(options.budgets),
        disk_dir=options.disk_dir,
    )
    with torch_threads(threads_for(setting.paced.device.type, checkpoint.shape.hidden)):
        prompts, texts = _exactness_prompts(checkpoint, options.exact_tokens, options.exact_prompts)
        advance("exactness: transformers")
        reference = Reference(checkpoint.path)
        expected = reference.generate(prompts, options.exact_tokens)
        shown, rows, completions = shown or policies[0][0].name, [], []
        for policy, named in policies:
            name = policy.name
            advance(f"exactness: {name}")
            with LLM.from_arguments(replace(arguments, policy=named)) as llm:
                outputs = [answer.outputs[0] for answer in llm.generate(prompts, params) if answer]
            tokens = compare_tokens(reference, prompts, expected, [output.token_ids for output in outputs])
            row = {"policy": name, "lossless": policy.lossless}
            row |= {"tokens": tokens.num_tokens, "equal": tokens.num_equal}
            row |= {"excused": tokens.num_excused, "exact": tokens.exact, "first_wrong": tokens.first_wrong}
            rows.append(row)
            if texts and name == shown:
                completions = [(text, output.text) for text, output in zip(texts, outputs, strict=True)]
        short = sorted(completions, key=lambda pair: len(pair[0]))
        return {"rows": rows, "completions": short[len(short) // 4 :][:4], "num_prompts": len(prompts)}


def _exactness_prompts(checkpoint: Checkpoint, num_tokens: int, max_prompts: int) -> tuple[list[list[int]], list[str]]:
    """Return (token ids, texts) of the shipped prompts that fit; random ids, and no texts, without a tokenizer."""
    limit = checkpoint.shape.max_context - num_tokens
    tokenizer = load_tokenizer(checkpoint.path)
    if tokenizer is None:
        generator = np.random.default_rng(0)
        lengths = [n for n in (1, 5, 17, 40, 100) if n <= limit]
        return [generator.integers(3, checkpoint.shape.vocab, n).tolist() for n in lengths], []
    pairs = [(ids, text) for text in shipped.prompts() if len(ids := tokenizer(text)["input_ids"]) <= limit]
    pairs = pairs[:: -(-len(pairs) // max_prompts)]
    return [ids for ids, _ in pairs], [text for _, text in pairs]


def _bench(setting: ComparisonSetting) -> Bench:
    """Return what runs the speed table's policies, over the same random prompts."""
    shape, device, paced = setting.problem.shape, setting.paced.device, setting.paced
    source = setting.checkpoint if setting.options.model else RandomWeights(shape, device=device.type)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, shape.vocab, n).tolist() for n in setting.workload.prompt_tokens]

    def make_weights(policy: Policy) -> Weights:
        return Weights(shape, source, setting.problem.dtype, device, policy, paced.disk)

    return Bench(make_weights, setting.problem, prompts, setting.options.gen_len, paced)


def _all_fit(setting: ComparisonSetting, policies: list[Policy]) -> bool:
    """Return whether these policies' pools are kept at the same time: on a CPU, if they fit its budgets."""
    problem = setting.problem
    plans = [total_bytes(wave_plan(problem, policy, setting.workload)) for policy in policies]
    limits = {tier: problem.budgets.of(tier) for tier in ("device", "host")}
    within = all(limit is None or sum(plan[tier] for plan in plans) <= limit for tier, limit in limits.items())
    return within and setting.paced.device.type != "cuda"


def _priced(problem: Problem, policy: Policy, workload: Workload) -> Priced:
    summary = virtual_clock.summarize(virtual_decode(problem, policy, workload), LAST)
    return Priced(summary.decode_tokens_per_s, summary.binding)


def _try(
    setting: ComparisonSetting, mix: Policy, bench: Bench, advance: Callable[[str], None]
) -> tuple[ComparisonSetting, Trials]:
    """Run trials of the searched mix and of the table's policies; return the setting on the corrected machine, whose
    record is written to the results."""
    named, sweep = setting.mixes(mix)
    table = [policy for policy in named + sweep if policy not in (mix, *setting.extra)]
    # where a checkpoint is named, exactness needs the memory
    keep = not setting.options.model and _all_fit(setting, [*table, *[mix] * MOST_ROUNDS])

    def run(policy: Policy) -> list[TraceEvent]:
        advance(f"trial {policy.name}")
        trace = bench.run_of(policy).session.decode(TRIAL_ITERATIONS)
        if not keep:
            bench.close()
        return trace

    def search(hardware: Hardware) -> Policy:
        return replace(setting.search(hardware).policy, name=mix.name)

    def price(hardware: Hardware, policy: Policy) -> Priced:
        return _priced(replace(setting.problem, hardware=hardware), policy, setting.workload)

    tried = run_trials(setting.machine, mix, search, price, others=table, run=run, last=LAST)
    tried.hardware.save(setting.options.out / f"hardware-{setting.paced.device.type}.json")
    setting = setting.measured(tried.hardware)
    bench.problem = setting.problem  # which decides the split points of both(…)
    return setting, tried


def _measure(
    setting: ComparisonSetting, bench: Bench, named: list[Policy], sweep: list[Policy], advance: Callable[[str], None]
) -> list[MeasuredPolicy]:
    """Run the table's policies and the sweep side by side; the ideal compute is measured for the table's."""
    policies, rounds = named + sweep, setting.options.rounds
    names = {policy.name for policy in named}

    def judged(policy: Policy) -> bool:
        """Return whether overlap means something: link and device alone work, and they may work at once."""
        alone = not policy.host_attends and not uses_disk(policy) and policy.overlap == "full"
        return policy.name in names and alone

    if not _all_fit(setting, policies):
        return bench.measure_in_turn(policies, rounds, judged, advance, _keeping_rows(setting.options.out))
    runs = []
    for policy in policies:
        advance(f"prefill {policy.name}")
        runs.append(bench.run_of(policy))
    return bench.measure(runs, rounds, judged, advance)


def _keeping_rows(out: Path) -> Callable[[MeasuredPolicy], None]:
    """Return a function that writes the speed of the policies that it was given to ``speed.csv``, for a comparison that
    is ended before the whole table is there."""
    rows: list[dict] = []

    def keep(m: MeasuredPolicy) -> None:
        figures = {"measured_tokens_per_s": m.median_tokens_per_s, "measured_rounds": m.decode_tokens_per_s}
        rows.append({"policy": m.policy.name, "act_share": m.policy.share("act")} | figures)
        _save_table(out, "speed", rows)

    return keep


def _row(m: MeasuredPolicy, virtual: list[TraceEvent], setting: ComparisonSetting, reference: MeasuredPolicy) -> dict:
    """Return one line of the speed table."""
    link, problem = setting.paced.link_gb_per_s, setting.problem
    rate = link * 1e9 if link else 1 / setting.machine.lines["h2d"].s_per_byte
    closed_form, limit = (float(rates[0]) for rates in closed_decode(problem, m.policy, setting.workload))
    predicted = virtual_clock.summarize(virtual, LAST).decode_tokens_per_s
    median, summary = m.median_tokens_per_s, m.summaries[m.median_round]
    ours, theirs = (list(chain.from_iterable(measured.tokens)) for measured in (m, reference))
    return {
        "policy": m.policy.name,
        "act_share": m.policy.share("act"),
        "limit_tokens_per_s": limit,
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
        "lossless": m.policy.lossless,
        "reference": reference.policy.name,
        "tokens_equal": sum(map(eq, ours, theirs)),
        "tokens_compared": len(ours),
        "prefill_s": virtual_clock.summarize_measured(m.prefill_trace).prefill_s,
    }


def _breakdown(m: MeasuredPolicy, virtual: list[TraceEvent]) -> dict:
    """Return the breakdown of a decode step on either clock; measured in the round nearest to the median."""
    measured = breakdown(m.traces[m.median_round], LAST)
    measured["step_rounds_s"] = [one.decode_s / one.num_decoded for one in m.summaries]
    return {"policy": m.policy.name, "predicted": breakdown(virtual, LAST), "measured": measured}


def _search_json(result: SearchResult, algorithm1: dict[str, float]) -> dict:
    return {
        "act_share": result.act_share,
        "kv_act_bytes_ratio": result.kv_act_bytes_ratio if np.isfinite(result.kv_act_bytes_ratio) else None,
        "predicted": result.prediction,
        "binding": result.prediction["binding"],
        "num_candidates": result.num_choices,
        "search_s": result.search_s,
        **{f"algorithm1_{balance}": share for balance, share in algorithm1.items()},
        "policy": result.policy.to_dict(),
    }


def _save_table(out: Path, name: str, rows: list[dict]) -> None:
    write_by_rename(out / f"{name}.csv", pd.DataFrame(rows).to_csv(index=False))


def _write(result: dict, chosen: MeasuredPolicy, virtual: list[TraceEvent], setting: ComparisonSetting) -> None:
    """Write JSON, CSV, trace and figures."""
    out, problem = setting.options.out, setting.problem
    write_by_rename(out / "compare.json", json.dumps(result, indent=1, default=float))
    tables = {name: result[name] for name in ("speed", "sweep") if result[name]}
    for name, rows in (tables | {"breakdown": flat_rows(result["breakdown"])}).items():
        _save_table(out, name, rows)
    from figures import compare as draw  # last, so that a missing library loses no run

    traces = {"predicted": virtual, "measured": chosen.traces[chosen.median_round]}
    save_chrome_trace(out / "trace.json", traces)
    drawn = {f"{chosen.policy.name}, {clock}": trace for clock, trace in traces.items()}
    pace = f"{result['link_gb_per_s']:g} GB/s" if result["link_gb_per_s"] else "not paced"
    title = f"{result['machine']}: {result['model']} in {result['dtype']}, link {pace}"
    draw.timeline(out / "timeline.png", drawn, iteration=3, title=title)
    draw.breakdown(out / "breakdown.png", result["breakdown"], title)
    draw.traffic(out / "traffic.png", result["breakdown"], title)
    if not result["sweep"]:
        return
    shares = np.linspace(0, 1, 65)
    cache = {"act@host": shares, "kv@host": 1.0 - shares}
    curve, _ = closed_decode(problem, hybrid(0.5, setting.mini_batch_tokens), setting.workload, cache)
    searched = next(row for row in result["speed"] if row["policy"] == "hybrid")
    draw.throughput(out / "throughput.png", result["sweep"], shares.tolist(), curve.tolist(), searched, title)
