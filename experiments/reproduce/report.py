"""The report of a reproduction: one HTML file that needs nothing else, and every table and picture beside it."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.experiment import (
    ASIDE,
    Constant,
    ErrorSummary,
    Experiment,
    Figure,
    is_judged,
    num_aside,
    summary,
)
from figures.reproduce import draw
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import write_by_rename

#: |error| up to which a cell has each colour; the last colour is for what is beyond.
BOUNDS = (0.05, 0.15, 0.30)
MISSING = "–"
UNJUDGED = "No row is judged: the paper's numbers here are context, or are judged in another experiment."
#: The table of all rows that have a number of the paper, of all experiments; context is left out.
SUMMARY = "summary.csv"
#: How texts cite a note of the reference numbers, and rows a number of a paper's prose.
CITED_NOTES = re.compile(r"\bnotes? (\d+(?:(?:, | and )\d+)*)")
CITED_ID = re.compile(r"\b[ckis]h\d{3}\b")
HEADLINES = ("capture_headlines", "kvpr_headlines", "infinigen_headlines", "cascade_headlines")
#: A table of more rows can be folded away.
FOLDED = 20

STYLE, _PAGE = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("report.css", "report.html"))
TEMPLATE = Template(_PAGE)


def write(experiments: Sequence[Experiment], out_dir: str | Path) -> Path:
    """Write NAME.csv and NAME-FIGURE.png of every experiment, summary.csv and report.html; return report.html's path.

    A file is complete or absent, and equal records give equal bytes. Raises InputError where the folder
    cannot be written or two experiments have one name.
    """
    out_dir = Path(out_dir)
    names = [experiment.name for experiment in experiments]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two experiments are called {twice!r}")
    sections = []
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for experiment in experiments:
            rows = experiment.rows.to_csv(index=False, lineterminator="\n")
            write_by_rename(out_dir / f"{experiment.name}.csv", rows)
            pictures = [_picture(figure) for figure in experiment.figures]
            for figure, picture in zip(experiment.figures, pictures, strict=True):
                _write_bytes(out_dir / f"{experiment.name}-{figure.name}.png", picture)
            sections.append(section(experiment, pictures))
        write_by_rename(out_dir / SUMMARY, summary_csv(experiments))
        write_by_rename(out_dir / "report.html", page(experiments, sections))
    except OSError as error:
        raise InputError(f"cannot write the report to {out_dir}: {error.strerror or error}") from None
    return out_dir / "report.html"


def summary_csv(experiments: Sequence[Experiment]) -> str:
    """Return the rows with a number of the paper, without context, as CSV."""
    columns = ["experiment", "what", "paper", "ours", "unit", "error", "role", ASIDE, "source"]
    tables = [pd.DataFrame(columns=columns)] if not experiments else []
    for experiment in experiments:
        rows = experiment.rows
        compared = rows.loc[rows["paper"].notna() & (rows["role"] != "context")]
        tables.append(compared.assign(experiment=experiment.name).reindex(columns, axis="columns"))
    return pd.concat(tables).to_csv(index=False, lineterminator="\n", float_format="%.5g")


def page(experiments: Sequence[Experiment], sections: Sequence[str]) -> str:
    """Return the HTML document."""
    bounds = [f"{bound:.0%}" for bound in BOUNDS]
    labels = [f"up to {bound}" for bound in bounds] + [f"beyond {bounds[-1]}"]
    key = " ".join(f'<span class="e{i}">{label}</span>' for i, label in enumerate(labels))
    text = "".join(sections)
    parts = {"contents": contents(experiments), "sections": text, "quoted": quoted(text), "notes": notes(text)}
    return TEMPLATE.substitute(style=STYLE, key=key, **parts)


def notes(text: str) -> str:
    """Return the notes that a text cites, from the reference numbers' README."""
    known, cited, more = reference.notes(), set(), text
    while new := {int(digits) for run in CITED_NOTES.findall(more) for digits in re.findall(r"\d+", run)} - cited:
        cited |= new
        more = " ".join(known[number] for number in new)  # a note may cite others
    items = (f'<li value="{number}">{escape(known[number])}</li>' for number in sorted(cited))
    listed = "\n".join(["<ol>", *items, "</ol>"])
    intro = '<p class="quiet">(spec): the argument also uses a public figure that the paper does not give.</p>'
    return f'<section id="notes">\n<h2>Notes cited</h2>\n{intro}\n{listed}\n</section>\n'


def quoted(text: str) -> str:
    """Return a table of the papers' quoted numbers whose ids a text has: value, place and the passage itself."""
    cited, lines = set(CITED_ID.findall(text)), []
    for name in HEADLINES:
        for row in reference.load(name).to_dict("records"):
            if row["id"] in cited:
                value = number(row["value"]) + (f" {row['unit']}" if row["unit"] != "1" else "")
                lines.append(
                    f"<td>{row['id']}</td><td>{escape(value)}</td>"
                    f'<td class="long">{escape(row["source"])}</td><td class="long">{escape(row["quote"])}</td>'
                )
    table = _table((("id", ""), ("value", ""), ("where", ""), ("passage", "")), lines)
    return f'<section id="quoted">\n<h2>Numbers quoted from the papers\' prose</h2>\n{table}\n</section>\n'


def contents(experiments: Sequence[Experiment]) -> str:
    """Return the table at the top: each experiment's errors, over all judged rows and over those held out."""
    numeric = ("rows compared", "median |error|", "worst error", "held-out rows", "their median", "their worst")
    names = ("Experiment", *numeric[:3], "worst row", *numeric[3:])
    heads = [(name, "n" if name in numeric else "") for name in names]
    lines = []
    for experiment in experiments:
        judged, held_out = summary(experiment.rows), summary(experiment.rows, "validate")
        link = f'<a href="#{escape(experiment.name)}">{escape(experiment.title)}</a>'
        lines.append(
            f'<td class="long">{link}<br><span class="quiet">{escape(experiment.paper)}</span></td>'
            f'<td class="n">{_compared(experiment.rows, judged)}</td>{_median_and_worst(judged)}'
            f'<td class="long">{escape(judged.worst_what) or MISSING}</td>'
            f'<td class="n">{held_out.num_rows or MISSING}</td>{_median_and_worst(held_out)}'
        )
    return _table(heads, lines)


def section(experiment: Experiment, pictures: Sequence[bytes]) -> str:
    """Return an experiment's section: description, the paper's numbers and ours, figures, constants, mismatches."""
    parts = [
        f'<section id="{escape(experiment.name)}">\n<h2>{escape(experiment.title)}</h2>',
        f'<p class="quiet">{escape(experiment.paper)}</p>',
        f'<h3>What the paper did</h3>\n<p class="said">{escape(experiment.description)}</p>',
    ]
    if len(experiment.rows):
        parts.append(f"<h3>Paper and ours</h3>\n{_verdict(experiment.rows)}\n{rows_table(experiment.rows)}")
    if experiment.figures:
        parts.append("<h3>Figures</h3>")
        if any(figure.paper is not None for figure in experiment.figures):
            parts.append('<p class="quiet">Ours is solid, the paper\'s values are hollow and dashed.</p>')
        shown = [_figure(figure, picture) for figure, picture in zip(experiment.figures, pictures, strict=True)]
        parts.append("\n".join(['<div class="figures">', *shown, "</div>"]))
    if experiment.constants:
        parts.append(f"<h3>Constants</h3>\n{constants_table(experiment.constants)}")
    if experiment.notes:
        parts.append(f"<h3>How it was done here</h3>\n{_list(experiment.notes)}")
    if experiment.mismatches:
        parts.append(f"<h3>What does not match, and why</h3>\n{_list(experiment.mismatches)}")
    return "\n".join([*parts, "</section>\n"])


def rows_table(rows: pd.DataFrame) -> str:
    """Return all rows as a table, without empty columns; a source that all rows share stands below it once."""
    first = ["what", "paper", "ours", "unit", "error", "role"]  # these are seen on a phone without scrolling
    columns = [*first, *(name for name in rows.columns if name not in (*first, "source")), "source"]
    always = ("what", "paper", "ours", "error")
    columns = [name for name in columns if name in always or not _is_blank(rows[name].tolist())]
    below = ""
    sources = list(dict.fromkeys(rows["source"]))
    if "source" in columns and len(rows) > 1 and len(sources) == 1:
        columns.remove("source")
        below = f'<p class="quiet">Source of all rows: {escape(str(sources[0]))}</p>'
    numbers = {name for name in columns if pd.api.types.is_numeric_dtype(rows[name])}
    lines = []
    for row in rows.loc[:, columns].to_dict("records"):
        cells = []
        for name, value in row.items():
            if name == "error":
                cells.append(_error_cell(value, judged=row.get("role") != "context" and not row.get(ASIDE)))
            elif name in numbers:
                cells.append(f'<td class="n">{number(value)}</td>')
            elif name == "role":
                cells.append(f'<td><span class="mark">{escape(value)}</span></td>' if value else "<td></td>")
            else:
                text = "" if pd.isna(value) else escape(str(value))
                cells.append(f'<td class="long">{text}</td>' if len(text) > 24 else f"<td>{text}</td>")
        lines.append("".join(cells))
    shown = _table([(name, "n" if name in numbers else "") for name in columns], lines) + below
    return shown if len(rows) <= FOLDED else f"<details open><summary>{len(rows)} rows</summary>\n{shown}</details>"


def constants_table(constants: Sequence[Constant]) -> str:
    """Return a table of the constants, each with its physical range and the rows it was fitted on."""
    heads = (("constant", ""), ("value", "n"), ("unit", ""), ("range", "n"), ("fitted on", ""), ("why this range", ""))
    lines = [
        f'<td>{escape(constant.name)}</td><td class="n">{number(constant.value)}</td><td>{escape(constant.unit)}</td>'
        f'<td class="n">{number(constant.low)} to {number(constant.high)}</td>'
        f'<td>{escape(constant.fitted_on or "not fitted")}</td><td class="long">{escape(constant.why)}</td>'
        for constant in constants
    ]
    return _table(heads, lines)


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


def _verdict(rows: pd.DataFrame) -> str:
    """Return a sentence for each role: number of rows, median, worst."""
    sentences = []
    for role, label in (("validate", "Held out"), ("calibrate", "Fitted on"), ("", "Others")):
        of_role = summary(rows, role)
        if of_role.num_rows:
            worst = f"worst {percent(of_role.worst_error, sign=True)} ({escape(of_role.worst_what)})"
            count = f"{of_role.num_rows} row{'s' * (of_role.num_rows > 1)}"
            sentences.append(f"{label}: {count}, median |error| {percent(of_role.median)}, {worst}.")
    if not sentences:
        sentences = [
            UNJUDGED if bool(rows["paper"].notna().any()) else "No row has a number of the paper to compare with."
        ]
    return f"<p>{'<br>'.join(sentences)}</p>"


def _compared(rows: pd.DataFrame, errors: ErrorSummary) -> str:
    """Return the number of rows compared, of all judged ones if fewer, and of those put aside."""
    num_judged = int(is_judged(rows).sum())
    compared = str(errors.num_rows) if num_judged == errors.num_rows else f"{errors.num_rows} of {num_judged}"
    return f"{compared} (+{num_aside(rows)} aside)" if num_aside(rows) else compared


def _median_and_worst(errors: ErrorSummary) -> str:
    if not errors.num_rows:
        return f'<td class="n">{MISSING}</td>' * 2
    return (
        f'<td class="n {_color(errors.median)}">{percent(errors.median)}</td>'
        f'<td class="n {_color(errors.worst)}">{percent(errors.worst_error, sign=True)}</td>'
    )


def _error_cell(error: float, judged: bool) -> str:
    if math.isnan(error):
        return f'<td class="n">{MISSING}</td>'
    color = f" {_color(error)}" if judged else ""
    return f'<td class="n{color}">{percent(error, sign=True)}</td>'


def _color(error: float) -> str:
    return f"e{sum(abs(error) > bound for bound in BOUNDS)}"


def _is_blank(cells: list) -> bool:
    return all(pd.isna(cell) or cell == "" for cell in cells)


def _table(heads: Sequence[tuple[str, str]], lines: Sequence[str]) -> str:
    head = "".join(f'<th class="{kind}">{escape(str(name))}</th>' for name, kind in heads)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _list(texts: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f'<li class="said">{escape(text)}</li>' for text in texts) + "\n</ul>"


def _figure(figure: Figure, picture: bytes) -> str:
    data = base64.b64encode(picture).decode("ascii")
    text = escape(f"{figure.title}: {figure.y_label} against {figure.x_label}")
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"></figure>'


def _picture(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    draw(figure, buffer)
    return buffer.getvalue()


def _write_bytes(path: Path, content: bytes) -> None:
    """As write_by_rename, for a picture."""
    part = path.with_name(path.name + ".partial")
    part.write_bytes(content)
    part.replace(path)
