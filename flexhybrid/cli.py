"""The ``flexhybrid`` command. For a user's error it prints one line to stderr and exits with status 2."""

import argparse
import functools
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path

from flexhybrid import __version__
from flexhybrid.arguments import LLMArguments, add_options, budgets_from, options_from, split_names
from flexhybrid.cascade.cli import add_cascade
from flexhybrid.core.errors import FORMER_FLAGS, InputError, file_error, stray_error, unknown
from flexhybrid.core.model.shape import shape_from_config
from flexhybrid.core.policy import Policy
from flexhybrid.jobs.hardware import add_hardware
from flexhybrid.jobs.options import AccuracyOptions, CompareOptions
from flexhybrid.jobs.paths import check_checkpoint, check_file
from flexhybrid.jobs.predicting import add_predicting
from flexhybrid.jobs.progress import lasting_streams, lost_interrupts_again
from flexhybrid.jobs.run.cli import add_doctor, add_run
from flexhybrid.serving.cli import add_serve


class _Once(argparse.Action):
    """Stores a value; refuses a second one for files and lists, which would silently replace the first.
    For other options, which take a number or a name, the last value counts."""

    seen: argparse.Namespace | None = None  #: result of the parse in which the option was given

    def __call__(self, parser, namespace, values, option_string=None):
        file, several = self.type is Path and self.dest != "model", ("vary", "system", "policy", "selection")
        if self.seen is namespace and (file or self.nargs or self.dest in several) and option_string:
            parser.error(f"{option_string} is given twice, {getattr(namespace, self.dest)} and {values}: give it once")
        self.seen = namespace
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser that accepts no abbreviated flags and prints one line for a wrong argument."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def parse_known_args(self, args=(), namespace=None):
        """Parse the arguments; former names of flags are accepted.
        Unknown flags are reported by the command itself, and before missing ones, since a missing flag may be
        misspelled."""
        former = {old: new for old, new in FORMER_FLAGS.items() if new in self._option_string_actions}
        args = [re.sub("^[^=]*", lambda name: former.get(name[0], name[0]), text) for text in args]
        options = [] if self._subparsers else [name for name in self._option_string_actions if name.startswith("--")]
        for argument in itertools.takewhile(lambda text: text != "--", args):
            name = argument.partition("=")[0]
            if options and name.startswith("--") and " " not in name and name not in options:
                text, guessed, _ = str(unknown("option", name, options)).partition("? known: ")
                self.error(text + guessed[:1])  # without the list of all flags, which --help has
        if "--model" in options and args and args[0][:1] != "-" and not self._get_positional_actions():
            self.error(f"unrecognized arguments: {args[0]}; did you mean --model {args[0]}?")
        known, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return known, others

    def _check_value(self, action, value):
        """Report a value that is not among the choices of an argument, with similar names first."""
        if action.choices is not None and value not in action.choices:
            kind = f"value of {action.option_strings[-1]}" if action.option_strings else "command"
            self.error(str(unknown(kind, value, action.choices)))

    def error(self, message: str):
        if message.endswith("expected one argument"):
            message += ", which does not begin with -"
        self.exit(2, f"flexhybrid: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="flexhybrid", description="Run language models that do not fit the GPU, and know beforehand how fast."
    )
    parser.add_argument("--version", action="version", version=f"flexhybrid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    compare = commands.add_parser(
        "compare",
        help="profile this machine, search a policy, and measure it against others",
        description="Profile this machine, search the best KV:ACT mix, run it and other policies, and compare "
        "predictions with measurements. Without --model, exactness uses the shipped checkpoint and speed a random "
        "model. Without --link-gb-per-s, the imitated link of a CPU runs at 0.4 GB/s, or faster if the best policy at "
        "0.4 GB/s is no mix.",
    )
    add_options(compare, CompareOptions)
    compare.add_argument("--device-memory", help="budget of the device, like 12GiB (default: no limit)")
    compare.add_argument("--host-memory", default="8GiB", help="budget of the host (default: 8GiB)")
    compare.add_argument("--disk-memory", help="budget of the disk (default: the free space)")
    compare.set_defaults(run=_compare)

    profile = commands.add_parser(
        "profile",
        help="measure this machine for policy auto",
        description="Time the tasks of a policy under load: copies over the link in both directions, matrix products, "
        "attention and packing, each at several sizes, twice. Lines fitted to the times (seconds = overhead + flops "
        "and bytes at a rate) are printed and saved in $FLEXHYBRID_CACHE or ~/.cache/flexhybrid, where policy auto, "
        "simulate, search and doctor find this machine under the name local. This takes 15 seconds for a small model, "
        "one to two minutes for the default one, on an otherwise idle machine. `flexhybrid run` measures this machine "
        "for its own model automatically.",
    )
    add_options(profile, LLMArguments, {"device", "link_gb_per_s"})
    profile.add_argument("--model", type=Path, help="measure at this checkpoint's layer sizes (default: hidden 1,024)")
    profile.add_argument("--disk", type=Path, metavar="DIR", help="also measure this folder's disk (needs 256 MiB)")
    profile.add_argument("--disk-gb-per-s", type=float, help="limit the rate of that disk")
    profile.set_defaults(run=_profile)
    _add_skew(commands)
    add_run(commands)
    add_serve(commands)
    add_doctor(commands)
    add_hardware(commands)
    add_predicting(commands)
    _add_reproduce(commands)
    _add_accuracy(commands)
    for command in [*commands.choices.values(), *add_cascade(commands)]:
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    return parser


def _add_skew(commands) -> None:
    parser = commands.add_parser(
        "skew",
        help="prepare a checkpoint for InfiniGen's selection",
        description="Write a copy of a checkpoint in which few columns of each head's queries and keys determine most "
        "of the attention (InfiniGen, Sec. 4.2); the tokens stay the same. The columns come from one forward pass over "
        "the beginning of a text.",
    )
    parser.add_argument("--model", type=Path, required=True, help="local checkpoint folder (Hugging Face layout)")
    parser.add_argument("--text", type=Path, required=True, help="sample text file")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the skewed checkpoint")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of the text to use (default: 2048)")
    parser.set_defaults(run=_skew)


def _add_reproduce(commands) -> None:
    parser = commands.add_parser(
        "reproduce",
        help="rebuild the papers' tables and figures next to their own numbers",
        description="Write CSV, PNG and one self-contained report.html with the papers' numbers next to ours.",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="experiments, like capture-table3 (default: all)")
    parser.add_argument("--list", action="store_true", help="list the experiments and stop")
    parser.add_argument("--out", type=Path, default=Path("results/reproduce"), help="(default: results/reproduce)")
    parser.add_argument("--workers", type=int, help="number of processes (default: all cores)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="MACHINE.FIELD=VALUE",
        help="change a field of a paper's machine, such as rtx4090-capture.link_gb_per_s=16; repeatable",
    )
    parser.set_defaults(run=_reproduce)


def _add_accuracy(commands) -> None:
    parser = commands.add_parser(
        "accuracy",
        help="measure what policies cost in accuracy on a text",
        description="Feed the tokens of a text through the executor under each policy. Report the perplexity per 256 "
        "tokens, the similarity of attention weights and the agreement of greedy tokens with the full cache, and the "
        "shares of the cache that are attended to and loaded, as table, CSV, JSON and figure.",
    )
    add_options(parser, AccuracyOptions)
    parser.set_defaults(run=_accuracy)


def _compare(args) -> dict:
    check_checkpoint(args.model)
    if args.policy:
        Policy.load(args.policy)

    from flexhybrid.jobs.compare.job import compare

    systems = split_names(args.systems or [])
    return compare(options_from(CompareOptions, args, budgets=budgets_from(args), systems=systems), quiet=args.json)


def _profile(args) -> dict:
    named = shape_from_config(args.model) if args.model else None
    if args.disk_gb_per_s is not None and args.disk is None:
        raise InputError("--disk-gb-per-s is the rate of a disk: name its folder with --disk")

    from flexhybrid.jobs.profile.job import run_profile

    return run_profile(args, named)


def _skew(args) -> dict:
    check_checkpoint(args.model)
    check_file(args.text, "text file ")

    from flexhybrid.jobs.skew import skew

    done = skew(args.model, args.text, args.out, args.tokens)
    args.show(f"skewed with {done['tokens']} tokens of {args.text}: {args.out}")
    return done


def _reproduce(args) -> dict:
    from experiments.reproduce import registry

    if args.list:
        names = registry.names()
        args.show("\n".join(names))
        return {"experiments": names}
    result = registry.reproduce(args.only, args.out, args.workers, args.set, quiet=args.json)
    args.show(registry.describe(result))
    return result


def _accuracy(args) -> dict:
    check_checkpoint(args.model)
    check_file(args.text, "text file ")

    from flexhybrid.jobs.accuracy.job import accuracy

    named = {"policies": split_names(args.policies)} if args.policies else {}
    return accuracy(options_from(AccuracyOptions, args, **named), quiet=args.json)


def _plain(value):
    """Return a value as plain JSON: numbers that are not finite become null, numpy's numbers Python's."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    as_float = float(value)
    return as_float if math.isfinite(as_float) else None


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return the exit status.
    0: done. 1: done, but a check failed, or a disk failed. 2: wrong input. 130: stopped by the user."""
    began = time.time()
    with lasting_streams() as stdout:
        parser = build_parser()
        if not (argv := sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        args = parser.parse_args(argv)
        args.show = (lambda text: None) if args.json else functools.partial(print, flush=True)  # prints a result
        args.began = began  # for the seconds of the whole command, imports included
        status = _status(args)
        stdout.flush()
        if stdout.failure and not isinstance(stdout.failure, BrokenPipeError):  # a reader like head may end early
            error = file_error("write to stdout", stdout.failure)
            print(f"flexhybrid: {error}", file=sys.stderr)
            return status if args.command == "run" else status or error.exit_status
        return status


def _status(args) -> int:
    """Run the command of parsed arguments; return the exit status."""
    try:
        with lost_interrupts_again():
            result = args.run(args)
    except (InputError, OSError) as error:
        error = stray_error(error) if isinstance(error, OSError) else error
        print(f"flexhybrid: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt as stop:
        print(": ".join(("flexhybrid: stopped", *stop.args)), file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(_plain(result), allow_nan=False))
    if "exit_status" in result:
        return result["exit_status"]
    wrong = any(row["lossless"] and not row["exact"] for row in result.get("exactness", ()))
    return 1 if result.get("trace_violations") or wrong else 0
