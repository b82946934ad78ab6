"""Whole jobs built from the floors below: profile, exactness, speed, compare."""

from pathlib import Path


def shipped(name: str) -> Path:
    """A file that ships with the experiments package."""
    import experiments

    return Path(experiments.__file__).parent / name
