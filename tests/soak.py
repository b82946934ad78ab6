"""A job killed at seeded points and resumed, until it is done: ``make soak``, and a short run of it in the suite.

Each attempt is a process of its own, forked from one that has loaded everything, and ended by SIGKILL: before, within
or after its n-th write, at its n-th fsync, at its n-th sampled step, or after some time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from models import save_opt
from tqdm import tqdm

from flexhybrid import cli
from flexhybrid.batch import answers as answers_module
from flexhybrid.requests import RequestCodec
from flexhybrid.runtime.executor import Executor

#: Shared with the attempts: how many answers the one at hand has completed.
COMPLETED = mmap.mmap(-1, 8)
tqdm.monitor_interval = 0  # its thread may hold the bars' lock while an attempt is forked, which then waits for ever
answers_module.SYNC_S = 0.0  # at every write: by the clock, an attempt might have fewer fsyncs than the one counted
KINDS = ("before write", "within write", "after write", "fsync", "step")


def write_requests(path: Path, count: int, seed: int) -> None:
    """Lines of all kinds: greedy and random, stopped early, refused, malformed; some ask for more than an answer."""
    generator = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            body = {
                "prompt": [generator.randrange(3, 61) for _ in range(generator.randrange(1, 24))],
                "max_tokens": generator.randrange(1, 9), "temperature": generator.choice([0, 0.8, 1.5]),
            }  # fmt: skip
            if number % 5 == 2:
                body |= {"n": generator.randrange(1, 4), "logprobs": 2, "echo": True, "frequency_penalty": 0.5}
            if number % 17 == 5:
                body["stream"] = True
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write("{broken\n" if number % 23 == 7 else json.dumps(line) + "\n")


def attempt(argv: list[str], point: tuple[str, int] | None, report: Path | None = None, after_s: float | None = None):
    """Run the command in a forked process; returns its wait status. ``report``: gets the counts of all points."""
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
    """Let this process die at its n-th event of a kind; returns the counts of events so far."""
    counts, write, fsync, tokens_of = Counter(), os.write, os.fsync, Executor.tokens_of
    complete = RequestCodec.completion

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

    RequestCodec.completion = counted
    os.write, os.fsync, Executor.tokens_of = trapped_write, trapped_fsync, trapped_step
    return counts


def answers(path: Path) -> dict[str, str]:
    """id -> the line without the job's time, of an output file; each id may stand there once. Log probabilities, which
    hang on company in their last digits, are left out; the tokens that have them are not."""
    found = {}
    for raw in path.read_bytes().splitlines():
        line = json.loads(raw, parse_float=lambda number: 0.0)
        line["response"]["body"].pop("created", None)
        assert line["id"] not in found, f"{line['id']} is answered twice"
        found[line["id"]] = json.dumps(line)
    return found


def soak(
    folder: Path, num_requests: int, num_points: int, num_timed: int, seed: int, batch: int, show: bool = False
) -> dict:
    """Kill and resume; raises AssertionError for anything lost, doubled or changed. Returns counts. ``show``: say now
    and then on stderr how far it is."""
    generator = random.Random(seed)
    os.environ["FLEXHYBRID_CACHE"] = str(folder / "cache")  # nothing is known of the machine, nothing predicted
    save_opt(folder / "model")
    policy = {"name": "soak", "cache": {"act@host": 0.5, "kv@host": 0.5}, "max_batch": batch}
    (folder / "policy.json").write_text(json.dumps(policy))
    write_requests(folder / "requests.jsonl", num_requests, seed)

    def command(out: Path) -> list[str]:
        return ["run", "-i", str(folder / "requests.jsonl"), "-o", str(out), "--model", str(folder / "model"),
                "--policy", str(folder / "policy.json"), "--device", "cpu", "--dtype", "float32", "--json"]  # fmt: skip

    began = time.monotonic()
    assert attempt(command(folder / "whole.jsonl"), None, folder / "counts.json") == 0
    whole_s = time.monotonic() - began
    expected = answers(folder / "whole.jsonl")
    assert len(expected) == num_requests
    counts = json.loads((folder / "counts.json").read_text())
    points = [(kind, n) for kind in KINDS for n in range(1, counts[kind] + 1)]
    shuffled = generator.sample(points, len(points))
    turns = zip_longest(*([point for point in shuffled if point[0] == kind] for kind in KINDS))
    chosen = [point for turn in turns for point in turn if point][:num_points]  # as many of each kind as there are
    chosen += generator.choices(points, k=num_points - len(chosen))
    killed = most_lost = 0
    for number, point in enumerate([*chosen, *[None] * num_timed]):
        out = folder / f"{number}.jsonl"
        status = attempt(command(out), point, after_s=None if point else generator.uniform(0, whole_s))
        killed += os.WIFSIGNALED(status)
        assert point is None or os.WIFSIGNALED(status), f"{point} was not reached"
        kept = out.read_bytes().count(b'"status_code": 200') if out.exists() else 0
        most_lost = max(most_lost, int.from_bytes(COMPLETED[:], "little") - kept)
        if number % 3 == 0:  # and again, somewhere in what is left
            killed += os.WIFSIGNALED(attempt(command(out), generator.choice(points)))
        assert attempt(command(out), None) == 0, f"not resumed after {point}"
        assert answers(out) == expected, f"other answers after {point}"
        for path in folder.glob(f"{number}.jsonl*"):
            path.unlink()
        if show and (number + 1) % 20 == 0:
            print(f"{number + 1} of {num_points + num_timed} points", file=sys.stderr, flush=True)
    assert most_lost <= batch, f"a kill lost {most_lost} complete answers; {batch} were in flight"
    return {
        "points": len(chosen), "timed": num_timed, "killed": killed, "most_answers_lost": most_lost,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--timed", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="requests in flight")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        result = soak(Path(folder), args.requests, args.points, args.timed, args.seed, args.batch, show=True)
        print(json.dumps(result), file=shown)


if __name__ == "__main__":
    main()
