"""What a GPU bench runs: a model's shape with random weights over random prompts of one length."""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.problem import Problem
from flexhybrid.jobs.compare.speed import Bench
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.profiling.attention_paths import fastest_paths
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights


class Setting(NamedTuple):
    """A model by name, and its requests."""

    model: str
    dtype: str
    batch: int
    context: int  #: tokens of a prompt
    max_tokens: int  #: that are generated for each request
    mini_batch: int  #: requests

    @property
    def mini_batch_tokens(self) -> int:
        """A bound that so many requests with their answers fit in, and no more."""
        return self.mini_batch * (self.context + self.max_tokens + 33)


def gpu() -> torch.device:
    """Return the GPU; on a machine without one its CPU, for tests of what runs on a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_bench(shape: ModelShape, device: torch.device, setting: Setting) -> Bench:
    """Return a bench of the setting's requests over random weights of the shape."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, shape.vocab, setting.context).tolist() for _ in range(setting.batch)]
    source = RandomWeights(shape, device=device.type)
    heads = shape.queries_per_key, shape.head_dim  # a GPU's runs attend in place, as those of users do
    paths = fastest_paths(device.type, setting.dtype, *heads) if device.type == "cuda" else None
    problem = Problem(shape=shape, dtype=setting.dtype, device=device.type, attention=paths)
    make_weights = partial(Weights, shape, source, setting.dtype, device)
    return Bench(make_weights, problem, prompts, setting.max_tokens, PacedDevice(device))
