"""``flexhybrid sweep --engine ray``: a sweep's jobs as tasks of a Ray cluster."""

import itertools
from collections.abc import Callable, Generator, Iterable

import ray
from ray.exceptions import RayError

from flexhybrid.jobs.ray_cluster import ENVIRONMENT, MAX_RETRIES
from flexhybrid.jobs.sweep.journal import JobResult

AHEAD = 2  #: tasks a worker, so that none waits for its next one


def results_on(
    jobs: Iterable[tuple[list, list]], outcome: Callable[..., JobResult], evaluate: Callable, num_workers: int
) -> Generator[tuple[list, JobResult]]:
    """Yield (job, ``outcome(evaluate, its points)``) as jobs end; repeat a task whose worker dies.

    Closing the generator cancels the tasks that run.
    """
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, runtime_env={"env_vars": ENVIRONMENT})(outcome)
    function = ray.put(evaluate)
    waiting, running = iter(jobs), {}
    try:
        while True:
            for job, payload in itertools.islice(waiting, AHEAD * num_workers - len(running)):
                running[task.remote(function, payload)] = job  # pyright: ignore[reportCallIssue] (any callable)
            if not running:
                return
            (done,), _ = ray.wait(list(running))
            try:
                result = ray.get(done)
            except RayError as error:
                result = JobResult(failure=f"the Ray cluster failed: {str(error).strip().splitlines()[-1]}")
            yield running.pop(done), result
    finally:
        for reference in running:
            ray.cancel(reference)
