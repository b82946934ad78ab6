"""The optional files of a run: a trace of its first wave, and a report in Markdown or HTML."""

import base64
import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.files import write_by_rename
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.trace import LaneTimes, TraceEvent, iteration_ends, lane_table
from flexhybrid.jobs.compare.breakdown import breakdown, flat_rows
from sim import virtual_clock

MOST_SAMPLES = 600  #: when there are more, every second one is dropped
MOST_REFUSED = 200  #: refused lines that a page lists one by one
STATM, PAGE_BYTES = Path("/proc/self/statm"), 4096


class Samples:
    """What a run generates and how much memory it uses over time: rows of (seconds, tokens so far, host bytes, device
    bytes). Bytes are 0 where the system does not tell them."""

    def __init__(self):
        self.rows: list[tuple[float, int, int, int]] = []
        self._began, self._apart_s = time.monotonic(), 0.1
        self.add(0)

    def add(self, num_tokens: int) -> None:
        """Note that the run has generated ``num_tokens`` tokens so far."""
        seconds = time.monotonic() - self._began
        if self.rows and seconds - self.rows[-1][0] < self._apart_s:
            return
        with contextlib.suppress(OSError):
            host = int(STATM.read_text().split()[1]) * PAGE_BYTES
            device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
            self.rows.append((seconds, num_tokens, host, device))
        if len(self.rows) > MOST_SAMPLES:
            self.rows = self.rows[::2]
            self._apart_s = (self.rows[-1][0] - self.rows[0][0]) / (len(self.rows) - 1)


@dataclass
class Refusals:
    """The refused lines of a file of answers."""

    codes: Counter = field(default_factory=Counter)  #: error code -> number of lines
    lines: list[tuple[str, str, str]] = field(default_factory=list)  #: (custom_id, code, message) of the first ones

    @staticmethod
    def of(errors: Path) -> "Refusals":
        """Read the refused lines of a file. Raise InputError if it cannot be read."""
        found = Refusals()
        with file_errors(f"read {errors}"), open(errors, "rb") as file:
            for raw in file:
                line = json.loads(raw)
                if line["response"]["status_code"] != 200:
                    error = line["response"]["body"]["error"]
                    found.codes[error["code"]] += 1
                    if len(found.lines) < MOST_REFUSED:
                        found.lines.append((line["custom_id"] or "", error["code"], error["message"]))
        return found


@dataclass(frozen=True)
class RunReport:
    """The contents of a report."""

    title: str  #: model, input, and time of the run
    printed: list[str]  #: lines of the plan and the summary
    manifest: dict
    refusals: Refusals
    traces: dict[str, list[TraceEvent]]  #: clock -> trace of the first wave
    lanes: dict[str, LaneTimes]  #: of the first wave
    policy: dict  #: ``Policy.to_dict``
    shares: Mapping[str, Mapping[str, float]]  #: "weights", "context" -> place -> share
    samples: Samples
    predicted_rate: float | None  #: tokens/s of the whole run; None: no prediction
    lengths: tuple[np.ndarray, np.ndarray]  #: prompt and answer tokens of the lines that this run answered

    @cached_property
    def steps(self) -> dict[str, dict]:
        """Return clock -> breakdown of a decode step; empty without one."""
        if not self.traces or len(iteration_ends(self.traces["measured"])) < 2:
            return {}
        return {clock: breakdown(trace) for clock, trace in self.traces.items()}

    @property
    def limit(self) -> str:
        """Return in words which resource limited the measured decode step; empty without one."""
        if not (steps := self.steps):
            return ""
        busy = steps["measured"]["busy"]
        return "Busy in a decode step: " + ", ".join(
            f"{name} {share:.0%}" for name, share in sorted(busy.items(), key=lambda item: -item[1])
        )

    @property
    def step_table(self) -> list[list[str]]:
        """Return the head and the rows of a decode step's table, with a column for each clock."""
        if not (steps := self.steps):
            return []
        rows = flat_rows([{"policy": "", "predicted": steps["measured"], **steps}])
        numbers = [[row["quantity"], row["unit"], *(f"{row[clock]:.4g}" for clock in steps)] for row in rows]
        return [["quantity", "unit", *steps], *numbers]

    def save(self, path: Path) -> None:
        """Write the page in the format of the path's ending, .md or .html. Raise InputError if that fails."""
        write_by_rename(path, self.html() if path.suffix.lower() == ".html" else self.markdown())

    def markdown(self) -> str:
        """Return the page in Markdown, without figures."""
        lines = ["# A run of flexhybrid", "", self.title, "", *(f"    {text}" for text in self.printed)]
        lines += ["", "## What the results depend on", "", "```json", json.dumps(self.manifest, indent=1), "```"]
        codes = [["why", "lines"], *([code, f"{count:,}"] for code, count in self.refusals.codes.most_common())]
        tables = {"Lines refused": codes, "A decode step of the first wave": self.step_table}
        tables["What the threads of the first wave did"] = lane_table(self.lanes)
        for title, table in tables.items():
            if len(table) > 1:
                lines += ["", f"## {title}", "", *_markdown_table(table)]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Return the page as HTML that needs no other file; all texts of the input are escaped."""
        from jinja2 import Environment

        import figures
        from figures import run as drawn

        pictures = {"tiers": drawn.tiers(self.shares)}
        if len(self.samples.rows) > 2:
            pictures["over_time"] = drawn.over_time(self.samples.rows, self.predicted_rate)
        if len(self.lengths[0]):
            pictures["lengths"] = drawn.lengths(*self.lengths)
        if self.step_table:
            pictures["iteration"] = drawn.iteration(self.traces)
        environment = Environment(autoescape=True, trim_blocks=True)
        environment.filters["json"] = partial(json.dumps, indent=1)
        template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
        return template.render(
            report=self,
            style=Path(figures.__file__).with_name("report.css").read_text(encoding="utf-8"),
            pictures={name: base64.b64encode(picture).decode("ascii") for name, picture in pictures.items()},
            lanes=lane_table(self.lanes),
        )


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


def _markdown_table(table: list[list[str]]) -> list[str]:
    """Return the lines of a table; columns after the first are aligned to the right if their head is no "unit"."""
    head, *rows = table
    aligned = ["---" if at == 0 or name == "unit" else "---:" for at, name in enumerate(head)]
    return [f"| {' | '.join(cells)} |" for cells in (head, aligned, *rows)]
