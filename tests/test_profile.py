"""What the profile of a machine runs."""

from dataclasses import replace

import torch

from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import ModelShape
from flexhybrid.runtime import profile as profiling
from flexhybrid.runtime.profile import Run
from policy_search.fit import fit_hardware


def test_a_profile_takes_as_many_requests_as_the_budgets_hold(monkeypatch):
    """Smaller runs, of the same verbs; one short request where nothing fits."""
    shape = ModelShape("small", "opt", 2, 64, 2, 2, 32, 128, 100, 96)
    planned, engine = [], profiling.Engine

    def watched(weights, policy, sizes, *rest, **more):
        planned.append(total_bytes(memory_plan(shape, policy, weights.bytes_per_element, sizes, "cpu")))
        return engine(weights, policy, sizes, *rest, **more)

    monkeypatch.setattr(profiling, "Engine", watched)
    runs = (Run(8, 48, 4, {"kv@host": 0.5, "act@host": 0.5}),)

    def measured(budgets) -> tuple[set[str], int]:
        planned.clear()
        samples = profiling.profile(shape, "float32", torch.device("cpu"), runs=runs, budgets=budgets).samples
        return set(samples), max(plan["host"] for plan in planned)

    verbs, whole = measured(None)
    assert measured({"host": whole}) == (verbs, whole)
    fewer, half = measured({"host": whole // 2})
    assert fewer == verbs and half <= whole // 2
    fewest, least = measured({"host": 1})
    assert fewest == verbs and least < half


def test_kernels_alone_have_lines_of_their_own_where_the_device_holds_all():
    """And only a policy that moves nothing is priced by them."""
    shape = ModelShape("small", "opt", 2, 64, 2, 2, 32, 128, 100, 96)
    runs = (Run(2, 32, 2, {"kv@host": 0.5, "act@host": 0.5}), profiling.ALONE[0])

    def measured(budgets) -> Hardware:
        samples = profiling.profile(shape, "float32", torch.device("cpu"), runs=runs, budgets=budgets).samples
        return fit_hardware(samples, name="here", device="cpu")

    machine = measured(None)
    alone, resident = machine.lines["project_alone"], Policy(cache={"kv@device": 1.0}, weights=Placement(device=1.0))
    assert machine.at_work(resident).line("project", "compute") == alone != machine.lines["project"]
    for elsewhere in ({"weights": Placement(device=0.9, host=0.1)}, {"cache": {"kv@host": 1.0}}, {"hidden": "host"}):
        assert machine.at_work(replace(resident, **elsewhere)) == machine
    assert not [key for key in measured({"device": 1}).lines if key.endswith("_alone")]
