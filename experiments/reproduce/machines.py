"""The papers' testbeds as entries of the catalogue: ``python -m experiments.reproduce.machines`` fits and writes them.

``simulate``, ``search`` and ``reproduce`` all read the entries; the suite holds them against a fresh fit.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from experiments import reference
from experiments.reproduce import published
from experiments.reproduce.calibrate import PCIE_SHARE
from experiments.reproduce.capture import setup as capture
from experiments.reproduce.infinigen import setup as infinigen
from experiments.reproduce.kvpr import setup as kvpr
from experiments.reproduce.kvpr.latency import TABLES, kvpr_s
from experiments.reproduce.kvpr.throughput import table5_paper, table5_rates
from experiments.reproduce.paper import INFINIGEN, values_of
from flexhybrid.core.hardware import Hardware
from sim import catalogue
from sim.datasheet import Datasheet, in_rates, load_datasheet

#: What all testbeds of FlexGen's engine have in common.
SHARED = (
    "CAPTURE's and KVPR's calibrate rows together: the link, 0.84 of PCIe's standard; FlexGen's authors' fit: matrix "
)
SHARED += "products, 0.33 of peak"


def in_words(ours, paper) -> str:
    """Return mean and worst error of rows that no constant was fitted on."""
    wrong = np.asarray(ours) / np.asarray(paper) - 1
    worst = wrong[np.argmax(np.abs(wrong))]
    return f"{len(wrong)} rows, mean |error| {100 * np.abs(wrong).mean():.1f} %, worst {100 * worst:+.1f} %"


def rtx4090_capture() -> Datasheet:
    """CAPTURE's machine: matrix products, and merging and attending, fitted on two of Table III's models."""
    fitted = {name: _rounded(value) for name, value in values_of(capture.refit()).items()}
    values, base = capture.PRIORS | fitted, load_datasheet(catalogue.FOLDER / "rtx4090.json")
    gemm, overhead = {"tflops": values["gemm_tflops"]}, {"overhead_us": values["overhead_us"]}
    memory, kv = ({"gb_per_s": values[name]} for name in ("memory_gb_per_s", "kv_memory_gb_per_s"))
    copy = overhead | {"gb_per_s": values["link_gb_per_s"]}
    lines = {
        "compute": overhead | gemm | memory,
        "attend_prefill": overhead | gemm | memory,
        "kv_gen": overhead | gemm,
        "assemble": overhead | gemm | kv,
        "attend": overhead | gemm | kv,
        "h2d": copy,
        "d2h": copy,
    }
    rows = reference.rows("capture_table3", role="validate")
    testbed = capture.machine(values)
    keys = zip(rows["variant"], rows["model"], strict=True)
    ours = [capture.run_variant(*key, testbed).tokens_per_s[0] for key in keys]
    on = f"CAPTURE, {capture.FITTED_ON}: matrix products, merging and attention; with KVPR's nine of Accelerate: the "
    on += "link, 0.84 of PCIe's standard; the rest is rtx4090's"
    rates = {
        "kind": "fitted",
        "on": on,
        "held_out": f"OPT-30B and OPT-66B there: {in_words(ours, rows['tokens_per_s'])}",
    }
    return replace(base, name=capture.ENTRY, lines=lines, rates=rates, attends_in_place=False)


def a100_kvpr() -> Datasheet:
    """KVPR's main testbed: the link that all testbeds share and the matrix products of FlexGen's engine."""
    base, link = (
        load_datasheet(catalogue.FOLDER / "a100-40g.json"),
        _rounded(PCIE_SHARE * kvpr.link_standard("a100-40g")),
    )
    testbed, paper, ours = kvpr.machine("a100-40g", link), [], []
    for model in TABLES.values():
        rows = reference.rows("kvpr_table3_4", model=model, method="KVPR", metric="decode_latency")
        paper += list(rows["value"])
        pairs = list(zip(rows["prompt_len"], rows["gen_len"], strict=True))
        ours += list(kvpr_s(model, pairs, constants=kvpr.a100_constants()))
    host = kvpr.fit_host_s()
    on = f"{SHARED}; a layer of transformers' code takes {1e3 * host.value:.2f} ms besides (KVPR, {host.fitted_on}), "
    on += "which is no part of this machine; the rest is a100-40g's, assumed"
    return _entry(base, "a100-kvpr", testbed, on, f"KVPR's latencies there: {in_words(ours, paper)}", engine=None)


def rtx5000_kvpr() -> Datasheet:
    """KVPR's low-end testbed under FlexGen's code, whose copies are fitted on FlexGen's rows."""
    base, paper = load_datasheet(catalogue.FOLDER / "rtx5000.json"), table5_paper()
    testbed = capture.relayed(kvpr.machine("rtx5000", PCIE_SHARE * kvpr.link_standard("rtx5000")))
    ours = table5_rates(testbed)
    on = f"{SHARED}; FlexGen's relayed copies: {capture.relay_constant().fitted_on}; the rest is rtx5000's, assumed"
    held_out = f"KVPR there: {in_words(ours['KVPR, paper rule'], paper['KVPR'])}"
    return _entry(base, "rtx5000-kvpr", testbed, on, held_out)


def t4_flexgen() -> Datasheet:
    """The T4 at the rates of FlexGen's engine: attention as its authors fitted it, 4-bit code, a disk's page cache."""
    base, fitted = load_datasheet(catalogue.FOLDER / "t4.json"), values_of(published.refit_engine())
    engine = published.engine(*(_rounded(value) for value in fitted.values()))
    saw = (*published.FITTED["engine"], *published.FITTED["eviction"])
    ids = [row_id for row_id in (*published.FLEXGEN_ROWS, *published.H2O_ROWS) if row_id not in saw]
    ours = [published.flexgen_rate(row_id, engine) for row_id in ids]
    paper = [published.record(row_id)["value"] for row_id in ids]
    on = "attention on the host and of prompts: FlexGen's published cost model, which its authors fitted here; 4-bit "
    on += "code, copies into page-locked memory and the disk behind its page cache: published T4 runs "
    on += ", ".join(published.FITTED["engine"])
    held_out = f"other T4 runs of FlexGen and H2O: {in_words(ours, paper)}"
    return _entry(base, published.ENTRY, engine, on, held_out)


def a6000_infinigen() -> Datasheet:
    """InfiniGen's machine: copies, 4-bit code and gathering on the host, fitted on three rows of batch 4."""
    base, values = load_datasheet(catalogue.FOLDER / "rtx-a6000.json"), values_of(infinigen.fitted())
    testbed = infinigen.machine(**{name: _rounded(value) for name, value in values.items()})
    ours = [float(infinigen.throughput(name, 20, hardware=testbed)) for name in infinigen.VALIDATE]
    paper = [INFINIGEN.value(row_id) for row_id in infinigen.VALIDATE.values()]
    on = (
        f"InfiniGen, {infinigen.fitted()[0].fitted_on}: copies, 4-bit code, gathering; attention reads the cache where "
    )
    on += "it lies; the rest is rtx-a6000's, assumed"
    return _entry(base, "a6000-infinigen", testbed, on, f"batch 20 of these: {in_words(ours, paper)}")


def _entry(
    base: Datasheet, name: str, testbed: Hardware, on: str, held_out: str, engine: str | None = "flexgen"
) -> Datasheet:
    """Return a testbed's datasheet: the base's with the lines of its own; ``engine``: whose code has these rates."""
    plain = base.hardware()
    own = {key: in_rates(line) for key, line in testbed.lines.items() if line != plain.lines.get(key)}
    lines = {key: {name: _rounded(rate) for name, rate in rates.items()} for key, rates in own.items()}
    rates = {"kind": "fitted", "on": on, "held_out": held_out} | ({"engine": engine} if engine else {})
    return replace(base, name=name, lines=lines, rates=rates, attends_in_place=False)


def _rounded(value: float) -> float:
    """Return a fitted number to six digits: what a file says is what is used."""
    return float(f"{value:.6g}")


ENTRIES: dict[str, Callable[[], Datasheet]] = {
    capture.ENTRY: rtx4090_capture,
    published.ENTRY: t4_flexgen,
    "a100-kvpr": a100_kvpr,
    "rtx5000-kvpr": rtx5000_kvpr,
    "a6000-infinigen": a6000_infinigen,
}


def main() -> None:
    """Fit every entry and write it."""
    for name, fitted in ENTRIES.items():
        sheet = fitted()
        sheet.save(catalogue.FOLDER / f"{name}.json")
        print(f"{name}: {sheet.rates['held_out']}")


if __name__ == "__main__":
    main()
