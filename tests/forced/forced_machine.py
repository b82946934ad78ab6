"""The choices that the product makes by looking at the machine, made by the tests instead.

``install`` puts ``faster_dtype`` in the place of the timing of matrix products, as the module that holds it is loaded:
what is faster is then the value of ``FLEXHYBRID_FASTER_DTYPE``. ``sitecustomize`` beside this file does so in every
process that a test starts, and ``conftest`` in that of the tests themselves.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

DTYPES = ("float32", "bfloat16")
FASTER_DTYPE = "FLEXHYBRID_FASTER_DTYPE"
PROFILE = "flexhybrid.runtime.profiling.profile"


def faster_dtype(*sizes: int) -> str:
    """What the environment says is faster. A test that asks without having said which is one that hangs on the machine
    it meets."""
    name = os.environ.get(FASTER_DTYPE)
    if name is None:
        raise AssertionError("this test computes in what is faster on this machine: let it take the fixture cpu_dtype")
    return name


def _force(module) -> None:
    """The function itself is still found by ``inspect.unwrap``."""
    if module._faster_product is not faster_dtype:
        module._faster_product = functools.update_wrapper(faster_dtype, module._faster_product)


class _Finder(MetaPathFinder):
    """Finds ``flexhybrid.runtime.profiling.profile`` as usual, and changes it once it is loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != PROFILE or (spec := PathFinder.find_spec(fullname, path, target)) is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _force(module)

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    if PROFILE in sys.modules:
        _force(sys.modules[PROFILE])
    else:
        sys.meta_path.insert(0, _Finder())
