"""The papers' testbeds as entries of the catalogue: ``python -m experiments.reproduce.machines`` fits and writes them.

``simulate``, ``search`` and ``reproduce`` all read the entries; the suite holds them against a fresh fit.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from experiments import reference
from experiments.reproduce.capture import setup as capture
from experiments.reproduce.paper import values_of
from sim import catalogue
from sim.datasheet import Datasheet, load_datasheet


def in_words(ours, paper) -> str:
    """Return mean and worst error of rows that no constant was fitted on."""
    wrong = np.asarray(ours) / np.asarray(paper) - 1
    worst = wrong[np.argmax(np.abs(wrong))]
    return f"{len(wrong)} rows, mean |error| {100 * np.abs(wrong).mean():.1f} %, worst {100 * worst:+.1f} %"


def rtx4090_capture() -> Datasheet:
    """CAPTURE's machine: link, matrix products, and merging and attending, fitted on two of Table III's models."""
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
    on = f"CAPTURE, {capture.FITTED_ON}: link, matrix products, merging and attention; the rest is rtx4090's"
    rates = {
        "kind": "fitted",
        "on": on,
        "held_out": f"OPT-30B and OPT-66B there: {in_words(ours, rows['tokens_per_s'])}",
    }
    return replace(base, name=capture.ENTRY, lines=lines, rates=rates)


def _rounded(value: float) -> float:
    """Return a fitted number to six digits: what a file says is what is used."""
    return float(f"{value:.6g}")


ENTRIES: dict[str, Callable[[], Datasheet]] = {capture.ENTRY: rtx4090_capture}


def main() -> None:
    """Fit every entry and write it."""
    for name, fitted in ENTRIES.items():
        sheet = fitted()
        sheet.save(catalogue.FOLDER / f"{name}.json")
        print(f"{name}: {sheet.rates['held_out']}")


if __name__ == "__main__":
    main()
