"""Import modules when a test first needs them: some take seconds, and each worker imports all test files."""

from importlib import import_module
from typing import Any


class Lazily:
    """A module that is imported when one of its members is first used."""

    __test__ = False  #: pytest asks each name of a file of tests for it

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
