"""The records of a reproduction: rows of paper against ours, figures as data, constants with their physical range.

A record holds data only. ``experiments.reproduce.report`` writes it, ``figures.reproduce`` draws its figures.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from flexhybrid.core.errors import InputError

#: What a row is for: fitted on, held out and compared, or shown without a judgement.
ROLES = ("calibrate", "validate", "context", "")
COLUMNS = ("what", "paper", "ours", "unit", "error", "role", "source")
KINDS = ("line", "bar")

#: A row may say in a column ``aside`` why it is shown without being judged although the paper has a number: the paper
#: prints it twice, it is arithmetic that tests no model, or the paper contradicts it itself.
ASIDE = "aside"
ARITHMETIC = "arithmetic"

FAR = 0.3  #: |error| beyond which a held-out row must have an explanation

Row = dict[str, Any]  #: a row before its error is computed: its cells by column
Data = pd.DataFrame | Sequence[dict]  #: a figure's frame, or its points


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number that no paper states: its value, the range that physics or datasheets leave, and why.

    ``fitted_on`` names the rows it was fitted on; None for one that was set beforehand. Raises InputError where the
    value is outside its range: a fit that needs an impossible constant is wrong elsewhere.
    """

    name: str
    value: float
    unit: str
    low: float
    high: float
    why: str
    fitted_on: str | None = None

    def __post_init__(self):
        for name in ("value", "low", "high"):
            field = getattr(self, name)
            if isinstance(field, bool) or not isinstance(field, (int, float, np.number)) or not math.isfinite(field):
                raise InputError(f"constant {self.name}: {name} must be a finite number, not {field!r}")
        if not self.low <= self.value <= self.high:
            raise InputError(
                f"constant {self.name} = {self.value:.6g} {self.unit} is outside its physical range "
                f"{self.low:.6g} to {self.high:.6g}: {self.why}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Figure:
    """A picture as data: columns ``x`` and ``y`` of ``frame``, one line or set of bars for each value of ``series``.

    ``paper`` has the same columns with the paper's values, where it gives any; columns "low" and "high" of ``frame``
    are the ends of error bars. A line's x may be text, then evenly spaced; ``log_x``, ``log_y`` are for decades.
    """

    name: str
    kind: str
    frame: pd.DataFrame
    x: str
    y: str
    series: str | None
    title: str
    x_label: str
    y_label: str
    paper: pd.DataFrame | None = None
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self):
        _check_name("figure", self.name)
        if self.kind not in KINDS:
            raise InputError(f"figure {self.name}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        for field, frame in (("frame", self.frame), ("paper", self.paper)):
            if frame is None:
                continue
            needed = [self.x, self.y, *([self.series] if self.series else [])]
            if missing := [column for column in needed if column not in frame.columns]:
                raise InputError(f"figure {self.name}: {field} has no column {missing[0]!r}")
            if not pd.api.types.is_numeric_dtype(frame[self.y]):
                raise InputError(f"figure {self.name}: column {self.y!r} of {field} must be numbers")
        if self.frame.empty:
            raise InputError(f"figure {self.name}: frame has no rows")


def bars(name: str, data: Data, title: str, x_label: str, y_label: str, paper: Data | None = None) -> Figure:
    """Return a figure of bars. The columns of ``data`` are x, y and, where there are several sets of bars, series."""
    frame = pd.DataFrame(data)
    x, y, *series = frame.columns
    return Figure(
        name=name,
        kind="bar",
        frame=frame,
        x=x,
        y=y,
        series=series[0] if series else None,
        title=title,
        x_label=x_label,
        y_label=y_label,
        paper=None if paper is None else pd.DataFrame(paper),
    )


def lines(
    name: str, data: Data, title: str, x_label: str, y_label: str, paper: Data | None = None, log: str = ""
) -> Figure:
    """Return a figure of lines over the columns of ``data`` (x, y, series); ``log``: axes over decades, "x" or "xy"."""
    figure = bars(name, data, title, x_label, y_label, paper)
    return replace(figure, kind="line", log_x="x" in log, log_y="y" in log)


@dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """One table or figure of a paper, reproduced.

    ``paper`` is the paper's title, ``description`` what the paper did. ``rows`` has COLUMNS (``table`` makes it) and
    any further columns. ``notes`` say how it was done here, ``mismatches`` what does not match, and why.
    """

    name: str
    paper: str
    title: str
    description: str
    rows: pd.DataFrame
    figures: tuple[Figure, ...] = ()
    constants: tuple[Constant, ...] = ()
    notes: tuple[str, ...] = ()
    mismatches: tuple[str, ...] = ()
    machines: Sequence[str] = ()  #: names that the process had loaded from the catalogue by its end

    def __post_init__(self):
        _check_name("experiment", self.name)
        for name in ("notes", "mismatches"):
            if isinstance(getattr(self, name), str):
                raise InputError(f"experiment {self.name}: {name} must be a tuple of texts, not one text")
        if missing := [column for column in COLUMNS if column not in self.rows.columns]:
            raise InputError(f"experiment {self.name}: rows have no column {missing[0]!r}")
        for column in ("paper", "ours", "error"):
            if not pd.api.types.is_numeric_dtype(self.rows[column]):
                raise InputError(f"experiment {self.name}: column {column!r} must be numbers")
        if wrong := sorted(set(self.rows["role"]) - set(ROLES)):
            raise InputError(f"experiment {self.name}: role {wrong[0]!r} is not one of {', '.join(map(repr, ROLES))}")
        expected = errors(self.rows["paper"], self.rows["ours"])
        if not np.allclose(self.rows["error"].to_numpy(float), expected, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise InputError(f"experiment {self.name}: column 'error' is not ours / paper - 1")
        names = [figure.name for figure in self.figures]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"experiment {self.name}: two figures are called {twice!r}")


class ErrorSummary(NamedTuple):
    """Errors over the judged rows that have a number of ours; NaN where there is none."""

    num_rows: int
    num_judged: int  #: with those that have no number of ours
    num_aside: int
    mean: float  #: of |error|
    median: float  #: of |error|
    worst: float  #: the error furthest from 0, with its sign
    worst_what: str
    within_10_percent: int
    beyond_30_percent: int

    @property
    def coverage(self) -> float:
        """The share of all rows with a number of the paper that are judged and have one of ours."""
        return self.num_rows / max(1, self.num_judged + self.num_aside)

    @property
    def in_words(self) -> str:
        """What held-out rows say."""
        if not self.num_rows:
            return "No row is held out."
        return (
            f"All {self.num_rows} held-out rows: |error| {self.mean:.1%} in the mean, {self.median:.1%} in the median, "
            f"worst {self.worst:+.1%} ({self.worst_what}); {self.within_10_percent} within 10 %, "
            f"{self.beyond_30_percent} beyond 30 %. They are {self.coverage:.0%} of the papers' numbers that nothing "
            f"was fitted on; {self.num_aside} are put aside: printed again, arithmetic, or contradicted by the paper."
        )


def errors(paper, ours) -> np.ndarray:
    """Return ours / paper - 1, element by element; NaN where either is missing or the paper says 0."""
    paper, ours = np.asarray(paper, dtype=float), np.asarray(ours, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(paper == 0, np.nan, ours / paper - 1)


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return an Experiment's rows from dicts with what, ours and any further columns; error is computed here.

    Columns: what, the further ones in order of appearance, then paper, ours, unit, error, role, source.
    """
    frame = pd.DataFrame(list(rows), columns=list(dict.fromkeys(key for row in rows for key in row)))
    if "error" in frame.columns:
        raise InputError("rows of an experiment come without 'error': it is computed")
    for column in ("what", "ours"):
        if column not in frame.columns:
            raise InputError(f"rows of an experiment need column {column!r}")
    frame = frame.assign(paper=frame.get("paper", np.nan))
    for column in ("paper", "ours"):
        try:
            frame[column] = frame[column].astype(float)
        except (TypeError, ValueError):
            raise InputError(f"rows of an experiment: column {column!r} must be numbers") from None
    for column in ("unit", "role", "source"):
        frame[column] = frame[column].fillna("") if column in frame.columns else ""
    if ASIDE in frame.columns:
        frame[ASIDE] = frame[ASIDE].fillna("")
    frame["error"] = errors(frame["paper"], frame["ours"])
    further = [column for column in frame.columns if column not in COLUMNS]
    return frame.loc[:, [COLUMNS[0], *further, *COLUMNS[1:]]]


def is_judged(rows: pd.DataFrame) -> np.ndarray:
    """Return which rows have a number of the paper that is judged: neither context nor put aside [rows]."""
    return is_compared(rows) & np.asarray(rows.get(ASIDE, "") == "")


def is_compared(rows: pd.DataFrame) -> np.ndarray:
    """Return which rows have a number of the paper and are no context [rows]."""
    return rows["paper"].notna().to_numpy() & (rows["role"] != "context").to_numpy()


def summary(rows: pd.DataFrame, role: str | None = None) -> ErrorSummary:
    """Summarize the errors of all judged rows, or of those of one role."""
    if role is not None:
        rows = rows.loc[rows["role"] == role]
    judged = rows.loc[is_judged(rows)]
    signed = judged["error"].dropna()
    sizes = signed.abs()
    none = signed.empty
    worst = None if none else sizes.idxmax()
    return ErrorSummary(
        num_rows=len(signed),
        num_judged=len(judged),
        num_aside=int(is_compared(rows).sum()) - len(judged),
        mean=float(sizes.mean()),
        median=float(sizes.median()),
        worst=math.nan if none else float(signed[worst]),
        worst_what="" if none else str(judged["what"][worst]),
        within_10_percent=int((sizes <= 0.1).sum()),
        beyond_30_percent=int((sizes > FAR).sum()),
    )


def _check_name(record: str, name: str) -> None:
    """Raise InputError unless the name can be a file's name and an anchor."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise InputError(f"{record} name {name!r}: use lower-case letters, digits, - and _")
