"""``flexhybrid cascade …``: the commands and their arguments. Slow imports happen only when a command runs."""

import argparse
from pathlib import Path

from flexhybrid.arguments import add_options, job
from flexhybrid.cascade.options import CascadeRunOptions, FitOptions, ProfileOptions, SearchOptions, ServeOptions
from flexhybrid.cascade.routes import COSTS
from flexhybrid.core.errors import flag


def add_cascade(commands) -> list[argparse.ArgumentParser]:
    """Add the group of commands; return their parsers."""
    group = commands.add_parser(
        "cascade",
        help="serve requests with small models if these are confident, else with larger ones",
        description="Serve several sizes of a model together: a calibrated confidence decides whether a model's answer "
        "is returned or the request goes on to a larger model.",
    )
    parts = group.add_subparsers(dest="part", required=True)
    for add in PARTS:
        add(parts)
    return list(parts.choices.values())


def _add_fit(parts) -> None:
    parser = parts.add_parser(
        "fit",
        help="fit each model's confidence on labelled validation data",
        description="Scale each model's logits by one temperature, so that its confidence is the probability that the "
        "answer is right. Logits come from files, or from running local models. The outputs of models do not change. "
        "Give models, and their costs, from small to large.",
    )
    add_options(parser, FitOptions)
    for cost, unit in zip(COSTS, ("joules", "seconds", "money"), strict=True):
        parser.add_argument(flag(cost), nargs="+", type=float, metavar="X", help=f"{unit} per request, for each model")
    parser.set_defaults(run=job("flexhybrid.cascade.thresholds.fit", "command"))


def _add_search(parts) -> None:
    parser = parts.add_parser(
        "search",
        help="search thresholds and skips for accuracy and cost",
        description="Compute the curve of accuracy against cost over all thresholds from the file of fit, and choose a "
        "point of it: with mode ap the cheapest one that is as accurate as the largest model, with mode eo the one "
        "beyond which accuracy costs much more. A cascade that costs more than the largest model alone is refused.",
    )
    parser.add_argument("fitted", type=Path, help="file written by fit")
    add_options(parser, SearchOptions)
    parser.add_argument("--curve", type=Path, help="write the curve to this CSV file")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file of the cascade to write")
    parser.set_defaults(run=job("flexhybrid.cascade.thresholds.search", "command"))


def _add_run(parts) -> None:
    parser = parts.add_parser(
        "run",
        help="answer a file of requests with a cascade of local models",
        description="Answer every request of a file with the cascade, in the file's order, one line of JSON each, and "
        "count the answers of each model. If a model fails, its requests go on to the next larger one.",
    )
    add_options(parser, CascadeRunOptions)
    add_options(parser, ServeOptions)
    parser.set_defaults(run=job("flexhybrid.cascade.serving.run", "command"))


def _add_stop(parts) -> None:
    parser = parts.add_parser(
        "stop",
        help="end a cascade that was started with run --detach",
        description="End an application of Ray Serve by its name. Other applications of the cluster keep running.",
    )
    parser.add_argument("--name", default="cascade", help="name that was given to run (default: cascade)")
    parser.set_defaults(run=job("flexhybrid.cascade.serving.ray_serve", "stop_command"))


def _add_profile(parts) -> None:
    parser = parts.add_parser(
        "profile",
        help="measure models' seconds, memory and utilisation over batch sizes",
        description="Measure local models at several batch sizes: seconds, memory, the share of the device's time "
        "that they use, and their energy if the machine counts it (Algorithm 3, lines 1 to 4). The file of profiles is "
        "for plan and simulate. The machine should be idle otherwise.",
    )
    add_options(parser, ProfileOptions)
    parser.set_defaults(run=job("flexhybrid.cascade.profiling", "command"))


def _add_plan(parts) -> None:
    parser = parts.add_parser(
        "plan",
        help="place a cascade's models and replicas on GPUs",
        description="Place replicas and partitions of a cascade's models on GPUs with the least transfers, within each "
        "GPU's memory and time (Algorithm 3). The result has a bound on its distance from the optimum.",
    )
    _placed(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan to this JSON file")
    parser.set_defaults(run=job("flexhybrid.cascade.placed", "plan_command"))


def _add_simulate(parts) -> None:
    parser = parts.add_parser(
        "simulate",
        help="predict latency, throughput and energy of a cascade on a cluster",
        description="Place a cascade and simulate requests: queues, batches, transfers and replicas in virtual time. "
        "Report mean and 99.9 % latency, throughput, and joules per request with the GPUs' idle power.",
    )
    _placed(parser)
    parser.add_argument("--requests", type=int, default=100_000, help="number of Poisson arrivals (default: 100000)")
    parser.add_argument("--trace", type=Path, help="CSV file with a column arrival_s, instead of Poisson arrivals")
    parser.add_argument(
        "--batch-wait-ms", type=float, default=0.0, help="wait of a batch that is not full (default: 0)"
    )
    parser.add_argument("--router-ms", type=float, default=0.0, help="time of the router per hop (default: 0)")
    service = "distribution of service times (default: fixed)"
    parser.add_argument("--service", choices=("fixed", "exponential"), default="fixed", help=service)
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and routes (default: 0)")
    parser.add_argument("--idle-w", type=float, help="power of an idle GPU, W (default: the hardware's, if known)")
    parser.add_argument("--busy-w", type=float, help="power of a busy GPU, W (default: the hardware's, if known)")
    parser.set_defaults(run=job("flexhybrid.cascade.placed", "simulate_command"))


def _placed(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a placement."""
    parser.add_argument("cascade", type=Path, help="cascade file written by `flexhybrid cascade search`")
    parser.add_argument("--profiles", type=Path, required=True, help="JSON file with seconds and bytes by batch size")
    parser.add_argument("--hardware", required=True, help="the GPUs: a machine by name (t4), or a hardware file")
    parser.add_argument("--hosts", type=int, default=1, help="number of hosts (default: 1)")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs per host (default: 1)")
    network = "rate of the network between hosts (default: 1.25, 10 Gbit/s)"
    parser.add_argument("--network-gb-per-s", type=float, default=1.25, help=network)
    parser.add_argument(
        "--rate", type=float, help="requests/s (default: the highest possible; simulate takes 0.7 of it)"
    )
    parser.add_argument("--batch", type=int, default=1, help="requests that arrive together (default: 1)")
    parser.add_argument("--most-load", type=float, default=0.8, help="usable share of a GPU's time (default: 0.8)")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the placement (default: 10)")


#: Functions that add the parsers of the group's commands; ``run`` is a function from arguments to a dict.
PARTS = (_add_fit, _add_search, _add_run, _add_stop, _add_profile, _add_plan, _add_simulate)
