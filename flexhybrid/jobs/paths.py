"""Checks paths on a command line before torch and transformers are loaded, so that a typo is reported at once."""

import stat
from collections.abc import Collection
from pathlib import Path

from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.model.shape import ModelShape, checkpoint_folder, has_own_file, shape_of, shape_of_checkpoint


def check_checkpoint(path: Path | None) -> None:
    """Raise InputError if the folder has no configuration of a known model; do nothing for None."""
    if path is not None and has_own_file(checkpoint_folder(path)):
        shape_of_checkpoint(path)


def shape_to_simulate(model: str | Path) -> ModelShape:
    """Return the shape of a model as it would run: of its weights if it has any, else by name or config.json.
    Models that run through transformers' modules get their shape from these, after seconds of imports. Raise InputError
    for an unknown model, or one that would not be exact."""
    folder = Path(model).parent if Path(model).name == "config.json" else Path(model)
    if folder.is_dir() and any(any(folder.glob(names)) for names in ("model*.safetensors", "pytorch_model*.bin")):
        from flexhybrid.runtime.storage.loader import Checkpoint

        return Checkpoint(folder).shape
    if folder.is_dir() and not has_own_file(folder):
        from flexhybrid.runtime.models.empty_model import empty_model

        return empty_model(folder).shape
    return shape_of(model)


def check_file(path: Path | None, kind: str = "") -> None:
    """Raise InputError if the file cannot be opened; do nothing for None, or for a pipe, which can be read only once.
    ``kind``: what the message calls the file ("text file ")."""
    if path is None:
        return
    with file_errors(f"read {kind}{path}"):
        if not stat.S_ISFIFO(path.stat().st_mode):
            path.open("rb").close()


def check_writable(folder: Path, names: Collection[str] = ()) -> None:
    """Create the folder and test that a file can be written to it, before hours of work.
    Raise InputError if not, or if one of the file names ``names`` is a folder there."""
    probe = folder / ".flexhybrid-probe"
    with file_errors(f"write results to {folder}", "; choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
        if taken := next((name for name in names if (folder / name).is_dir()), None):
            raise InputError(f"cannot write results to {folder}: {taken} is a folder there; choose another --out")
