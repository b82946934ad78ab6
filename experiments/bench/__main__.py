"""``make bench``: every figure that has a bar, in one table and in results/bench.json (``harness.Table``).

Each module of this package registers its benches by part. A figure that misses its bar is kept, with ok: false. Speeds
are ratios from one run: against the bound, against a plain kernel of equal shape, or predicted against measured.
"""

import argparse
import os
import pkgutil
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import experiments.bench
from experiments.bench.harness import BENCHES, Table
from flexhybrid.jobs.machine import device_name


def load() -> None:
    """Import all modules of this package, which register their benches."""
    for module in pkgutil.walk_packages(experiments.bench.__path__, "experiments.bench."):
        import_module(module.name)


def main() -> None:
    load()
    parser = argparse.ArgumentParser(prog="python -m experiments.bench", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", choices=BENCHES, nargs="+", help="renew the rows of these parts in bench.json alone")
    args = parser.parse_args()
    out, machine = args.out / "bench.json", device_name(torch.device("cpu"))
    table = Table(machine)
    table.read(out, BENCHES)
    for part in args.only or BENCHES:
        table.renew(part)
        for bench in BENCHES[part]:
            bench(table)
        table.save(out)  # after every part, for a run that is interrupted
    missed = [name for name, row in table.rows.items() if not row["ok"]]
    print(f"\n{machine}: {len(table.rows) - len(missed)} of {len(table.rows)} figures hold.")
    for name in missed:
        print(f"  missed: {name}")


if __name__ == "__main__":
    main()
