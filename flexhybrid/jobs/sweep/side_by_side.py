"""Compares predicted runs of several systems, or several values of one field, as a table or a figure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from flexhybrid.core.errors import InputError, flag, shown, unknown
from flexhybrid.core.files import check_new_file
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.rates import RATES, costs
from flexhybrid.jobs.simulate import (
    LENGTHS,
    POINT,
    WEIGHTS_STREAMED,
    Note,
    SimulatedQueue,
    is_policy_file,
    no_start,
    run_point,
    shares_text,
    unlike_weights,
)
from policy_search.systems import Setting, System, dropped, parse
from sim.simulate import SimulatedRun

LOSSY = "changes the tokens"  #: note on a lossy system
#: Field that can be varied -> function that converts a value's text.
VARIED: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(POINT, str), **dict.fromkeys(LENGTHS, int), **dict.fromkeys(RATES, float)
}  # fmt: skip
MOST_LINES = 10  #: lines of a figure, the number of colours
FORMATS = (".png", ".pdf", ".svg")


class Varied(NamedTuple):
    """A field of a point, and the values to compare."""

    field: str
    values: tuple


class SystemRun(NamedTuple):
    """The predicted run of a point, or the reason why it cannot run."""

    point: Mapping
    setting: Setting | None = None
    made: System | None = None
    run: SimulatedRun | SimulatedQueue | None = None
    error: str = ""
    notes: tuple[str, ...] = ()  #: further remarks

    @property
    def system(self) -> str:
        return self.point["system"]

    def to_dict(self, field: str | None) -> dict:
        """Return plain JSON. ``field``: the varied field, whose value is included; None: none."""
        row = {"system": self.system} | ({field: self.point[field]} if field else {})
        if self.run is None or self.setting is None:
            return row | {"error": self.error}
        return row | self.run.to_dict() | costs(self.setting.machine, self.tokens_per_s)

    @property
    def tokens_per_s(self) -> float:
        """Rate of generated tokens; 0 if the point cannot run."""
        return self.run.tokens_per_s if self.run else 0.0

    @property
    def remarks(self) -> str:
        """Notes on the run; "" if the point cannot run."""
        if not self.run:
            return ""
        row = self.run.to_dict()
        streamed = self.system.startswith("resident") and bool(row["kept_weights"]["device"] < 1)
        notes = [*self.notes, WEIGHTS_STREAMED * streamed, LOSSY * (not row["lossless"])]
        return "; ".join(filter(None, [*notes, dropped(self.system, row["policy"]["attention"])]))


def varied_of(text: str) -> Varied:
    """Parse FIELD=VALUE,VALUE,…. Raise InputError for an unknown field or an impossible value."""
    field, equals, rest = (part.strip() for part in text.partition("="))
    field = field.removeprefix("--").replace("-", "_")
    if field not in VARIED:
        raise unknown("field of --vary", field, VARIED)
    texts = [part.strip() for part in rest.split(",") if part.strip()]
    if not equals or not texts:
        raise InputError(f"--vary {text!r}: write FIELD=VALUE,VALUE, like batch=1,2,4,8")
    try:
        return Varied(field, tuple(dict.fromkeys(map(VARIED[field], texts))))
    except ValueError:
        raise InputError(f"--vary {field}: {shown(rest)} must be numbers, for example {field}=1,2,4,8") from None


def answers(points: Iterable[Mapping], workload: Workload | None = None, note: Note | None = None) -> list[SystemRun]:
    """Return the run of each point, or its error; ``workload`` and ``note`` as in ``run_point``."""
    found = []
    for point in points:
        try:
            found.append(SystemRun(point, *run_point(point, workload, note)))
        except InputError as error:
            found.append(SystemRun(point, error=str(error)))
        note = None  # only the first point prints notes
    return found


def side_by_side(
    point: Mapping,
    systems: Sequence[str],
    varied: Varied | None,
    workload: Workload | None = None,
    note: Note | None = None,
) -> list[SystemRun]:
    """Return a run of every system at every value of the varied field.
    Raise InputError for an unknown system, and if no run is possible."""
    for text in systems:
        if not is_policy_file(text):
            parse(text)
    values = [{varied.field: value} for value in varied.values] if varied else [{}]
    found = answers([{**point, **value, "system": text} for value in values for text in systems], workload, note)
    if not any(answer.run for answer in found):
        raise InputError(found[0].error)
    return found


def describe_answers(found: list[SystemRun], varied: Varied | None) -> str:
    """Return a table as text: a row per value with the tokens/s of each system, or without a field a row per system."""
    table = _by_value(found, varied) if varied else by_system(found)
    runs = [answer.run.to_dict() for answer in found if answer.run]
    on_device = [run["kept_weights"]["device"] for run in runs]
    unlike = unlike_weights(on_device) if len({answer.system for answer in found}) > 1 else []
    return "\n".join([table, *unlike, *no_start(min(run["total_s"] for run in runs))])


def _by_value(found: list[SystemRun], varied: Varied) -> str:
    systems = list(dict.fromkeys(answer.system for answer in found))
    widths = [max(12, len(system)) for system in systems]
    first = max(len(varied.field), *(len(str(value)) for value in varied.values))
    columns = (f"{system:>{width}}" for system, width in zip(systems, widths, strict=True))
    lines = ["tokens/s", f"  {varied.field:>{first}}  {'  '.join(columns)}"]
    for value in varied.values:
        cells = []
        for answer, width in zip((one for one in found if one.point[varied.field] == value), widths, strict=True):
            cells.append(f"{answer.tokens_per_s:{width}.4g}" if answer.run else f"{'-':>{width}}")
        lines.append(f"  {value!s:>{first}}  {'  '.join(cells)}")
    wrong = dict.fromkeys(f"{answer.system}: {answer.error}" for answer in found if answer.error)
    said = dict.fromkeys(f"  {answer.system}: {answer.remarks}" for answer in found if answer.remarks)
    return "\n".join([*lines, *(f"  -  {text}" for text in wrong), *said])


def by_system(found: Sequence[SystemRun], best: float | None = None) -> str:
    """Return a table as text, the fastest system first. ``best``: tokens/s to compare each with; None: none."""
    width = max(len(answer.system) for answer in found)
    compared = f" {'':7}" if best else ""
    lines = [f"  {'':{width}}  {'tokens/s':>10}{compared}  {'seconds':>10}  {'requests':>9}  at a time"]
    for answer in sorted(found, key=lambda answer: -answer.tokens_per_s):
        if answer.run is None:
            lines.append(f"  {answer.system:{width}}  does not run: {answer.error}")
            continue
        row = answer.run.to_dict()
        placed = f"weights {shares_text(row['kept_weights'])}; cache {shares_text(row['policy']['cache'])}"
        requests, at_a_time = row.get("requests", row.get("batch")), row.get("at_a_time", row.get("wave"))
        compared = f" {answer.tokens_per_s / best - 1:+7.1%}" if best else ""
        lines.append(
            f"  {answer.system:{width}}  {answer.tokens_per_s:10.4g}{compared}  {row['total_s']:10.4g}  {requests:9}  "
            f"{at_a_time:9}  {placed}; bound by {row['binding']}{_costs_text(answer)}"
            f"{answer.remarks and f' ({answer.remarks})'}"
        )
    return "\n".join(lines)


def _costs_text(answer: SystemRun) -> str:
    found = costs(answer.setting.machine, answer.tokens_per_s) if answer.setting else {}
    words = {"dollars_per_million_tokens": "${:.3g}", "kwh_per_million_tokens": "{:.3g} kWh"}
    parts = [words[name].format(value) for name, value in found.items()]
    return f"; {' and '.join(parts)} a million tokens" if parts else ""


def check_plot(path: Path | None, field: str | None, remedy: str = "name it, like --vary batch=1,2,4,8") -> None:
    """Raise InputError if ``path`` cannot be a figure, or no ``field`` is varied; ``remedy``: advice for that case."""
    if path is None:
        return
    if field is None:
        raise InputError(f"--plot {path} draws tokens/s over one field: {remedy}")
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot {path}: a figure is a {', '.join(FORMATS)} file")
    check_new_file(path)


def draw_rows(rows: Sequence[tuple[str, Any, float]], field: str, title: str, path: Path) -> None:
    """Draw rows (series, value of the field, tokens/s), with a line for each of the MOST_LINES fastest series."""
    import pandas as pd

    from figures.reproduce import draw

    lines = list(dict.fromkeys(name for name, _, _ in sorted(rows, key=lambda row: -row[2])))
    if len(lines) > MOST_LINES:
        rows = [row for row in rows if row[0] in lines[:MOST_LINES]]
        title = f"{title}: the {MOST_LINES} fastest of {len(lines)} lines"
    frame = pd.DataFrame(rows, columns=["system", field, "tokens_per_s"])
    values = frame[field].unique().tolist()
    numbers = [value for value in values if isinstance(value, (int, float))]
    spread = len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= 8 * min(numbers)
    figure = {"name": path.stem, "kind": "line", "frame": frame, "title": title, "series": "system", "paper": None}
    figure |= {"x": field, "x_label": flag(field).removeprefix("--").replace("-", " "), "log_x": spread}
    figure |= {"y": "tokens_per_s", "y_label": "generated tokens/s", "log_y": False}
    path.write_bytes(draw(SimpleNamespace(**figure))[path.suffix.lower().removeprefix(".")])
