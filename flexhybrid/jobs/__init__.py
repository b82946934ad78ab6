"""Whole jobs built from the floors below: profile, exactness, speed, compare."""

from pathlib import Path


def shipped(name: str) -> Path:
    """A file that ships with the experiments package."""
    import experiments

    return Path(experiments.__file__).parent / name


def shipped_prompts() -> list[str]:
    """The prompts that ship with the experiments package, one a line of their file."""
    return [line for line in shipped("prompts.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
