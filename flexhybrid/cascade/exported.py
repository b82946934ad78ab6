"""Programs of torch.export (.pt2) that run no code of their file, which torch would unpickle, evaluate and call."""

import io
import json
import re
from zipfile import ZipFile

#: Files of an archive: graph, tensors and example inputs, but no compiled code.
_MEMBERS = re.compile(
    r"[^/]+/(models/[^/]+\.json|data/(weights|constants|sample_inputs)/[^/]+|\.data/\w+|byteorder|version|archive_\w+)"
)
#: What a node may call: operators on tensors, and arithmetic of sizes.
_TARGETS = re.compile(
    r"torch\.ops\.(aten|prims|quantized|higher_order)\.(?!from_file)([a-z_]\w*)(\.\w+)?|torch\.sym_\w+|math\.[a-z]\w*|"
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
)
#: Sizes, which torch evaluates: calls of classes alone, numbers, names and arithmetic; texts only as a symbol's name.
_SIZES = re.compile(
    r"((Symbol|Float)\('[\w.+-]+'|(floor|ceiling|[A-Z]\w*)\(|\w+(?!\s*[\w(])|\d+\.\d*|[\s(+*/%,<>=&|~-]|\)(?!\s*\())*"
)


def load_program(source: str):
    """Return the program of a .pt2 file. Raise whatever torch raises for a damaged file, ValueError for one that holds
    more than a graph and tensors."""
    import torch

    with ZipFile(source) as archive:
        names = archive.namelist()
        if len(set(names)) < len(names) or not all(map(_MEMBERS.fullmatch, names)):
            raise ValueError("it is no archive of torch.export's with a graph and tensors alone")
        for name in names:
            if name.endswith(".pt"):
                torch.load(io.BytesIO(archive.read(name)), weights_only=True)
            elif name.endswith(".json"):
                json.loads(archive.read(name), object_hook=_checked)
    return torch.export.load(source)


def _checked(fields: dict) -> dict:
    """Return an object of the archive's JSON. Raise ValueError where it makes torch run code of the file."""
    texts = {"target": _TARGETS, "expr_str": _SIZES, "path_name": re.compile("(weight|tensor)_.*")}
    for key, allowed in texts.items():
        value = fields.get(key)
        if isinstance(value, str) and (not allowed.fullmatch(value) or "__" in value.replace("__and__", "")):
            raise ValueError(f"its {key} {value[:60]!r} is none that is run from a file")
    if fields.get("use_pickle"):
        raise ValueError("it holds pickled objects, which are not read")
    return fields
