"""Architectures that the executor runs. Each is a file of pure layer functions and a map of weight names."""

from types import ModuleType

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.runtime.models import llama, opt

ARCHITECTURES: dict[str, ModuleType] = {"opt": opt, "llama": llama}


def architecture(shape: ModelShape) -> ModuleType:
    """Return the module of a shape's family; raise InputError without one."""
    if shape.family not in ARCHITECTURES:
        raise InputError(
            f"model {shape.name}: the executor cannot run the {shape.family} family; it runs {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[shape.family]
