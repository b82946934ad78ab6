"""Fit the hardware record's lines through profiling samples (CAPTURE section IV: sampling and linear regression)."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import ALONE_SUFFIX, Hardware, Line

REWEIGHTINGS = 5  #: least-squares fits in turn; the first weighs by measured times, and three or four suffice
PAPERS_R2 = 0.99  #: CAPTURE reports R² >= 0.99 for T_kv_gen and T_load_kv

#: Ratios of times above which a GPU's sample is dropped as an unexplained wait for the host: to another sample of the
#: line with at least its work; with an idle link, to the verb's line at a busy link. A CPU's tasks wait in a job as
#: they do in a profile, so they keep such samples.
TROUBLED, TROUBLED_ALONE = 5.0, 1.5

Sample = tuple[float, float, float]  #: (flops, bytes, seconds)


def fit_line(samples: Iterable[Sample], on_gpu: bool = False) -> Line:
    """The line through samples (flops, bytes, seconds), its terms not negative.

    Least squares of the error relative to the line's own time: an error of 10 % weighs the same on a short task as on a
    long one. Relative to the measured time, what came late by chance would weigh less than what came early, and lines
    would be early: by 4 % where times scatter by a fifth. A term that does not vary over the samples is dropped,
    because the overhead already holds it. Samples of a GPU that waited (TROUBLED) are kept and not fitted. R² is that
    of the fitted seconds. Raises InputError for no samples, or times that are not positive.
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
    scales = {name: column.max() for name, column in columns.items()}  # nnls needs columns of like size
    matrix, fitted = np.stack([columns[name] / scales[name] for name in columns], axis=1), seconds
    for _ in range(REWEIGHTINGS):
        expected = np.maximum(fitted, seconds / 10)  # a line through the origin is 0 where there is no work
        solution, _ = nnls(matrix / expected[:, None], seconds / expected)
        fitted = matrix @ solution
    terms = {name: float(value / scales[name]) for name, value in zip(columns, solution, strict=True)}
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    # Without spread (one size only) there is nothing to explain.
    r2 = 1.0 - float(((seconds - fitted) ** 2).sum()) / spread if spread > 0 else None
    return Line(**terms, r2=r2, samples=tuple((f, b, s) for f, b, s in table.tolist()))


def _troubled(flops: np.ndarray, num_bytes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return which samples took TROUBLED times as long as one with at least their work."""
    as_much = (flops >= flops[:, None]) & (num_bytes >= num_bytes[:, None])
    return np.any(as_much & (TROUBLED * seconds <= seconds[:, None]), axis=1)


def _fit_alone(samples: tuple[Sample, ...], beside: Line) -> Line:
    """Return a GPU's line of a verb with an idle link, through the samples that agree with its line ``beside`` a busy
    link (``beside`` if none does). A busy link slows kernels, so slower samples contain waits for the host, which the
    launcher's line prices."""
    agree = [(f, b, s) for f, b, s in samples if s < TROUBLED_ALONE * beside.at(f, b)]
    return replace(fit_line(agree, True) if agree else beside, samples=samples)


def fit_contention(sizes: Iterable[tuple[float, float, int]]) -> dict[str, float]:
    """Return what tasks take on the mean, ``wait_s`` + ``factor`` · undisturbed seconds, through sizes of (undisturbed
    seconds, mean seconds, number of tasks).

    A task waits for a thread or a lock once, and is interrupted the more often the longer it is. Least squares of the
    relative error, weighted by the tasks; neither term speeds a task up.
    """
    undisturbed, mean, count = np.array(list(sizes), dtype=np.float64).T
    weights = np.sqrt(count) / mean
    matrix = np.stack([weights, undisturbed * weights], axis=1)
    (wait_s, slower), _ = nnls(matrix, np.maximum(0.0, mean - undisturbed) * weights)
    return {"wait_s": float(wait_s), "factor": 1.0 + float(slower)}


def fit_hardware(samples_by_key: dict[str, list[Sample]], **record) -> Hardware:
    """Return a hardware record with one fitted line per key (a verb or a resource).

    ``record``: the other fields of ``Hardware``: name, device, device_memory, host_memory, source, dtype, notes, …
    Raise InputError naming the key whose samples cannot be fitted.
    """
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
    """Return a row per line: key, achieved rates (GFLOP/s, GB/s; None without such a term), intercept in µs, R², number
    of samples, largest relative error, and whether R² is below the papers' 0.99."""
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
