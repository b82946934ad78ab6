"""Reads the profiles of a cascade's models, seconds and bytes by batch size; the simulator profiles offloaded models.

    {"version": 1, "models": {
      "small": {"seconds": [[1, 0.004], [8, 0.011]], "memory_bytes": [[1, 3e8], [8, 4e8]], "output_bytes": 5e4},
      "giant": {"offloaded": {"model": "opt-30b", "hardware": "t4", "prompt_len": 512, "gen_len": 32}}}}

A model has a profile ([batch, seconds] and [batch, bytes] pairs, to which lines are fitted), or it is ``offloaded``:
its weights and cache are on the host, and the virtual clock predicts the seconds of its batches. The link is assumed to
be its own, and the host memory of each replica is not planned.

``flexhybrid cascade profile`` measures models and writes the file (``profiling``). Its fields ``UNUSED`` are for the
reader only.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flexhybrid.cascade.cluster.served import SHARE_SLACK, BatchLine, Flow, ServedModel, chain, fit_batch_line
from flexhybrid.cascade.routes import Cascade, read_json
from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.model.shape import DTYPE_BYTES, shape_of
from flexhybrid.core.problem import Problem
from policy_search.systems import Setting, run_system
from sim import catalogue

VERSION = 1
NUMBERS = ("output_bytes", "hidden_bytes")
COUNTS = ("max_batch", "max_partitions")
UNUSED = ("utilisation", "energy_j", "measured")  #: fields of ``flexhybrid cascade profile`` that are not used here
OFFLOADED = {"model": str, "hardware": str, "prompt_len": int, "gen_len": int}  #: required fields of "offloaded"
OPTIONAL = ("system", "batches", "clock", "dtype")  #: its optional fields, arguments of ``offloaded_lines``


def offloaded_lines(
    model: str,
    hardware: str,
    prompt_len: int,
    gen_len: int,
    system: str = "capture",
    batches: Sequence[int] = (1, 2, 4, 8),
    clock: str = "virtual",
    dtype: str = "float16",
) -> tuple[BatchLine, BatchLine]:
    """Return lines over the batch size, for seconds and GPU bytes, of a model with weights on the host.

    The virtual clock (with ``clock`` "closed", the array clock) predicts each batch, prefill and all tokens. A batch
    that does not fit at once runs in waves, as in ``sim.simulate``.
    """
    problem = Problem(shape=shape_of(model), dtype=dtype, hardware=catalogue.load(hardware))
    seconds, memory = [], []
    for batch in batches:
        outcome = run_system(system, Setting(problem, batch, prompt_len, gen_len), clock)
        seconds.append((batch, outcome.total_s))
        memory.append((batch, float(outcome.peak_bytes["device"])))
    return fit_batch_line(seconds), fit_batch_line(memory)


def read_profiles(path: str | Path, names: Sequence[str]) -> tuple[ServedModel, ...]:
    """Return the models of these names from a file of profiles. Raise InputError that names file, model and field."""
    record = read_json(path)
    if not isinstance(record, dict) or record.get("version") != VERSION or not isinstance(record.get("models"), dict):
        raise InputError(f"{path}: a file of profiles is {{'version': {VERSION}, 'models': {{name: …}}}}")
    models = []
    for name in names:
        if name not in record["models"]:
            raise InputError(f"{path}: {unknown('model', name, record['models'])}")
        try:
            models.append(_model(name, record["models"][name]))
        except InputError as error:
            raise InputError(f"{path}, model {name}: {error}") from None
    return tuple(models)


def _model(name: str, record: object) -> ServedModel:
    """Return the model of a record in the file. Raise InputError for a wrong field."""
    if not isinstance(record, dict):
        raise InputError(f"it must be a JSON object, not {record!r}")
    known = ("seconds", "memory_bytes", "offloaded", *NUMBERS, *COUNTS, *UNUSED)
    if strange := [key for key in record if key not in known]:
        raise unknown("field", strange[0], known)
    if "offloaded" in record:
        if "seconds" in record or "memory_bytes" in record:
            raise InputError("give either offloaded, or seconds and memory_bytes of a profile")
        if record.get("max_partitions", 1) != 1:
            raise InputError("max_partitions must be 1 for an offloaded model")
        seconds, memory = _offloaded(record["offloaded"])
    else:
        seconds, memory = (_line(record, key) for key in ("seconds", "memory_bytes"))
    more = {key: record[key] for key in (*NUMBERS, *COUNTS) if key in record}
    for key in NUMBERS:
        if isinstance(more.get(key), bool) or not isinstance(more.get(key, 0), (int, float)):
            raise InputError(f"{key} is {more[key]!r}; it must be a number")
    return ServedModel(name, seconds, memory, **more)


def _line(record: dict, key: str) -> BatchLine:
    """Return the line of a model's field with [batch, value] pairs. Raise InputError if they are wrong."""
    if not isinstance(record.get(key), list):
        raise InputError(f"{key} must be a list of pairs [batch, value], unless the model is offloaded")
    try:
        line = fit_batch_line(record[key])
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    if line.worst_error is None and record.get("max_batch", 1) != 1:
        raise InputError(f"{key} has one batch size; with max_batch {record['max_batch']!r} it needs two or more")
    return line


def _offloaded(record: object) -> tuple[BatchLine, BatchLine]:
    """Return the lines of an offloaded model (``offloaded_lines``). Raise InputError for a wrong field."""
    if not isinstance(record, dict):
        raise InputError(f"offloaded must be a JSON object, not {record!r}")
    if strange := [key for key in record if key not in (*OFFLOADED, *OPTIONAL)]:
        raise unknown("field of offloaded", strange[0], (*OFFLOADED, *OPTIONAL))
    for key, kind in OFFLOADED.items():
        if not isinstance(record.get(key), kind) or isinstance(record.get(key), bool):
            raise InputError(f"offloaded: {key} must be {'a name' if kind is str else 'a whole number'}")
    if not isinstance(batches := record.get("batches", [1]), list) or not batches:
        raise InputError(f"offloaded: batches is {batches!r}; it must be a list of whole numbers")
    if (dtype := record.get("dtype", "float16")) not in DTYPE_BYTES:
        raise unknown("dtype", dtype, DTYPE_BYTES)
    return offloaded_lines(**record)


def flow_of(cascade: Cascade) -> Flow:
    """Return the flow of requests with a cascade's expected shares and skips.

    Without skips, the shares determine the flow. With skips, several flows agree with the shares, all with equal loads;
    the one with the most steps to the next larger model is returned. Raise InputError if the cascade has no expected
    shares, or if no flow agrees with them.
    """
    if cascade.expected is None:
        raise InputError("the cascade has no expected shares of requests: use a file of `flexhybrid cascade search`")
    answered, visited = (np.array(getattr(cascade.expected, name), dtype=float) for name in ("answered", "visited"))
    if not any(cascade.skips):
        return chain(answered)
    from scipy.optimize import linprog

    n = len(visited)
    targets = [sorted({i + 1, *(skip.to for skip in cascade.skips[i])}) for i in range(n - 1)]
    edges = [(i, j) for i in range(n - 1) for j in targets[i]]
    leaves, enters = np.zeros((n - 1, len(edges))), np.zeros((n - 1, len(edges)))
    for column, (i, j) in enumerate(edges):
        leaves[i, column] = enters[j - 1, column] = 1.0
    far = np.array([j - i for i, j in edges], dtype=float)
    rows, sums = np.concatenate([leaves, enters]), np.concatenate([(visited - answered)[:-1], visited[1:]])
    slack = np.ones((len(rows), 1))  # printed shares are rounded, so the least slack is minimised too
    limits = np.block([[rows, -slack], [-rows, -slack]])
    result = linprog(np.append(far, 1e3 * n), limits, np.concatenate([sums, -sums]), method="highs")
    if result.status != 0 or result.x[-1] > 100 * SHARE_SLACK:
        raise InputError("the cascade's expected shares do not fit its skips: no requests could go that way")
    onward = np.zeros((n, n))
    for (i, j), share in zip(edges, result.x, strict=False):
        if visited[i] > SHARE_SLACK:
            onward[i, j] = share / visited[i]
    onward /= np.maximum(1.0, onward.sum(axis=1))[:, None]
    return Flow((1.0, *[0.0] * (n - 1)), tuple(map(tuple, onward.tolist())))
