"""Breaks a decode step of a trace down: seconds by kind of task, bytes by link, busy share by resource.

The same functions take measured and virtual traces, so that both can be compared (as in KVPR's Fig. 10 and
HybridServe's Fig. 13 and 14).
"""

from flexhybrid.core.hardware import LINKS
from flexhybrid.core.task import RESOURCES, Task
from flexhybrid.core.trace import TraceEvent, TraceWindow
from flexhybrid.core.verbs import CARGO, VERBS
from sim.virtual_clock import summarize

#: Kinds of tasks in a step's order. Tasks of one resource run one after another; those of different resources overlap.
KINDS = (
    *("disk_read", "load_weights", "load_cache", "load_activation", "load_other"),
    *("compute", "host_compute", "store", "disk_write"),
)
_LOADS = {"weights": "load_weights", "kv": "load_cache", "act": "load_activation", "hidden": "load_other"}


def kind_of(task: Task) -> str:
    """Return the task's kind, one of KINDS."""
    if task.resource == "h2d":
        return _LOADS[VERBS[task.verb].cargo]
    return "store" if task.resource == "d2h" else task.resource


def seconds_per_step(trace: list[TraceEvent], last: int = -1) -> dict[str, float]:
    """Return kind -> seconds of its tasks in a decode step.

    The mean is over the iterations after the first, up to ``last`` (a list index: ``TraceWindow``). A task at the
    window's edge counts in part, so that the kinds of a resource add up to its busy time in ``summarize``. Raise
    ValueError for a trace without such iterations.
    """
    window = TraceWindow(trace, last)
    seconds: dict[str, float] = {}
    for event in trace:
        if (inside_s := window.inside_s(event)) > 0:
            kind = kind_of(event.task)
            seconds[kind] = seconds.get(kind, 0.0) + inside_s
    return {kind: seconds[kind] / window.num_iterations for kind in KINDS if kind in seconds}


def bytes_per_step(trace: list[TraceEvent]) -> dict[str, dict[str, float]]:
    """Return link -> cargo -> bytes moved in a decode step, the mean over the trace's decode iterations."""
    moved: dict[str, dict[str, float]] = {}
    for task, _, _ in trace:
        if task.resource in LINKS and task.iteration:
            of_link = moved.setdefault(task.resource, {})
            cargo = VERBS[task.verb].cargo
            of_link[cargo] = of_link.get(cargo, 0) + task.work.link_bytes
    steps = len({event.task.iteration for event in trace if event.task.iteration})
    return {
        link: {cargo: moved[link][cargo] / steps for cargo in CARGO if cargo in moved[link]}
        for link in LINKS
        if link in moved
    }


def breakdown(trace: list[TraceEvent], last: int = -1) -> dict:
    """Return step_s, seconds, bytes and busy (resource -> share of the time) of a decode step.
    ``last``: as in ``seconds_per_step``."""
    summary = summarize(trace, last)
    return {
        "step_s": summary.decode_s / summary.num_decoded,
        "seconds": seconds_per_step(trace, last),
        "bytes": bytes_per_step(trace),
        "busy": {resource: summary.busy[resource] for resource in RESOURCES if resource in summary.busy},
    }


def flat_rows(breakdowns: list[dict]) -> list[dict]:
    """Return a row for each policy and quantity: policy, quantity, unit, predicted, measured.

    ``breakdowns``: {"policy": name, "predicted": breakdown, "measured": breakdown}.
    """
    rows = []
    for row in breakdowns:
        predicted, measured = (_values(row[clock]) for clock in ("predicted", "measured"))
        for quantity, unit in dict.fromkeys([*predicted, *measured]):
            values = (of_clock.get((quantity, unit), 0.0) for of_clock in (predicted, measured))
            texts = {"policy": row["policy"], "quantity": quantity, "unit": unit}
            rows.append({**texts, **dict(zip(("predicted", "measured"), values, strict=True))})
    return rows


def _values(step: dict) -> dict[tuple[str, str], float]:
    """Return (quantity, unit) -> value of a breakdown."""
    return (
        {("step", "s"): step["step_s"]}
        | {(kind, "s"): seconds for kind, seconds in step["seconds"].items()}
        | {(f"{link} {cargo}", "bytes"): size for link, of in step["bytes"].items() for cargo, size in of.items()}
        | {(f"busy {resource}", "share"): share for resource, share in step["busy"].items()}
    )
