"""The architectures with layer functions of their own. Each is a file of pure functions and a map of weight names."""

from types import ModuleType

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.runtime.models import llama, opt

ARCHITECTURES: dict[str, ModuleType] = {"opt": opt, "llama": llama}


def architecture(shape: ModelShape) -> ModuleType:
    """Return the module of a shape's family. Raise InputError if there is none."""
    if shape.family not in ARCHITECTURES:
        raise InputError(
            f"model {shape.name}: the executor cannot run the {shape.family} family; it runs {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[shape.family]
