"""Predictions of the decode iterations that a comparison measures, by the closed form and by the virtual clock."""

import numpy as np

from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.speed import LAST
from sim import virtual_clock
from sim.array_clock import Prediction, predict
from sim.candidates import Candidates, mean_lengths, num_mini_batches, padded_width
from sim.cost import hardware_of


def closed_decode(
    problem: Problem, policy: Policy, workload: Workload, cache: dict[str, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the closed form's decode tokens/s and their limit by the busiest resource, arrays [policies].

    ``cache``: cache entry -> shares [policies] in place of the policy's; None: one policy. The seconds of the measured
    iterations are those of a run that ends with them, minus those of a run that ends with the first decode iteration.
    The difference excludes overlap with the prefill, and the missing loads of the last iteration. Raise ValueError for
    answers of fewer than LEAST_TOKENS tokens.
    """
    batch, (prompt, generated) = workload.num_requests, mean_lengths(workload)
    if (steps := generated - 1 + LAST) < 1:
        raise ValueError(f"answers of {generated} tokens leave no iteration to predict")
    _, size = num_mini_batches(batch, prompt, generated, policy.max_mini_batch_tokens, policy.packing)

    def ending_after(tokens: int) -> Prediction:
        mini_batch_tokens = size * padded_width(prompt, tokens)  # cut as the whole run is
        return predict(problem, Candidates(policy, batch, prompt, tokens, mini_batch_tokens, cache=cache))

    longer, shorter = ending_after(2 + steps), ending_after(2)
    least_s = np.ravel(longer.bound_s - shorter.bound_s)
    seconds = np.maximum(np.ravel(longer.total_s - shorter.total_s), least_s)
    return batch * steps / seconds, batch * steps / least_s


def virtual_decode(problem: Problem, policy: Policy, workload: Workload) -> list[TraceEvent]:
    """Return the virtual clock's trace of the decode iterations' tasks, which are those measured."""
    return virtual_clock.run(stream(admit(problem, policy, workload), first_iteration=1), hardware_of(problem, policy))
