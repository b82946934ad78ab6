"""Experiments: training of small checkpoints, benchmarks, GPU runs, peers, studies, reproduced papers, results."""

from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"  #: models that only experiments use
