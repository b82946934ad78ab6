"""Bench rows of the census of a file of requests: lines a second, against a loop that reads line by line."""

import json
import random
import statistics
from io import BytesIO

from experiments.bench.harness import Table, seconds_of
from flexhybrid import shipped
from flexhybrid.batch.census import take_census
from flexhybrid.batch.requests import LineRules
from flexhybrid.core.model.shape import shape_of_checkpoint
from flexhybrid.requests import RequestCodec, load_tokenizer

NUM_LINES, NUM_PLAIN, ROUNDS = 20_000, 2_000, 3
#: Bar. The census that encoded line by line took 1.55 times the plain loop's seconds a line; five times its speed.
FASTER = 3.2


def bench_census(table: Table) -> None:
    """Add the rows: texts of 120 to 300 characters, each with its own max_tokens. The plain loop parses each line and
    calls the tokenizer, and does nothing else."""
    folder = shipped.CHECKPOINT
    codec = RequestCodec(shape_of_checkpoint(folder), folder, load_tokenizer(folder))
    text, generator = folder.with_name("held_out.txt").read_text(encoding="utf-8"), random.Random(0)
    lines = []
    for index in range(NUM_LINES):
        start = generator.randrange(len(text) - 300)
        prompt = text[start : start + generator.randint(120, 300)]
        body = {"model": "m", "prompt": prompt, "max_tokens": generator.randint(1, 64), "temperature": 0}
        line = {"custom_id": f"request-{index}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line).encode() + b"\n")
    file = BytesIO(b"".join(lines))

    def plain() -> None:
        for line in lines[:NUM_PLAIN]:
            codec.tokenizer(json.loads(line)["body"]["prompt"])

    def census() -> None:
        take_census(file, LineRules("jsonl", {}, 0).reader(codec), codec.shape.max_context)

    census()  # loads what the process keeps
    rates = [(NUM_LINES / seconds_of(census), NUM_PLAIN / seconds_of(plain)) for _ in range(ROUNDS)]
    ratios = [ours / loop for ours, loop in rates]
    conditions = {"samples": ratios, "lines_per_s": [ours for ours, _ in rates]}
    table.at_least("run: census against a plain loop", statistics.median(ratios), FASTER, "x", **conditions)
