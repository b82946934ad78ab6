"""The files that a run writes on request: a trace of its first wave, and a page about the run."""

import contextlib
import json
from collections import Counter
from pathlib import Path

from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.files import write_by_rename
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.trace import LaneTimes, TraceEvent, iteration_ends, lane_table
from flexhybrid.jobs.compare.breakdown import breakdown, flat_rows
from sim import virtual_clock


def clocks(trace: list[TraceEvent], hardware: Hardware | None) -> dict[str, list[TraceEvent]]:
    """Return the traces by clock: "predicted", the virtual clock's of the same tasks, if the machine is known, and
    "measured". Empty without a trace."""
    if not trace:
        return {}
    traces = {"measured": trace}
    if hardware is not None:
        with contextlib.suppress(InputError):  # a machine without a line for one of the policy's verbs
            traces = {"predicted": virtual_clock.run((event.task for event in trace), hardware)} | traces
    return traces


def refusal_codes(errors: Path) -> Counter:
    """Return error code -> number of lines of a file of answers with it."""
    codes: Counter = Counter()
    with file_errors(f"read {errors}"), open(errors, "rb") as file:
        for raw in file:
            response = json.loads(raw)["response"]
            if response["status_code"] != 200:
                codes[response["body"]["error"]["code"]] += 1
    return codes


def write_report(
    path: Path,
    printed: list[str],
    manifest: dict,
    refusals: Counter,
    traces: dict[str, list[TraceEvent]],
    lanes: dict[str, LaneTimes],
) -> None:
    """Write a Markdown page: the ``printed`` lines, the manifest, reasons of refused lines, a decode step's times in
    the first wave, and its lanes' threads. Raise InputError if it cannot be written."""
    lines = ["# A run of flexhybrid", "", *(f"    {text}" for text in printed), "", "## What the results depend on", ""]
    lines += ["```json", json.dumps(manifest, indent=1), "```"]
    if refusals:
        lines += ["", "## Lines refused", "", "| why | lines |", "| --- | ---: |"]
        lines += [f"| {code} | {count:,} |" for code, count in refusals.most_common()]
    if traces and len(iteration_ends(traces["measured"])) > 1:
        lines += ["", "## A decode step of the first wave", "", *_step_table(traces)]
    if lanes:
        lines += ["", "## What the threads of the first wave did", "", *lane_table(lanes)]
    write_by_rename(path, "\n".join(lines) + "\n")


def _step_table(traces: dict[str, list[TraceEvent]]) -> list[str]:
    """Return the rows of a decode step's breakdown, a column a clock."""
    steps = {clock: breakdown(trace) for clock, trace in traces.items()}
    lines = [f"| quantity | unit | {' | '.join(steps)} |", "| --- | --- |" + " ---: |" * len(steps)]
    for row in flat_rows([{"policy": "", "predicted": steps["measured"], **steps}]):
        lines.append(f"| {row['quantity']} | {row['unit']} | {' | '.join(f'{row[clock]:.4g}' for clock in steps)} |")
    return lines
