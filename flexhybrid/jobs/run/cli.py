"""The commands for people with a file of requests: ``run`` and ``doctor``."""

import argparse
from collections.abc import Callable
from pathlib import Path

from flexhybrid.arguments import LLMArguments
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import flag
from flexhybrid.core.model.generation_config import SOURCES, default_sampling
from flexhybrid.core.model.shape import checkpoint_folder
from flexhybrid.jobs.options import budgets_from, options_from

TRIALS_HELP = "take the search's choice as it is: no trials correct the profile"
DISK_DIR_HELP = (
    "scratch folder of policies that use a disk (scratch in $FLEXHYBRID_CACHE, or in ~/.cache/flexhybrid without it)"
)
#: Sampling parameters that ``run`` takes for all requests: name, type, help.
SAMPLING = (
    ("max_tokens", int, "most tokens of an answer", "16; of a chat, what the model has room for"),
    ("temperature", float, "0 takes the most probable token", "1"),
    ("top_p", float, "share of probability drawn from", "1"),
    ("top_k", int, "tokens drawn from", "all"),
)


def add_run(commands, common: Callable) -> None:
    """The command; ``common`` adds the arguments that all commands on a model share."""
    parser = commands.add_parser(
        "run",
        help="answer a file of requests; the same command goes on after any stop",
        description="Answer every request of a file: lines of OpenAI's Batch format (/v1/completions or "
        "/v1/chat/completions) or of their bodies alone, plain text with a prompt a line, or a column of CSV, "
        "Parquet or a dataset. Answers are appended as they come, in OpenAI's format. Stopped or killed, the same "
        "command goes on.",
    )
    common(parser)
    parser.add_argument(
        "-i",
        "--input",
        type=Path,
        required=True,
        help="file of requests (also .gz), a dataset's folder, or - for stdin",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of answers: JSON lines, or .parquet")
    parser.add_argument(
        "--model", type=Path, required=True, help="checkpoint: a local folder, or a name in the Hugging Face cache"
    )
    parser.add_argument("--errors", type=Path, help="file of the lines that were refused (the output)")
    parser.add_argument("--format", choices=("auto", "jsonl", "text", "csv", "parquet", "dataset"), default="auto")
    parser.add_argument(
        "--encoding", metavar="NAME", help="of text, CSV and JSON lines, like cp1252 (UTF-8, or by BOM)"
    )
    parser.add_argument("--column", help="column of the prompts, of CSV, Parquet and a dataset")
    parser.add_argument("--id-column", help="column of the custom_ids there (line-1, line-2, …)")
    parser.add_argument("--chat", action="store_true", help="send prompts of text and tables as messages of a user")
    parser.add_argument("--system-prompt", metavar="TEXT", help="message of the system before them, with --chat")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template of chats (the tokenizer's)")
    parser.add_argument(
        "--chat-template-kwargs", metavar="JSON",
        help='variables of the template, like {"enable_thinking": false}, where a request names no others',
    )  # fmt: skip
    parser.add_argument(
        "--generation-config", choices=SOURCES, default="auto",
        help="auto: sampling that neither a request nor this command names is that of the checkpoint's "
        "generation_config.json (auto)",
    )  # fmt: skip
    for name, kind, meaning, default in SAMPLING:
        text = f"{meaning}, where a request names none ({default})"
        parser.add_argument(flag(name), type=kind, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of requests without one, together with their line (0)")
    parser.add_argument("--policy", default="auto", help="auto, a system by name, or a policy JSON file (auto)")
    parser.add_argument("--hardware", help="what auto reckons with: a machine by name or a file (a profile, kept)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    for tier in TIERS:
        parser.add_argument(f"--{tier}-memory", help=f"budget of the {tier}, like 12GiB (what is free)")
    parser.add_argument("--disk-dir", type=Path, metavar="DIR", help=DISK_DIR_HELP)
    parser.add_argument("--disk-gb-per-s", type=float, help="pace of that disk")
    parser.add_argument(
        "--max-batch", type=int, metavar="N",
        help="requests at a time, at most: a stop loses what is not complete of so many (as many as memory holds)",
    )  # fmt: skip
    parser.add_argument(
        "--answer-tokens", type=float, metavar="MEAN",
        help="tokens expected of an answer, on average: for the forecast and policy auto (as many as it may have)",
    )  # fmt: skip
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="compute and keep what prompts begin with alike once for all of them (yes)",
    )  # fmt: skip
    graphs = "launch decode steps on a GPU by CUDA graphs, where they can be (yes)"
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help=graphs)
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="ray: on a Ray cluster (local)")
    parser.add_argument("--actors", type=int, metavar="N", help="executors on the Ray cluster (one a GPU, or a node)")
    parser.add_argument("--ordered", action="store_true", help="put the output in the input's order at the end")
    parser.add_argument("--restart", action="store_true", help="begin anew, over the output of an earlier run")
    parser.add_argument("--verify", action="store_true", help="hash the model's files, to compare when going on")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write what ran when in a wave, for Perfetto")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page about the run, in Markdown")
    parser.add_argument("--reprofile", action="store_true", help="measure this machine again for policy auto")
    parser.add_argument(
        "--replan", action=argparse.BooleanOptionalAction, default=True,
        help="search policy auto again when iterations or answers take a tenth more or less than predicted (yes)",
    )  # fmt: skip
    parser.add_argument("--no-trials", dest="trials", action="store_false", help=TRIALS_HELP)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=_run)


def _run(args) -> dict:
    from flexhybrid.jobs.run.options import RunOptions, check_options, journal_of

    named = {name: getattr(args, name) for name, *_ in SAMPLING if getattr(args, name) is not None}
    llm = options_from(LLMArguments, args, budgets=budgets_from(args))
    defaults = default_sampling(checkpoint_folder(args.model), args.generation_config)
    table = args.output if args.output.suffix.lower() == ".parquet" else None
    output = journal_of(table) if table else args.output
    options = options_from(
        RunOptions,
        args,
        llm=llm,
        named_sampling=named,
        checkpoint_sampling=defaults,
        quiet=args.quiet or args.json,
        output=output,
        parquet=table,
    )
    check_options(options)  # before the imports that take seconds

    from flexhybrid.jobs.malloc import return_freed_memory
    from flexhybrid.jobs.run.job import run

    return_freed_memory()
    return run(options, args.show, args.began)


def add_doctor(commands) -> None:
    """The command."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine offers, and which models fit it how fast",
        description="Show versions, memory, the measured links and disk, and what the search predicts of each model "
        "that is known by name. Nothing is run.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--models", "--model", nargs="+", metavar="NAME", default=[], help="models by name or config.json (all)"
    )
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of each prompt (512)")
    parser.add_argument("--gen-len", type=int, default=128, help="tokens each request generates (128)")
    parser.set_defaults(run=_doctor)


def _doctor(args) -> dict:
    from flexhybrid.jobs.doctor import describe_doctor, doctor
    from flexhybrid.resolve import pick_device

    record = doctor(pick_device(args.device).device, args.models, args.prompt_len, args.gen_len)
    args.show(describe_doctor(record))
    return record
