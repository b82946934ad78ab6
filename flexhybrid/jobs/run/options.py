"""Options of ``flexhybrid run``, and the checks that need no heavy imports."""

from argparse import BooleanOptionalAction
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from flexhybrid.arguments import TRIALS_HELP, LLMArguments, option
from flexhybrid.batch.formats import FORMATS, STDIN, ChatRules, Columns, check_encoding, format_of
from flexhybrid.core.errors import InputError, check, file_errors
from flexhybrid.core.files import check_new_file, parse_json
from flexhybrid.core.policy import Policy
from flexhybrid.jobs.paths import check_checkpoint, check_file
from flexhybrid.sampling_params import SamplingParams
from sim import catalogue

#: Option -> what a run writes to that file, and the endings allowed for it.
WRITTEN = {
    "--output": ("JSON lines (or, into *.parquet or *.csv, a table)", ".jsonl", ".json", ".ndjson"),
    "--errors": ("JSON lines", ".jsonl", ".json", ".ndjson"),
    "--trace": ("JSON", ".json"),
    "--report": ("Markdown or HTML", ".md", ".html"),
}
TABLES = (".parquet", ".csv")  #: endings of --output that ask for a table
#: Endings that are refused for an option unless they are its own.
OTHERS = {".parquet", ".csv", ".tsv", ".xlsx", ".html", ".htm", ".pdf", ".arrow", ".feather", ".gz", ".zst", ".zip"}
OTHERS |= {ending for _, *endings in WRITTEN.values() for ending in endings}


@dataclass(frozen=True)
class RunOptions:
    """The command's flags by name."""

    input: Path = option("file of requests (also .gz), a dataset's folder, or - for stdin", names=("-i", "--input"))
    output: Path = option("file of answers: JSON lines, or a table, .parquet or .csv", names=("-o", "--output"))
    llm: LLMArguments  # pyright: ignore[reportGeneralTypeIssues] (no option, and required like those before it)
    errors: Path | None = option("file for the lines that were refused (default: the output)", None)
    format: str = option(None, "auto", choices=("auto", *FORMATS))
    encoding: str | None = option(
        "encoding of text, CSV and JSON lines, like cp1252 (default: UTF-8, or by BOM)", None, metavar="NAME"
    )
    column: str | None = option("column with the prompts in CSV, Parquet or a dataset", None)
    id_column: str | None = option("column with the custom_ids (default: line-1, line-2, …)", None)
    chat: bool = option("send the prompts of text and tables as user messages of chats", False)
    system_prompt: str | None = option("with --chat: system message before each prompt", None, metavar="TEXT")
    chat_template: Path | None = option("Jinja template of chats (default: the tokenizer's)", None, metavar="FILE")
    chat_template_kwargs: str | None = option(
        'default variables of the chat template, like {"enable_thinking": false}', None, metavar="JSON"
    )
    table: Path | None = None  #: table of the answers, written at the end; ``output`` is then its journal
    named_sampling: dict = field(default_factory=dict)  #: sampling parameters given as flags
    checkpoint_sampling: dict = field(default_factory=dict)  #: sampling parameters of generation_config.json
    seed: int = option("seed of requests without their own; each also depends on its line (default: 0)", 0)
    max_batch: int | None = option(
        "most requests at a time; a stop loses their unfinished answers (default: what memory holds)", None, metavar="N"
    )
    answer_tokens: float | None = option(
        "expected mean tokens of an answer, for the forecast and policy auto (default: max_tokens)",
        None,
        metavar="MEAN",
    )
    engine: str = option("ray: run on a Ray cluster (default: local)", "local", choices=("local", "ray"))
    actors: int | None = option("executors on the Ray cluster (default: one per GPU or node)", None, metavar="N")
    ordered: bool = option("sort the output into the input's order at the end", False)
    restart: bool = option("start over and replace the output of an earlier run", False)
    verify: bool = option("hash the model's files, so that a continued run detects changes", False)
    trace: Path | None = option("write the start and end of every task in a wave, for Perfetto", None, metavar="FILE")
    report: Path | None = option("write a page about the run, .html with figures or .md", None, metavar="FILE")
    reprofile: bool = option("measure this machine again for policy auto", False)
    quiet: bool = option("no progress bar", False)
    replan: bool = option(
        "search policy auto again if iterations or answers are 10 %% longer or shorter than predicted (default: yes)",
        True,
        action=BooleanOptionalAction,
    )
    trials: bool = option(TRIALS_HELP, True)

    @property
    def sampling(self) -> dict:
        """The default sampling parameters of requests."""
        return self.checkpoint_sampling | self.named_sampling

    @property
    def columns(self) -> Columns | None:
        return None if self.column is None else Columns(self.column, self.id_column)

    def chat_rules(self) -> ChatRules:
        """Return the rules for chats. Raise InputError if the template or its variables cannot be read."""
        rules = read_chat_rules(self.chat_template, self.chat_template_kwargs)
        return ChatRules(self.chat, self.system_prompt, *rules)


def read_chat_rules(path: Path | None, text: str | None) -> tuple[str | None, dict | None]:
    """Return the chat template of a file, and its variables from a JSON text. Raise InputError if unreadable."""
    template = variables = None
    if path:
        with file_errors(f"read {path}"):
            template = path.read_text(encoding="utf-8")
    if text is not None:
        variables = parse_json(text, "--chat-template-kwargs")
        wanted = 'an object like {"enable_thinking": false}'
        check("--chat-template-kwargs", text, isinstance(variables, dict), wanted)
    return template, variables


def journal_of(table: Path) -> Path:
    """Return the file that gets each answer before the table is written at the end."""
    return table.with_name(table.name + ".jsonl")


def check_options(options: RunOptions) -> None:
    """Raise InputError for missing paths, files given twice, and flags that contradict each other."""
    limit = options.sampling.get("max_tokens")
    check("--max-tokens", limit, limit is None or limit >= 1, "at least 1")
    SamplingParams(**options.sampling)
    check("--max-num-seqs", options.max_batch, options.max_batch is None or options.max_batch >= 1, "at least 1")
    mean = options.answer_tokens
    check("--mean-output-len", mean, mean is None or mean >= 1, "at least 1")
    if options.encoding is not None:
        check_encoding(options.encoding)
    check("--seed", options.seed, options.seed >= 0, "at least 0")
    if options.engine == "local" and options.actors is not None:
        raise InputError("--num-replicas needs --engine ray; the local engine is one executor")
    if options.engine == "ray" and options.trace:
        raise InputError("--trace is not supported with --engine ray: only the local engine writes a trace")
    flags = {"--errors": options.errors, "--trace": options.trace, "--report": options.report}
    paths = {"the input": options.input, "the output": options.output, "--output": options.table, **flags}
    policy = Path(str(options.llm.policy))  # a policy file, or a name that is not a path
    paths |= {"--policy": policy if policy.is_file() else None, "--chat-template": options.chat_template}
    resolved: dict[object, str] = {}
    for name, path in paths.items():
        if path == STDIN and name != "the input":
            raise InputError(f"{name} is -: give a file, as a continued run cannot read stdout")
        place = path and (path.stat()[1:3] if path.is_file() else path.resolve())  # a file may have several paths
        if path is not None and (other := resolved.setdefault(place, name)) != name:
            raise InputError(f"{name} and {other} are the same file, {path}")
    for name, path in {"--output": options.output, "the table": options.table, **flags}.items():
        if path is not None:
            what, *own = WRITTEN.get(name, ("", path.suffix.lower()))
            if path.suffix.lower() in OTHERS - set(own):
                raise InputError(f"{name} is {path}, but a run writes {what} there: choose the ending {own[0]}")
            check_new_file(path)
            if path.exists() and (not path.is_file() or path.parent == Path("/dev")):
                raise InputError(f"cannot write {path}: it is not a regular file")
    if options.input != STDIN and not options.input.is_dir():
        check_file(options.input)
    check_chat(options)
    if options.table and options.table.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise InputError("writing Parquet needs pyarrow: pip install pyarrow")
    check_checkpoint(Path(options.llm.model))
    if str(options.llm.policy).endswith(".json"):
        Policy.load(str(options.llm.policy))
    if isinstance(options.llm.hardware, (str, Path)):
        catalogue.load(options.llm.hardware)


def check_chat(options: RunOptions) -> None:
    """Raise InputError for flags about chats and tables that do not apply to the input's format."""
    named = format_of(options.input, options.format)
    if options.id_column is not None and options.column is None:
        raise InputError("--id-column needs --column, which names the prompts")
    if named == "jsonl" and (options.chat or options.system_prompt is not None):
        flag = "--chat" if options.chat else "--system-prompt"
        raise InputError(f"{flag} is of text and tables; in a jsonl file, a line's url says whether it is a chat")
    if options.system_prompt is not None and not options.chat:
        raise InputError("--system-prompt needs --chat: a completion has no messages")
    options.chat_rules()
