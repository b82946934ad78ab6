"""The gate: a file keeps the errors of all judged rows, and a change that worsens them needs ``--accept``.

``python -m experiments.reproduce.gate [--only PAPER …]`` (``make gate``) computes the rows and writes the file.
Where a row that ran runs no more, a system's median |error| in a paper is worse by more than a twentieth, or a row
beyond 30 % has no explanation, it names the rows and writes nothing; with ``--accept`` it does. The suite fails where
the file is not what a commit computes.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments.reproduce import registry
from experiments.reproduce.experiment import ASIDE, is_judged, summary
from experiments.reproduce.paper import COMPARED, PAPERS, as_csv, compared, unexplained
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import write_by_rename

FILE = registry.KEPT / "summary.csv"
WORSE = 1 / 20  #: by how much of itself a median may grow
SLACK = 1e-3  #: of a median: a tenth of a percentage point, which says nothing
SAME = 1e-3  #: relative; optimizers and libraries differ by less
_NUMBERS = ("paper", "ours", "error")


def kept() -> pd.DataFrame:
    """Return the file's rows. Raises InputError where it is not such a file."""
    try:
        rows = pd.read_csv(FILE, keep_default_na=False, na_values={name: [""] for name in _NUMBERS})
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {FILE}: {error}") from None
    if list(rows.columns) != list(COMPARED):
        raise InputError(f"{FILE} must have the columns {', '.join(COMPARED)}; take it from the last commit")
    return rows


def _of(rows: pd.DataFrame, papers: Sequence[str]) -> np.ndarray:
    return rows["experiment"].str.split("-").str[0].isin(papers).to_numpy()


def worse(before: pd.DataFrame, after: pd.DataFrame) -> list[str]:
    """Return what a change has worsened: rows that have no number any more, and systems whose median |error| in a paper
    has grown by more than WORSE, with the rows that are further off than before."""
    old, new = _by_row(before), _by_row(after)
    ran, runs = old["ours"].notna().to_numpy(), new["ours"].reindex(old.index).notna().to_numpy()
    lost = old.index[ran & ~runs & is_judged(old)]
    found = [f"no number any more: {_name(row)} (was {old.loc[row, 'ours']:.5g})" for row in lost]
    for group, of_system in old.loc[is_judged(old)].groupby(["key", "system"]):
        now = new.loc[(new["key"] == group[0]) & (new["system"] == group[1]) & is_judged(new)]
        median, is_now = summary(of_system).median, summary(now).median
        if is_now > (1 + WORSE) * median + SLACK:
            errors = pd.DataFrame({"was": of_system["error"], "is": now["error"]})
            further = errors.loc[errors.isna().any(axis=1) | (errors["is"].abs() > errors["was"].abs() * (1 + SAME))]
            pairs = [f"{_name(row)} {_percent(was)} -> {_percent(error)}" for row, was, error in further.itertuples()]
            found.append(f"{' '.join(group)}: median |error| {median:.1%} -> {is_now:.1%}: {'; '.join(pairs)}")
    return found


def stale(before: pd.DataFrame, after: pd.DataFrame) -> list[str]:
    """Return the rows of the file that are not what was computed, or are missing on one side."""
    old, new = _by_row(before), _by_row(after)
    found = [f"not in the file: {_name(row)}" for row in new.index.difference(old.index, sort=False)]
    found += [f"only in the file: {_name(row)}" for row in old.index.difference(new.index, sort=False)]
    for row in old.index.intersection(new.index, sort=False):
        for column in ("paper", "ours", "unit", "role", "system", ASIDE):
            was, now = old.loc[row, column], new.loc[row, column]
            is_number = column in _NUMBERS
            if not (np.isclose(was, now, rtol=SAME, equal_nan=True) if is_number else was == now):
                shown = [f"{value:.5g}" if is_number else str(value) for value in (now, was)]
                found.append(f"{_name(row)}: {column} is {shown[0]}, in the file {shown[1]}")
    return found


def check(paper: str) -> list[str]:
    """Return what is worse, stale or far off without an explanation in a paper's rows, computed now. Experiments
    without rows in the file are not run: they have none that is compared, or are new, and the command adds them."""
    before = kept()
    before = before.loc[_of(before, [paper])]
    experiments = [registry.run(name) for name in dict.fromkeys(before["experiment"])]
    after = compared(experiments)
    return worse(before, after) + stale(before, after) + unexplained(experiments)


def _by_row(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows by experiment, text, source, and a number where these are alike."""
    names = ["experiment", "what", "source"]
    rows = rows.assign(key=rows["experiment"].str.split("-").str[0], again=rows.groupby(names).cumcount())
    return rows.set_index([*names, "again"], drop=False)


def _name(row) -> str:
    experiment, quantity, source, _ = row
    return f"{experiment}, {quantity} ({source})"


def _percent(error: float) -> str:
    return "not judged" if np.isnan(error) else f"{error:+.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or say why not: exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m experiments.reproduce.gate", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PAPERS), default=list(PAPERS), help="some papers (all)")
    parser.add_argument("--accept", action="store_true", help="write rows that are worse, too")
    options = parser.parse_args(arguments)
    names = [name for name in registry.names() if name.partition("-")[0] in options.only]
    before = kept()
    others = before.loc[~_of(before, options.only)]
    experiments = registry.run_all(names)
    after = compared(experiments)
    complaints = worse(before.drop(others.index), after) + unexplained(experiments)
    print("\n".join(complaints) or "Nothing is worse.")
    if complaints and not options.accept:
        print("Nothing was written. If this is meant: --accept", file=sys.stderr)
        return 2
    order = {name: place for place, name in enumerate(registry.names())}
    rows = pd.concat([others, after], ignore_index=True)
    rows = rows.sort_values("experiment", key=lambda names: names.map(order), kind="stable")
    write_by_rename(FILE, as_csv(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
