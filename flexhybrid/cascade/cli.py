"""``flexhybrid cascade …``: the commands and their arguments. Nothing slow is imported before one runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable

#: A command of the group: adds its parser, with ``run`` set to a function of the arguments that returns a dict.
PARTS: tuple[Callable, ...] = ()


def add_cascade(commands) -> list[argparse.ArgumentParser]:
    """The group; returns the parsers of its commands."""
    group = commands.add_parser(
        "cascade",
        help="small models answer what they are sure of, large ones the rest",
        description="Serve several sizes of a model together: a calibrated confidence decides whether an answer stands "
        "or the request goes on to a larger model.",
        allow_abbrev=False,
    )
    parts = group.add_subparsers(dest="part", required=True)
    for add in PARTS:
        add(parts)
    return list(parts.choices.values())
