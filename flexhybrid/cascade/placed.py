"""``flexhybrid cascade plan`` and ``simulate``: place a cascade on GPUs, and simulate its requests."""

import json

from flexhybrid.cascade.cluster import arrivals, simulation
from flexhybrid.cascade.cluster.deployment import deploy
from flexhybrid.cascade.cluster.profiles import flow_of, read_profiles
from flexhybrid.cascade.cluster.served import even_cluster
from flexhybrid.cascade.cluster.simulation import POWER, PowerModel
from flexhybrid.cascade.placement.search import Plan, describe, most_rate, plan
from flexhybrid.cascade.routes import Cascade
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import check_new_file, write_by_rename
from sim import catalogue


def _placement(args) -> Plan:
    """Return the plan for the arguments, by default for the highest rate that can be placed."""
    cascade = Cascade.load(args.cascade)
    hardware = catalogue.load(args.hardware)
    link = 1e-9 / hardware.lines["h2d"].s_per_byte  # rate between two GPUs of a host
    memory = int(hardware.usable_memory("device") or 0)
    cluster = even_cluster(args.hosts, args.gpus, memory, max(link, args.network_gb_per_s), args.network_gb_per_s)
    served = read_profiles(args.profiles, cascade.names), flow_of(cascade), cluster
    limits = args.batch, args.most_load, args.time_limit
    return plan(*served, most_rate(*served, *limits) if args.rate is None else args.rate, *limits)


def plan_command(args) -> dict:
    """Place a cascade; return the plan as a record."""
    if args.out:
        check_new_file(args.out)
    placed = _placement(args)
    record = {"version": 1, "cascade": str(args.cascade), **placed.to_dict()}
    if args.out:
        write_by_rename(args.out, json.dumps(record, indent=1))
    args.show(describe(placed))
    return record


def simulate_command(args) -> dict:
    """Place a cascade and simulate its requests; return a record."""
    power = _power(args)
    times = arrivals.read_trace(args.trace) if args.trace else None
    placed = _placement(args)
    deployment = deploy(placed, args.router_ms / 1e3)
    if times is None:
        rate = 0.7 * placed.layout.rate if args.rate is None else args.rate
        simulation.check_stable(deployment, rate)
        times = arrivals.poisson(rate, args.requests, args.seed)
    served = simulation.simulate(deployment, times, power, args.batch_wait_ms / 1e3, args.service, args.seed)
    args.show(f"{describe(placed)}\n{simulation.describe(served)}")
    return {"plan": placed.to_dict(), **served.to_dict(), "capacity": deployment.capacity()}


def _power(args) -> PowerModel:
    """Return the GPUs' power. Raise InputError if it is unknown."""
    watts = args.idle_w, args.busy_w
    if None not in watts:
        return PowerModel(*watts, f"given: {args.idle_w:g} W idle, {args.busy_w:g} W busy")
    if watts != (None, None):
        raise InputError("give both --idle-w and --busy-w, or neither")
    name = catalogue.load(args.hardware).name
    if name not in POWER:
        raise InputError(f"the power of {name} is not known: give --idle-w and --busy-w")
    return POWER[name]
