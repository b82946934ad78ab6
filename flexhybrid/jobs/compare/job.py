"""The job of ``flexhybrid compare``: profile the machine, search a policy, and measure it against other policies.

With named systems, the job measures those instead and shows the parts of each system's decode step.
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

#: Tolerance of trace checks on a CUDA device: times of its events on the host's clock are this imprecise.
CUDA_TRACE_TOLERANCE_S = 5e-5

#: Rates of a CPU's imitated link, GB/s. The job takes the first rate at which the best policy mixes KV and ACT: two
#: ordinary cores do so at 0.4. At a rate too low for the machine, the best policy would recompute everything.
LINK_LADDER = (0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
INSIDE = (0.05, 0.9)  #: a policy with an ACT share between these values is a mix

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

SMALLEST_KEPT_HIDDEN = 512  #: least hidden size of a kept profile: rates of tiny models do not hold at real sizes
EXACT_MINI_BATCH_TOKENS = 1024  #: max_mini_batch_tokens of the policies in the exactness runs
EXACT_POLICIES = 6  #: policies of the exactness runs without named systems


def _num_steps(options: CompareOptions, profiling: int) -> int:
    """Return the number of progress steps, of which the profile takes ``profiling``."""
    extra = options.policy is not None
    if options.systems:
        num = len(options.systems) + extra
        return profiling + 1 + num + num * (2 + options.rounds)
    runs = 4 + extra + len(SWEEP)
    tried = MOST_TRIED if options.trials else 0
    return profiling + 1 + EXACT_POLICIES + extra + runs * (1 + options.rounds) + 4 + extra + tried


def compare(options: CompareOptions, quiet: bool = False) -> dict:
    """Run the comparison; return the record that is also written to ``options.out`` as compare.json.

    Raise InputError, before anything is measured or written, if the options cannot work.
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
            # Exactness resolves a system again, for the checkpoint's model.
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
    """Return the optional parts of the profile that the compared policies may need; mixes need none."""
    return PARTS if options.systems or options.policy else frozenset()


def _profile_and_search(
    setting: ComparisonSetting, report: Report, progress: Progress
) -> tuple[ComparisonSetting, list[str], SearchResult | None]:
    """Measure the machine, then search for the best mix, on a CPU at a link rate of LINK_LADDER unless one is given.
    Return the setting for the measured machine, the sizes on which two passes disagreed, and the search's result
    (None with ``options.systems``)."""
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
    """Save the machine's record for policy auto and the machine name "local"; return a message about the result.
    A record of a paced link never replaces one of an unpaced link."""
    path, machine, pace = profile_file(setting.paced.device.type), setting.machine, setting.machine.notes.get(PACE)
    with suppress(InputError):  # none yet, or none that can be read
        earlier = load_hardware(path)
        if pace and not earlier.notes.get(PACE):
            return f"The profile at {path} stays as it is: it was measured without a pace, this one at {pace:g} GB/s"
        if set(machine.lines) < {key for key in earlier.lines if not is_of_disk(key) or key in machine.lines}:
            return f"The profile at {path} stays as it is: it has lines that this profile lacks"
    before = ", in place of an earlier profile" if path.is_file() else ""
    try:
        with_earlier_disk(machine, path).save(path)
    except OSError as error:
        print(f"note: the profile could not be saved for policy auto: {error}", file=sys.stderr)
        return "The profile was not saved for policy auto."
    lifted = f"; without --link-gb-per-s its pace of {pace:g} GB/s is left out there" if pace else ""
    return f"Saved the profile for policy auto and the machine named local at {path}{before}{lifted}"


def _algorithm1_shares(setting: ComparisonSetting) -> dict[str, float]:
    """Return the share of tokens in ACT by each balance of Algorithm 1, for the batch halfway through its decode."""
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
    """Compare each policy's tokens with transformers' on the checkpoint in float32.
    ``policies``: pairs of a policy and the ``policy`` argument for ``LLM``. Return a row per policy, and four
    completions as text by the policy named ``shown`` (None: the first)."""
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
    """Return token ids and texts of shipped prompts that fit; without a tokenizer, random ids and no texts."""
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
    """Return a bench that runs policies over the same random prompts."""
    shape, device, paced = setting.problem.shape, setting.paced.device, setting.paced
    source = setting.checkpoint if setting.options.model else RandomWeights(shape, device=device.type)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, shape.vocab, n).tolist() for n in setting.workload.prompt_tokens]

    def make_weights(policy: Policy) -> Weights:
        return Weights(shape, source, setting.problem.dtype, device, policy, paced.disk)

    return Bench(make_weights, setting.problem, prompts, setting.options.gen_len, paced)


def _all_fit(setting: ComparisonSetting, policies: list[Policy]) -> bool:
    """Return whether the policies' pools fit the budgets together; False on CUDA."""
    problem = setting.problem
    plans = [total_bytes(wave_plan(problem, policy, setting.workload)) for policy in policies]
    limits = {tier: problem.budgets.of(tier) for tier in ("device", "host")}
    within = all(limit is None or sum(plan[tier] for plan in plans) <= limit for tier, limit in limits.items())
    return within and setting.paced.device.type != "cuda"


def _priced(problem: Problem, policy: Policy, workload: Workload) -> Priced:
    """Return the virtual clock's prediction of the measured decode iterations."""
    summary = virtual_clock.summarize(virtual_decode(problem, policy, workload), LAST)
    return Priced(summary.decode_tokens_per_s, summary.binding)


def _try(
    setting: ComparisonSetting, mix: Policy, bench: Bench, advance: Callable[[str], None]
) -> tuple[ComparisonSetting, Trials]:
    """Run trials of the searched mix and the table's policies; return the setting on the corrected machine.
    The corrected record is written to the results."""
    named, sweep = setting.mixes(mix)
    table = [policy for policy in named + sweep if policy not in (mix, *setting.extra)]
    # With a named checkpoint, the exactness runs need the memory.
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
    bench.problem = setting.problem  # its hardware decides the split points of both(…)
    return setting, tried


def _measure(
    setting: ComparisonSetting, bench: Bench, named: list[Policy], sweep: list[Policy], advance: Callable[[str], None]
) -> list[MeasuredPolicy]:
    """Measure the table's policies and the sweep; ideal compute times are measured for the table's alone."""
    policies, rounds = named + sweep, setting.options.rounds
    names = {policy.name for policy in named}

    def judged(policy: Policy) -> bool:
        """Return whether to report overlap: only link and device work, and they may work at the same time."""
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
    """Return a function that adds a policy's speed to ``speed.csv``, so that an interrupted comparison leaves some."""
    rows: list[dict] = []

    def keep(m: MeasuredPolicy) -> None:
        figures = {"measured_tokens_per_s": m.median_tokens_per_s, "measured_rounds": m.decode_tokens_per_s}
        rows.append({"policy": m.policy.name, "act_share": m.policy.share("act")} | figures)
        _save_table(out, "speed", rows)

    return keep


def _row(m: MeasuredPolicy, virtual: list[TraceEvent], setting: ComparisonSetting, reference: MeasuredPolicy) -> dict:
    """Return a policy's row of the speed table."""
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
    """Return a decode step's breakdown by prediction and by the measured round nearest to the median."""
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
    """Write the record as JSON, its tables as CSV, the trace of the ``chosen`` policy, and the figures."""
    out, problem = setting.options.out, setting.problem
    write_by_rename(out / "compare.json", json.dumps(result, indent=1, default=float))
    tables = {name: result[name] for name in ("speed", "sweep") if result[name]}
    for name, rows in (tables | {"breakdown": flat_rows(result["breakdown"])}).items():
        _save_table(out, name, rows)
    from figures import compare as draw  # last: a missing library must not lose the results

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
