"""Modules that are imported when a test first asks for something of theirs: some take seconds, and every worker of
pytest imports all files of tests."""

from importlib import import_module
from typing import Any


class Lazily:
    """A module by its name."""

    __test__ = False  #: pytest asks each name of a file of tests for it

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
