"""What ``flexhybrid simulate`` is asked beyond one run: systems side by side, one field varied, the best batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError, flag, shown, unknown
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.rates import RATES, Budgets, costs
from flexhybrid.jobs.simulate import (
    MOST_AT_A_TIME,
    Note,
    SimulatedQueue,
    is_policy_file,
    named_system,
    no_start,
    queue_setting,
    setting_of,
    shares_text,
    simulate_queue,
    simulate_system,
    unlike_weights,
)
from policy_search.papers.at_best import at_best, best_batch
from policy_search.systems import Setting, System, dropped, parse
from sim.simulate import SimulatedRun

LOSSY = "changes the tokens"  #: said of a system that does
AUTO = "auto"  #: as a batch: the one with which the system answers most tokens a second
MEMORIES = tuple(f"{tier}_memory" for tier in TIERS)
LENGTHS = ("prompt_len", "gen_len")
#: Fields that can be varied -> what reads a value of theirs.
VARIED: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("batch", *LENGTHS), int), **dict.fromkeys(RATES, float),
    **dict.fromkeys((*MEMORIES, "model", "hardware", "host", "dtype"), str),
}  # fmt: skip
FORMATS = (".png", ".pdf", ".svg")


class Varied(NamedTuple):
    """A field of the setting, and the values that it takes in turn."""

    field: str
    values: tuple


class SystemRun(NamedTuple):
    """One run of one system: what was asked, and what is predicted or why it cannot run."""

    system: str
    value: Any  #: of the field that is varied; None without one
    setting: Setting | None
    run: SimulatedRun | SimulatedQueue | None
    error: str = ""

    def to_dict(self, field: str | None) -> dict:
        """Plain JSON."""
        row = {"system": self.system} | ({field: self.value} if field else {})
        if self.run is None or self.setting is None:
            return row | {"error": self.error}
        rate = self.run.to_dict()["tokens_per_s"]
        return row | self.run.to_dict() | costs(self.setting.machine, rate)

    @property
    def remarks(self) -> str:
        """What is said of a run beside its numbers; "" for a system that does not run."""
        row = self.run and self.run.to_dict()
        said = row and [LOSSY * (not row["lossless"]), dropped(self.system, row["policy"]["attention"])]
        return "; ".join(filter(None, said or ()))


def varied_of(text: str) -> Varied:
    """Read FIELD=VALUE,VALUE,…. Raise InputError for an unknown field, and for a value that it cannot have."""
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
        raise InputError(f"--vary {field}: {shown(rest)} must be numbers, like {field}=1,2,4,8") from None


def run_point(
    point: dict, budgets: Budgets, workload: Workload | None = None, note: Note | None = None
) -> tuple[Setting, SimulatedRun | SimulatedQueue]:
    """Return (the setting, the predicted run) of a point's system, which is a name or a policy file; with a
    ``workload`` of a queue. A batch may be AUTO. Raise InputError as ``setting_of``, and where nothing fits."""
    text, clock, auto = point["system"], point.get("clock") or "closed", point["batch"] == AUTO
    point = {**point, "batch": None if auto else point["batch"]}
    if workload is not None:
        setting = queue_setting(point, workload, budgets, note)
        return setting, simulate_queue(setting, named_system(text, setting), workload, clock)
    setting = setting_of({**point, "batch": MOST_AT_A_TIME if auto else point["batch"]}, budgets, note)
    if not auto:
        return setting, simulate_system(setting, named_system(text, setting), clock)
    made, run = at_its_best(text, setting)
    setting = replace(setting, batch=run.batch)
    return setting, run if clock == "closed" else simulate_system(setting, made, clock)


def at_its_best(text: str, setting: Setting) -> tuple[System, SimulatedRun]:
    """Return a system, or a policy of a file, in the batch of at most the setting's with which it is fastest. Of a
    system its own settings are tried as well, as `search` lists it. Raise InputError where nothing fits."""
    if is_policy_file(text):
        return best_batch(lambda there: named_system(text, there), setting)
    return at_best(text, setting, True)


def answers(
    point: dict,
    systems: Sequence[str],
    varied: Varied | None,
    budgets: Budgets,
    workload: Workload | None = None,
    note: Note | None = None,
) -> list[SystemRun]:
    """Return a run of every system at every value of the field that is varied. What cannot run has its error; raise
    InputError where nothing can, and for a name that is none of a system."""
    for text in systems:
        if not is_policy_file(text):
            parse(text)
    found = []
    for value in varied.values if varied else (None,):
        there, sizes = dict(point), dict(budgets)
        if varied and varied.field in MEMORIES:
            sizes[varied.field.removesuffix("_memory")] = str(value)
        elif varied:
            there[varied.field] = value
        for system in systems:
            try:
                found.append(SystemRun(system, value, *run_point({**there, "system": system}, sizes, workload, note)))
            except InputError as error:
                found.append(SystemRun(system, value, None, None, str(error)))
            note = None  # said once
    if not any(answer.run for answer in found):
        raise InputError(found[0].error)
    return found


def describe_answers(found: list[SystemRun], varied: Varied | None) -> str:
    """Return a table: of one field's values, tokens/s of each system; without one, a line a system."""
    table = _by_value(found, varied) if varied else _by_system(found)
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
        for answer, width in zip((one for one in found if one.value == value), widths, strict=True):
            cells.append(f"{_rate(answer.run):{width}.4g}" if answer.run else f"{'-':>{width}}")
        lines.append(f"  {value!s:>{first}}  {'  '.join(cells)}")
    wrong = dict.fromkeys(f"{answer.system}: {answer.error}" for answer in found if answer.error)
    said = dict.fromkeys(f"  {answer.system}: {answer.remarks}" for answer in found if answer.remarks)
    return "\n".join([*lines, *(f"  -  {text}" for text in wrong), *said])


def _by_system(found: list[SystemRun]) -> str:
    width = max(len(answer.system) for answer in found)
    lines = [f"  {'':{width}}  {'tokens/s':>10}  {'seconds':>10}  {'requests':>9}  at a time"]
    for answer in sorted(found, key=lambda answer: -_rate(answer.run)):
        if answer.run is None:
            lines.append(f"  {answer.system:{width}}  does not run: {answer.error}")
            continue
        row = answer.run.to_dict()
        placed = f"weights {shares_text(row['kept_weights'])}; cache {shares_text(row['policy']['cache'])}"
        requests, at_a_time = row.get("requests", row.get("batch")), row.get("at_a_time", row.get("wave"))
        lines.append(
            f"  {answer.system:{width}}  {row['tokens_per_s']:10.4g}  {row['total_s']:10.4g}  {requests:9}  "
            f"{at_a_time:9}  {placed}; bound by {row['binding']}{_costs_text(answer)}"
            f"{answer.remarks and f' ({answer.remarks})'}"
        )
    return "\n".join(lines)


def _costs_text(answer: SystemRun) -> str:
    found = costs(answer.setting.machine, _rate(answer.run)) if answer.setting else {}
    words = {"dollars_per_million_tokens": "${:.3g}", "kwh_per_million_tokens": "{:.3g} kWh"}
    parts = [words[name].format(value) for name, value in found.items()]
    return f"; {' and '.join(parts)} a million tokens" if parts else ""


def _rate(run: SimulatedRun | SimulatedQueue | None) -> float:
    if run is None:
        return 0.0
    return run.run.tokens_per_s if isinstance(run, SimulatedQueue) else run.tokens_per_s


def check_plot(path: Path | None, field: str | None, remedy: str = "name it, like --vary batch=1,2,4,8") -> None:
    """Raise InputError for a picture that cannot be drawn: of no ``field``, with the remedy, or in another format."""
    if path is None:
        return
    if field is None:
        raise InputError(f"--plot {path} draws tokens/s over one field: {remedy}")
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot {path}: a picture is a {', '.join(FORMATS)} file")


def plot(found: list[SystemRun], varied: Varied, title: str, path: Path) -> None:
    """Draw tokens/s over the values of the field, one line a system."""
    draw_rows([(a.system, a.value, _rate(a.run)) for a in found if a.run], varied.field, title, path)


def draw_rows(rows: Sequence[tuple[str, Any, float]], field: str, title: str, path: Path) -> None:
    """Draw (series, value of the field, tokens/s), one line a series."""
    import pandas as pd

    from figures.reproduce import draw

    frame = pd.DataFrame(rows, columns=["system", field, "tokens_per_s"])
    values = frame[field].unique().tolist()
    numbers = [value for value in values if isinstance(value, (int, float))]
    spread = len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= 8 * min(numbers)
    figure = {"name": path.stem, "kind": "line", "frame": frame, "title": title, "series": "system", "paper": None}
    figure |= {"x": field, "x_label": flag(field).removeprefix("--").replace("-", " "), "log_x": spread}
    figure |= {"y": "tokens_per_s", "y_label": "generated tokens/s", "log_y": False}
    path.write_bytes(draw(SimpleNamespace(**figure))[path.suffix.lower().removeprefix(".")])
