"""The ``flexhybrid`` command. Errors of the user's are one clear line on stderr and exit status 2."""

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


class _Once(argparse.Action):
    """Store a value. Files and options that name several things are refused when they are given twice, as the second
    value would replace the first unseen; of a number or a name the last one counts."""

    seen: argparse.Namespace | None = None  #: the parse in which it was given

    def __call__(self, parser, namespace, values, option_string=None):
        file, several = self.type is Path and self.dest != "model", ("vary", "system", "policy", "selection")
        if self.seen is namespace and (file or self.nargs or self.dest in several) and option_string:
            parser.error(f"{option_string} is given twice, {getattr(namespace, self.dest)} and {values}: give it once")
        self.seen = namespace
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no shortened flags and prints one line for a wrong argument."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def parse_known_args(self, args=(), namespace=None):
        """Parse; a command reports the arguments that it does not know itself, instead of the parser above it, and
        before those that are missing: one of them may be misspelled. Former names of flags are understood."""
        args = [re.sub("^[^=]*", lambda name: FORMER_FLAGS.get(name[0], name[0]), text) for text in args]
        options = [] if self._subparsers else [name for name in self._option_string_actions if name.startswith("--")]
        for argument in itertools.takewhile(lambda text: text != "--", args):
            name = argument.partition("=")[0]
            if options and name.startswith("--") and " " not in name and name not in options:
                text, guessed, _ = str(unknown("option", name, options)).partition("? known: ")
                self.error(text + guessed[:1])  # --help has all of them
        known, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return known, others

    def _check_value(self, action, value):
        """Report a value that is none of the choices of an argument as any other unknown name, the nearest first."""
        if action.choices is not None and value not in action.choices:
            kind = f"value of {action.option_strings[-1]}" if action.option_strings else "command"
            self.error(str(unknown(kind, value, action.choices)))

    def error(self, message: str):
        if message.endswith("expected one argument"):
            message += ", which does not begin with -"
        self.exit(2, f"flexhybrid: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="flexhybrid", description="Run language models that do not fit the GPU, and know beforehand how fast."
    )
    parser.add_argument("--version", action="version", version=f"flexhybrid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    compare = commands.add_parser(
        "compare",
        help="profile this machine, search a policy, run it against others",
        description="Profile this machine, search the best KV:ACT mix, run it and other policies, and show "
        "predicted against measured. Without --model: exactness on the shipped checkpoint, speed on a random model. "
        "Without --link-gb-per-s a CPU's link is paced at 0.4 GB/s, or faster where 0.4 leaves nothing to mix.",
    )
    add_options(compare, CompareOptions)
    compare.add_argument("--device-memory", help="budget of the device, like 12GiB (no limit)")
    compare.add_argument("--host-memory", default="8GiB", help="budget of the host (8GiB)")
    compare.add_argument("--disk-memory", help="budget of the disk (what is free)")
    compare.set_defaults(run=_compare)

    profile = commands.add_parser(
        "profile",
        help="measure this machine for policy auto",
        description="Time what a policy is made of, under load: copies over the link in both directions, products, "
        "attention, packing, each at several sizes, twice. Lines through the times (seconds = overhead + flops and "
        "bytes at a rate) are printed with their fit and kept in $FLEXHYBRID_CACHE or ~/.cache/flexhybrid, where "
        "policy auto, simulate, search and doctor find this machine under the name local. A quarter of a minute at a "
        "small model's sizes, one to two minutes at the usual ones, on a machine that should do nothing else. "
        "`flexhybrid run` measures at its own model's by itself.",
    )
    add_options(profile, LLMArguments, {"device", "link_gb_per_s"})
    profile.add_argument("--model", type=Path, help="measure at this checkpoint's layer sizes (hidden 1,024)")
    profile.add_argument("--disk", type=Path, metavar="DIR", help="measure the disk of this folder too (needs 256 MiB)")
    profile.add_argument("--disk-gb-per-s", type=float, help="pace of that disk")
    profile.set_defaults(run=_profile)
    _add_skew(commands)
    add_run(commands)
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
        description="Write a copy of a checkpoint in which few columns of each head's queries and keys say most about "
        "attention (InfiniGen, Sec. 4.2); tokens stay what they are. One forward of the text's beginning decides.",
    )
    parser.add_argument("--model", type=Path, required=True, help="local checkpoint folder (Hugging Face layout)")
    parser.add_argument("--text", type=Path, required=True, help="text file to learn from")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the skewed checkpoint")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of the text that are used (2048)")
    parser.set_defaults(run=_skew)


def _add_reproduce(commands) -> None:
    parser = commands.add_parser(
        "reproduce",
        help="rebuild the papers' tables and figures next to their own numbers",
        description="Write CSV, PNG and one self-contained report.html with the papers' numbers next to ours.",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some experiments, like capture-table3 (all)")
    parser.add_argument("--list", action="store_true", help="name the experiments and stop")
    parser.add_argument("--out", type=Path, default=Path("results/reproduce"), help="folder (results/reproduce)")
    parser.add_argument("--workers", type=int, help="processes (all cores)")
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
        description="Feed a text's own tokens through the executor under each policy: perplexity by 256 tokens, cosine "
        "similarity of attention weights and agreement of greedy tokens with the full cache, share of the cache that "
        "is looked at and moved; as table, CSV, JSON and picture.",
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
        raise InputError("--disk-gb-per-s is the pace of a disk: name its folder with --disk")

    from flexhybrid.jobs.profile.job import run_profile

    return run_profile(args, named)


def _skew(args) -> dict:
    check_checkpoint(args.model)
    check_file(args.text, "text file ")

    from flexhybrid.jobs.skew import skew

    done = skew(args.model, args.text, args.out, args.tokens)
    args.show(f"skewed by {done['tokens']} tokens of {args.text}: {args.out}")
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
    """What JSON can say: numbers that are not finite become null, numpy's numbers plain ones."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    as_float = float(value)
    return as_float if math.isfinite(as_float) else None


def main(argv: list[str] | None = None) -> int:
    """Parse, run, return the exit status: 0 done, 1 done but something is not as it must be, or a disk has failed,
    2 wrong input, 130 stopped by the user."""
    began = time.time()
    with lasting_streams() as stdout:
        parser = build_parser()
        if not (argv := sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        args = parser.parse_args(argv)
        # what a command tells people, besides its record, as soon as it knows it
        args.show = (lambda text: None) if args.json else functools.partial(print, flush=True)
        args.began = began  # what a command says of its own seconds has its imports in them
        status = _status(args)
        stdout.flush()
        if stdout.failure and not isinstance(stdout.failure, BrokenPipeError):  # a reader may leave, as head does
            error = file_error("write to stdout", stdout.failure)
            print(f"flexhybrid: {error}", file=sys.stderr)
            return status if args.command == "run" else status or error.exit_status
        return status


def _status(args) -> int:
    """Do what the command line asks for; return the exit status."""
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
