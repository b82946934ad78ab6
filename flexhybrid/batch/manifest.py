"""The manifest: everything that decides a job's results, in a file next to the output. A resumed run must agree."""

import json
import re
from collections.abc import Iterator
from hashlib import file_digest, sha256
from pathlib import Path

from flexhybrid.core.errors import SHOWN, InputError, file_errors, flag
from flexhybrid.core.files import write_by_rename

FORMAT = "flexhybrid-run-1"
#: Small files of a checkpoint that affect the tokens.
SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
#: Place in the manifest -> flag of ``run`` that decides it, if named differently.
FLAGS = {
    "errors": "--errors", "columns.prompt": "--column", "columns.custom_id": "--id-column", "chat.prompts": "--chat",
    "chat.system": "--system-prompt", "chat.template": "--chat-template", "chat.variables": "--chat-template-kwargs",
    "numbers.bits": "--policy",
    "numbers.selection": "--policy",
}  # fmt: skip
#: Key in the manifest of a run whose lines were all refused: the next run may change any setting.
NOTHING_SERVED = "nothing_served"
MAX_HEADER_BYTES = 100_000_000  #: safetensors' limit for the size of a header


def manifest_path(output: Path) -> Path:
    return output.with_name(output.name + ".manifest.json")


def model_record(folder: Path, verify: bool) -> dict:
    """Return a checkpoint's identity: hashes of small files; headers, sizes and times of weights.
    ``verify``: also hash the weights."""
    weights = {}
    for path in sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        stat = path.stat()
        record = {"bytes": stat.st_size, "header": _header_hash(path), "mtime_ns": stat.st_mtime_ns}
        weights[path.name] = {**record, "sha256": _file_hash(path)} if verify else record
    files = {name: _file_hash(folder / name) for name in SETTINGS if (folder / name).is_file()}
    return {"files": files, "weights": weights}


def _header_hash(path: Path) -> str:
    """Return the hash of a safetensors header, or of another file's first 4 KiB."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 4096
        file.seek(0)
        return sha256(file.read(8 + min(size, MAX_HEADER_BYTES))).hexdigest()


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def save_manifest(output: Path, manifest: dict) -> None:
    write_by_rename(manifest_path(output), json.dumps({"format": FORMAT, **manifest}, indent=1), durable=True)


def load_manifest(output: Path) -> dict | None:
    """Return the manifest of an earlier run; None without one. Raise InputError for a file that is not a manifest."""
    path = manifest_path(output)
    with file_errors(f"read {path}"):
        if not path.exists():
            return None
        content = path.read_bytes()
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {error}; move it and {output} away") from None
    if not isinstance(manifest, dict) or manifest.pop("format", None) != FORMAT:
        raise InputError(f"{path} is not the manifest of a run; move it and {output} away")
    return manifest


def check_same(output: Path, earlier: dict, now: dict) -> None:
    """Raise InputError when a resumed run would not continue the earlier one, naming what differs."""
    if "columns" not in earlier:  # an earlier version's
        now = {name: value for name, value in now.items() if name != "columns"}
    differences = list(_differences(earlier, now, ""))
    if other_columns := [place for place in differences if place[0].startswith("columns")]:
        differences = other_columns + [place for place in differences if not place[0].startswith(("columns", "input"))]
    if differences:
        of_model = [place for place in differences if place[0].startswith("model.")]
        shown = []
        if any(not where.endswith(".mtime_ns") for where, *_ in of_model):
            differences = [place for place in differences if place not in of_model]
            shown = [f"it was written with another model than --model ({_names(of_model)} differ)"]
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        shown += [
            f"{where} was {_short(was)}, is {_short(is_now)}{_reason(where)}" for where, was, is_now in differences[:3]
        ]
        if any(where.endswith(".mtime_ns") for where, _, _ in differences):
            more += " (times of change in nanoseconds: give a copy of the same weights the earlier time with `touch -d "
            more += "@SECONDS`; runs that all have --verify compare hashes instead)"
        raise InputError(
            f"{output} has results of another run: {'; '.join(shown)}{more}. Give the earlier settings, "
            "another output, or start over with --overwrite"
        )


def _names(of_model: list[tuple[str, object, object]]) -> str:
    """Return the files of a model that differ, by name."""
    facts = r"\.(bytes|header|mtime_ns|sha256)$"
    names = dict.fromkeys(re.sub(facts, "", where.split(".", 2)[2]) for where, *_ in of_model)
    return ", ".join(list(names)[:3]) + (" and others" if len(names) > 3 else "")


def _differences(earlier, now, where: str) -> Iterator[tuple[str, object, object]]:
    """Yield (place, old value, new value) for each difference of two manifests."""
    if where == "created":
        return
    if isinstance(earlier, dict) and isinstance(now, dict):
        # Hashes are compared if both manifests have them, else the times of change.
        skipped = {"mtime_ns"} if "sha256" in earlier and "sha256" in now else {"sha256"}
        for key in dict.fromkeys([*earlier, *now]):
            if key not in skipped:
                yield from _differences(earlier.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif earlier != now:
        yield where, earlier, now


def _reason(where: str) -> str:
    """Return a note on the flag or file behind a place of the manifest; "" if the place's name is clear."""
    if where == "input.sha256":
        return " (the file was changed)"
    section, _, name = where.partition(".")
    option = FLAGS.get(where) or (flag(name) if section == "sampling" else None)
    return f" ({option})" if option else ""


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN // 2 else text[: SHOWN // 2] + "…"
