"""HybridServe (Edinburgh): its models with their published sizes and shares, its cluster of 12 T4s, as they are served.

Nothing is fitted: all its numbers are for validation. Sizes, accuracies and request shares are inputs; seconds follow
from sizes and the catalogue's T4.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments import reference
from experiments.reproduce.experiment import Constant
from experiments.reproduce.paper import CASCADE
from flexhybrid.cascade.cluster.arrivals import poisson
from flexhybrid.cascade.cluster.deployment import deploy
from flexhybrid.cascade.cluster.served import BatchLine, Flow, ServedModel, chain, direct, even_cluster
from flexhybrid.cascade.cluster.simulation import POWER, Served, simulate
from flexhybrid.cascade.placement import assign
from flexhybrid.cascade.placement.instances import layouts
from flexhybrid.cascade.placement.search import Plan, most_rate
from flexhybrid.core.errors import InputError
from sim import catalogue

FAMILIES = ("ViT", "T5", "GPT")
MODES = ("AP", "EO")
COMPRESSED = ("GPT-Q", "ViT-Q")  #: in Table II beside the sizes; no part of the dataflow
NUM_GPUS = 12
BATCH = 32  #: requests that enter together
MOST_LOAD = 0.9  #: of a GPU's time, in a plan
#: Least share of the requests that a deployed model answers. In Table III, the models that are left out answer 0, 0 and
#: 0.1 %.
LEAST_SHARE = 0.01
ROUTINGS = {"chain": chain, "direct": direct}
SOURCE = "hybridserve_cascade"

#: Tokens that a request computes: 14 x 14 patches and a class token at 224 pixels (the names of the ViTs say both);
#: GLUE's and LAMBADA's usual lengths are assumed. In a ratio of one family's energies they cancel.
TOKENS = {"ViT": 197, "T5": 128, "GPT": 100}
#: Bytes that a request sends: its input and the prediction on to the next model, hidden states between partitions.
OUTPUT_BYTES = {"ViT": 224 * 224 * 3 + 4000, "T5": 2048, "GPT": 50_000}


def constants() -> tuple[Constant, ...]:
    """Return the constants that no passage of the paper states."""
    values = {"idle_w": POWER["t4"].idle_w, "busy_w": POWER["t4"].busy_w, "batch": BATCH, "network": 1.25}
    return tuple(CASCADE.constant(name, number) for name, number in values.items())


@dataclass(frozen=True)
class Family:
    """Sizes of one model, small to giant: names, parameters, accuracies 0..1."""

    name: str
    models: tuple[str, ...]
    parameters: np.ndarray
    accuracy: np.ndarray

    def shares(self, mode: str) -> np.ndarray:
        """Return each model's share of all requests (Table III) [models]."""
        rows = reference.rows("cascade_tables", table="III", family=self.name, mode=mode, metric="request_share")
        by_model = dict(zip(rows["model"], rows["value"], strict=True))
        return np.array([by_model[model] for model in self.models]) / 100

    @property
    def relative(self) -> np.ndarray:
        """Return each model's parameters over the giant's."""
        return self.parameters / self.parameters[-1]


@cache
def family(name: str) -> Family:
    """Return a family of Table II, in order of size."""
    records = {
        metric: reference.rows("cascade_tables", table="II", family=name, metric=metric).to_dict("records")
        for metric in ("parameters", "accuracy")
    }
    size, accuracy = ({row["model"]: row["value"] for row in rows} for rows in records.values())
    models = tuple(sorted((model for model in size if model not in COMPRESSED), key=lambda model: size[model]))
    parameters, percents = (np.array([values[model] for model in models]) for values in (size, accuracy))
    return Family(name, models, parameters * 1e6, percents / 100)


def kept(family: Family, mode: str) -> tuple[list[int], np.ndarray]:
    """Return (the models that are deployed, the share that each of them answers).

    A model that hardly answers is left out, and its requests go to the next larger one (IV-C). Algorithm 2 as printed
    would also drop GPT-M, GPT-L and ViT-S under AP.
    """
    places, shares = list(range(len(family.models))), family.shares(mode)
    while shares[idle := int(shares[:-1].argmin())] < LEAST_SHARE:
        shares[idle + 1] += shares[idle]
        shares = np.delete(shares, idle)
        places.pop(idle)
    return places, shares


def routing_ratio(family: Family, mode: str, routing: str = "direct") -> float:
    """Return the giant's energy over the cascade's, a request's energy being in proportion to the model's size."""
    places, shares = kept(family, mode)
    return 1 / float(ROUTINGS[routing](shares).visits @ family.relative[places])


def perfect_ratio(family: Family, mode: str) -> float:
    """Return ``routing_ratio`` with every request at the model that answers it alone: no routing does better."""
    return 1 / float(family.shares(mode) @ family.relative)


def served_model(family: Family, place: int) -> ServedModel:
    """Return a size on a T4 in float16: weights read once a batch, two flops a parameter and token."""
    line, tokens = catalogue.load("t4").lines["compute"], TOKENS[family.name]
    parameters = float(family.parameters[place])
    weights_bytes = 2 * parameters
    return ServedModel(
        family.models[place],
        BatchLine(weights_bytes * line.s_per_byte, 2 * parameters * tokens * line.s_per_flop),
        BatchLine(weights_bytes + 2**29, 16e6),
        output_bytes=OUTPUT_BYTES[family.name],
        hidden_bytes=tokens * 2048 * 2,
        max_batch=BATCH,
    )


def cluster():
    return even_cluster(NUM_GPUS, 1, int(catalogue.load("t4").usable_memory("device") or 0), 12.0, 1.25)


@dataclass(frozen=True)
class CascadeSystem:
    """A family's cascade in a mode, or its giant alone (mode "giant"), and how requests are routed, one of ROUTINGS."""

    family: str
    mode: str
    routing: str = "direct"  #: "almost all requests can directly jump" by skip connections (Sec. VI-B)

    @property
    def name(self) -> str:
        return "giant alone" if self.mode == "giant" else f"{self.mode}, {self.routing}"

    def models(self) -> tuple[tuple[ServedModel, ...], Flow]:
        sizes = family(self.family)
        if self.mode == "giant":
            return (served_model(sizes, len(sizes.models) - 1),), chain((1.0,))
        places, shares = kept(sizes, self.mode)
        return tuple(served_model(sizes, place) for place in places), ROUTINGS[self.routing](shares)


@cache
def highest_rate(system: CascadeSystem) -> float:
    """Return the highest rate that the 12 GPUs carry, each at most all the time busy."""
    return most_rate(*system.models(), cluster(), BATCH, most_load=1.0, time_limit=60)


def placed(system: CascadeSystem, rate: float) -> Plan:
    """Return a plan with as few replicas as carry the rate with GPUs busy to MOST_LOAD.

    The planner's search lays them without its time limit, so that every machine finds one answer; transfers take
    microseconds here.
    """
    for layout in layouts(*system.models(), cluster(), rate, BATCH, MOST_LOAD):
        if assigned := assign.assign(layout, cluster(), MOST_LOAD, math.inf, math.inf):
            return Plan(layout, cluster(), MOST_LOAD, gpu_of=assigned[1], transfer_s=assigned[0])
    raise InputError(f"{system.family}, {system.name}: no placement for {rate:.4g} requests/s")


@cache
def run(system: CascadeSystem, rate: float, requests: int = 20_000) -> Served:
    """Simulate Poisson arrivals at the rate for which it is placed. Energy counts the GPUs that hold a model."""
    return simulate(deploy(placed(system, rate)), poisson(rate, requests), POWER["t4"])
