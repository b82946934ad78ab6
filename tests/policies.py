"""Lossless policies that together use every verb of the executor."""

from __future__ import annotations

from flexhybrid.core.policy import Placement, Policy, Selection


def wider_policies(wide: int, narrow: int, chunk: int) -> dict[str, Policy]:
    """Return policies for every way to run; the selection here keeps all tokens. Bounds of mini-batches in tokens:
    ``wide`` holds several requests, ``narrow`` fewer, ``chunk`` less than a prompt."""
    everything = Selection("speculative", None, 1e9, 0.3, 1.0, 1.0, "lru", "device")
    return {
        "disk": Policy(
            weights=Placement(device=0.2, host=0.4, disk=0.4), max_mini_batch_tokens=wide,
            cache={"act@disk": 0.3, "kv@disk": 0.4, "kv@host": 0.3},
        ),
        "row": Policy(
            weights=Placement(device=0.5, host=0.2, disk=0.3), schedule="row", hidden="host",
            cache={"act@device": 0.5, "kv@host": 0.5}, max_mini_batch_tokens=narrow,
        ),
        "chunks, hidden on host": Policy(
            weights=Placement(host=1), cache={"act@host": 0.5, "kv@disk": 0.5}, hidden="host",
            max_mini_batch_tokens=chunk,
        ),
        "host attention": Policy(
            weights=Placement(device=0.5, host=0.5), attention="host", max_mini_batch_tokens=narrow
        ),
        "host attention, disk": Policy(
            cache={"kv@host": 0.4, "kv@disk": 0.6}, attention="host", max_mini_batch_tokens=narrow
        ),
        "split attention": Policy(
            weights=Placement(device=0.5, host=0.5), attention={"host": 0.6, "device": 0.4},
            max_mini_batch_tokens=narrow,
        ),
        "split attention, mixed": Policy(
            cache={"attended(kv@host)": 0.3, "act@host": 0.2, "kv@device": 0.1, "kv@disk": 0.2, "tok": 0.2},
            max_mini_batch_tokens=narrow,
        ),
        "split attention, chunks": Policy(
            cache={"attended(kv@host)": 0.5, "act@device": 0.3, "kv@host": 0.2}, schedule="row",
            max_mini_batch_tokens=chunk,
        ),
        "kvpr": Policy(cache={"both(kv@host,act@host)": 1.0}, max_mini_batch_tokens=wide),
        "two copies": Policy(
            cache={"both(kv@host,act@device)": 0.5, "both(kv@disk,act@host)": 0.5}, max_mini_batch_tokens=wide
        ),
        "tok": Policy(cache={"tok": 0.4, "act@device": 0.3, "kv@host": 0.3}, max_mini_batch_tokens=wide),
        "speculative": Policy(
            cache={"act@host": 0.4, "kv@host": 0.6}, selection=everything, max_mini_batch_tokens=wide
        ),
    }  # fmt: skip
