"""Reads the lengths of a queue of requests from a table, or counts those of a file of requests."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flexhybrid.core.errors import InputError, check, file_errors, unknown
from flexhybrid.core.workload import Prefixes, Workload
from flexhybrid.jobs.paths import check_file
from sim.answer_lengths import with_mean

COLUMNS = ("prompt_tokens", "max_tokens", "answer_tokens")  #: columns of a table; answer_tokens is optional
MISSPELLED = 0.85  #: similarity from which an unknown column counts as a misspelled known one
PREFIX = ("prefix", "prefix_tokens")  #: optional columns: name and length of a beginning that prompts share


def read_lengths(path: Path, model: str, answer_tokens: float | None = None) -> Workload:
    """Return the lengths of a file's requests in ``run``'s order, the longest first.

    ``path``: CSV with a header, or JSON lines, with COLUMNS and PREFIX; or OpenAI Batch lines, counted with the
    tokenizer next to ``model`` (a config.json or its folder). ``answer_tokens``: mean answer length, at least 1, for a
    file without answer_tokens. Raise InputError that names the line if one is wrong.
    """
    check("--mean-output-len", answer_tokens, answer_tokens is None or answer_tokens >= 1, "at least 1")
    check_file(path)
    with file_errors(f"read {path}"), open(path, encoding="utf-8", newline="") as file:
        is_table = path.suffix.lower() == ".csv"
        rows = csv.DictReader(file) if is_table else _objects(file, path)
        first = next(iter(rows), None)
        if first is None:
            raise InputError(f"{path} has no requests")
        if not is_table and not {"body", "prompt", "messages"}.isdisjoint(first):
            return _known(_counted(path, model), answer_tokens)
        names = COLUMNS if COLUMNS[2] in first else COLUMNS[:2]
        seen: set[str | None] = {None}  # csv's key for surplus fields of a row
        columns: list[list[int]] = [[] for _ in names]
        tree = PrefixTable()
        for number, row in enumerate((row for group in ((first,), rows) for row in group), 1 + is_table):
            if new := [name for name in row if name not in seen]:
                _check_names(new, row, f"{path}, line {1 if is_table else number}")
                seen.update(new)
            for name, column in zip(names, columns, strict=True):
                column.append(_count(row.get(name), f"{path}, line {number}: {name}"))
            if len(names) > 2 and columns[2][-1] > columns[1][-1]:
                answer, limit = columns[2][-1], columns[1][-1]
                raise InputError(f"{path}, line {number}: answer_tokens is {answer}, more than max_tokens, {limit}")
            names_of_prefix, ends = (row.get(name) for name in PREFIX)
            tree.add(names_of_prefix, ends, columns[0][-1], f"{path}, line {number}: ")
    answers = np.array(columns[2]) if len(columns) > 2 else None
    try:
        workload = Workload(np.array(columns[0]), np.array(columns[1]), answers, tree.prefixes())
        return _known(workload, answer_tokens)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _check_names(new: list[str], row: dict, where: str) -> None:
    """Raise InputError for a misspelled column among ``new``, and for a row without a required column."""
    known = (*COLUMNS, *PREFIX)
    for name in new:
        if name not in known and difflib.get_close_matches(name.strip().lower(), known, 1, MISSPELLED):
            raise InputError(f"{where}: {unknown('column', name, known)}")
    for name in COLUMNS[:2]:
        if name not in row:
            names = ", ".join(filter(None, row))
            raise InputError(f"{where}: there is no {name}; columns: {names}; known: {', '.join(known)}")


class PrefixTable:
    """The shared prefixes of a table's prompts by name; prefix "a/b" continues prefix "a"."""

    def __init__(self):
        self.numbers: dict[str, int] = {}  #: full name of a prefix -> its number
        self.tokens: list[int] = []  #: [prefixes] tokens from the prompt's start to the prefix's end
        self.parents: list[int] = []  #: [prefixes] number of the continued prefix; -1: none
        self.of_request: list[int] = []  #: [requests] number of the longest prefix; -1: none

    def add(self, names, tokens, prompt_tokens: int, where: str) -> None:
        """Add the prefix of a request, with the values of its columns PREFIX.
        Raise InputError, with a text that begins with ``where``, if they contradict each other or earlier ones."""
        parts = str(names).split("/") if names not in (None, "") else []
        ends = str("" if tokens is None else tokens).split("/") if parts else []
        if len(ends) != len(parts):
            raise InputError(
                f"{where}prefix_tokens is {tokens!r}; it must say where each part of {names!r} ends: 40/90"
            )
        number, before = -1, 0
        for depth, end in enumerate(ends):
            count, name = _count(end, f"{where}prefix_tokens"), "/".join(parts[: depth + 1])
            if not before < count <= prompt_tokens:
                raise InputError(
                    f"{where}prefix {name!r} ends at {count}: it must be above {before} and within the prompt"
                )
            if name not in self.numbers:
                self.numbers[name] = len(self.tokens)
                self.tokens.append(count)
                self.parents.append(number)
            number, before = self.numbers[name], count
            if self.tokens[number] != count:
                raise InputError(
                    f"{where}prefix {name!r} has {count} tokens, and {self.tokens[number]} on an earlier line"
                )
        self.of_request.append(number)

    def prefixes(self) -> Prefixes | None:
        """Return the prefixes; None if no prompt has one."""
        if not self.tokens:
            return None
        return Prefixes(*map(np.array, (self.tokens, self.parents, self.of_request)))


def _known(workload: Workload, answer_tokens: float | None) -> Workload:
    """Return the workload in a run's order, with answers of ``answer_tokens`` on average if it has none."""
    if workload.answer_tokens is None and answer_tokens is not None:
        workload = with_mean(workload, answer_tokens)
    return workload.select(np.lexsort((workload.prompt_tokens, workload.max_tokens))[::-1])


def _objects(file, path: Path) -> Iterator[dict]:
    """Yield the JSON object of each line. Raise InputError for a line without one."""
    for number, line in enumerate(file, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: no JSON object with {', '.join(COLUMNS[:2])}, or of a request")
        yield row


def _count(value, what: str) -> int:
    """Return a text or JSON number as a positive integer. Raise InputError, which begins with ``what``, for others."""
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or isinstance(value, (bool, float)):
        raise InputError(f"{what} is {value!r}; it must be a whole number of at least 1")
    return count


def _counted(path: Path, model: str) -> Workload:
    """Return the lengths of a file of requests, counted with the model's tokenizer."""
    folder = Path(model).parent if model.endswith(".json") else Path(model)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{path} has requests, whose tokens are counted with the model's tokenizer, but --model is {model!r}; "
            f"give a checkpoint's config.json as --model, or a table of {', '.join(COLUMNS)}"
        )
    from flexhybrid.batch.request_index import count_requests  # loads torch

    return count_requests(path, folder)
