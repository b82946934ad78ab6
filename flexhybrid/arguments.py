"""Records of a command's options: each field made by ``option`` is a flag, declared once with its help.

One of them is ``LLMArguments``, the arguments of ``LLM``. Importing this loads neither torch nor transformers.
"""

import argparse
import re
import types
import typing
from argparse import BooleanOptionalAction
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError, flag
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.generation_config import SOURCES
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import AttentionPaths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
TRIALS_HELP = "do not correct the profile with trials"
DEVICE_HELP = "(default: auto, CUDA if there is a device)"
LINK_HELP = "rate at which a CPU imitates the copies over a GPU's link"
DISK_DIR_HELP = (
    "scratch folder of policies that use a disk (default: scratch in $FLEXHYBRID_CACHE, or else in ~/.cache/flexhybrid)"
)
DISK_PACE_HELP = "limit the rate of that disk"


def option(text: str | None, default: Any = MISSING, **how) -> Any:
    """Return a field of a record that is also a flag of the same name; without a default, it is required.

    ``text``: help. ``how``: more arguments for ``add_argument``, and ``names``, flags in place of the field's name. A
    bool with the default True is switched off by --no-NAME.
    """
    return field(default=default, metadata={"help": text, **how})


def add_options(parser: argparse.ArgumentParser, record: type, names: Collection[str] | None = None) -> None:
    """Add the flags of a record, or those of its fields ``names``. Flags that are not given are parsed as None."""
    kinds = typing.get_type_hints(record)
    for one in fields(record):
        if "help" not in one.metadata or names is not None and one.name not in names:
            continue
        how = {"dest": one.name, "default": None, "required": one.default is MISSING, **one.metadata}
        kind = kinds[one.name]
        kind = typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind  # without "| None"
        if kind is bool:
            how.setdefault("action", "store_false" if one.default else "store_true")
        elif typing.get_origin(kind) is not None:
            how = {"nargs": "+", "type": typing.get_args(kind)[0], **how}
        else:
            how.setdefault("type", kind)
        own = flag(one.name) if how.get("action") != "store_false" else f"--no-{flag(one.name)[2:]}"
        parser.add_argument(*how.pop("names", (own,)), **how)


def add_budgets(parser: argparse.ArgumentParser, default: str) -> None:
    """Add a flag for the memory of each tier. ``default``: description of the default, for the help."""
    for tier in TIERS:
        parser.add_argument(f"--{tier}-memory", help=f"budget of the {tier}, like 12GiB (default: {default})")


def options_from(record: type[Record], args: argparse.Namespace, **others) -> Record:
    """Return a record with the values of the given flags, and ``others``."""
    names = {field.name for field in fields(record)} - others.keys()
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return record(**given, **others)


def budgets_from(args: argparse.Namespace) -> dict[str, str | None]:
    """Return tier -> text of its memory flag; None if the flag was not given."""
    return {tier: getattr(args, f"{tier}_memory") for tier in TIERS}


def split_names(texts: list[str]) -> tuple[str, ...]:
    """Return names that are separated by spaces, or by commas outside of parentheses.
    A text may end with a comma. Raise InputError for an empty name."""
    parts = [part.strip() for text in texts for part in re.split(r",(?![^()]*\))", text.strip().removesuffix(","))]
    if "" in parts:
        raise InputError(f"{' '.join(texts)!r} has an empty name: write names with commas between, like kv_only,int4")
    return tuple(parts)


def job(module: str, name: str) -> Callable[[argparse.Namespace], dict]:
    """Return a function that imports ``module`` and calls its function ``name``, so that parsing needs no imports."""
    return lambda args: getattr(import_module(module), name)(args)


@dataclass(frozen=True)
class LLMArguments:
    """The arguments of ``LLM(…)`` as one value."""

    model: str | Path = option("checkpoint: a local folder, or a name in the Hugging Face cache", type=Path)
    policy: str | Path | Policy = option(
        "auto, a system's name, or a policy JSON file (default: auto)", "auto", type=str
    )
    device: str = option(DEVICE_HELP, "auto", choices=DEVICES)
    dtype: str = option(None, "auto", choices=DTYPES)
    hardware: Hardware | str | Path | None = option(
        "machine whose rates policy auto uses, by name or file (default: a profile of this machine)", None, type=str
    )
    budgets: dict[str, str | float | None] = field(default_factory=dict)  #: tier -> memory; missing or None: no limit
    link_gb_per_s: float | None = option(LINK_HELP, None)
    disk_dir: str | Path | None = option(DISK_DIR_HELP, None, type=Path, metavar="DIR")
    disk_gb_per_s: float | None = option(DISK_PACE_HELP, None)
    max_model_len: int | None = None  #: most tokens of a prompt and its answer together; None: the model's positions
    enable_prefix_caching: bool = option(
        "compute and keep shared beginnings of prompts once (default: yes)", True, action=BooleanOptionalAction
    )
    generation_config: str = option(
        "auto: take default sampling parameters from the checkpoint's generation_config.json (default: auto)",
        "auto",
        choices=SOURCES,
    )
    cuda_graphs: bool = option(
        "launch decode steps on a GPU with CUDA graphs if possible (default: yes)", True, action=BooleanOptionalAction
    )
    attention: AttentionPaths | None = None  #: kernels of an earlier run or another process; None: the fastest here
