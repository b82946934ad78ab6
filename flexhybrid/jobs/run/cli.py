"""The commands ``run`` and ``doctor``."""

from flexhybrid.arguments import DEVICES, LLMArguments, add_budgets, add_options, budgets_from, options_from
from flexhybrid.core.errors import flag
from flexhybrid.core.model.generation_config import default_sampling
from flexhybrid.core.model.shape import checkpoint_folder
from flexhybrid.jobs.run.options import TABLES, RunOptions, check_options, journal_of

#: Sampling parameters that ``run`` and ``serve`` take for all requests: name, type, help.
SAMPLING = (
    ("max_tokens", int, "most tokens of an answer", "16; for chats: the remaining context"),
    ("temperature", float, "0 takes the most probable token", "1"),
    ("top_p", float, "draw from the most probable tokens with this total probability", "1"),
    ("top_k", int, "draw from this number of most probable tokens", "all"),
)


def add_run(commands) -> None:
    """Add the command ``run``."""
    parser = commands.add_parser(
        "run",
        help="answer a file of requests; the same command continues after any stop",
        description="Answer every request of a file: lines of OpenAI's Batch format (/v1/completions or "
        "/v1/chat/completions) or only their bodies, plain text with one prompt per line, or a column of CSV, "
        "Parquet or a dataset. Answers are appended as they come, in OpenAI's format. After a stop or a crash, the "
        "same command continues.",
    )
    add_options(parser, RunOptions)
    add_options(parser, LLMArguments)
    add_budgets(parser, "what is free")
    add_sampling(parser)
    parser.set_defaults(run=_run)


def add_sampling(parser) -> None:
    """Add the flags of SAMPLING."""
    for name, kind, meaning, default in SAMPLING:
        text = f"{meaning}, for requests that do not set it (default: {default})"
        parser.add_argument(flag(name), type=kind, help=text)


def sampling_from(args) -> dict:
    """Return the sampling parameters that were given as flags."""
    return {name: getattr(args, name) for name, *_ in SAMPLING if getattr(args, name) is not None}


def _run(args) -> dict:
    named = sampling_from(args)
    llm = options_from(LLMArguments, args, budgets=budgets_from(args))
    defaults = default_sampling(checkpoint_folder(args.model), llm.generation_config)
    table = args.output if args.output.suffix.lower() in TABLES else None
    output = journal_of(table) if table else args.output
    options = options_from(
        RunOptions,
        args,
        llm=llm,
        named_sampling=named,
        checkpoint_sampling=defaults,
        quiet=args.quiet or args.json,
        output=output,
        table=table,
    )
    check_options(options)  # before imports that take seconds

    from flexhybrid.jobs.machine import return_freed_memory
    from flexhybrid.jobs.run.job import run

    return_freed_memory()
    return run(options, args.show, args.began)


def add_doctor(commands) -> None:
    """Add the command ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="show this machine's resources, and the predicted speed of models on it",
        description="Show versions, memory, the measured links and disk, and the predicted speed of every known "
        "model. No model is run.",
    )
    parser.add_argument("--device", choices=DEVICES, default="auto")
    models = "models by name or config.json (default: all)"
    parser.add_argument("--models", "--model", nargs="+", metavar="NAME", default=[], help=models)
    lengths = ("input", "prompt_len", 512, "tokens of each prompt"), ("output", "gen_len", 128, "tokens of each answer")
    for name, dest, default, text in lengths:
        parser.add_argument(
            f"--{name}-len", dest=dest, metavar="N", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.set_defaults(run=_doctor)


def _doctor(args) -> dict:
    from flexhybrid.jobs.doctor import describe_doctor, doctor
    from flexhybrid.resolve import pick_device

    record = doctor(pick_device(args.device).device, args.models, args.prompt_len, args.gen_len)
    args.show(describe_doctor(record))
    return record
