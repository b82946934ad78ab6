"""A job killed at seeded points and resumed, until it is done: ``make soak``, and a short run of it in the suite.

Each attempt is a process of its own, forked from one that has loaded everything, and ended by SIGKILL: before, within
or after its n-th write, at its n-th fsync, at its n-th sampled step, as its n-th request joins or steps back, at the
n-th chunk of its index, as its policy changes for the n-th time, or after some time. Files are JSON lines, or Parquet
in and out. Pools are so small that requests step back, some prompts begin alike, and the index counts a few lines
before the first answers, the others meanwhile. Every few iterations the mix changes, as after a new search, once the
running requests have ended, or at once, and they begin again, in turn.

A second part has a fault at every file operation of a small job with all of its files (``faults.py``).
"""

from __future__ import annotations

import argparse
import io
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import attend_once  # noqa: F401 for the attempts, which are forked
import pyarrow as pa
import torch
from faults import Faults, is_one_line, points
from models import LETTERS, save_text_model
from pyarrow import parquet
from tqdm import tqdm

from flexhybrid import cli, runner
from flexhybrid.batch import answers as answers_module
from flexhybrid.batch import request_index as index_module
from flexhybrid.core.admission import Places
from flexhybrid.core.schedule.scheduler import Scheduler
from flexhybrid.jobs.run import job as run_module
from flexhybrid.jobs.run.options import journal_of
from flexhybrid.requests import RequestCodec
from flexhybrid.runtime.executor import Executor

#: Shared with the attempts: how many answers the one at hand has completed.
COMPLETED = mmap.mmap(-1, 8)
tqdm.monitor_interval = 0  # its thread may hold the bars' lock while an attempt is forked, which then waits for ever
answers_module.SYNC_S = 0.0  # at every write: by the clock, an attempt might have fewer fsyncs than the one counted
index_module.CHUNK_LINES, run_module.INDEXING_S = 8, 0.0  # the first chunk is answered while the others are counted
KINDS = ("before write", "within write", "after write", "fsync", "step", "join", "step back", "request index", "change")
CHANGE_ITERATIONS = 20  #: after which the policy changes
MIXES = ({"kv@host": 1.0}, {"act@host": 0.5, "kv@host": 0.5})
SYSTEM_PROMPT = [3 + number % 50 for number in range(32)]  #: of every fourth line
POOL_SHARE = 0.1  #: of an answer's limit, for which there are blocks: the youngest requests step back


def write_table(path: Path, count: int, seed: int) -> None:
    """Write prompts as a column of a Parquet file."""
    generator = random.Random(seed)
    texts = ["".join(generator.choices(list(LETTERS), k=generator.randrange(1, 24))) for _ in range(count)]
    parquet.write_table(pa.table({"id": [f"p{number}" for number in range(count)], "text": texts}), path)


def write_requests(path: Path, count: int, seed: int) -> None:
    """Write lines of all kinds: greedy, random, stopped early, refused and malformed; some with more options."""
    generator = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            body = {
                "prompt": [generator.randrange(3, 61) for _ in range(generator.randrange(1, 24))],
                "max_tokens": generator.randrange(1, 24),
                "temperature": generator.choice([0, 0.8, 1.5]),
            }
            if number % 4 == 1:
                body["prompt"] = SYSTEM_PROMPT + body["prompt"]
            if number % 5 == 3:
                body |= {"guided_regex": "([0-9]{1,4}[A-Z])+"}
            if number % 5 == 2:
                body |= {"n": generator.randrange(1, 4), "logprobs": 2, "echo": True, "frequency_penalty": 0.5}
            if number % 17 == 5:
                body["stream"] = True
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write("{broken\n" if number % 23 == 7 else json.dumps(line) + "\n")


def attempt(argv: list[str], point: tuple[str, int] | None, report: Path | None = None, after_s: float | None = None):
    """Run the command in a forked process; return its wait status. ``report`` gets the counts of all points."""
    COMPLETED[:] = bytes(8)
    child = os.fork()
    if child:
        if after_s is not None:
            time.sleep(after_s)
            os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1]
    status = 70
    try:
        counts = lay_traps(point)
        status = cli.main(argv)
        if report:
            report.write_text(json.dumps(counts))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        os._exit(status)


def lay_traps(point: tuple[str, int] | None) -> Counter:
    """Make this process die at its n-th event of a kind; return the counts of events so far."""
    counts, write, fsync, tokens_of = Counter(), os.write, os.fsync, Executor.tokens_of
    complete, start, back = RequestCodec.completion, RequestCodec.open, Scheduler._preempt
    count_on = index_module.RequestIndex.count_on

    def reached(kind: str) -> bool:
        counts[kind] += 1
        return point == (kind, counts[kind])

    def die_at(kind: str) -> None:
        if reached(kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def trapped_write(fd, data):
        die_at("before write")
        if reached("within write"):
            write(fd, data[: random.Random(point[1]).randrange(len(data))])
            os.kill(os.getpid(), signal.SIGKILL)
        written = write(fd, data)
        die_at("after write")
        return written

    def trapped_fsync(fd):
        die_at("fsync")
        return fsync(fd)

    def trapped_step(self, step):
        die_at("step")
        return tokens_of(self, step)

    def counted(self, generated):
        if generated.index == 0:  # lines are counted, however many answers they ask for
            COMPLETED[:] = (int.from_bytes(COMPLETED[:], "little") + 1).to_bytes(8, "little")
        return complete(self, generated)

    def trapped(kind: str, function):
        def call(*arguments):
            die_at(kind)
            return function(*arguments)

        return call

    change_mixes(die_at)
    RequestCodec.completion, RequestCodec.open = counted, trapped("join", start)
    Scheduler._preempt = trapped("step back", back)
    index_module.RequestIndex.count_on = trapped("request index", count_on)
    # another number of requests at a time would not fit pools of this share
    runner.batch_size = lambda _problem, policy, workload, at_most, *_: Places(
        min(at_most, policy.max_batch, workload.num_requests), POOL_SHARE
    )
    os.write, os.fsync, Executor.tokens_of = trapped_write, trapped_fsync, trapped_step
    return counts


def change_mixes(die_at) -> None:
    """Make a job change its mix every CHANGE_ITERATIONS, as it does after a second search."""
    advance, iterations, changes = run_module.JobLines.advance, [0], [0]

    def counts(self, num_tokens):
        iterations[0] += 1
        advance(self, num_tokens)

    def changed(self):
        if iterations[0] < CHANGE_ITERATIONS:
            return
        die_at("change")
        iterations[0], changes[0] = 0, changes[0] + 1
        self.llm.use(replace(self.llm.settled_policy, cache=MIXES[changes[0] % 2]))

    def drains(self):
        return iterations[0] >= CHANGE_ITERATIONS and changes[0] % 2 == 0

    def restarts(self):
        return iterations[0] >= CHANGE_ITERATIONS and changes[0] % 2 == 1

    run_module.JobLines.advance, run_module.JobLines.between_batches = counts, changed
    run_module.JobLines.drains, run_module.JobLines.restarts = drains, restarts


def answers(path: Path) -> dict[str, str]:
    """Return id -> line without the job's time, of an output file; each id may occur once. Log probabilities are left
    out, since their last digits depend on the batch; their tokens are compared."""
    found = {}
    for raw in path.read_bytes().splitlines():
        line = json.loads(raw, parse_float=lambda number: 0.0)
        line["response"]["body"].pop("created", None)
        assert line["id"] not in found, f"{line['id']} is answered twice"
        found[line["id"]] = json.dumps(line)
    return found


class Files:
    """A file of requests and the command that answers it: JSON lines, or Parquet in and out."""

    def __init__(self, folder: Path, ending: str, num_requests: int, seed: int):
        self.folder, self.ending, self.num_requests = folder, ending, num_requests
        self.source = folder / f"requests.{ending}"
        (write_table if ending == "parquet" else write_requests)(self.source, num_requests, seed)

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.{self.ending}"

    def journal(self, name: str) -> Path:
        """Return the file that takes the answers one by one."""
        return journal_of(self.out(name)) if self.ending == "parquet" else self.out(name)

    def command(self, name: str) -> list[str]:
        column = ["--column", "text", "--id-column", "id"] if self.ending == "parquet" else []
        return ["run", "-i", str(self.source), "-o", str(self.out(name)), "--model", str(self.folder / "model"),
                "--policy", str(self.folder / "policy.json"), "--device", "cpu", "--dtype", "float32", "--json",
                *column]  # fmt: skip

    def whole(self) -> tuple[dict[str, str], dict[str, int]]:
        """Return the answers of an undisturbed run, and the number of points of each kind in it."""
        counts = self.folder / "counts.json"
        assert attempt(self.command("whole"), None, counts) == 0
        expected = answers(self.journal("whole"))
        assert len(expected) == self.num_requests
        return expected, json.loads(counts.read_text())

    def check(self, name: str, expected: dict[str, str]) -> None:
        """Raise AssertionError for lost, doubled or changed answers; remove the files."""
        assert answers(self.journal(name)) == expected, f"other answers in {name}"
        if self.ending == "parquet":
            table = parquet.read_table(self.out(name)).to_pylist()
            assert [row["line"] for row in table] == sorted({row["line"] for row in table})
            assert len(table) == self.num_requests
        for path in self.folder.glob(f"{name}.*"):
            path.unlink()


def chosen_points(counts: dict[str, int], num_points: int, generator: random.Random) -> list[tuple[str, int]]:
    """Return points of each kind in turn, without the last ones: indexing in the background moves those."""
    most = {kind: max(1, count * 4 // 5) for kind, count in counts.items()}
    points = [(kind, n) for kind in KINDS for n in range(1, most.get(kind, 0) + 1)]
    shuffled = generator.sample(points, len(points))
    turns = zip_longest(*([point for point in shuffled if point[0] == kind] for kind in KINDS))
    chosen = [point for turn in turns for point in turn if point][:num_points]
    return chosen + generator.choices(points, k=num_points - len(chosen))


def soak(
    folder: Path, num_requests: int, num_points: int, num_timed: int, seed: int, batch: int, show: bool = False
) -> dict:
    """Kill and resume jobs; raise AssertionError for lost, doubled or changed answers; return counts."""
    generator, began = random.Random(seed), time.monotonic()
    os.environ["FLEXHYBRID_CACHE"] = str(folder / "cache")  # nothing is known of the machine, nothing predicted
    save_text_model(folder / "model")
    policy = {"name": "soak", "cache": {"act@host": 0.5, "kv@host": 0.5}, "max_batch": batch}
    (folder / "policy.json").write_text(json.dumps(policy))
    runs = []  # of both kinds of files: (files, expected answers, points)
    for ending, share in (("jsonl", 0.8), ("parquet", 0.2)):
        files = Files(folder, ending, num_requests, seed)
        expected, counts = files.whole()
        assert ending != "jsonl" or all(counts.get(kind) for kind in KINDS), f"no point of some kinds: {counts}"
        runs += [(files, expected, point) for point in chosen_points(counts, round(share * num_points), generator)]
    whole_s = (time.monotonic() - began) / 2
    runs += [(*runs[number % len(runs)][:2], None) for number in range(num_timed)]
    killed, most_lost, reached = 0, 0, Counter()
    for number, (files, expected, point) in enumerate(runs):
        name = f"n{number}"
        status = attempt(files.command(name), point, after_s=None if point else generator.uniform(0, whole_s))
        killed += os.WIFSIGNALED(status)
        reached[point[0] if point else "some time"] += os.WIFSIGNALED(status)
        journal = files.journal(name)
        kept = journal.read_bytes().count(b'"status_code": 200') if journal.exists() else 0
        most_lost = max(most_lost, int.from_bytes(COMPLETED[:], "little") - kept)
        if number % 6 == 0 and point:  # and again, somewhere in what is left
            killed += os.WIFSIGNALED(attempt(files.command(name), (point[0], generator.randrange(1, point[1] + 1))))
        assert attempt(files.command(name), None) == 0, f"not resumed after {point}"
        files.check(name, expected)
        if show and (number + 1) % 20 == 0:
            print(f"{number + 1} of {len(runs)} points", file=sys.stderr, flush=True)
    points = len(runs) - num_timed
    assert sum(reached.values()) - reached["some time"] >= 0.9 * points, f"points that were reached: {reached}"
    assert most_lost <= batch, f"a kill lost {most_lost} complete answers; {batch} were in flight"
    return {
        "points": points, "timed": num_timed, "killed": killed, "reached": reached, "most_answers_lost": most_lost,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def failing_disk(folder: Path, step: int = 1, first: int = 0) -> dict:
    """Plant every ``step``-th fault from ``first`` at a job's file operations, then resume; return counts."""
    job, said, record = folder / "job", folder / "said", folder / "seen.json"
    os.environ["FLEXHYBRID_CACHE"] = str(folder / "cache")
    tempfile.tempdir = str(job / "temporary")  # of the table's lines
    answers_module.ROOM_WAIT_S, answers_module.RETRY_S = 0.0, 1e-3
    save_text_model(folder / "model")
    (folder / "policy.json").write_text(json.dumps({"name": "soak", "cache": {"kv@host": 1.0}, "max_batch": 4}))
    write_table(folder / "in.parquet", 6, 0)
    paths = {"-i": folder / "in.parquet", "-o": job / "out.parquet", "--model": folder / "model"}
    paths |= {"--policy": folder / "policy.json", "--errors": job / "errors.jsonl"}
    paths |= {"--report": job / "report.md", "--trace": job / "trace.json"}
    argv = ["run", *(str(part) for pair in paths.items() for part in pair), "--device", "cpu", "--dtype", "float32"]
    argv += ["--column", "text", "--id-column", "id", "--ordered", "--quiet", "--max-tokens", "3", "--temperature", "0"]

    def run(*point) -> tuple[int, str, list]:
        child = os.fork()
        if child:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return status, said.read_text(), json.loads(record.read_text())[1] if status >= 0 else []
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr, status = io.TextIOWrapper(io.FileIO(2, "w"), "utf-8"), 70
        try:
            with Faults(job, *point) as faults:
                status = cli.main(argv)
        except BaseException:
            traceback.print_exc()
        record.write_text(json.dumps([faults.seen, faults.happened]))
        sys.stderr.flush()
        os._exit(status)

    counts: Counter[str] = Counter()
    expected: dict[str, str] = {}
    names: set[str] = set()
    chosen: list = [None]  # the first run is whole
    while chosen:
        point = chosen.pop()
        shutil.rmtree(job, ignore_errors=True)
        (job / "temporary").mkdir(parents=True)
        status, text, happened = run(*(point or ()))
        if point is None:
            assert status == 0, text
            chosen = points(json.loads(record.read_text())[0])[first::step][::-1]
            expected, names = answers(job / "out.parquet.jsonl"), {path.name for path in job.iterdir()}
            continue
        told = is_one_line(status, text, happened)
        counts["killed" if status < 0 else "tracebacks" if not told else "went on" if status == 0 else "one line"] += 1
        if status >= 0 and not told:
            print(f"{point}: status {status}, {happened}: {text}", file=sys.stderr)
        status, text, _ = run()
        assert status == 0, f"not resumed after {point}: {text}"
        rows = len(parquet.read_table(job / "out.parquet"))
        if answers(job / "out.parquet.jsonl") != expected or rows != len(expected):
            counts["lost or doubled"] += 1
            print(f"{point}: {happened}, {rows} rows, {answers(job / 'out.parquet.jsonl')}", file=sys.stderr)
        counts["left behind"] += len({path.name for path in job.iterdir()} - names)
        counts["points"] += 1
        if counts["points"] % 50 == 0:
            print(f"{counts['points']} faults of a disk, {len(chosen)} left", file=sys.stderr, flush=True)
    assert not counts["tracebacks"] + counts["lost or doubled"] + counts["left behind"], counts
    return {**dict.fromkeys(("tracebacks", "lost or doubled", "left behind"), 0), **counts}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--timed", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="requests in flight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk-step", type=int, default=1, help="every n-th fault of a disk; 0: none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        result = soak(Path(folder), args.requests, args.points, args.timed, args.seed, args.batch, show=True)
        if args.disk_step:
            result["disk"] = failing_disk(Path(folder) / "disk", args.disk_step)
        print(json.dumps(result), file=shown)


if __name__ == "__main__":
    main()
