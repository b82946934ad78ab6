"""Intervals of a study's figures: the functions live with the command ``flexhybrid accuracy``, which prints them."""

from flexhybrid.jobs.accuracy.bootstrap import (
    Interval,
    interval,
    mean,
    mean_difference,
    perplexity_ratio,
    ratio_of_means,
)

__all__ = ["Interval", "interval", "mean", "mean_difference", "perplexity_ratio", "ratio_of_means"]
