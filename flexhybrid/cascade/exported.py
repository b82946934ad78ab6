"""Loads programs of torch.export (.pt2) after checking that no code in the file runs while torch reads it."""

import io
import json
import re
from zipfile import ZipFile

#: Allowed members of the archive: a graph, tensors and example inputs.
_MEMBERS = re.compile(
    r"[^/]+/(models/[^/]+\.json|data/(weights|constants|sample_inputs)/[^/]+|\.data/\w+|byteorder|version|archive_\w+)"
)
#: Field of the archive's JSON -> its allowed texts. "target": operators on tensors, and arithmetic. "expr_str": sizes,
#: which torch evaluates: numbers, names and calls of classes, with a text only as a symbol's name. "path_name": tensors
#: that are not pickled.
_TEXTS = {
    "target": r"torch\.ops\.(aten|prims|quantized|higher_order)\.(?!from_file)[a-z_]\w*(\.\w+)?|torch\.sym_\w+|"
    r"math\.[a-z]\w*|_operator\.([a-z]{2,3}|floordiv|truediv|and_|or_|not_|getitem)",
    "expr_str": r"((Symbol|Float)\('[\w.+-]+'|(floor|ceiling|[A-Z]\w*)\(|\w+(?!\s*[\w(])|\d+\.\d*|[\s(+*/%,<>=&|~-]|"
    r"\)(?!\s*\())*",
    "path_name": r"(weight|tensor)_.*",
}


def load_program(source: str):
    """Return the program of a .pt2 file. Raise ValueError if it has more than a graph and tensors.
    For a damaged file, torch may raise other errors."""
    import torch

    with ZipFile(source) as archive:
        names = archive.namelist()
        if len(set(names)) < len(names) or not all(map(_MEMBERS.fullmatch, names)):
            raise ValueError("it is not an archive of torch.export with only a graph and tensors")
        for name in names:
            if name.endswith(".pt"):
                torch.load(io.BytesIO(archive.read(name)), weights_only=True)
            elif name.endswith(".json"):
                json.loads(archive.read(name), object_hook=_checked)
    return torch.export.load(source)


def _checked(fields: dict) -> dict:
    """Return an object of the archive's JSON. Raise ValueError if torch would run code from it."""
    for key, value in fields.items():
        known = key in _TEXTS and isinstance(value, str)
        if key == "use_pickle" and value or known and ("__" in value or not re.fullmatch(_TEXTS[key], value)):
            raise ValueError(f"its {key} {str(value)[:60]!r} could run code and is refused")
    return fields
