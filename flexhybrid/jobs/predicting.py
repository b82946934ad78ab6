"""The commands that predict without running a model: ``simulate``, ``search``, ``sweep``."""

import argparse
from pathlib import Path

from flexhybrid.arguments import add_budgets, add_options, job
from flexhybrid.jobs.options import PolicySearchOptions
from sim.catalogue.hosts import HOSTS


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
        "fastdecode(gpus=4), ideal, …; the error for an unknown name lists all.",
    )
    parser.add_argument("--system", help="name, with options like hybrid(0.4), or policy JSON file (default: capture)")
    parser.add_argument(
        "--compare", nargs="+", metavar="SYSTEM", help='compare several systems: "kv_only,hybrid(0.5),mine.json"'
    )
    _model_and_machine(parser, required=False)
    parser.add_argument(
        "--batch",
        type=_batch,
        help="number of requests, or auto for each system's fastest; with --lengths, the most requests that run "
        "together (default: 1024)",
    )
    parser.add_argument("--policy", help="the same as --system")
    parser.add_argument(
        "--vary",
        metavar="FIELD=V,V",
        help="a run for each value of a field: batch, prompt_len, gen_len, link_gb_per_s, device_memory, model, …",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the runs of --vary: .png, .pdf or .svg")
    parser.add_argument(
        "--clock", choices=("closed", "virtual"), default="closed",
        help="closed: a formula, in milliseconds; virtual: a simulation of each task (default: closed)",
    )  # fmt: skip
    parser.set_defaults(run=job("flexhybrid.jobs.predictions", "simulate"))


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
    parser.add_argument(
        "--batch",
        type=_batch,
        help="number of requests; with --lengths, of those that run together; auto: the fastest (default: auto)",
    )
    add_options(parser, PolicySearchOptions)
    parser.add_argument("--lossless", action="store_true", default=None, help=argparse.SUPPRESS)  # the former flag
    parser.add_argument("--save-policy", type=Path, help="write the policy to this JSON file, in an existing folder")
    parser.set_defaults(run=job("flexhybrid.jobs.predictions", "search"))


def _add_sweep(commands) -> None:
    parser = commands.add_parser(
        "sweep",
        help="simulate all combinations of a grid file",
        description="A JSON or TOML file gives lists for system (names and policy files), model, hardware, batch, "
        "prompt_len, gen_len (and host, dtype, clock, memories, rates and fields of the policy). Points that the table "
        "already has are not simulated again.",
    )
    parser.add_argument("grid", type=Path, help="grid file")
    parser.add_argument("--out", type=Path, help="table to write or to continue (default: the grid's name, .csv)")
    parser.add_argument("--workers", type=int, help="number of processes (default: all cores)")
    parser.add_argument(
        "--overwrite", dest="fresh", action="store_true", help="overwrite the table instead of continuing it"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw tokens/s over the grid's first key with several numbers"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=job("flexhybrid.jobs.predictions", "sweep"))


def _model_and_machine(parser: argparse.ArgumentParser, required: bool = True) -> None:
    texts = "a model by name (opt-30b, llama-2-70b), or a config.json", "a machine by name (rtx4090, local), or a file"
    for name, text in zip(("--model", "--hardware"), texts):
        parser.add_argument(name, required=required, help=text)
    hosts = f"host with memory, cores and disk for a catalogue GPU: {', '.join(HOSTS)} (default: the machine's own)"
    parser.add_argument("--host", metavar="NAME", help=hosts)
    parser.add_argument("--input-len", dest="prompt_len", metavar="N", type=int, help="tokens of each prompt")
    parser.add_argument("--output-len", dest="gen_len", metavar="N", type=int, help="tokens each request generates")
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE",
        help="in place of --input-len and --output-len: a queue of requests that join as others end. The file is CSV "
        "with a header, or JSON lines, with prompt_tokens, max_tokens and optionally answer_tokens, prefix (the name "
        "of a beginning that prompts share) and prefix_tokens (its length); or lines of OpenAI's Batch format, whose "
        "tokens are counted by the tokenizer next to --model (a config.json)",
    )  # fmt: skip
    parser.add_argument(
        "--mean-output-len", dest="answer_tokens", type=float, metavar="MEAN",
        help="mean answer length, if the file of --lengths has none (default: max_tokens)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="(default: as a run would choose)")
    add_budgets(parser, "the machine's")
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        help="rate of the link in each direction (default: the machine's). For a catalogue machine, its standard's "
        "rate, as `flexhybrid hardware` shows it: copies reach a share of it. For a measured one, the rate of copies",
    )
    parser.add_argument("--disk-gb-per-s", type=float, help="rate of the disk, read and write (default: the machine's)")
    parser.add_argument(
        "--gemm-tflops", type=float, help="10^12 operations a second of matrix products (default: the machine's)"
    )
    host_rate = "peak rate of the host's memory, of which attention reaches a share (default: the machine's)"
    parser.add_argument("--host-memory-gb-per-s", type=float, help=host_rate)
