"""Test measured energy: a tree like Linux's powercap, a stand-in for NVML, and models that use known joules."""

import json
import os
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from flexhybrid import cli
from flexhybrid.cascade import metering, profiling
from flexhybrid.cascade.cluster.profiles import read_profiles
from flexhybrid.cascade.metering import Energy, Meter, describe_energy
from flexhybrid.cascade.routes import Cascade, CascadeModel
from flexhybrid.cascade.serving import run as run_module
from flexhybrid.cascade.serving.answers import Answer
from flexhybrid.cascade.serving.counts import Counts
from flexhybrid.cascade.thresholds import fit as fit_module
from flexhybrid.cascade.thresholds.fit import Fitted

RANGE_UJ = 100_000_000  #: at which the counters begin again: 100 J


class Powercap:
    """Zones as on a server with two packages; cores and psys count joules of the packages again."""

    def __init__(self, root: Path):
        self.root, self.spent = root, {}
        for zone, name in (
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:0:0", "core"),
            ("intel-rapl:0:1", "dram"),
            ("intel-rapl:1", "package-1"),
            ("intel-rapl:2", "psys"),
            ("intel-rapl-mmio:0", "package-0"),
        ):
            (root / zone).mkdir(parents=True)
            (root / zone / "name").write_text(f"{name}\n")
            (root / zone / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
            self.spent[zone] = 12_345_678
            self.spend(zone, 0.0)
        (root / "intel-rapl").mkdir()

    def spend(self, zone: str, joules: float) -> None:
        self.spent[zone] += round(joules * 1e6)
        new = self.root / "new"
        new.write_text(f"{self.spent[zone] % RANGE_UJ}\n")
        os.replace(new, self.root / zone / "energy_uj")  # whole, whenever it is read


@pytest.fixture
def powercap(tmp_path, monkeypatch) -> Powercap:
    tree = Powercap(tmp_path / "powercap")
    monkeypatch.setattr(metering, "POWERCAP", tree.root)
    return tree


def test_packages_and_memory_count_once_and_through_their_counters_wraps(powercap):
    draw = np.random.default_rng(0).uniform(0, 60, size=(40, 6))
    counted = [0, 2, 3]  # package-0, dram, package-1
    with Meter(interval_s=60) as meter:
        assert meter.is_measured and meter.joules == 0
        for row in draw:
            for zone, joules in zip(powercap.spent, row):
                powercap.spend(zone, joules)
            assert meter.joules is not None  # read, as the thread does in time
        assert meter.joules == pytest.approx(draw[:, counted].sum(), abs=1e-3)
        assert draw[:, 0].sum() > 10 * 100  # so many times one counter began again
        assert meter.source == "measured: RAPL, package-0 + dram + package-1"


def test_a_counter_that_wraps_unasked_is_read_in_time(powercap):
    with Meter(interval_s=0.001) as meter:
        for _ in range(5):
            powercap.spend("intel-rapl:0", 70.0)
            now = (powercap.spent["intel-rapl:0"] % RANGE_UJ) * 1e-6
            until = time.monotonic() + 60
            while meter._counters[0].last != now and time.monotonic() < until:
                time.sleep(0.001)
        assert meter.joules == pytest.approx(350.0)


def test_a_meter_without_counters_gives_a_reason_and_no_number(tmp_path, powercap, monkeypatch):
    with Meter(powercap=tmp_path / "none") as meter:
        assert meter.joules is None and not meter.is_measured
        assert meter.source.startswith("not measured: RAPL: no processor under")

    def refuse(file: Path) -> float:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(metering, "_joules_in", refuse)
    with Meter() as meter:
        assert meter.joules is None and "only root may read" in meter.source


class Nvml(types.SimpleNamespace):
    """Two boards; ``counters`` are in mJ, or None if a board has no counter."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, counters):
        super().__init__(counters=counters)

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return {"GPU-aa": 0, "GPU-bb": 1}[name]

    def nvmlDeviceGetTotalEnergyConsumption(self, board):
        if self.counters is None:
            raise self.NVMLError("Not Supported")
        return self.counters[board]


@pytest.mark.parametrize(
    ("visible", "joules"), [(None, 12.0), ("1", 7.0), ("GPU-aa", 5.0), ("0,-1,1", 5.0), ("0,GPU-bb", 12.0)]
)
def test_nvml_counts_the_gpus_that_the_process_may_see(tmp_path, monkeypatch, visible, joules):
    nvml = Nvml([1e9, 2e9])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Meter("cuda", powercap=tmp_path) as meter:
        nvml.counters = [1e9 + 5e3, 2e9 + 7e3]
        assert meter.joules == pytest.approx(joules) and "measured: NVML" in meter.source
        assert "RAPL: no processor" in meter.source  # it does not hide that the processors are not in the number
        nvml.counters = None  # the board is lost
        assert meter.joules is None and meter.source.startswith("not measured: reading failed")


def test_a_gpu_and_its_processors_add_up(powercap, monkeypatch):
    nvml = Nvml([0, 0])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with Meter("cuda") as meter:
        nvml.counters = [1000, 2000]
        powercap.spend("intel-rapl:1", 4.0)
        assert meter.joules == pytest.approx(7.0)
        assert meter.source == "measured: NVML, 2 GPUs; RAPL, package-0 + dram + package-1"
    with Meter("cpu") as meter:
        nvml.counters = [9000, 9000]
        assert meter.joules == 0.0  # what a GPU draws is not of a model on the processors


@pytest.mark.parametrize("nvml", [None, Nvml(None)])
def test_processors_do_not_replace_an_unreadable_gpu(powercap, monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: an import of it fails
    with Meter("cuda") as meter:
        assert meter.joules is None and meter.source.startswith("not measured: NVML")


def test_energy_is_reported_with_its_source_and_per_token():
    record = Energy(12.0, "measured: RAPL, package-0", 4, 24).record()
    assert (record["joules_per_request"], record["joules_per_token"]) == (3.0, 0.5)
    assert describe_energy(record) == "24 tokens, energy 3 J per request, 0.5 J per token (measured: RAPL, package-0)"
    assert describe_energy(Energy(None, "not measured: no meter", 4).record()) == "energy not measured: no meter"


# ---- models that spend known joules ----------------------------------------------------------------------------------

TREE: list[Powercap] = []
A_REQUEST = {"small": 2.0, "large": 5.0}


class Heater(torch.nn.Module):
    """A model that returns its rows of three logits and adds joules to a package's counter."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tree in TREE:
            tree.spend("intel-rapl:0", A_REQUEST[self.name] / 5 * len(x))
            for _ in range(4):  # in parts, that the counter may wrap between
                metering_reads()
                tree.spend("intel-rapl:0", A_REQUEST[self.name] / 5 * len(x))
        return x * (1.0 if self.name == "small" else 9.0)


def metering_reads() -> None:
    """Let every open meter read now instead of in its thread."""
    for meter in METERS:
        meter._update()


METERS: list[Meter] = []


def small() -> Heater:
    return Heater("small")


def large() -> Heater:
    return Heater("large")


@pytest.fixture
def heated(powercap, tmp_path, monkeypatch):
    """Return data for the heaters, on a machine that counts joules."""

    class Seen(Meter):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            METERS.append(self)

    for module in (fit_module, run_module, profiling):
        monkeypatch.setattr(module, "Meter", Seen)
    for module in (fit_module, profiling):
        monkeypatch.setattr(module, "MEASURED_S", 0.02)
    x = np.random.default_rng(1).normal(size=(96, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=x.argmax(axis=1))
    TREE.append(powercap)
    yield tmp_path
    TREE.clear()
    METERS.clear()


def test_fit_and_run_report_the_joules_that_the_machine_counts(heated, monkeypatch, capsys):
    data, fitted, cascade = (f"{heated}/{name}" for name in ("data.npz", "fitted.json", "cascade.json"))
    models = [f"{name}={__name__}:{name}" for name in A_REQUEST]
    fit = ["cascade", "fit", "--models", *models, "--data", data, "-o", fitted]
    assert cli.main(fit) == 0
    told = capsys.readouterr().out
    assert "small: energy 2 J per request (measured: RAPL" in told and "large: energy 5 J per request (measured" in told
    record = Fitted.load(Path(fitted))
    assert [model.energy_j for model in record.models] == pytest.approx([2.0, 5.0], rel=1e-4)
    assert cli.main(["cascade", "search", fitted, "-o", cascade]) == 0  # by what was measured
    # what was stated goes before, and is called so
    for more, stated, energies in (
        (["--energy-j", "3", "4"], "stated: given to fit", [3, 4]),
        (["--watts", "100"], "stated: 100 W of its seconds", None),
    ):
        assert cli.main([*fit, *more, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
        assert [row["energy_source"] for row in rows] == [stated] * 2
        assert [row["joules_per_request"] for row in rows] == pytest.approx(
            energies or [100 * row["seconds"] for row in rows]
        )
    # a run measures, whatever the cascade's file says
    stated = tuple(
        CascadeModel(n, energy_j=1.0, source=f"{__name__}:{n}", energy_source="stated: x") for n in A_REQUEST
    )
    Cascade(stated, (0.6,)).save(cascade)
    run = ["cascade", "run", "--cascade", cascade, "-i", data, "-o", f"{heated}/out.jsonl", "--overwrite", "--json"]
    assert cli.main(run) == 0
    result = json.loads(capsys.readouterr().out)
    visited = [row["visited"] for row in result["models"]]
    assert visited[0] == 96 > visited[1] > 0
    assert result["joules"] == pytest.approx(2 * visited[0] + 5 * visited[1], rel=1e-6)
    assert result["energy_source"].startswith("measured: RAPL") and result["tokens"] is None
    # without a counter it states what the file has
    monkeypatch.setattr(metering, "POWERCAP", heated / "none")
    assert cli.main(run) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["joules"] == sum(visited) and result["energy_source"].startswith("stated: energy of each")
    assert "stated: x" in result["energy_source"] and "not measured: RAPL" in result["energy_source"]


def test_a_cascade_of_unknown_energy_reports_none():
    counts = Counts(Cascade((CascadeModel("a"),), (), task="generation"))
    counts.add([Answer(0, "x", "a", 0.9, visited=["a"], tokens=3)])
    record = counts.record(None, "not measured: no meter")
    assert (record["joules"], record["tokens"], record["energy_source"]) == (None, 3, "not measured: no meter")
    assert counts.record(6.0, "measured: by a test")["joules_per_token"] == 2.0


# ---- profiles --------------------------------------------------------------------------------------------------------


def test_profile_measures_seconds_memory_use_and_joules(heated, monkeypatch, capsys):
    """Models advance the clock: 3 ms, and 1 ms per request, half of it on each core."""
    now = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(
        profiling, "time", types.SimpleNamespace(perf_counter=lambda: now["wall"], process_time=lambda: now["cpu"])
    )
    monkeypatch.setattr(profiling, "num_cores", lambda: 4)
    forward = Heater.forward

    def timed(self, x):
        took = 0.003 + 0.001 * len(x)
        now["wall"] += took
        now["cpu"] += 4 * took / 2
        if len(x) > 8 and self.name == "large":
            raise MemoryError("no room")
        return forward(self, x)

    monkeypatch.setattr(Heater, "forward", timed)
    out = f"{heated}/profiles.json"
    command = ["cascade", "profile", "--data", f"{heated}/data.npz", "-o", out, "--batches", "1", "4", "8", "16"]
    assert cli.main([*command, "--models", *(f"{name}={__name__}:{name}" for name in A_REQUEST)]) == 0
    told = capsys.readouterr()
    assert "model large failed at a batch of 16: MemoryError: no room; its profile ends with" in told.err
    models = json.loads(Path(out).read_text())["models"]
    assert (models["small"]["max_batch"], models["large"]["max_batch"]) == (16, 8)
    for name, model in models.items():
        for batch, seconds in model["seconds"]:
            assert seconds == pytest.approx(0.003 + 0.001 * batch)
        assert [share for _, share in model["utilisation"]] == pytest.approx([0.5] * len(model["seconds"]))
        for batch, joules in model["energy_j"]:
            assert joules == pytest.approx(A_REQUEST[name] * batch, rel=1e-4)
        assert model["output_bytes"] == 3 * 4 and model["measured"]["energy"].startswith("measured: RAPL")
    lines = read_profiles(out, ["small", "large"])  # plan and simulate read them
    assert lines[0].seconds(10) == pytest.approx(0.013) and lines[1].max_batch == 8


class Wide(torch.nn.Module):
    """A model with 256 inputs and 512 logits."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 512)
        self.tied = self.layer.weight  # counts once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_module_s_memory_is_its_weights_and_the_tensors_of_a_batch(tmp_path, monkeypatch):
    """Logits count in float32, and again in float64, which confidences are computed in."""
    monkeypatch.setattr(metering, "POWERCAP", tmp_path)
    np.savez(tmp_path / "data.npz", x=np.ones((3, 256), dtype=np.float32))
    options = profiling.ProfileOptions(
        out=tmp_path / "out.json", models=[f"wide={__name__}:Wide"], data=tmp_path / "data.npz", batches=(1, 7),
        device="cpu", repeats=1,
    )  # fmt: skip
    model = profiling.run_profile(options)["models"]["wide"]
    weights = 4 * (256 * 512 + 512)
    assert model["memory_bytes"] == [[batch, weights + batch * 512 * (4 + 8)] for batch in (1, 7)]
    assert "energy_j" not in model and model["measured"]["energy"].startswith("not measured")


def test_overlapping_spans_are_counted_once():
    rng = np.random.default_rng(5)
    for _ in range(50):
        begins = rng.integers(0, 60, size=rng.integers(0, 9))
        spans = [(int(begin), int(begin + length)) for begin, length in zip(begins, rng.integers(0, 20, size=9))]
        assert profiling.covered(spans) == len({tick for begin, end in spans for tick in range(begin, end)})
