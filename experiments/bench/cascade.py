"""Bench rows of the cascade on Ray Serve: what its router adds to a request."""

import socket
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from experiments.bench.harness import Table, bench, seconds_in_turn
from flexhybrid.cascade.models import ModelOutputs
from flexhybrid.cascade.routes import Cascade, CascadeModel
from flexhybrid.cascade.serving.ray_serve import HOST, ROUTER, ServeOptions, deployed

WARM_UP = 20  #: requests that set up connections
ROUTED_BYTES, NUM_ROUTED = 50_000, 200  #: the paper's prediction vector of GPT (Sec. VI-D)


class Instant:
    """A model that computes nothing: a request takes only its transport."""

    name = "instant"

    def predict(self, batch: Sequence | np.ndarray) -> ModelOutputs:
        logits = np.zeros((len(batch), 1, 2))
        logits[..., 0] = 9.0
        return ModelOutputs([0] * len(batch), logits, np.ones((len(batch), 1), dtype=bool))

    def close(self) -> None:
        pass


class Holder:
    """A plain actor of Ray that answers a request at once, or by asking another one."""

    def __init__(self, other=None):
        self.other = other

    async def ask(self, request):
        return 0 if self.other is None else await self.other.ask.remote(request)


@bench("cascade")
def bench_serve(table: Table) -> None:
    """The router's addition to requests of 50 KB on Ray Serve, one at a time: through it, and straight to a model's
    process. Two applications on one cluster: models in the router's process, and each in a process of its own. Beside
    them the same hop between two plain actors of Ray, below which no router in another process can come."""
    import ray
    from ray import serve

    cascade = Cascade((CascadeModel(Instant.name), CascadeModel("larger")), (0.5,))
    request, loads = np.zeros(ROUTED_BYTES // 4, dtype=np.float32), [Instant, Instant]
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    together = ServeOptions(port=port, name="together", route="/together")
    apart = ServeOptions(port=port, name="apart", route="/apart", isolate=True)
    with deployed(cascade, loads, together, tqdm.write), deployed(cascade, loads, apart, tqdm.write):
        routers = {options.name: serve.get_deployment_handle(ROUTER, options.name) for options in (together, apart)}
        process = serve.get_deployment_handle(Instant.name, apart.name)
        actor = ray.remote(num_cpus=0)(Holder)
        last = actor.remote()
        first = actor.remote(last)
        calls = {
            "together": lambda turn: routers["together"].answer.remote(request, 0).result(),
            "apart": lambda turn: routers["apart"].answer.remote(request, 0).result(),
            "process": lambda turn: process.ask.remote(0, request).result(),
            "two actors": lambda turn: ray.get(first.ask.remote(request)),
            "actor": lambda turn: ray.get(last.ask.remote(request)),
        }
        seconds = seconds_in_turn(calls, NUM_ROUTED, WARM_UP)
    ms = {call: 1e3 * float(np.median(taken)) for call, taken in seconds.items()}
    rays = ms["two actors"] - ms["actor"]
    name = "cascade on Ray Serve: what the router adds to a request of 50 KB"
    for words, call in (("", "together"), (", each model in its own process", "apart")):
        straight, through = ms["process"], ms[call]
        conditions = {"straight_ms": straight, "through_ms": through, "hop_of_plain_actors_ms": rays}
        table.at_most(name + words, through - straight, 2, "ms", **conditions)
    name = "cascade on Ray Serve: the router's hop to another process, over that of two plain actors of Ray"
    table.at_most(name, (ms["apart"] - ms["process"]) / rays, 1.5, "x", hop_of_plain_actors_ms=rays)
