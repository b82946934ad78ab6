"""The committed record of an H200: its lines are the fit of its samples, and predict the runs that were measured there.

In the first record three samples are not the profile's: what launching a task takes, and KV-Gen at the size of the
overlap's bench, twice. They come from rows of that day's bench, which the record's notes keep.
``PYTHONPATH=. python tests/search/test_h200_record.py`` fits the record again.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from flexhybrid.core.hardware import LAUNCHER, Hardware, Line, load_hardware
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.work import kv_gen
from policy_search.fit import fit_hardware
from sim.simulate import SimulatedRun, simulate

RECORD = Path(__file__).parents[2] / "experiments/results/nvidia-h200/profiles/hardware-cuda.json"
SHAPE, ON_DEVICE = shape_by_name("opt-6.7b"), Placement(device=1.0)
ROWS = "rows of the bench"  #: of the record's notes
#: The runs beside peers: policy, (requests, prompt, answer), seconds.
RUNS = {
    "18 GiB": (
        Policy("resident", ON_DEVICE, cache={"kv@device": 1.0}, max_mini_batch_tokens=8192, max_batch=12),
        (128, 512, 32),
        4.8274,
    ),
    "12 GiB": (
        Policy(
            "searched",
            Placement(host=1.0),
            cache={"act@device": 0.42267219387755106, "act@host": 0.5773278061224489},
            hidden="host",
            max_mini_batch_tokens=12552,
            max_batch=48,
        ),
        (48, 1536, 24),
        12.2585,
    ),
}


def overlap_kv_gen(hardware: Hardware, rows: dict) -> list[tuple[float, float, float]]:
    """Return (flops, bytes, seconds) of KV-Gen in the overlap bench: 32 requests of 512 + 128 tokens in mini-batches of
    16. Seconds are the bench's, less other verbs by the record and by the bench of attention. Kernels ran in bursts,
    and in ten seconds of launched steps, during which the card may reach its power limit; a run is in between."""
    kernels = {"attend": Line(s_per_byte=1e-9 / rows["attention_gb_per_s"])} | dict.fromkeys(
        ("kv_gen", "embed", LAUNCHER), Line()
    )  # behind a sleep nothing waits for the host
    problem = Problem(shape=SHAPE, hardware=replace(hardware, lines={**hardware.undisturbed.lines, **kernels}))
    policy = Policy("resident, ACT", ON_DEVICE, cache={"act@host": 1.0}, max_mini_batch_tokens=16 * (512 + 128 + 33))
    run = simulate(problem, policy, 32, 512, 128)
    positions = SHAPE.num_layers * run.num_mini_batches * 127
    work = kv_gen(SHAPE, problem.bytes_per_element, 16 * (512 + 64))
    others_s, size = run.busy["compute"] * run.decode_s, (float(work.flops), float(work.memory_bytes))
    return [(*size, (rows[name] - others_s) / positions) for name in ("kernels_s", "launched_s")]


def refitted(record: Hardware) -> Hardware:
    """Return the record that the present fit makes of the samples, and of the bench's rows if the record has any."""
    others = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "lines"}
    samples = {key: list(line.samples) for key, line in record.lines.items()}
    if rows := record.notes.get(ROWS):
        samples[LAUNCHER] = [(0.0, 0.0, rows["issuing_s"] / rows["issued_tasks"])]
        samples["kv_gen"] = [sample for sample in samples["kv_gen"] if sample[0] < 2e11]
        samples["kv_gen"] += overlap_kv_gen(fit_hardware(samples, **others), rows)
    return fit_hardware(samples, **others)


def test_the_record_is_what_its_samples_and_rows_give():
    record = load_hardware(RECORD)
    made = refitted(record)
    assert made.lines.keys() == record.lines.keys()
    for key, line in record.lines.items():
        for name in ("overhead_s", "s_per_flop", "s_per_byte"):
            assert getattr(line, name) == pytest.approx(getattr(made.lines[key], name), rel=1e-6), (key, name)
        np.testing.assert_allclose(line.samples, made.lines[key].samples, rtol=1e-6)


def predicted(name: str) -> SimulatedRun:
    policy, lengths, _ = RUNS[name]
    return simulate(Problem(shape=SHAPE, hardware=load_hardware(RECORD)), policy, *lengths)


@pytest.mark.skipif(ROWS not in load_hardware(RECORD).notes, reason="a later record is of later kernels")
@pytest.mark.parametrize("name", RUNS)
def test_measured_runs_are_predicted_within_a_tenth(name):
    assert predicted(name).total_s == pytest.approx(RUNS[name][2], rel=0.1)


if __name__ == "__main__":
    refitted(load_hardware(RECORD)).save(RECORD)
    for name in RUNS:
        print(f"{name}: predicted {predicted(name).total_s:.2f} s, measured {RUNS[name][2]:.2f} s")
