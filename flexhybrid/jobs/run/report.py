"""The optional files of a run: a trace of its first wave, and a report page."""

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
    """Return the trace as "measured", and as "predicted" the virtual clock's trace of the same tasks.
    Without a profile for all tasks, "predicted" is missing; without a trace, the result is empty."""
    if not trace:
        return {}
    traces = {"measured": trace}
    if hardware is not None:
        with contextlib.suppress(InputError):  # the profile lacks one of the policy's verbs
            traces = {"predicted": virtual_clock.run((event.task for event in trace), hardware)} | traces
    return traces


def refusal_codes(errors: Path) -> Counter:
    """Return error code -> number of refused lines in a file of answers."""
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
    """Write a Markdown page: printed lines, manifest, error codes, a decode step's times, and times of the threads.
    ``traces``, ``lanes``: of the first wave. Raise InputError if the page cannot be written."""
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
    """Return a decode step's breakdown as lines of a Markdown table, with a column for each clock."""
    steps = {clock: breakdown(trace) for clock, trace in traces.items()}
    lines = [f"| quantity | unit | {' | '.join(steps)} |", "| --- | --- |" + " ---: |" * len(steps)]
    for row in flat_rows([{"policy": "", "predicted": steps["measured"], **steps}]):
        lines.append(f"| {row['quantity']} | {row['unit']} | {' | '.join(f'{row[clock]:.4g}' for clock in steps)} |")
    return lines
