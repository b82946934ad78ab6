"""Closed-form mean latencies of queueing theory, as a reference for the cluster simulation. Arrivals are Poisson, and
service is first come, first served; L. Kleinrock, Queueing Systems, vol. 1 (1975), ch. 3 and 5."""

from __future__ import annotations

from flexhybrid.core.errors import InputError


def mmc_latency_s(rate: float, service_s: float, servers: int) -> float:
    """Mean time from arrival to answer of M/M/c: exponential service of mean ``service_s``, Erlang's C."""
    _check_stable(rate, service_s, servers)
    offered = rate * service_s
    blocked = 1.0  # Erlang's B by its recursion: no factorials
    for c in range(1, servers + 1):
        blocked = offered * blocked / (c + offered * blocked)
    waits = blocked / (1 - offered / servers * (1 - blocked))
    return service_s + waits * service_s / (servers - offered)


def md1_latency_s(rate: float, service_s: float) -> float:
    """Mean time from arrival to answer of M/D/1: constant service (Pollaczek and Khinchine)."""
    _check_stable(rate, service_s, 1)
    rho = rate * service_s
    return service_s + rho * service_s / (2 * (1 - rho))


def _check_stable(rate: float, service_s: float, servers: int) -> None:
    if not (rate > 0 and service_s > 0 and servers >= 1):
        raise InputError(f"rate {rate!r}, service {service_s!r} s and servers {servers!r} must be above 0")
    if rate * service_s >= servers:
        raise InputError(f"unstable: {rate:g}/s x {service_s:g} s on {servers} servers is rho >= 1")
