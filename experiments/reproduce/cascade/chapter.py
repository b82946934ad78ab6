"""HybridServe of Edinburgh (ICDCS 2025): its tables and figures about serving, by name.

``cascade_setup`` has its models and the cluster; what concerns confidence and thresholds is measured on real models
elsewhere. Fig. 7 and 8 are seconds of a machine: ``make bench`` has them.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.reproduce.cascade.accuracy import figure6, table4
from experiments.reproduce.cascade.serving import figure4, figure5, table5
from experiments.reproduce.experiment import Experiment

EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    "cascade-table4": table4,
    "cascade-table5": table5,
    "cascade-fig4": figure4,
    "cascade-fig5": figure5,
    "cascade-fig6": figure6,
}
