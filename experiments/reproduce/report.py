"""The report of a reproduction: one HTML file that needs nothing else, and every table and picture beside it."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.experiment import ASIDE, Constant, Experiment, Figure, Summary, is_judged, num_aside, summary
from figures.reproduce import draw
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import write_by_rename

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

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #1b1f24; background: #fff;
  max-width: 76rem; margin: 0 auto; padding: 1rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .5rem 0 .75rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 3rem 0 .25rem; padding-top: .75rem; border-top: 2px solid #d0d7de; }
h3 { font-size: 1.02rem; margin: 1.5rem 0 .4rem; }
p, li { max-width: 52rem; overflow-wrap: break-word; }
.said { white-space: pre-line; }
p { margin: .4rem 0; }
.quiet { color: #59636e; font-size: .9rem; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .86rem; line-height: 1.35; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e4e8ec; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #c4ccd4; background: #f6f8fa; vertical-align: bottom; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
td { white-space: nowrap; }
td.long { white-space: normal; min-width: 12rem; max-width: 32rem; overflow-wrap: break-word; }
summary { cursor: pointer; }
.e0 { background: #d3f0d9; } .e1 { background: #fbf0b6; } .e2 { background: #fdd9b0; } .e3 { background: #f8c3c1; }
.key span { padding: .05rem .5rem; margin-right: .4rem; white-space: nowrap; }
.mark { padding: .05rem .4rem; border: 1px solid #c4ccd4; border-radius: .6rem; font-size: .8rem; white-space: nowrap; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: .5rem 0; }
figure { margin: 0; flex: 0 1 36rem; break-inside: avoid; }
img { width: 100%; height: auto; border: 1px solid #e4e8ec; }
a { color: #0a58b5; }
@media (max-width: 40rem) {
  body { padding: .5rem .75rem 3rem; font-size: 15px; } h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; }
  th, td { padding: .25rem .4rem; } td.long { min-width: 11rem; } }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } .wide { overflow: visible; } a { color: inherit; }
  .figures { display: block; } figure { margin: .5rem 0; max-width: 15cm; }
  h2 { break-before: page; } h3, h3 + .quiet { break-after: avoid; } tr { break-inside: avoid; }
  thead { display: table-header-group; }
  .e0, .e1, .e2, .e3, th { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
"""


def write(experiments: Sequence[Experiment], out_dir: str | Path) -> Path:
    """Write NAME.csv and NAME-FIGURE.png of every experiment, summary.csv, report.html; returns the latter's path.

    Every file is whole or not there, and the same records give the same bytes. Raises InputError where the folder
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
            write_by_rename(
                out_dir / f"{experiment.name}.csv", experiment.rows.to_csv(index=False, lineterminator="\n")
            )
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
    """Rows with a number of the paper, context left out."""
    columns = ["what", "paper", "ours", "unit", "error", "role", ASIDE, "source"]
    given = {one.name: one.rows[one.rows["paper"].notna() & (one.rows["role"] != "context")] for one in experiments}
    tables = [rows.reindex(columns=columns).assign(experiment=name) for name, rows in given.items()]
    whole = pd.concat(tables)[["experiment", *columns]] if tables else pd.DataFrame(columns=["experiment", *columns])
    return whole.to_csv(index=False, lineterminator="\n", float_format="%.5g")


def page(experiments: Sequence[Experiment], sections: Sequence[str]) -> str:
    """The whole document."""
    bounds = [f"{bound:.0%}" for bound in BOUNDS]
    words = [f"up to {bound}" for bound in bounds] + [f"beyond {bounds[-1]}"]
    key = " ".join(f'<span class="e{i}">{word}</span>' for i, word in enumerate(words))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Reproduced results</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Reproduced results</h1>
<p>Numbers that papers report, computed again with flexhybrid's cost model. Error is ours / paper − 1.
Rows marked <span class="mark">calibrate</span> were used to fit constants and prove nothing by themselves;
<span class="mark">validate</span> rows were not; <span class="mark">context</span> rows are shown without being judged
and are left out of medians and worst cases, as are rows put aside for the reason in their column "aside": the same
number printed again, arithmetic that tests no model, or a number that the paper itself contradicts. Ids such as ch020
name <a href="#quoted">numbers quoted from the papers' prose</a>; <a href="#notes">notes</a> say where a paper
contradicts itself or another.</p>
<p class="key quiet">|error|: {key}</p>
{contents(experiments)}
{"".join(sections)}
{quoted("".join(sections))}
{notes("".join(sections))}
</body>
</html>
"""


def notes(text: str) -> str:
    """The notes that a text cites, as they stand in the reference numbers' README."""
    known, cited, more = reference.notes(), set(), text
    while found := {int(one) for some in CITED_NOTES.findall(more) for one in re.findall(r"\d+", some)} - cited:
        cited |= found
        more = " ".join(known[one] for one in found)  # a note may cite others
    listed = "\n".join(["<ol>", *(f'<li value="{one}">{escape(known[one])}</li>' for one in sorted(cited)), "</ol>"])
    intro = '<p class="quiet">(spec): the argument also uses a public figure that the paper does not give.</p>'
    return f'<section id="notes">\n<h2>Notes cited</h2>\n{intro}\n{listed}\n</section>\n'


def quoted(text: str) -> str:
    """The numbers of the papers' prose whose ids a text has: value, place and the passage itself."""
    cited, lines = set(CITED_ID.findall(text)), []
    for name in HEADLINES:
        for row in reference.load(name).to_dict("records"):
            if row["id"] in cited:
                value = f"{number(row['value'])} {row['unit']}" if row["unit"] != "1" else number(row["value"])
                lines.append(
                    f"<td>{row['id']}</td><td>{escape(value)}</td>"
                    f'<td class="long">{escape(row["source"])}</td><td class="long">{escape(row["quote"])}</td>'
                )
    table = _table((("id", ""), ("value", ""), ("where", ""), ("passage", "")), lines)
    return f'<section id="quoted">\n<h2>Numbers quoted from the papers\' prose</h2>\n{table}\n</section>\n'


def contents(experiments: Sequence[Experiment]) -> str:
    """The table at the top: how close each experiment comes, over all judged rows and over those held out."""
    heads = (
        ("Experiment", ""), ("rows compared", "n"), ("median |error|", "n"), ("worst error", "n"), ("worst row", ""),
        ("held-out rows", "n"), ("their median", "n"), ("their worst", "n"),
    )  # fmt: skip
    lines = []
    for experiment in experiments:
        found, held_out = summary(experiment.rows), summary(experiment.rows, "validate")
        link = f'<a href="#{escape(experiment.name)}">{escape(experiment.title)}</a>'
        lines.append(
            f'<td class="long">{link}<br><span class="quiet">{escape(experiment.paper)}</span></td>'
            f'<td class="n">{_compared(experiment.rows, found)}</td>{_median_and_worst(found)}'
            f'<td class="long">{escape(found.worst_what) or MISSING}</td>'
            f'<td class="n">{held_out.num_rows or MISSING}</td>{_median_and_worst(held_out)}'
        )
    return _table(heads, lines)


def section(experiment: Experiment, pictures: Sequence[bytes]) -> str:
    """One experiment: what the paper did, its numbers beside ours, figures, constants, what does not match."""
    parts = [
        f'<section id="{escape(experiment.name)}">\n<h2>{escape(experiment.title)}</h2>',
        f'<p class="quiet">{escape(experiment.paper)}</p>',
        f'<h3>What the paper did</h3>\n<p class="said">{escape(experiment.what)}</p>',
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
    """All rows; columns without any content are left out, and a source that all rows share is said once."""
    first = ["what", "paper", "ours", "unit", "error", "role"]  # these are seen on a phone without scrolling
    columns = [*first, *(name for name in rows.columns if name not in (*first, "source")), "source"]
    columns = [name for name in columns if name in ("what", "paper", "ours", "error") or not _is_blank(rows[name])]
    below = ""
    if "source" in columns and len(rows) > 1 and rows["source"].nunique(dropna=False) == 1:
        columns.remove("source")
        below = f'<p class="quiet">Source of all rows: {escape(str(rows["source"].iloc[0]))}</p>'
    numbers = {name for name in columns if pd.api.types.is_numeric_dtype(rows[name])}
    lines = []
    for row in rows[columns].to_dict("records"):
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
    """Every constant with the range it had to stay in and the rows it was fitted on."""
    heads = (("constant", ""), ("value", "n"), ("unit", ""), ("range", "n"), ("fitted on", ""), ("why this range", ""))
    lines = [
        f'<td>{escape(one.name)}</td><td class="n">{number(one.value)}</td><td>{escape(one.unit)}</td>'
        f'<td class="n">{number(one.low)} to {number(one.high)}</td>'
        f'<td>{escape(one.fitted_on) if one.fitted_on else "not fitted"}</td><td class="long">{escape(one.why)}</td>'
        for one in constants
    ]
    return _table(heads, lines)


def number(value: float) -> str:
    """Four significant digits; a number from 10,000 up in full; a dash where there is none."""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if pd.isna(value):
        return MISSING
    if math.isinf(value):
        return str(value)
    size = abs(value)
    return f"{value:,.0f}" if 1e4 <= size < 1e12 else f"{float(value):.4g}"


def percent(value: float, sign: bool = False) -> str:
    """With one decimal; a dash where there is none."""
    if math.isnan(value):
        return MISSING
    value = round(100 * value, 1) + 0.0  # no -0.0
    return f"{value:+,.1f}%".replace("-", "−") if sign and value else f"{value:,.1f}%"


def _verdict(rows: pd.DataFrame) -> str:
    """A sentence a role: how many rows, median, worst."""
    sentences = []
    for role, words in (("validate", "Held out"), ("calibrate", "Fitted on"), ("", "Others")):
        found = summary(rows, role)
        if found.num_rows:
            sentences.append(
                f"{words}: {found.num_rows} row{'s' * (found.num_rows > 1)}, median |error| {percent(found.median)}, "
                f"worst {percent(found.worst_error, sign=True)} ({escape(found.worst_what)})."
            )
    if not sentences:
        sentences = [UNJUDGED if rows["paper"].notna().any() else "No row has a number of the paper to compare with."]
    return f"<p>{'<br>'.join(sentences)}</p>"


def _compared(rows: pd.DataFrame, found: Summary) -> str:
    """Rows compared; where the paper has more numbers than came out here, of how many; those put aside."""
    num_given = int(is_judged(rows).sum())
    compared = str(found.num_rows) if num_given == found.num_rows else f"{found.num_rows} of {num_given}"
    return f"{compared} (+{num_aside(rows)} aside)" if num_aside(rows) else compared


def _median_and_worst(found: Summary) -> str:
    if not found.num_rows:
        return f'<td class="n">{MISSING}</td>' * 2
    return (
        f'<td class="n {_color(found.median)}">{percent(found.median)}</td>'
        f'<td class="n {_color(found.worst)}">{percent(found.worst_error, sign=True)}</td>'
    )


def _error_cell(error: float, judged: bool) -> str:
    if math.isnan(error):
        return f'<td class="n">{MISSING}</td>'
    color = f" {_color(error)}" if judged else ""
    return f'<td class="n{color}">{percent(error, sign=True)}</td>'


def _color(error: float) -> str:
    return f"e{sum(abs(error) > bound for bound in BOUNDS)}"


def _is_blank(column: pd.Series) -> bool:
    return bool(((column.isna()) | (column.astype(str) == "")).all())


def _table(heads: Sequence[tuple[str, str]], lines: Sequence[str]) -> str:
    head = "".join(f'<th class="{kind}">{escape(str(name))}</th>' for name, kind in heads)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _list(texts: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f'<li class="said">{escape(text)}</li>' for text in texts) + "\n</ul>"


def _figure(figure: Figure, picture: bytes) -> str:
    data = base64.b64encode(picture).decode("ascii")
    words = escape(f"{figure.title}: {figure.y_label} against {figure.x_label}")
    return f'<figure><img alt="{words}" src="data:image/png;base64,{data}"></figure>'


def _picture(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    draw(figure, buffer)
    return buffer.getvalue()


def _write_bytes(path: Path, content: bytes) -> None:
    """As write_by_rename, for a picture."""
    part = path.with_name(path.name + ".partial")
    part.write_bytes(content)
    part.replace(path)
