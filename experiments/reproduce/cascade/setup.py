"""HybridServe (Edinburgh): its models with their published sizes and shares, its cluster of 12 T4s, as they are served.

Nothing is fitted: all its numbers are for validation. Sizes, accuracies and request shares are inputs; seconds follow
from sizes and the catalogue's T4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments import reference
from experiments.reproduce.experiment import Constant
from flexhybrid.cascade.cluster.arrivals import poisson
from flexhybrid.cascade.cluster.deployment import deploy
from flexhybrid.cascade.cluster.energy import POWER
from flexhybrid.cascade.cluster.served import BatchLine, Flow, ServedModel, chain, direct, even_cluster
from flexhybrid.cascade.cluster.simulation import Served, simulate
from flexhybrid.cascade.placement import assign
from flexhybrid.cascade.placement.instances import layouts
from flexhybrid.cascade.placement.search import Plan, most_rate
from flexhybrid.core.errors import InputError
from sim import catalogue

PAPER = "HybridServe: Efficient Serving of Large AI Models with Confidence-Based Cascade Routing, Edinburgh, ICDCS 2025"
FAMILIES = ("ViT", "T5", "GPT")
MODES = ("AP", "EO")
COMPRESSED = ("GPT-Q", "ViT-Q")  #: in Table II beside the sizes; no part of the dataflow
NUM_GPUS = 12
BATCH = 32  #: requests that enter together
MOST_LOAD = 0.9  #: of a GPU's time, in a plan
LEAST_SHARE = 0.01  #: of the requests that a deployed model answers; Table III has 0, 0 and 0.1 % among the others
ROUTINGS = {"chain": chain, "direct": direct}
SOURCE = "hybridserve_cascade"

#: Tokens that a request computes: 14 x 14 patches and a class token at 224 pixels (the names of the ViTs say both);
#: GLUE's and LAMBADA's usual lengths are assumed. In a ratio of one family's energies they cancel.
TOKENS = {"ViT": 197, "T5": 128, "GPT": 100}
#: Bytes that a request sends: its input and the prediction on to the next model, hidden states between partitions.
OUTPUT_BYTES = {"ViT": 224 * 224 * 3 + 4000, "T5": 2048, "GPT": 50_000}


def constants() -> tuple[Constant, ...]:
    """What no passage of the paper states."""
    t4 = POWER["t4"]
    return (
        Constant("idle_w", t4.idle_w, "W", 8.0, 17.0, "an idle T4 with its context loaded, as commonly reported"),
        Constant("busy_w", t4.busy_w, "W", 60.0, 70.0, "the T4's board limit"),
        Constant("batch", BATCH, "requests", 1, 256, "that enter the dataflow together; the paper names none"),
        Constant("network", 1.25, "GB/s", 0.1, 3.2, "cloud servers' 10 Gbit/s; the paper names none"),
    )


@dataclass(frozen=True)
class Family:
    """Sizes of one model, small to giant: names, parameters, accuracies 0..1."""

    name: str
    models: tuple[str, ...]
    parameters: np.ndarray
    accuracy: np.ndarray

    def shares(self, mode: str) -> np.ndarray:
        """Of all requests, what each model answers (Table III) [models]."""
        rows = reference.rows("cascade_tables", table="III", family=self.name, mode=mode, metric="request_share")
        by_model = dict(zip(rows["model"], rows["value"], strict=True))
        return np.array([by_model[model] for model in self.models]) / 100

    @property
    def relative(self) -> np.ndarray:
        """Each model's parameters over the giant's."""
        return self.parameters / self.parameters[-1]


@cache
def family(name: str) -> Family:
    """Out of Table II, in order of size."""
    size = reference.rows("cascade_tables", table="II", family=name, metric="parameters")
    size = size[~size["model"].isin(COMPRESSED)].sort_values("value")
    accuracy = reference.rows("cascade_tables", table="II", family=name, metric="accuracy").set_index("model")["value"]
    models = tuple(size["model"])
    return Family(name, models, size["value"].to_numpy(float) * 1e6, accuracy[list(models)].to_numpy(float) / 100)


def kept(one: Family, mode: str) -> tuple[list[int], np.ndarray]:
    """(models that are deployed, what each of them answers): one that hardly answers is left out, its requests go to
    the next larger one (IV-C). Algorithm 2 taken at its word would also drop GPT-M, GPT-L and ViT-S under AP."""
    places, shares = list(range(len(one.models))), one.shares(mode)
    while shares[idle := int(shares[:-1].argmin())] < LEAST_SHARE:
        shares[idle + 1] += shares[idle]
        shares = np.delete(shares, idle)
        places.pop(idle)
    return places, shares


def routing_ratio(one: Family, mode: str, routing: str = "chain") -> float:
    """Energy of the giant alone over the cascade's, a request's energy being in proportion to the model's size."""
    places, shares = kept(one, mode)
    return 1 / float(ROUTINGS[routing](shares).visits @ one.relative[places])


def perfect_ratio(one: Family, mode: str) -> float:
    """The same if every request went to the model that answers it and to no other: no routing does better."""
    return 1 / float(one.shares(mode) @ one.relative)


def served_model(one: Family, place: int) -> ServedModel:
    """A size on a T4 in float16: weights read once a batch, two flops a parameter and token."""
    line, p = catalogue.load("t4").lines["compute"], 2
    parameters, tokens = float(one.parameters[place]), TOKENS[one.name]
    return ServedModel(
        one.models[place],
        BatchLine(parameters * p * line.s_per_byte, 2 * parameters * tokens * line.s_per_flop),
        BatchLine(parameters * p + 2**29, 16e6),
        output_bytes=OUTPUT_BYTES[one.name], hidden_bytes=TOKENS[one.name] * 2048 * p, max_batch=BATCH,
    )  # fmt: skip


def cluster():
    return even_cluster(NUM_GPUS, 1, int(catalogue.load("t4").usable_memory("device")), 12.0, 1.25)


@dataclass(frozen=True)
class System:
    """A family's cascade in a mode, or its giant alone (mode "giant"), and how requests are routed."""

    family: str
    mode: str
    routing: str = "chain"

    @property
    def name(self) -> str:
        return "giant alone" if self.mode == "giant" else f"{self.mode}, {self.routing}"

    def models(self) -> tuple[tuple[ServedModel, ...], Flow]:
        one = family(self.family)
        if self.mode == "giant":
            return (served_model(one, len(one.models) - 1),), chain((1.0,))
        places, shares = kept(one, self.mode)
        return tuple(served_model(one, place) for place in places), ROUTINGS[self.routing](shares)


@cache
def most(system: System) -> float:
    """The highest rate that the 12 GPUs carry, each at most all the time busy."""
    return most_rate(*system.models(), cluster(), BATCH, most_load=1.0, time_limit=60)


def placed(system: System, rate: float) -> Plan:
    """As few replicas as carry the rate with GPUs busy to MOST_LOAD, laid by the planner's search without its clock, so
    that every machine finds the same; transfers are microseconds here."""
    for layout in layouts(*system.models(), cluster(), rate, BATCH, MOST_LOAD):
        if found := assign.search(layout, cluster(), MOST_LOAD, math.inf, math.inf):
            return Plan(layout, cluster(), MOST_LOAD, found[1], found[0], 0.0, "search", 1, 0.0)
    raise InputError(f"{system.family}, {system.name}: no placement for {rate:.4g} requests/s")


@cache
def run(system: System, rate: float, requests: int = 20_000) -> Served:
    """Poisson arrivals at the rate for which it is placed. Energy counts the GPUs that hold a model."""
    return simulate(deploy(placed(system, rate)), poisson(rate, requests), POWER["t4"])
