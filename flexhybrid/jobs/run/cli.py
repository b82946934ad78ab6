"""The commands for people with a file of requests: ``run`` and ``doctor``."""

from flexhybrid.arguments import DEVICES, LLMArguments, add_budgets, add_options, budgets_from, options_from
from flexhybrid.core.errors import flag
from flexhybrid.core.model.generation_config import default_sampling
from flexhybrid.core.model.shape import checkpoint_folder
from flexhybrid.jobs.run.options import RunOptions, check_options, journal_of

#: Sampling parameters that ``run`` takes for all requests: name, type, help.
SAMPLING = (
    ("max_tokens", int, "most tokens of an answer", "16; of a chat, what the model has room for"),
    ("temperature", float, "0 takes the most probable token", "1"),
    ("top_p", float, "share of probability drawn from", "1"),
    ("top_k", int, "tokens drawn from", "all"),
)


def add_run(commands) -> None:
    """The command."""
    parser = commands.add_parser(
        "run",
        help="answer a file of requests; the same command goes on after any stop",
        description="Answer every request of a file: lines of OpenAI's Batch format (/v1/completions or "
        "/v1/chat/completions) or of their bodies alone, plain text with a prompt a line, or a column of CSV, "
        "Parquet or a dataset. Answers are appended as they come, in OpenAI's format. Stopped or killed, the same "
        "command goes on.",
    )
    add_options(parser, RunOptions)
    add_options(parser, LLMArguments)
    add_budgets(parser, "what is free")
    for name, kind, meaning, default in SAMPLING:
        text = f"{meaning}, where a request names none ({default})"
        parser.add_argument(flag(name), type=kind, help=text)
    parser.set_defaults(run=_run)


def _run(args) -> dict:
    named = {name: getattr(args, name) for name, *_ in SAMPLING if getattr(args, name) is not None}
    llm = options_from(LLMArguments, args, budgets=budgets_from(args))
    defaults = default_sampling(checkpoint_folder(args.model), llm.generation_config)
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

    from flexhybrid.jobs.machine import return_freed_memory
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
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument(
        "--models", "--model", nargs="+", metavar="NAME", default=[], help="models by name or config.json (all)"
    )
    parser.add_argument(
        "--input-len", dest="prompt_len", metavar="N", type=int, default=512, help="tokens of each prompt (512)"
    )
    parser.add_argument(
        "--output-len", dest="gen_len", metavar="N", type=int, default=128, help="tokens each request generates (128)"
    )
    parser.set_defaults(run=_doctor)


def _doctor(args) -> dict:
    from flexhybrid.jobs.doctor import describe_doctor, doctor
    from flexhybrid.resolve import pick_device

    record = doctor(pick_device(args.device).device, args.models, args.prompt_len, args.gen_len)
    args.show(describe_doctor(record))
    return record
