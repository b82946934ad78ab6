"""Checks of the paths on a command line, made before torch and transformers are loaded: a typo costs no wait."""

import stat
from collections.abc import Collection
from pathlib import Path

from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.model.shape import ModelShape, checkpoint_folder, has_own_file, shape_of, shape_of_checkpoint


def check_checkpoint(path: Path | None) -> None:
    """Raise InputError when the folder holds no configuration of a known model; do nothing for None."""
    if path is not None and has_own_file(checkpoint_folder(path)):
        shape_of_checkpoint(path)


def shape_to_simulate(model: str | Path) -> ModelShape:
    """Return the shape of a model as it would run: a folder with weights has the checkpoint's own, others ``shape_of``.
    Without a file of its own, transformers' modules give it, after seconds of imports. Raise InputError for neither, or
    for a model that would not be exact."""
    folder = Path(model).parent if Path(model).name == "config.json" else Path(model)
    if folder.is_dir() and any(any(folder.glob(names)) for names in ("model*.safetensors", "pytorch_model*.bin")):
        from flexhybrid.runtime.storage.loader import Checkpoint

        return Checkpoint(folder).shape
    if folder.is_dir() and not has_own_file(folder):
        from flexhybrid.runtime.models.empty_model import empty_model

        return empty_model(folder).shape
    return shape_of(model)


def check_file(path: Path | None, kind: str = "") -> None:
    """Raise InputError, calling the file ``kind`` ("text file "), when it cannot be opened; do nothing for None. A pipe
    is left alone: it can be read only once."""
    if path is None:
        return
    with file_errors(f"read {kind}{path}"):
        if not stat.S_ISFIFO(path.stat().st_mode):
            path.open("rb").close()


def check_writable(folder: Path, names: Collection[str] = ()) -> None:
    """Make the folder and a file in it, before an hour's work is to be written there. Raise InputError when that fails,
    or when one of ``names`` is a folder there."""
    probe = folder / ".flexhybrid-probe"
    with file_errors(f"write results to {folder}", "; choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
        if taken := next((name for name in names if (folder / name).is_dir()), None):
            raise InputError(f"cannot write results to {folder}: {taken} is a folder there; choose another --out")
