"""Fit the hardware record's lines through profiling samples (CAPTURE section IV: sampling and linear regression)."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import ALONE_SUFFIX, Hardware, Line

REWEIGHTINGS = 5  #: successive least-squares fits; three or four suffice
PAPERS_R2 = 0.99  #: CAPTURE reports R² >= 0.99 for T_kv_gen and T_load_kv

#: A GPU's sample contains an unexplained wait for the host, and is not fitted, if its time is this many times that of a
#: sample with at least its work (TROUBLED), or that of the verb's line at a busy link (TROUBLED_ALONE, for samples at
#: an idle link). A CPU's samples are all fitted, because its tasks wait in a job as in a profile.
TROUBLED, TROUBLED_ALONE = 5.0, 1.5

Sample = tuple[float, float, float]  #: (flops, bytes, seconds)


def fit_line(samples: Iterable[Sample], on_gpu: bool = False) -> Line:
    """Return the line through samples; its coefficients are nonnegative.

    Least squares of the error relative to the line's own time, so 10 % weighs the same on short and long tasks. Errors
    relative to the measured time would favour early samples: if times scatter by 20 %, lines would be 4 % too fast. A
    term that is constant over the samples becomes part of the overhead. R² is that of the fitted seconds. The line
    keeps all samples. Raise InputError if there are no samples, or if a value is negative or a time is zero.
    """
    table = np.array(sorted(map(tuple, samples)), dtype=np.float64).reshape(-1, 3)
    if len(table) == 0:
        raise InputError("a line cannot be fitted through no samples")
    if not np.isfinite(table).all() or (table[:, 2] <= 0).any() or (table[:, :2] < 0).any():
        raise InputError("samples must be finite (flops >= 0, bytes >= 0, seconds > 0)")
    flops, num_bytes, seconds = (table[~_troubled(*table.T)] if on_gpu else table).T
    columns = {"overhead_s": np.ones_like(seconds)}
    if np.ptp(flops) > 0:
        columns["s_per_flop"] = flops
    if np.ptp(num_bytes) > 0:
        columns["s_per_byte"] = num_bytes
    scales = {name: column.max() for name, column in columns.items()}  # nnls needs columns of similar size
    matrix, fitted = np.stack([columns[name] / scales[name] for name in columns], axis=1), seconds
    for _ in range(REWEIGHTINGS):
        expected = np.maximum(fitted, seconds / 10)  # not 0, which a line without overhead gives for no work
        solution, _ = nnls(matrix / expected[:, None], seconds / expected)
        fitted = matrix @ solution
    terms = {name: float(value / scales[name]) for name, value in zip(columns, solution, strict=True)}
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    # With samples of one size, R² is undefined.
    r2 = 1.0 - float(((seconds - fitted) ** 2).sum()) / spread if spread > 0 else None
    return Line(**terms, r2=r2, samples=tuple((f, b, s) for f, b, s in table.tolist()))


def _troubled(flops: np.ndarray, num_bytes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return whether each sample took TROUBLED times as long as another sample with at least its work."""
    as_much = (flops >= flops[:, None]) & (num_bytes >= num_bytes[:, None])
    return np.any(as_much & (TROUBLED * seconds <= seconds[:, None]), axis=1)


def _fit_alone(samples: tuple[Sample, ...], beside: Line) -> Line:
    """Return a GPU's line of a verb at an idle link. ``beside``: the verb's line at a busy link. A busy link slows
    kernels. So samples that are slower than ``beside`` (TROUBLED_ALONE) contain waits for the host, which the
    launcher's line prices, and are not fitted. If no sample remains, the result is ``beside``."""
    agree = [(f, b, s) for f, b, s in samples if s < TROUBLED_ALONE * beside.at(f, b)]
    return replace(fit_line(agree, True) if agree else beside, samples=samples)


def fit_contention(sizes: Iterable[tuple[float, float, int]]) -> dict[str, float]:
    """Fit a task's mean seconds as ``wait_s`` + ``factor`` · undisturbed seconds; return both coefficients.

    ``sizes``: (undisturbed seconds, mean seconds, number of tasks). A task waits once for a thread or a lock, and is
    interrupted in proportion to its length. Least squares of the relative error, weighted by the number of tasks, with
    ``wait_s`` >= 0 and ``factor`` >= 1.
    """
    undisturbed, mean, count = np.array(list(sizes), dtype=np.float64).T
    weights = np.sqrt(count) / mean
    matrix = np.stack([weights, undisturbed * weights], axis=1)
    (wait_s, slower), _ = nnls(matrix, np.maximum(0.0, mean - undisturbed) * weights)
    return {"wait_s": float(wait_s), "factor": 1.0 + float(slower)}


def fit_hardware(samples_by_key: dict[str, list[Sample]], **record) -> Hardware:
    """Return a hardware record with one fitted line per key (a verb or a resource). ``record``: the other fields of
    ``Hardware``. Raise InputError, with the key, if samples cannot be fitted."""
    lines, on_gpu = {}, record["device"] == "cuda"
    for key, samples in samples_by_key.items():
        try:
            lines[key] = fit_line(samples, on_gpu)
        except InputError as error:
            raise InputError(f"line {key!r}: {error}") from None
    for key in lines if on_gpu else ():
        if key.endswith(ALONE_SUFFIX) and (beside := lines.get(key.removesuffix(ALONE_SUFFIX))):
            lines[key] = _fit_alone(lines[key].samples, beside)
    return Hardware(lines=lines, **record)


def fit_report(hardware: Hardware) -> list[dict]:
    """Return a row for each line: key, rates (None without such a term), overhead, R², number of samples, largest
    relative error, and whether R² is below the papers' 0.99."""
    rows = []
    for key, line in hardware.lines.items():
        errors = [abs(line.at(f, b) / s - 1) for f, b, s in line.samples]
        rows.append(
            {
                "key": key,
                "gflop_per_s": 1e-9 / line.s_per_flop if line.s_per_flop else None,
                "gb_per_s": 1e-9 / line.s_per_byte if line.s_per_byte else None,
                "overhead_us": line.overhead_s * 1e6,
                "r2": line.r2,
                "num_samples": len(line.samples),
                "worst_error": max(errors, default=None),
                "worse_than_papers": line.r2 is not None and line.r2 < PAPERS_R2,
            }
        )
    return rows
