"""``flexhybrid cascade …``: the commands and their arguments. Nothing slow is imported before one runs."""

import argparse
import functools
import sys
from pathlib import Path

from flexhybrid.core.errors import InputError, flag

TASKS = ("classification", "generation", "extraction")
COSTS = ("energy_j", "seconds", "money")


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
    parser.add_argument("--logits", nargs="+", default=[], metavar="NAME=FILE", help=".npz or .parquet with logits")
    parser.add_argument("--labels", type=Path, help=".npz or .parquet with labels, beside --logits")
    sources = "local models: .pt2 of torch.export, module:function, or a checkpoint folder (generation)"
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME=PATH", help=sources)
    parser.add_argument("--data", type=Path, help="requests and labels for --models: .npz with x and labels, or .jsonl")
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help=f"({TASKS[0]})")
    parser.add_argument("--max-tokens", type=int, default=1, help="generation: tokens of an answer (1)")
    _policies(parser)
    parser.add_argument("--top-k", type=int, help="generation: likeliest tokens that confidence is read off (10)")
    for cost, unit in zip(COSTS, ("joules", "seconds", "money"), strict=True):
        parser.add_argument(flag(cost), nargs="+", type=float, metavar="X", help=f"{unit} of a request, one a model")
    parser.add_argument("--watts", type=float, help="a stated power: energy is this times the seconds, not measured")
    _device(parser)
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file to write")
    parser.set_defaults(run=_fit)


def _policies(parser: argparse.ArgumentParser) -> None:
    policies = "generation: where a model keeps weights and caches, a system by name or a policy JSON file (auto)"
    parser.add_argument("--policies", nargs="+", default=[], metavar="NAME=POLICY", help=policies)


def _add_search(parts) -> None:
    parser = parts.add_parser(
        "search",
        help="search thresholds and skips for accuracy and cost",
        description="From what fit wrote: the curve of accuracy against cost over all thresholds, and a point of it. "
        "ap is the cheapest as accurate as the largest model, eo where more accuracy begins to be dear. A cascade that "
        "costs more than the largest model alone is refused.",
    )
    parser.add_argument("fitted", type=Path, help="the file that fit wrote")
    parser.add_argument("--cost", choices=COSTS, default=COSTS[0], help=f"what is saved ({COSTS[0]})")
    parser.add_argument("--mode", choices=("ap", "eo"), default="ap")
    parser.add_argument("--accuracy", type=float, help="the cheapest that is so accurate (0.97), in place of --mode")
    parser.add_argument("--method", choices=("exact", "sampling"), default="exact", help="sampling is the paper's")
    parser.add_argument("--drop", choices=("best", "paper", "none"), default="best", help="which models go")
    parser.add_argument("--skips", choices=("fitted", "paper", "none"), default="fitted", help="which ones are jumped")
    parser.add_argument(
        "--caution", type=float, help="divides the doubt 1 - t that a threshold t allows: safer and dearer (1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    parser.add_argument("--curve", type=Path, help="write the curve to this CSV file")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file of the cascade to write")
    parser.set_defaults(run=_search)


def _add_run(parts) -> None:
    parser = parts.add_parser(
        "run",
        help="serve a file of requests through a cascade of local models",
        description="Answer every request of a file through the cascade, in the file's order, a line of JSON each, and "
        "count who answered. Where a model fails, its requests go on to the next larger one.",
    )
    parser.add_argument("--cascade", type=Path, required=True, help="the file that search wrote")
    parser.add_argument("-i", "--input", type=Path, help="requests: .npz with x, .jsonl or .txt")
    parser.add_argument("-o", "--output", type=Path, help="answers, .jsonl")
    parser.add_argument("--restart", action="store_true", help="write over the answers of an earlier run")
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME=PATH", help="where models are now")
    parser.add_argument("--max-tokens", type=int, default=1, help="generation: tokens of an answer (1)")
    _policies(parser)
    engines = "ray: deployments of Ray Serve with an HTTP endpoint, which without -i serves until Ctrl-C (local)"
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help=engines)
    _device(parser)
    parser.add_argument("--plan", type=Path, help="ray: replicas, batches and places by `flexhybrid cascade plan`")
    parser.add_argument("--isolate", action="store_true", help="ray: a process for each model (one for all)")
    parser.add_argument("--port", type=int, default=8000, help="ray: of the endpoint on this machine (8000)")
    parser.add_argument("--name", help="ray: of the application (cascade)")
    parser.add_argument("--route", help="ray: path under which the endpoint has it (/)")
    parser.add_argument("--timeout-s", type=float, help="ray: a model that takes longer is passed over (120)")
    parser.add_argument("--queue", type=int, help="ray: HTTP requests under way; more get status 503 (256)")
    parser.add_argument("--detach", action="store_true", help="ray: without -i, leave it serving on a running cluster")
    parser.set_defaults(run=_run)


def _add_stop(parts) -> None:
    parser = parts.add_parser(
        "stop",
        help="end a cascade that run --detach left serving",
        description="End an application of Ray Serve by its name. Other applications of the cluster are left alone.",
    )
    parser.add_argument("--name", default="cascade", help="as it was given to run (cascade)")
    parser.set_defaults(run=_stop)


def _device(parser: argparse.ArgumentParser) -> None:
    devices = "auto, cpu or cuda: where models compute; auto is the GPU, if there is one (auto)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help=devices)


def _add_profile(parts) -> None:
    parser = parts.add_parser(
        "profile",
        help="measure models' seconds, memory and utilisation over batch sizes",
        description="Time local models at several batch sizes, with the memory that they take, the share of the "
        "device's time that they use, and their energy where the machine counts it (Algorithm 3, lines 1 to 4). "
        "Writes the profiles that plan and simulate read. For a machine that should do nothing else meanwhile.",
    )
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=PATH", help="local models, as fit's")
    parser.add_argument("--data", type=Path, required=True, help="requests, as fit's; labels are not needed")
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help=f"({TASKS[0]})")
    parser.add_argument("--batches", nargs="+", type=int, metavar="B", help="requests of a batch (1 2 4 8 16)")
    parser.add_argument("--repeats", type=int, help="of each batch size, of which the median counts (5)")
    parser.add_argument("--max-tokens", type=int, default=1, help="generation: tokens of an answer (1)")
    _policies(parser)
    _device(parser)
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON file of profiles to write")
    parser.set_defaults(run=_profile)


def _add_plan(parts) -> None:
    parser = parts.add_parser(
        "plan",
        help="place a cascade's models and replicas on GPUs",
        description="Place replicas and partitions of a cascade's models on GPUs with as little transfer as can be, "
        "within each GPU's memory and time (Algorithm 3); says how far from the best that can be at most.",
    )
    _placed(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan to this JSON file")
    parser.set_defaults(run=_plan)


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
    parser.set_defaults(run=_simulate)


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


def _fit(args) -> dict:
    from flexhybrid.cascade.thresholds.fit import FitOptions, describe_fit, run_fit
    from flexhybrid.jobs.options import options_from

    result = run_fit(options_from(FitOptions, args, costs={cost: getattr(args, cost) for cost in COSTS}))
    args.show(describe_fit(result))
    return result


def _search(args) -> dict:
    from flexhybrid.cascade.thresholds.search import SearchOptions, describe_search, run_search
    from flexhybrid.jobs.options import options_from

    result = run_search(args.fitted, args.out, options_from(SearchOptions, args), args.curve)
    args.show(describe_search(result))
    return result


def _run(args) -> dict:
    from tqdm import tqdm

    from flexhybrid.cascade.serving.ray_serve import ServeOptions
    from flexhybrid.cascade.serving.run import CascadeRunOptions, describe_run, run
    from flexhybrid.jobs.options import options_from

    with tqdm(desc="cascade", unit="request", file=sys.stderr, disable=args.json or None, leave=False) as bar:
        options = options_from(
            CascadeRunOptions, args, serving=options_from(ServeOptions, args), on_progress=bar.update
        )
        result = run(options, say=functools.partial(print, file=sys.stderr))
    if not args.json:
        print(describe_run(result))
    return result


def _profile(args) -> dict:
    from flexhybrid.cascade.profiling import ProfileOptions, describe_profile, run_profile
    from flexhybrid.jobs.options import options_from

    result = run_profile(options_from(ProfileOptions, args), say=functools.partial(print, file=sys.stderr))
    args.show(describe_profile(result))
    return result


def _stop(args) -> dict:
    from flexhybrid.cascade.serving.ray_serve import stop

    result = stop(args.name, functools.partial(print, file=sys.stderr))
    args.show(f"ended: {result['ended']}")
    return result


def _placement(args):
    """Return the plan of the arguments, for the most requests/s that can be placed where they name no rate."""
    from flexhybrid.cascade.cluster.profiles import flow_of, read_profiles
    from flexhybrid.cascade.cluster.served import even_cluster
    from flexhybrid.cascade.placement.search import most_rate, plan
    from flexhybrid.cascade.routes import Cascade
    from sim import catalogue

    cascade = Cascade.load(args.cascade)
    hardware = catalogue.load(args.hardware)
    link = 1e-9 / hardware.lines["h2d"].s_per_byte  # two GPUs of a host talk over their links
    memory = int(hardware.usable_memory("device") or 0)
    cluster = even_cluster(args.hosts, args.gpus, memory, max(link, args.network_gb_per_s), args.network_gb_per_s)
    served = read_profiles(args.profiles, cascade.names), flow_of(cascade), cluster
    limits = args.batch, args.most_load, args.time_limit
    return plan(*served, most_rate(*served, *limits) if args.rate is None else args.rate, *limits)


def _plan(args) -> dict:
    import json

    from flexhybrid.cascade.placement.search import describe
    from flexhybrid.core.files import check_new_file, write_by_rename

    if args.out:
        check_new_file(args.out)
    plan = _placement(args)
    record = {"version": 1, "cascade": str(args.cascade), **plan.to_dict()}
    if args.out:
        write_by_rename(args.out, json.dumps(record, indent=1))
    args.show(describe(plan))
    return record


def _simulate(args) -> dict:
    from flexhybrid.cascade.cluster import arrivals
    from flexhybrid.cascade.cluster import simulation as cluster
    from flexhybrid.cascade.cluster.deployment import deploy
    from flexhybrid.cascade.placement.search import describe

    power = _power(args)
    times = arrivals.read_trace(args.trace) if args.trace else None
    plan = _placement(args)
    deployment = deploy(plan, args.router_ms / 1e3)
    if times is None:
        rate = 0.7 * plan.layout.rate if args.rate is None else args.rate
        cluster.check_stable(deployment, rate)
        times = arrivals.poisson(rate, args.requests, args.seed)
    served = cluster.simulate(deployment, times, power, args.batch_wait_ms / 1e3, args.service, args.seed)
    if not args.json:
        print(describe(plan))
        print(cluster.describe(served))
    return {"plan": plan.to_dict(), **served.to_dict(), "capacity": deployment.capacity()}


def _power(args):
    """Return the GPUs' power; InputError where it is not known."""
    from flexhybrid.cascade.cluster.energy import POWER, PowerModel
    from sim import catalogue

    watts = args.idle_w, args.busy_w
    if None not in watts:
        return PowerModel(*watts, f"given: {args.idle_w:g} W idle, {args.busy_w:g} W busy")
    if watts != (None, None):
        raise InputError("give both --idle-w and --busy-w, or neither")
    name = catalogue.load(args.hardware).name
    if name not in POWER:
        raise InputError(f"the power of {name} is not known: give --idle-w and --busy-w")
    return POWER[name]


#: The commands of the group: each adds its parser, with ``run`` set to a function of the arguments that returns a dict.
PARTS = (_add_fit, _add_search, _add_run, _add_stop, _add_profile, _add_plan, _add_simulate)
