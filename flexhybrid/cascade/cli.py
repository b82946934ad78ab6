"""``flexhybrid cascade …``: the commands and their arguments. Nothing slow is imported before one runs."""

import argparse
from pathlib import Path

from flexhybrid.arguments import add_options, job
from flexhybrid.cascade.options import CascadeRunOptions, FitOptions, ProfileOptions, SearchOptions, ServeOptions
from flexhybrid.cascade.routes import COSTS
from flexhybrid.core.errors import flag


def add_cascade(commands) -> list[argparse.ArgumentParser]:
    """Add the group; return the parsers of its commands."""
    group = commands.add_parser(
        "cascade",
        help="small models answer what they are sure of, large ones the rest",
        description="Serve several sizes of a model together: a calibrated confidence decides whether an answer stands "
        "or the request goes on to a larger model.",
    )
    parts = group.add_subparsers(dest="part", required=True)
    for add in PARTS:
        add(parts)
    return list(parts.choices.values())


def _add_fit(parts) -> None:
    parser = parts.add_parser(
        "fit",
        help="fit each model's confidence on labelled validation data",
        description="Scale each model's logits by one temperature, so that its confidence says how often it is right: "
        "from files of logits, or by running local models. No output of a model changes. Models are named from small "
        "to large, and so are their costs.",
    )
    add_options(parser, FitOptions)
    for cost, unit in zip(COSTS, ("joules", "seconds", "money"), strict=True):
        parser.add_argument(flag(cost), nargs="+", type=float, metavar="X", help=f"{unit} of a request, one a model")
    parser.set_defaults(run=job("flexhybrid.cascade.thresholds.fit", "command"))


def _add_search(parts) -> None:
    parser = parts.add_parser(
        "search",
        help="search thresholds and skips for accuracy and cost",
        description="From what fit wrote: the curve of accuracy against cost over all thresholds, and a point of it. "
        "ap is the cheapest as accurate as the largest model, eo where more accuracy begins to be dear. A cascade that "
        "costs more than the largest model alone is refused.",
    )
    parser.add_argument("fitted", type=Path, help="the file that fit wrote")
    add_options(parser, SearchOptions)
    parser.add_argument("--curve", type=Path, help="write the curve to this CSV file")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file of the cascade to write")
    parser.set_defaults(run=job("flexhybrid.cascade.thresholds.search", "command"))


def _add_run(parts) -> None:
    parser = parts.add_parser(
        "run",
        help="serve a file of requests through a cascade of local models",
        description="Answer every request of a file through the cascade, in the file's order, a line of JSON each, and "
        "count who answered. Where a model fails, its requests go on to the next larger one.",
    )
    add_options(parser, CascadeRunOptions)
    add_options(parser, ServeOptions)
    parser.set_defaults(run=job("flexhybrid.cascade.serving.run", "command"))


def _add_stop(parts) -> None:
    parser = parts.add_parser(
        "stop",
        help="end a cascade that run --detach left serving",
        description="End an application of Ray Serve by its name. Other applications of the cluster are left alone.",
    )
    parser.add_argument("--name", default="cascade", help="as it was given to run (cascade)")
    parser.set_defaults(run=job("flexhybrid.cascade.serving.ray_serve", "stop_command"))


def _add_profile(parts) -> None:
    parser = parts.add_parser(
        "profile",
        help="measure models' seconds, memory and utilisation over batch sizes",
        description="Time local models at several batch sizes, with the memory that they take, the share of the "
        "device's time that they use, and their energy where the machine counts it (Algorithm 3, lines 1 to 4). "
        "Writes the profiles that plan and simulate read. For a machine that should do nothing else meanwhile.",
    )
    add_options(parser, ProfileOptions)
    parser.set_defaults(run=job("flexhybrid.cascade.profiling", "command"))


def _add_plan(parts) -> None:
    parser = parts.add_parser(
        "plan",
        help="place a cascade's models and replicas on GPUs",
        description="Place replicas and partitions of a cascade's models on GPUs with as little transfer as can be, "
        "within each GPU's memory and time (Algorithm 3); says how far from the best that can be at most.",
    )
    _placed(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan to this JSON file")
    parser.set_defaults(run=job("flexhybrid.cascade.placed", "plan_command"))


def _add_simulate(parts) -> None:
    parser = parts.add_parser(
        "simulate",
        help="predict latency, throughput and energy of a cascade on a cluster",
        description="Place a cascade and let requests arrive: queues, batches, hops and replicas in virtual time. Mean "
        "and 99.9 % latency, throughput, joules a request with the GPUs' idle power.",
    )
    _placed(parser)
    parser.add_argument("--requests", type=int, default=100_000, help="of a Poisson process (100000)")
    parser.add_argument("--trace", type=Path, help="CSV file with a column arrival_s, instead of Poisson arrivals")
    parser.add_argument("--batch-wait-ms", type=float, default=0.0, help="a batch that is not full waits so long (0)")
    parser.add_argument("--router-ms", type=float, default=0.0, help="what the router takes for a hop (0)")
    parser.add_argument("--service", choices=("fixed", "exponential"), default="fixed", help="times of service (fixed)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and ways (0)")
    parser.add_argument("--idle-w", type=float, help="power of a GPU that idles, W (what is known of the hardware)")
    parser.add_argument("--busy-w", type=float, help="power of a GPU that computes, W (likewise)")
    parser.set_defaults(run=job("flexhybrid.cascade.placed", "simulate_command"))


def _placed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cascade", type=Path, help="cascade file, as `flexhybrid cascade search` writes it")
    parser.add_argument("--profiles", type=Path, required=True, help="JSON file: seconds and bytes over the batch")
    parser.add_argument("--hardware", required=True, help="the GPUs: a machine by name (t4), or a hardware file")
    parser.add_argument("--hosts", type=int, default=1, help="(1)")
    parser.add_argument("--gpus", type=int, default=1, help="of each host (1)")
    parser.add_argument("--network-gb-per-s", type=float, default=1.25, help="between hosts (1.25: 10 Gbit/s)")
    parser.add_argument("--rate", type=float, help="requests/s (most that can be placed; 0.7 of it is simulated)")
    parser.add_argument("--batch", type=int, default=1, help="requests that enter together (1)")
    parser.add_argument("--most-load", type=float, default=0.8, help="of a GPU's time that may be planned (0.8)")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the placement (10)")


#: The commands of the group: each adds its parser, with ``run`` set to a function of the arguments that returns a dict.
PARTS = (_add_fit, _add_search, _add_run, _add_stop, _add_profile, _add_plan, _add_simulate)
