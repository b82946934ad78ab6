"""The report of a reproduction: one HTML file that needs nothing else, and every table and picture beside it."""

import base64
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
from jinja2 import Environment

import figures
from experiments import reference
from experiments.reproduce.experiment import ASIDE, ErrorSummary, Experiment, summary
from experiments.reproduce.paper import PAPERS, Paper, as_csv, compared, far_off
from figures.reproduce import draw
from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.files import write_by_rename
from sim import catalogue

#: |error| up to which a cell has each colour; the last colour is for what is beyond.
BOUNDS = (0.05, 0.15, 0.30)
MISSING = "–"
#: The table of all rows that have a number of the paper, of all experiments; context is left out.
SUMMARY = "summary.csv"
#: How texts cite a note of the reference numbers, and rows a number of a paper's prose.
CITED_NOTES = re.compile(r"\bnotes? (\d+(?:(?:, | and )\d+)*)")
CITED_ID = re.compile(r"\b[ckis]h\d{3}\b")
HEADLINES = tuple(f"{key}_headlines" for key in PAPERS if f"{key}_headlines" in reference.TABLES)
#: A table of more rows can be folded away.
FOLDED = 20


def write(experiments: Sequence[Experiment], out_dir: str | Path, changes: Sequence[str] = ()) -> Path:
    """Write NAME.csv and NAME-FIGURE.png, .pdf and .svg of every experiment, summary.csv and report.html; return the
    path of report.html. ``changes``: what a reader has changed of the machines.

    A file is complete or absent, and equal records give equal bytes. Raises InputError where the folder
    cannot be written or two experiments have one name.
    """
    out_dir = Path(out_dir)
    names = [experiment.name for experiment in experiments]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two experiments are called {twice!r}")
    with file_errors(f"write the report to {out_dir}"):
        out_dir.mkdir(parents=True, exist_ok=True)
        pictures = [[draw(figure) for figure in experiment.figures] for experiment in experiments]
        for experiment, drawn in zip(experiments, pictures, strict=True):
            rows = experiment.rows.to_csv(index=False, lineterminator="\n")
            write_by_rename(out_dir / f"{experiment.name}.csv", rows)
            for figure, picture in zip(experiment.figures, drawn, strict=True):
                for ending, content in picture.items():
                    write_by_rename(out_dir / f"{experiment.name}-{figure.name}.{ending}", content)
        write_by_rename(out_dir / SUMMARY, as_csv(compared(experiments)))
        shown = [[one["png"] for one in drawn] for drawn in pictures]
        write_by_rename(out_dir / "report.html", page(experiments, shown, changes))
    return out_dir / "report.html"


def verdicts(experiments: Sequence[Experiment]) -> list[dict]:
    """Return the first page: each paper whose experiments were all run, its compared rows and constants, what holds."""
    rows, found = compared(experiments), []
    for paper in PAPERS.values():
        own = [experiment for experiment in experiments if experiment.name.startswith(f"{paper.key}-")]
        constants = {(constant.name, constant.unit): constant for one in own for constant in one.constants}
        of_paper = rows.loc[rows["experiment"].str.startswith(f"{paper.key}-")]
        with suppress(KeyError):  # a number that stands in an experiment which was not run
            holds, fails = paper.verdict(of_paper)
            known = {"paper": paper, "rows": of_paper, "constants": list(constants.values())}
            found.append(known | {"holds": holds, "fails": fails})
    return found


def machines(paper: Paper) -> str:
    """Return the machines that a paper is computed on, and where their rates are from."""
    return ", ".join(f"{name} ({catalogue.load(name).rates['kind']})" for name in paper.machines)


def notes(text: str) -> dict[int, str]:
    """Return the notes that a text cites, and those that they cite, from the reference numbers' README."""
    known, cited, more = reference.notes(), set(), text
    while new := {int(digits) for run in CITED_NOTES.findall(more) for digits in re.findall(r"\d+", run)} - cited:
        cited |= new
        more = " ".join(known[number] for number in new)
    return {number: known[number] for number in sorted(cited)}


def quoted(text: str) -> list[dict]:
    """Return the papers' quoted numbers whose ids a text has, as rows of the reference tables."""
    cited = set(CITED_ID.findall(text))
    return [row for name in HEADLINES for row in reference.load(name).to_dict("records") if row["id"] in cited]


def shown(rows: pd.DataFrame) -> tuple[list[str], set[str], str]:
    """Return the columns of a table that are shown, those of them that are numbers, and the source of all rows.

    Empty columns are left out, and a source that all rows share, which stands below the table.
    """
    first = ["what", "paper", "ours", "unit", "error", "role"]  # these are seen on a phone without scrolling
    columns = [*first, *(name for name in rows.columns if name not in (*first, "source")), "source"]
    always = ("what", "paper", "ours", "error")
    columns = [name for name in columns if name in always or any(map(_text, rows[name]))]
    source, *others = dict.fromkeys(rows["source"])
    if "source" in columns and len(rows) > 1 and not others:
        columns.remove("source")
    else:
        source = ""
    return columns, {name for name in columns if pd.api.types.is_numeric_dtype(rows[name])}, str(source)


def number(value: float) -> str:
    """Format a number: four significant digits, in full from 10,000 up; a dash where there is none."""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if pd.isna(value):
        return MISSING
    if math.isinf(value):
        return str(value)
    size = abs(value)
    return f"{value:,.0f}" if 1e4 <= size < 1e12 else f"{float(value):.4g}"


def percent(value: float, sign: bool = False) -> str:
    """Format a share as percent with one decimal; a dash where there is none."""
    if math.isnan(value):
        return MISSING
    value = round(100 * value, 1) + 0.0  # no -0.0
    return f"{value:+,.1f}%".replace("-", "−") if sign and value else f"{value:,.1f}%"


def num_compared(errors: ErrorSummary) -> str:
    """Return the number of rows compared, of all judged ones if fewer, and of those put aside."""
    text = str(errors.num_rows) if errors.num_rows == errors.num_judged else f"{errors.num_rows} of {errors.num_judged}"
    return f"{text} (+{errors.num_aside} aside)" if errors.num_aside else text


def _text(value) -> str:
    return "" if pd.isna(value) else str(value)


def _color(error: float) -> str:
    return f"e{sum(abs(error) > bound for bound in BOUNDS)}"


def _macros() -> dict:
    """Return the macros of report.html."""
    environment = Environment(autoescape=True, extensions=["jinja2.ext.do"])
    functions = {"number": number, "percent": percent, "color": _color, "text": _text}
    functions["base64"] = lambda content: base64.b64encode(content).decode("ascii")
    environment.filters |= functions
    environment.globals |= functions | {"summary": summary, "shown": shown, "num_compared": num_compared}
    environment.globals |= {"verdicts": verdicts, "machines": machines, "compared": compared, "far_off": far_off}
    environment.globals |= {"quoted": quoted, "notes": notes, "missing": MISSING, "aside": ASIDE, "folded": FOLDED}
    bounds = [f"{bound:.0%}" for bound in BOUNDS]
    environment.globals["labels"] = [*(f"up to {bound}" for bound in bounds), f"beyond {bounds[-1]}"]
    environment.globals["style"] = Path(figures.__file__).with_name("report.css").read_text(encoding="utf-8")
    html = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return vars(environment.from_string(html).module)


_MACROS = _macros()
page = _MACROS["page"]  #: (experiments, pictures of each, changes of the machines) -> the HTML document
rows_table = _MACROS["rows_table"]  #: rows -> an HTML table
