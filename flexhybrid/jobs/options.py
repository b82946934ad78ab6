"""Options of a job from parsed arguments: every field of a record takes the argument of its own name."""

import argparse
import re
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")


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
