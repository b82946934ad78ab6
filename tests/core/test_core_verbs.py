"""Test that the executor's functions, the streams and the table of verbs agree."""

from dataclasses import replace

import numpy as np
import pytest

from flexhybrid.core.admission import open_batch
from flexhybrid.core.hardware import Hardware, Line, resource_of_line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.model.states import LayerState, StateTensor
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Experts, Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.scheduler import may_share
from flexhybrid.core.task import RESOURCES
from flexhybrid.core.verbs import CARGO, VERBS
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Prefixes, Workload
from flexhybrid.runtime.verbs import VERB_FUNCTIONS
from sim.array_clock import predict
from sim.candidates import Candidates

SHAPE = ModelShape("small", "opt", 4, 64, 2, 2, 32, 64, 32, 128)
SPECULATIVE = Selection(
    "speculative", alpha=1.0, partial_ratio=0.3, max_fraction=0.3, pool=1.0, victim="fifo", partial_keys="host"
)
ON_DISK = Placement(device=0.3, host=0.3, disk=0.4)
BOTH = "both(kv@host,act@host)"
POLICIES = (
    Policy("every tier", ON_DISK, cache={f"{r}@{t}": 1 / 6 for r in ("kv", "act") for t in ("device", "host", "disk")}),
    Policy("prefix of token ids", cache={"tok": 0.5, "kv@host": 0.5}, hidden="host"),
    Policy("both", cache={BOTH: 1.0}),
    Policy("few bits", cache={"kv@host": 0.5, "act@host": 0.5}, bits=Bits(8, 2, 1)),
    Policy("attention on the host", attention="host", schedule="row"),
    Policy("attention on host and device", attention={"host": 0.5, "device": 0.5}),
    Policy("heavy hitters", selection=Selection("heavy_hitter", budget=0.5)),
    Policy("speculative", cache={"kv@host": 0.5, "act@host": 0.5}, selection=SPECULATIVE),
    Policy("one task at a time", overlap="none"),
    Policy("barriers", cache={"act@host": 1.0}, overlap="step"),
)


@pytest.fixture(scope="module")
def problem() -> Problem:
    lines = {resource: Line(1e-5, 1e-12, 1e-10) for resource in RESOURCES}
    return Problem(shape=SHAPE, dtype="float32", hardware=Hardware("toy", "cpu", lines))


def test_the_executor_the_streams_and_the_table_know_the_same_verbs(problem):
    workload = Workload(np.array([20, 40, 33]), np.array([5, 3, 20]))
    emitted = {}
    for policy in POLICIES:
        wave = admit(problem, replace(policy, max_mini_batch_tokens=150), workload)
        emitted |= {task.verb: task.resource for task in stream(wave)}
    state = LayerState((StateTensor("recurrent", 0, (4,), True),), attends=False)
    recurrent = replace(problem, shape=replace(SHAPE, states=(state,) * SHAPE.num_layers))
    emitted |= {task.verb: task.resource for task in stream(admit(recurrent, Policy(), workload))}
    routed = replace(problem, shape=replace(SHAPE, routed=(True,) * SHAPE.num_layers))
    emitted |= {task.verb: task.resource for task in stream(admit(routed, Policy(experts=Experts(1)), workload))}
    for policy in POLICIES:
        if may_share(policy, SHAPE):  # they begin with 32 tokens; one more is computed in chunks
            lengths = Workload(np.array([40, 40, 300]), np.array([5, 3, 2]))
            beginning = Prefixes(np.array([32]), np.array([-1]), np.zeros(3, np.int64))
            batch = open_batch(
                problem, replace(policy, max_mini_batch_tokens=150), replace(lengths, prefixes=beginning), 3
            )
            emitted |= {task.verb: task.resource for task in stream(batch)}
    assert set(VERBS) == set(emitted)
    assert set(VERBS) - set(VERB_FUNCTIONS) == {"load_keys"}  # partial keys on the host are simulated alone
    assert set(VERB_FUNCTIONS) <= set(VERBS)
    assert emitted == {name: verb.resource for name, verb in VERBS.items()}


def test_records_have_only_known_values():
    for name, verb in VERBS.items():
        assert verb.name == name and verb.resource in RESOURCES
        assert verb.per in ("layer", "gap", "choosing layer", "iteration", "part")
        assert verb.needs in (None, "blocks", "rows", "recomputed", "shared", "chunk", "state") and (
            verb.needs in ("blocks", "rows")
        ) == bool(verb.blocks)
        assert (verb.cargo in CARGO) == (verb.resource not in ("compute", "host_compute")), name
        assert verb.otherwise is None or VERBS[verb.otherwise].resource == verb.resource
        for suffix in ("", "_alone", "_unpaced", "_both"):
            assert resource_of_line(name + suffix) == verb.resource
    assert resource_of_line("lode_kv") is None


def test_a_verb_without_a_record_is_refused(problem, monkeypatch):
    policy = Policy(cache={"kv@host": 1.0})
    monkeypatch.delitem(VERBS, "assemble")
    with pytest.raises(KeyError, match="assemble"):
        predict(Problem(shape=SHAPE, dtype="float32", hardware=problem.hardware), Candidates(policy, 2, 40, 4))
