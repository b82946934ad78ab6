"""Records of options: a field that is made by ``option`` is a flag of a command, declared once with its help.

``LLMArguments``, the arguments of ``LLM`` as one value, is one of them. Importing this loads neither torch nor
transformers.
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
TRIALS_HELP = "take the search's choice as it is: no trials correct the profile"
DEVICE_HELP = "(auto: CUDA, if there is one)"
LINK_HELP = "pace of the link that a CPU has in place of a GPU's, which copies reach"
DISK_DIR_HELP = (
    "scratch folder of policies that use a disk (scratch in $FLEXHYBRID_CACHE, or in ~/.cache/flexhybrid without it)"
)
DISK_PACE_HELP = "pace of that disk"


def option(text: str | None, default: Any = MISSING, **how) -> Any:
    """Return a field of a record that is a flag of the same name; without a default it is required.

    ``text``: its help. ``how``: what ``add_argument`` takes besides what the field's name and type say, and ``names``,
    flags in place of the field's own. A bool that is True is switched off by --no-NAME.
    """
    return field(default=default, metadata={"help": text, **how})


def add_options(parser: argparse.ArgumentParser, record: type, names: Collection[str] | None = None) -> None:
    """Add the flags of a record, or those of the fields ``names``. One that is not given is None in the arguments."""
    kinds = typing.get_type_hints(record)
    for one in fields(record):
        if "help" not in one.metadata or names is not None and one.name not in names:
            continue
        how = {"dest": one.name, "default": None, "required": one.default is MISSING, **one.metadata}
        kind = _plain_type(kinds[one.name])
        if kind is bool:
            how.setdefault("action", "store_false" if one.default else "store_true")
        elif typing.get_origin(kind) is not None:
            how = {"nargs": "+", "type": typing.get_args(kind)[0], **how}
        else:
            how.setdefault("type", kind)
        own = flag(one.name) if how.get("action") != "store_false" else f"--no-{flag(one.name)[2:]}"
        parser.add_argument(*how.pop("names", (own,)), **how)


def _plain_type(kind):
    """Return the first type of a union, ``kind`` itself otherwise."""
    return typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind


def add_budgets(parser: argparse.ArgumentParser, default: str) -> None:
    """Add a flag for the memory of each tier; ``default`` says what it is without one."""
    for tier in TIERS:
        parser.add_argument(f"--{tier}-memory", help=f"budget of the {tier}, like 12GiB ({default})")


def options_from(record: type[Record], args: argparse.Namespace, **others) -> Record:
    """Return ``record(…)`` of the arguments that have its fields' names and were given, and of ``others``."""
    names = {field.name for field in fields(record)} - others.keys()
    return record(
        **{name: value for name, value in vars(args).items() if name in names and value is not None}, **others
    )


def budgets_from(args: argparse.Namespace) -> dict[str, str | None]:
    """Return tier -> the text of its memory flag; None where the flag was not given."""
    return {tier: getattr(args, f"{tier}_memory") for tier in TIERS}


def split_names(texts: list[str]) -> tuple[str, ...]:
    """Return the names of a list: separated by spaces, or by commas outside parentheses. Raise InputError for an empty
    name; a comma may end a text."""
    parts = [part.strip() for text in texts for part in re.split(r",(?![^()]*\))", text.strip().removesuffix(","))]
    if "" in parts:
        raise InputError(f"{' '.join(texts)!r} has an empty name: write names with commas between, like kv_only,int4")
    return tuple(parts)


def job(module: str, name: str) -> Callable[[argparse.Namespace], dict]:
    """Return a function of a module, which is imported when it is called: commands parse before they load."""
    return lambda args: getattr(import_module(module), name)(args)


@dataclass(frozen=True)
class LLMArguments:
    """What ``LLM(…)`` takes, to keep, to change with ``replace``, or to send to another process."""

    model: str | Path = option("checkpoint: a local folder, or a name in the Hugging Face cache", type=Path)
    policy: str | Path | Policy = option("auto, a system by name, or a policy JSON file (auto)", "auto", type=str)
    device: str = option(DEVICE_HELP, "auto", choices=DEVICES)
    dtype: str = option(None, "auto", choices=DTYPES)
    hardware: Hardware | str | Path | None = option(
        "what auto reckons with: a machine by name or a file (a profile, kept)", None, type=str
    )
    budgets: dict[str, str | float | None] = field(default_factory=dict)  #: tier -> memory; absent or None: no limit
    link_gb_per_s: float | None = option(LINK_HELP, None)
    disk_dir: str | Path | None = option(DISK_DIR_HELP, None, type=Path, metavar="DIR")
    disk_gb_per_s: float | None = option(DISK_PACE_HELP, None)
    max_model_len: int | None = None  #: most tokens of a prompt and its answer together; None: the model's positions
    enable_prefix_caching: bool = option(
        "compute and keep what prompts begin with alike once for all of them (yes)", True, action=BooleanOptionalAction
    )
    generation_config: str = option(
        "auto: sampling that neither a request nor this command names is that of the checkpoint's "
        "generation_config.json (auto)", "auto", choices=SOURCES,
    )  # fmt: skip
    cuda_graphs: bool = option(
        "launch decode steps on a GPU by CUDA graphs, where they can be (yes)", True, action=BooleanOptionalAction
    )
    attention: AttentionPaths | None = None  #: of an earlier run or another process; None: the fastest ones here
