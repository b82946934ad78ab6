"""The choices that the product makes by looking at the machine, made by the tests instead.

``install`` puts ``faster_dtype`` and ``attention_paths`` in the place of the timing of matrix products and of
attention, as the modules that hold it are loaded: what is faster is then the value of ``FLEXHYBRID_FASTER_DTYPE``, and
the way to attend that of ``FLEXHYBRID_ATTENTION``. Figures are drawn as one small PNG. ``sitecustomize`` beside this
file does so in every process that a test starts, and ``conftest`` in that of the tests themselves.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

DTYPES = ("float32", "bfloat16")
FASTER_DTYPE = "FLEXHYBRID_FASTER_DTYPE"
ATTENTION = "FLEXHYBRID_ATTENTION"  #: one name for all phases; without it, the usual ones, and decode steps in place
SMALL_DPI = 40


def faster_dtype(*sizes: int) -> str:
    """Return the dtype that the environment declares faster; otherwise tests would depend on the machine."""
    name = os.environ.get(FASTER_DTYPE)
    if name is None:
        raise AssertionError("this test computes in what is faster on this machine: let it take the fixture cpu_dtype")
    return name


def attention_paths(device: str, dtype: str, group: int, head_dim: int = 128):
    """Return the attention paths that the environment names; nothing is timed, kept or read."""
    module = sys.modules["flexhybrid.runtime.profiling.attention_paths"]
    name = os.environ.get(ATTENTION)
    if device == "cpu" and name:
        return type(module.USUAL)(*[name] * 3)
    in_place = module.can_attend_in_place(dtype) if device == "cpu" else module.proved_on_gpu(dtype, group, head_dim)
    return module.USUAL._replace(in_place=in_place, on_host=module.can_attend_in_place(dtype, on_host=True))


def small_png(figure) -> dict[str, bytes]:
    """Return a figure as one small PNG, which takes a quarter of the time of all its files."""
    from unittest.mock import patch

    with patch.multiple("figures.style", FORMATS=("png",), DPI=SMALL_DPI):
        return inspect.unwrap(small_png)(figure)


@contextmanager
def every_format():
    """Draw figures as for users: in all formats and at full size."""
    from figures import reproduce, style

    style.rendered = reproduce.rendered = inspect.unwrap(small_png)
    try:
        yield
    finally:
        style.rendered = reproduce.rendered = small_png


#: Module -> name of its function, and what stands in its place.
FORCED = {
    "flexhybrid.runtime.profiling.profile": ("_faster_product", faster_dtype),
    "flexhybrid.runtime.profiling.attention_paths": ("fastest_paths", attention_paths),
    "figures.style": ("rendered", small_png),
}


def _force(module) -> None:
    """Replace a function; ``inspect.unwrap`` still finds the original."""
    name, forced = FORCED[module.__name__]
    if getattr(module, name) is not forced:
        setattr(module, name, functools.update_wrapper(forced, getattr(module, name)))


class _Finder(MetaPathFinder):
    """Find the modules of ``FORCED`` as usual, and change them once they are loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in FORCED or (spec := PathFinder.find_spec(fullname, path, target)) is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _force(module)

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    for name in FORCED.keys() & sys.modules.keys():
        _force(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
