"""KVPR (University of Southern California, Findings of ACL 2025): its tables and figures about speed, by name.

``kvpr_setup`` has the testbeds, constants and systems; the other modules have the experiments.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.reproduce.experiment import Experiment
from experiments.reproduce.kvpr.figures import figure8, figure10, figure12, figure14, table1
from experiments.reproduce.kvpr.latency import figure7, figure13, table3, table4
from experiments.reproduce.kvpr.throughput import figure6, figure9, table2, table5

EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    "kvpr-table1": table1,
    "kvpr-table2": table2,
    "kvpr-table3": table3,
    "kvpr-table4": table4,
    "kvpr-table5": table5,
    "kvpr-fig6": figure6,
    "kvpr-fig7": figure7,
    "kvpr-fig8": figure8,
    "kvpr-fig9": figure9,
    "kvpr-fig10": figure10,
    "kvpr-fig12": figure12,
    "kvpr-fig13": figure13,
    "kvpr-fig14": figure14,
}
