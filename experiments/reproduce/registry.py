"""All experiments by name, and the command that runs them."""

import json
import multiprocessing
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.reproduce.experiment import Experiment, summary
from experiments.reproduce.paper import PAPERS, compared, listing
from flexhybrid.core.errors import InputError, check, unknown
from flexhybrid.core.files import load_json
from flexhybrid.jobs.paths import check_writable
from flexhybrid.jobs.progress import Progress
from sim import catalogue
from sim.datasheet import load_datasheet

KEPT = Path(__file__).parents[1] / "results" / "reproduce"  #: the folder with the rows of the last commit


def names(module: str = "") -> list[str]:
    """Return the experiments' names in the report's order: all, or those of a module ("kvpr", "kvpr.latency")."""
    return [name for name, row in listing().items() if not module or row["function"].startswith(f"{module}.")]


@cache
def run(name: str) -> Experiment:
    """Run one experiment, once in a process."""
    module, _, function = listing()[name]["function"].rpartition(".")
    experiment = getattr(import_module(f"{__package__}.{module}"), function)()
    return replace(experiment, machines=sorted(catalogue.READ))


def reproduce(
    only: Sequence[str] | None,
    out: Path,
    workers: int | None = None,
    changes: Sequence[str] = (),
    quiet: bool = False,
) -> dict:
    """Run experiments on all cores, write tables, pictures and report.html. ``changes``: of ``change_machines``.

    Raises InputError for an unknown name or change, and for changes whose report would replace the rows that the
    repository keeps.
    """
    from experiments.reproduce import report

    known = names()
    for name in only or ():
        if name not in known:
            raise unknown("experiment", name, known)
    check("workers", workers, workers is None or workers >= 1, "a whole number >= 1")
    if changes and out.resolve() == KEPT:
        raise InputError(f"--out {out} has the rows of the unchanged machines: with --set, name another folder")
    check_writable(out)
    chosen = [name for name in known if not only or name in only]
    with TemporaryDirectory() as folder:
        if changes:
            change_machines(changes, Path(folder))
        results = run_all(chosen, workers, quiet, Path(folder) if changes else None)
    path = report.write(results, out, changes)
    held_out = summary(compared(results), "validate")
    read = {machine for experiment in results for machine in experiment.machines}
    return {
        "report": str(path),
        "summary": str(path.with_name(report.SUMMARY)),
        "held_out": {**held_out._asdict(), "coverage": held_out.coverage, "in_words": held_out.in_words},
        "experiments": [_row(experiment) for experiment in results],
        "without_effect": [change for change in changes if change.partition(".")[0].strip() not in read],
    }


def change_machines(changes: Sequence[str], folder: Path) -> None:
    """Write the catalogue's machines to a folder, with changes "MACHINE.FIELD=VALUE".

    MACHINE is one that a paper is computed on, FIELD one of its datasheet, or of a table there, such as
    "lines.h2d.gb_per_s"; VALUE is JSON, or else text. Raises InputError for an unknown machine or field and for a value
    that no datasheet may have.
    """
    known = dict.fromkeys(machine for paper in PAPERS.values() for machine in paper.machines)
    sheets = {name: load_json(catalogue.SHIPPED / f"{name}.json") for name in catalogue.names()}
    for change in changes:
        place, equals, text = change.partition("=")
        name, _, path = place.strip().partition(".")
        *tables, field = path.split(".")
        if not equals or not path:
            raise InputError(f"--set {change}: write MACHINE.FIELD=VALUE, such as rtx4090-capture.link_gb_per_s=16")
        if name not in known:
            raise unknown("machine", name, known)
        table = sheets[name]
        for key in tables:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise InputError(f"--set {change}: {key} has no fields of its own")
        try:
            table[field] = json.loads(text)
        except ValueError:
            table[field] = text.strip()
    for name, sheet in sheets.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(sheet), encoding="utf-8")
        try:
            load_datasheet(file)
        except InputError as error:
            raise InputError(f"--set: {str(error).replace(str(file), name)}") from None


def run_all(
    chosen: Sequence[str], workers: int | None = None, quiet: bool = False, machines: Path | None = None
) -> list[Experiment]:
    """Run experiments, in processes of their own where ``workers`` (None: one a core) and they are several, or with
    ``machines``, a folder that takes the place of the catalogue's."""
    done: dict[str, Experiment] = {}
    workers = min(workers or multiprocessing.cpu_count(), len(chosen))
    if workers == 1 and machines is None:
        with Progress(len(chosen), "reproduce", "experiment", quiet) as progress:
            progress.steps_alike = False
            for name in chosen:
                done[name] = run(name)
                progress.advance()
        return [*done.values()]
    context = multiprocessing.get_context("spawn")  # numpy's and scipy's threads do not survive a fork
    with (
        ProcessPoolExecutor(workers, context, _read_machines, (machines,)) as pool,
        Progress(len(chosen), "reproduce", "experiment", quiet) as progress,
    ):
        progress.steps_alike = False
        futures = _submit(pool, chosen)
        try:
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                progress.advance()
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():  # they ignore SIGINT, and keep nothing
                worker.terminate()
            raise
    return [done[name] for name in chosen]


def _read_machines(folder: Path | None) -> None:
    """Let this process read the machines of a folder."""
    catalogue.FOLDER = folder or catalogue.SHIPPED


def _submit(pool: ProcessPoolExecutor, chosen: Sequence[str]) -> dict:
    """Start the workers with SIGINT ignored: Ctrl-C is for the parent, which cancels what they have not begun."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return {pool.submit(run, name): name for name in chosen}
    finally:
        signal.signal(signal.SIGINT, before)


def _row(experiment: Experiment) -> dict:
    """Return an experiment's row of the command's table; errors are over the held-out rows alone."""
    held_out, every = summary(experiment.rows, "validate"), summary(experiment.rows)
    counts = {"num_held_out": held_out.num_rows, "num_fitted": summary(experiment.rows, "calibrate").num_rows}
    errors = {"mean_error": held_out.mean, "median_error": held_out.median, "worst_error": held_out.worst}
    row = {"name": experiment.name, "title": experiment.title, **counts, "num_aside": every.num_aside}
    return {**row, **errors, "worst": held_out.worst_what}


def describe(result: dict) -> str:
    """Return the result of ``reproduce`` as a table for people."""
    heads = f"{'held out':>8s} {'fitted':>6s} {'aside':>5s} {'mean':>8s} {'median':>8s} {'worst':>8s}"
    lines = [f"{'experiment':20s} {heads}  worst row"]
    for row in result["experiments"]:
        counts = f"{row['num_held_out']:8d} {row['num_fitted']:6d} {row['num_aside']:5d}"
        figures = " ".join([f"{'–':>8s}"] * 3)
        if row["num_held_out"]:
            figures = f"{row['mean_error']:8.1%} {row['median_error']:8.1%} {row['worst_error']:+8.1%}  {row['worst']}"
        lines.append(f"{row['name']:20s} {counts} {figures}")
    unread = result["without_effect"]
    lines += [f"note: --set {change} changed nothing: no experiment here reads this machine" for change in unread]
    lines += ["", result["held_out"]["in_words"], LEGEND, "", f"Report: {result['report']}"]
    return "\n".join([*lines, f"All rows: {result['summary']}"])


#: What the columns of the table mean.
LEGEND = """held out: numbers that nothing was fitted on; mean, median and worst of |ours / paper - 1| are of these.
fitted: rows that constants were fitted on. aside: not judged, with its reason in the report: the same number printed
again, arithmetic that tests no model, or a number that the paper itself contradicts. Context is in the report alone: an
experiment of zeros has nothing else."""
