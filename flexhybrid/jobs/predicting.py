"""The commands that predict without running a model: ``simulate``, ``search``, ``sweep``."""

import argparse
import gc
import sys
from dataclasses import asdict
from pathlib import Path

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError, flag
from flexhybrid.core.files import check_new_file
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.options import options_from, split_names
from sim.catalogue.hosts import HOSTS

#: New objects after which Python looks for cycles. Predictions make many that live long, and few cycles: after every
#: 700, as usual, looking for them takes a seventh of a search.
UNTIL_COLLECTED = 100_000


def add_predicting(commands) -> None:
    """Add the commands' parsers."""
    _add_simulate(commands)
    _add_search(commands)
    _add_sweep(commands)


def _add_simulate(commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict one run of one system, without running a model",
        description="Predict throughput, latency, memory, traffic and utilisation of a system. Systems: kv_only, "
        "act_only, hybrid(0.4), capture, flexgen, deepspeed, accelerate, kvpr_row, kvpr_column, token_recompute(0.2), "
        "int4 (4-bit keys and values; native weights), h2o(0.2), h2o(0.2, whole_layers=0), infinigen, uvm, "
        "fastdecode(gpus=4), ideal, …; a wrong name lists all.",
    )
    parser.add_argument("--system", help="by name, options as in a call, or a JSON file (capture)")
    parser.add_argument(
        "--compare", nargs="+", metavar="SYSTEM", help='several side by side, like "kv_only,hybrid(0.5),mine.json"'
    )
    _model_and_machine(parser, required=False)
    parser.add_argument(
        "--batch", type=_batch,
        help="requests; auto: as many as each system is fastest with; with --lengths, at a time at most (1024)",
    )  # fmt: skip
    parser.add_argument("--policy", help="the same as --system")
    parser.add_argument(
        "--vary", metavar="FIELD=V,V",
        help="a run for each value of a field: batch, prompt_len, gen_len, link_gb_per_s, device_memory, model, …",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw that, .png, .pdf or .svg")
    parser.add_argument(
        "--clock", choices=("closed", "virtual"), default="closed",
        help="closed form in milliseconds, or the executor's own stream task by task (closed)",
    )  # fmt: skip
    parser.set_defaults(run=_simulate)


def _batch(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r} (nor is it auto)") from None


def _add_search(commands) -> None:
    parser = commands.add_parser(
        "search",
        help="find the best policy for a model, a machine and a workload",
        description="Search placement over three tiers, KV:ACT mix, compression, batch, mini-batch and schedule.",
    )
    _model_and_machine(parser)
    parser.add_argument("--batch", type=_batch, help="requests, with --lengths at a time; auto: as many as pay (auto)")
    parser.add_argument("--max-batch", type=int, default=1024, help="most requests to try (1024)")
    parser.add_argument("--objective", choices=("throughput", "latency"), default="throughput")
    parser.add_argument(
        "--max-ttft", type=float, metavar="SECONDS", help="most to the first tokens of the requests that run at once"
    )
    parser.add_argument("--max-tpot", type=float, metavar="SECONDS", help="most from a request's token to its next one")
    parser.add_argument(
        "--lossy", dest="lossless", action="store_false",
        help="also fewer bits and selections, which change the tokens (default: the same tokens)",
    )  # fmt: skip
    parser.add_argument("--lossless", action="store_true", default=True, help=argparse.SUPPRESS)  # as it was asked for
    parser.add_argument("--attention", choices=("any", "device", "host"), default="any", help="where it may run (any)")
    parser.add_argument(
        "--keep", nargs="+", action="extend", default=[], metavar="FIELD=VALUE",
        help="of the policy, what the search may not change: cache=kv@host,act@host (their shares are free), "
        "cache.act@disk=0, weights.device=0.5, bits.kv=8, packing=fifo, max_mini_batch_tokens=8192, …",
    )  # fmt: skip
    parser.add_argument(
        "--selection", help="infinigen(…), with --lossy: used where it is faster; expected=SHARE as measured"
    )
    parser.add_argument("--time-limit", type=float, help="seconds after which the best so far is taken")
    parser.add_argument(
        "--no-confirm", dest="confirm", action="store_false", help="do not walk the winner on the virtual clock"
    )
    parser.add_argument("--save-policy", type=Path, help="write the policy to this JSON file, in a folder that exists")
    parser.add_argument("--lp", type=Path, help="write the winner's linear program, rows named, to this .lp file")
    parser.set_defaults(run=_search)


def _add_sweep(commands) -> None:
    parser = commands.add_parser(
        "sweep",
        help="simulate all combinations of a grid file",
        description="A JSON or TOML file gives lists for system (names and policy files), model, hardware, batch, "
        "prompt_len, gen_len (and host, dtype, clock, memories, rates and fields of the policy). Points that the table "
        "has already are not simulated again.",
    )
    parser.add_argument("grid", type=Path, help="grid file")
    parser.add_argument("--out", type=Path, help="table to write or to continue (the grid's name, .csv)")
    parser.add_argument("--workers", type=int, help="processes (all cores)")
    parser.add_argument("--fresh", action="store_true", help="overwrite the table instead of continuing it")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw tokens/s over the first key with several numbers"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=_sweep)


def _model_and_machine(parser: argparse.ArgumentParser, required: bool = True) -> None:
    names = {"model": "a shape by name (opt-30b, llama-2-70b), or a config.json"}
    names["hardware"] = "a machine by name (rtx4090, t4, local), or a hardware file"
    for name, text in names.items():
        parser.add_argument(flag(name), required=required, help=text)
    hosts = f"memory, cores and disk beside a GPU of the catalogue: {', '.join(HOSTS)} (the machine's own)"
    parser.add_argument("--host", metavar="NAME", help=hosts)
    parser.add_argument("--prompt-len", type=int, help="tokens of each prompt")
    parser.add_argument("--gen-len", type=int, help="tokens each request generates")
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE",
        help="in place of these: a queue of requests that join as others end, as CSV with a header or JSON lines of "
        "prompt_tokens, max_tokens and, if known, answer_tokens, prefix and prefix_tokens (what prompts begin with "
        "alike: a name, and how long it is), or as lines of OpenAI's Batch format, counted by the tokenizer beside "
        "--model (a config.json)",
    )  # fmt: skip
    parser.add_argument(
        "--answer-tokens", type=float, metavar="MEAN",
        help="mean of the answers, where the file does not name them (as many as they may have)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="(the checkpoint's, as run)")
    for tier in TIERS:
        parser.add_argument(f"--{tier}-memory", help=f"budget of the {tier}, like 12GiB (the machine's)")
    parser.add_argument(
        "--link-gb-per-s", type=float,
        help="rate of the link in each direction as `flexhybrid hardware` shows it, of which copies reach the "
        "machine's share; of a measured machine, what copies reach (the machine's)",
    )  # fmt: skip
    parser.add_argument("--disk-gb-per-s", type=float, help="rate of the disk, both directions (the machine's)")
    parser.add_argument(
        "--gemm-tflops", type=float, help="10^12 operations a second of matrix products (the machine's)"
    )
    host_rate = "rate of the host's memory by its channels, of which attention reaches a share (the machine's)"
    parser.add_argument("--host-memory-gb-per-s", type=float, help=host_rate)


def _note(line: str) -> None:
    print(f"flexhybrid: {line}", file=sys.stderr)


def _lengths(args) -> Workload | None:
    """Return the queue of --lengths; None without it. Raise InputError for flags that say lengths twice."""
    if args.lengths is None:
        if args.answer_tokens is not None:
            raise InputError("--answer-tokens is of --lengths; --gen-len says how long answers of one length are")
        return None
    if args.prompt_len is not None or args.gen_len is not None:
        raise InputError("--lengths says how long requests are: leave --prompt-len and --gen-len out")
    from flexhybrid.jobs.lengths import read_lengths

    return read_lengths(args.lengths, args.model, args.answer_tokens)


def _simulate(args) -> dict:
    gc.set_threshold(UNTIL_COLLECTED)
    from flexhybrid.jobs.rates import costs, describe_costs, describe_rates
    from flexhybrid.jobs.simulate import POINT, SimulatedQueue, asked_record, describe, describe_queue, run_point
    from flexhybrid.jobs.sweep.side_by_side import check_plot, varied_of

    named = {"--system": args.system, "--policy": args.policy, "--compare": args.compare}
    if len(given := [f"{name} {value}" for name, value in named.items() if value]) > 1:
        raise InputError(f"{' and '.join(given)}: give one of them")
    varied = varied_of(args.vary) if args.vary else None
    check_plot(args.plot, varied and varied.field)
    if varied and getattr(args, varied.field, None) is not None:
        raise InputError(f"--vary {args.vary} and {flag(varied.field)}: give one of them")
    if varied and varied.field in ("prompt_len", "gen_len") and args.lengths:
        raise InputError(f"--lengths says how long requests are: --vary {varied.field} has nothing to vary")
    needed = [name for name in ("model", "hardware") if name != (varied and varied.field)]
    if missing := [name for name in needed if getattr(args, name) is None]:
        raise InputError(f"the following arguments are required: {', '.join(map(flag, missing))}")
    point = {key: getattr(args, key) for key in ("clock", *POINT)}
    if args.compare or varied:
        return _what_if(args, point, varied)
    point = {"system": args.system or args.policy or "capture", **point}
    setting, _, outcome = run_point(point, _lengths(args), _note)
    args.show(describe_queue(outcome) if isinstance(outcome, SimulatedQueue) else describe(outcome))
    rate = outcome.tokens_per_s
    for text in filter(None, (describe_costs(setting.machine, rate), describe_rates(setting.machine))):
        args.show(text)
    record = asked_record(setting.machine, _asked(args, point))
    return record | outcome.to_dict() | costs(setting.machine, rate)


def _what_if(args, point: dict, varied) -> dict:
    """Simulate several systems, or one at several values of a field."""
    from flexhybrid.jobs.rates import RATES, describe_rates, without_given
    from flexhybrid.jobs.simulate import asked_record
    from flexhybrid.jobs.sweep.side_by_side import describe_answers, plot, side_by_side

    if args.plot:
        check_new_file(args.plot)
    systems = split_names(args.compare) if args.compare else (args.system or args.policy or "capture",)
    found = side_by_side(point, systems, varied, _lengths(args), _note)
    args.show(describe_answers(found, varied))
    machines = {
        answer.setting.machine.name: without_given(answer.setting.machine, varied.field if varied else "")
        for answer in found
        if answer.setting
    }
    for machine in machines.values():
        args.show(describe_rates(machine))
    if varied and varied.field in RATES:
        args.show(f"  {flag(varied.field)} in turn: {', '.join(f'{value:g}' for value in varied.values)}")
    if args.plot:
        asked = ", ".join(str(point[key]) for key in ("model", "hardware") if point[key] is not None)
        plot(found, varied, asked, args.plot)
        args.show(f"  {args.plot}")
    inputs = _asked(args, point | {"compare": list(systems), "vary": args.vary})
    record = asked_record(next(iter(machines.values())), inputs)
    return record | {"runs": [answer.to_dict(varied and varied.field) for answer in found]}


def _asked(args, point: dict) -> dict:
    """Return what a prediction was asked for, with the files that say it."""
    files = {"lengths": args.lengths and str(args.lengths), "answer_tokens": args.answer_tokens}
    return point | files


def _search(args) -> dict:
    gc.set_threshold(UNTIL_COLLECTED)
    from flexhybrid.core.files import write_by_rename
    from flexhybrid.jobs.rates import costs, describe_costs, describe_rates
    from flexhybrid.jobs.search import PolicySearchOptions, run_search, search_queue, search_record
    from flexhybrid.jobs.simulate import POINT, asked_record, describe_queue

    names = ("max_batch", "objective", "max_ttft", "max_tpot", "lossless", "attention", "selection", "time_limit")
    args.batch = None if args.batch == "auto" else args.batch
    point = {name: getattr(args, name) for name in POINT}
    asked = _asked(args, point | {name: getattr(args, name) for name in names} | {"keep": list(args.keep) or None})
    options = options_from(PolicySearchOptions, args, point=point, lengths=_lengths(args), keep=tuple(args.keep))
    for path in (args.save_policy, args.lp):
        if path:
            check_new_file(path)  # before the work
    if options.lengths is not None:
        choice = search_queue(options, _note)
        if args.save_policy:
            write_by_rename(args.save_policy, choice.system.policy.to_json())
        args.show(describe_queue(choice))
        args.show(describe_rates(choice.system.hardware))
        return asked_record(choice.system.hardware, asked) | choice.to_dict()
    report = run_search(options, _note, args.show)
    if args.save_policy:
        write_by_rename(args.save_policy, report.found.policy.to_json())
    machine, rate = report.hardware, report.best.tokens_per_s
    for text in filter(None, (describe_costs(machine, rate), describe_rates(machine))):
        args.show(text)
    record = asked_record(machine, asked)
    return record | search_record(report) | costs(machine, rate)


def _sweep(args) -> dict:
    gc.set_threshold(UNTIL_COLLECTED)
    from flexhybrid.jobs.sweep.simulated import sweep_grid

    out, quiet = args.out or args.grid.with_suffix(".csv"), args.quiet or args.json
    summary = sweep_grid(args.grid, out, args.workers, args.fresh, quiet, args.plot)
    resumed = f", {summary.num_resumed} kept from before" if summary.num_resumed else ""
    failed = f", {summary.num_errors} cannot run (column error)" if summary.num_errors else ""
    args.show(f"{summary.num_points} points in {summary.seconds:.1f} s{resumed}{failed}: {summary.path}")
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(summary).items()}
