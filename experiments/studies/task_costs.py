"""Whether a task takes the sum of its operations' time and its bytes' time, or the larger of both, on measured records.

    python -m experiments.studies.task_costs RECORD.json …

Each line of a record that has samples of several sizes in operations and in bytes is fitted both ways. What is compared
is how far off each sample is from a line that was fitted without it, as the root of the mean square of relative errors.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flexhybrid.core.hardware import Hardware, Line, load_hardware
from policy_search.fit import fit_line

LEAST_SAMPLES = 5
ALIKE = 1e-6  #: relative: operations and bytes in one proportion cannot be told apart

Seconds = Callable[[np.ndarray], np.ndarray]  #: of samples [n, (flops, bytes, …)]


class LineErrors(NamedTuple):
    """Relative errors of held-out samples of one line of a record, as ``root_mean_square``."""

    record: str
    line: str
    of_sum: float
    of_largest: float


def sum_of(samples: np.ndarray) -> Seconds:
    """Fit the record's own form: overhead + flops·a + bytes·b."""
    line = fit_line(map(tuple, samples.tolist()))
    return lambda table: line.seconds(table[:, 0], table[:, 1])


def largest_of(samples: np.ndarray) -> Seconds:
    """Fit overhead + max(flops·a, bytes·b): of all ways to let samples of more operations a byte than some be bound by
    operations and the others by bytes, the one whose line is nearest to all samples."""
    flops, moved, _ = samples.T
    intensity = flops / np.maximum(moved, 1e-300)
    best, least = sum_of(samples), np.inf
    for threshold in (-1.0, *np.unique(intensity)):
        by_flops = intensity > threshold
        terms = samples.copy()
        terms[:, 0], terms[:, 1] = np.where(by_flops, flops, 0.0), np.where(by_flops, 0.0, moved)
        found = _larger(fit_line(map(tuple, terms.tolist())))
        error = root_mean_square(found(samples), samples[:, 2])
        if error < least:
            best, least = found, error
    return best


def _larger(line: Line) -> Seconds:
    return lambda table: line.overhead_s + np.maximum(table[:, 0] * line.s_per_flop, table[:, 1] * line.s_per_byte)


def root_mean_square(found: np.ndarray, seconds: np.ndarray) -> float:
    """Return the root of the mean square of found / seconds - 1."""
    return float(np.sqrt(np.mean((found / seconds - 1) ** 2)))


def held_out_error(fit: Callable[[np.ndarray], Seconds], samples: np.ndarray) -> float:
    """Return ``root_mean_square`` of samples, each by a line that was fitted through the others."""
    left_out = [fit(np.delete(samples, i, axis=0))(samples[i : i + 1])[0] for i in range(len(samples))]
    return root_mean_square(np.array(left_out), samples[:, 2])


def compare(hardware: Hardware, name: str = "") -> list[LineErrors]:
    """Return the errors of every line of a record that both forms can be told apart by."""
    found = []
    for key, line in hardware.lines.items():
        samples = np.array(line.samples, dtype=np.float64).reshape(-1, 3)
        if len(samples) < LEAST_SAMPLES or not all(np.ptp(samples[:, column]) > 0 for column in (0, 1)):
            continue
        found.append(LineErrors(name, key, *(held_out_error(fit, samples) for fit in (sum_of, largest_of))))
    return found


def describe(found: Iterable[LineErrors]) -> str:
    """Return a table of errors in percent by verb, and over all; and on how many of the lines on which the two forms
    differ the sum is nearer."""
    rows = list(found)
    verbs = dict.fromkeys(row.line for row in rows)
    groups = {verb: [row for row in rows if row.line == verb] for verb in verbs} | {"all": rows}
    lines = [f"{'line':24}{'records':>8}{'sum':>8}{'larger':>8}{'sum is nearer':>15}"]
    for verb, of in groups.items():
        errors = [100 * float(np.mean([getattr(row, form) for row in of])) for form in ("of_sum", "of_largest")]
        differ = [row for row in of if abs(row.of_sum / row.of_largest - 1) > ALIKE]
        nearer = sum(row.of_sum < row.of_largest for row in differ)
        lines.append(f"{verb:24}{len(of):8}{errors[0]:7.1f}%{errors[1]:7.1f}%{nearer:9} of {len(differ)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", type=Path, nargs="+", help="records that flexhybrid profile has written")
    records = parser.parse_args().records
    print(describe([row for path in records for row in compare(load_hardware(path), path.stem)]))


if __name__ == "__main__":
    main()
