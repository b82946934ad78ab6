"""The commands ``flexhybrid simulate``, ``search`` and ``sweep``."""

import gc
import sys
from dataclasses import asdict
from pathlib import Path

from flexhybrid.arguments import options_from, split_names
from flexhybrid.core.errors import InputError, flag
from flexhybrid.core.files import check_new_file, write_by_rename
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.lengths import read_lengths
from flexhybrid.jobs.options import PolicySearchOptions
from flexhybrid.jobs.rates import RATES, costs, describe_costs, describe_rates, without_given
from flexhybrid.jobs.search import describe_policy, run_search, search_queue, search_record
from flexhybrid.jobs.simulate import POINT, SimulatedQueue, asked_record, describe, describe_queue, run_point
from flexhybrid.jobs.sweep.side_by_side import check_plot, describe_answers, draw_rows, side_by_side, varied_of
from flexhybrid.jobs.sweep.simulated import sweep_grid
from policy_search.systems import dropped

#: Number of new objects after which Python's garbage collector runs. Predictions make many long-lived objects and few
#: cycles; at Python's default of 700, the collector takes a seventh of a search's time.
UNTIL_COLLECTED = 100_000


def _note(line: str) -> None:
    print(f"flexhybrid: {line}", file=sys.stderr)


def _lengths(args) -> Workload | None:
    """Return the queue of --lengths; None without it. Raise InputError if other flags give lengths as well."""
    if args.lengths is None:
        if args.answer_tokens is not None:
            raise InputError("--mean-output-len needs --lengths; for answers of one length give --output-len")
        return None
    if args.prompt_len is not None or args.gen_len is not None:
        raise InputError("--lengths says how long requests are: leave --input-len and --output-len out")
    return read_lengths(args.lengths, args.model, args.answer_tokens)


def simulate(args) -> dict:
    """Predict one run, or compare several (--compare, --vary); return the record."""
    gc.set_threshold(UNTIL_COLLECTED)
    named = {"--system": args.system, "--policy": args.policy, "--compare": args.compare}
    shown = {name: ",".join(of) if isinstance(of, list) else of for name, of in named.items() if of is not None}
    if len(given := [f"{name} {value}" for name, value in shown.items()]) > 1:
        raise InputError(f"{' and '.join(given)}: give one of them")
    varied = varied_of(args.vary) if args.vary else None
    check_plot(args.plot, varied and varied.field)
    if varied and getattr(args, varied.field, None) is not None:
        raise InputError(f"--vary {args.vary} and {flag(varied.field)}: give one of them")
    if varied and varied.field in ("prompt_len", "gen_len") and args.lengths:
        raise InputError(f"--lengths says how long requests are: --vary {varied.field} is not possible with it")
    needed = [name for name in ("model", "hardware") if name != (varied and varied.field)]
    if missing := [name for name in needed if getattr(args, name) is None]:
        raise InputError(f"the following arguments are required: {', '.join(map(flag, missing))}")
    point = {key: getattr(args, key) for key in ("clock", *POINT)}
    one = [text for text in (args.system, args.policy) if text is not None] or ["capture"]
    systems = tuple(one) if args.compare is None else split_names(args.compare)
    if args.compare is not None or varied:
        return _what_if(args, point, systems, varied)
    point = {"system": one[0], **point}
    setting, made, outcome = run_point(point, _lengths(args), _note)
    args.show(describe_queue(outcome) if isinstance(outcome, SimulatedQueue) else describe(outcome))
    if unused := dropped(point["system"], made.policy.attending_tier):
        args.show(f"  {unused}")
    return _record(args, setting.machine, outcome.tokens_per_s, point) | outcome.to_dict()


def _what_if(args, point: dict, systems: tuple[str, ...], varied) -> dict:
    """Simulate several systems, or one at several values of a field; return the record."""
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
        rows = [(answer.system, answer.point[varied.field], answer.tokens_per_s) for answer in found if answer.run]
        draw_rows(rows, varied.field, asked, args.plot)
        args.show(f"  {args.plot}")
    inputs = _asked(args, point | {"compare": list(systems), "vary": args.vary})
    record = asked_record(next(iter(machines.values())), inputs)
    return record | {"runs": [answer.to_dict(varied and varied.field) for answer in found]}


def _record(args, machine: Hardware, tokens_per_s: float, asked: dict) -> dict:
    """Print the cost of tokens and the origin of the machine's rates; return both with the inputs ``asked``."""
    for text in filter(None, (describe_costs(machine, tokens_per_s), describe_rates(machine))):
        args.show(text)
    return asked_record(machine, _asked(args, asked)) | costs(machine, tokens_per_s)


def _asked(args, point: dict) -> dict:
    """Return the inputs of a prediction, with those of a queue."""
    return point | {"lengths": args.lengths and str(args.lengths), "answer_tokens": args.answer_tokens}


def search(args) -> dict:
    """Search a policy for requests of one length, or for a queue (--lengths); return the record."""
    gc.set_threshold(UNTIL_COLLECTED)
    names = ("max_batch", "objective", "max_ttft", "max_tpot", "lossless", "attention", "selection", "time_limit")
    args.batch = None if args.batch == "auto" else args.batch
    point = {name: getattr(args, name) for name in POINT}
    options = options_from(PolicySearchOptions, args, point=point, lengths=_lengths(args))
    asked = point | {name: getattr(options, name) for name in names} | {"keep": list(options.keep) or None}
    for path in filter(None, (args.save_policy, args.lp)):
        check_new_file(path)  # before the search takes its time
    if options.lengths is not None:
        choice = search_queue(options, _note)
        if args.save_policy:
            write_by_rename(args.save_policy, choice.system.policy.to_json())
        lines = describe_policy(choice.system.policy, choice.run.at_a_time)
        args.show("\n".join([describe_queue(choice), *lines]))
        args.show(describe_rates(choice.system.hardware))
        return asked_record(choice.system.hardware, _asked(args, asked)) | choice.to_dict()
    report = run_search(options, _note, args.show)
    if args.save_policy:
        write_by_rename(args.save_policy, report.found.policy.to_json())
    return _record(args, report.hardware, report.best.tokens_per_s, asked) | search_record(report)


def sweep(args) -> dict:
    """Simulate all points of a grid file into a table; return a summary."""
    gc.set_threshold(UNTIL_COLLECTED)
    out, quiet = args.out or args.grid.with_suffix(".csv"), args.quiet or args.json
    summary = sweep_grid(args.grid, out, args.workers, args.fresh, quiet, args.plot)
    resumed = f", {summary.num_resumed} already in the table" if summary.num_resumed else ""
    failed = f", {summary.num_errors} cannot run (see column error)" if summary.num_errors else ""
    args.show(f"{summary.num_points} points in {summary.seconds:.1f} s{resumed}{failed}: {summary.path}")
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(summary).items()}
