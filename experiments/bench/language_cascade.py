"""Bench rows of the cascade of language models that finish lines of code (``experiments.studies.line_cascade``)."""

from experiments.bench.harness import Table
from experiments.studies.line_cascade import answered, line_study
from experiments.training.code_lines import read


def bench_language_cascade(table: Table) -> None:
    """Accuracy and stated energy of AP on files that no threshold has seen, with 95 % intervals over files."""
    study = line_study(answered(read()))
    ways = study["ways"]
    gained, low, high = ways["AP"]["gained_points"]
    size = {"files": study["num_files"], "requests": study["num_requests"]}
    name = "cascade, lines of code: AP less the largest model, upper end of the interval"
    table.at_least(name, high, 0, "points", mean=gained, interval_95=[low, high], **size)
    cost, *interval = ways["AP"]["cost_of_largest"]
    bounds = {words.replace(" ", "_").replace(",", ""): ways[words]["cost_of_largest"][0] for words in BOUNDS}
    name = "cascade, lines of code: cost of AP, of the largest model's"
    table.at_most(name, cost, 0.6, "x", interval_95=interval, **bounds)


BOUNDS = ("all-knowing, as accurate as the largest", "perfect confidence", "by type alone")
