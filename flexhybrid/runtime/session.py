"""A session: one wave of requests on an engine. It can be run once and then decoded repeatedly, for measurements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexhybrid.core.hardware import Hardware
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import BufferSizes, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine, RunControl, WaveResult
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.profiling.attention_paths import fastest_paths
from flexhybrid.runtime.storage.weights import Weights

#: Makes a session's engine. ``functools.partial(Engine, num_threads=1)`` sets options.
MakeEngine = Callable[[Weights, Policy, BufferSizes], Engine]

TRACED = RunControl(keep_trace=True)


def random_prompts(workload: Workload, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return random token ids with the workload's prompt lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, length).tolist() for length in workload.prompt_tokens]


class Session:
    """A wave with greedy sampling, its prompts, and its executor, whose cache all runs use.

    ``prompts``: token ids in the wave's order (default: random ones). ``close()`` and the end of a ``with`` block close
    the engine only if ``Session.of`` made it.
    """

    def __init__(self, engine: Engine, wave: Wave, prompts: list[list[int]] | None = None):
        self.engine, self.wave = engine, wave
        self.prompts = random_prompts(wave.workload, wave.shape.vocab) if prompts is None else prompts
        self.executor = engine.executor(wave, self.prompts, greedy_plan(len(self.prompts)))
        self._owns_engine = False

    @classmethod
    def of(
        cls,
        weights: Weights,
        policy: Policy,
        workload: Workload,
        prompts: list[list[int]] | None = None,
        hardware: Hardware | None = None,
        make_engine: MakeEngine = Engine,
    ) -> Session:
        """Return a session that runs the workload as one wave, on a new engine with buffers of its size.

        ``hardware`` determines the split points of both(…) entries (``admit``).
        """
        device = weights.device.type
        shape, dtype = weights.shape, weights.dtype_name
        paths = fastest_paths(device, dtype, shape.queries_per_key, shape.head_dim)
        problem = Problem(shape=shape, dtype=dtype, hardware=hardware, device=device, attention=paths)
        wave = admit(problem, policy, workload)
        engine = make_engine(weights, policy, buffer_sizes(wave))
        session = cls(engine, wave, prompts)
        session._owns_engine = True
        return session

    def generate(self, control: RunControl = TRACED) -> WaveResult:
        """Run the wave from its prompts to its last tokens."""
        return self.engine.run(self.executor, control)

    def decode(self, num_iterations: int | None = None) -> list[TraceEvent]:
        """Run the first ``num_iterations`` decode iterations (default: all) on the present cache; return the trace."""
        return self.decode_result(num_iterations).trace

    def decode_result(self, num_iterations: int | None = None, control: RunControl = TRACED) -> WaveResult:
        """Do as ``decode``; return the whole result."""
        last = self.wave.workload.max_tokens.max() if num_iterations is None else num_iterations
        tasks = (task for task in stream(self.wave, first_iteration=1) if task.iteration <= last)
        return self.engine.run(self.executor, control, tasks)

    def close(self) -> None:
        """Close the engine if ``Session.of`` made it."""
        if self._owns_engine:
            self.engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error) -> None:
        self.close()
