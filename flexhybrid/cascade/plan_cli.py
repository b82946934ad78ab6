"""``flexhybrid cascade plan`` and ``simulate``: cascade file, profiles and cluster in; placement, latencies out."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_plan(commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="place a cascade's models and replicas on GPUs",
        description="Place replicas and partitions of a cascade's models on GPUs with as little transfer as can be, "
        "within each GPU's memory and time (Algorithm 3); says how far from the best that can be at most.",
    )
    _placed(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan to this JSON file")
    parser.set_defaults(run=_plan)


def add_simulate(commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
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
    from flexhybrid.core.files import check_new_file, save_text

    if args.out:
        check_new_file(args.out)
    plan = _placement(args)
    record = {"version": 1, "cascade": str(args.cascade), **plan.to_dict()}
    if args.out:
        save_text(args.out, json.dumps(record, indent=1))
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
    from flexhybrid.core.errors import InputError
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
