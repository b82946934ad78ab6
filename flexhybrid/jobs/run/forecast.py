"""Predicts the time and the memory of a file of requests under a policy."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flexhybrid.core.admission import EXPECTED_SHARE, Places, batch_size, open_batch
from flexhybrid.core.context.cache_entries import TIERS, representation_of
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import kept_shares, memory_plan, total_bytes
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.scheduler import sharing_limit
from flexhybrid.core.units import counted, gib
from flexhybrid.core.workload import Workload
from flexhybrid.llm import LLM
from flexhybrid.runner import MOST_AT_A_TIME
from policy_search.systems import dropped
from sim.answer_lengths import with_mean
from sim.queue_clock import ROUGH_TASKS, WALKED_TASKS, QueueRun, price_queue

WINDOW = MOST_AT_A_TIME  #: requests that must be known before a batch begins, if there are that many


class Estimate(NamedTuple):
    """Predicted seconds of a queue whose answers have ``tokens`` tokens in all."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Forecast:
    """Predictions for requests with expected answer lengths, or with answers at max_tokens if none are known."""

    seconds: float | None  #: None: the machine has no profile
    tokens: int  #: tokens of all answers, if each reaches max_tokens
    expected_tokens: int  #: tokens of all answers, with the lengths that ``seconds`` assumes
    at_a_time: int  #: requests that run together
    memory: dict[str, int]  #: tier -> bytes of the run
    layer_bytes: dict[str, int]  #: tier -> bytes of the layers' weights
    run: QueueRun | None = None  #: None: the machine has no profile
    #: A second estimate: for answers of EXPECTED_SHARE of max_tokens if ``seconds`` assumes max_tokens, else for
    #: max_tokens; None: not known.
    other: Estimate | None = None
    num_requests: int = 1

    def seconds_of(self, tokens: int) -> float | None:
        """Return the predicted seconds for answers of ``tokens`` tokens in all.
        Two estimates are interpolated linearly; the result is at most the larger one."""
        if self.seconds is None:
            return None
        own = self.seconds, self.expected_tokens
        other = (self.other.seconds, self.other.tokens) if self.other else own
        less, most = sorted((own, other), key=lambda prediction: prediction[1])
        fewer = (most[1] - tokens) / max(1, most[1] - less[1])
        return min(max(most[0] - fewer * (most[0] - less[0]), 0.0), most[0])


def forecast(llm: LLM, workload: Workload) -> Forecast:
    """Predict the run of requests, given in running order, under the current policy."""
    places, memory = first_batch(llm, workload)
    run, of_limits, other = price(llm, workload, places), workload.answer_tokens is None, None
    if run is not None and (of_limits or (workload.answers < workload.max_tokens).any()):
        shorter = with_mean(workload, EXPECTED_SHARE * float(workload.max_tokens.mean())) if of_limits else None
        answers = shorter or replace(workload, answer_tokens=None)
        if (priced := price(llm, answers, places, ROUGH_TASKS)) is not None:
            other = Estimate(priced.total_s, int(answers.answers.sum()))
    layers = {tier: memory[tier].get("resident weights" if tier == "device" else "weights", 0) for tier in TIERS}
    return Forecast(
        run and run.total_s,
        tokens=int(workload.max_tokens.sum()),
        expected_tokens=int(workload.answers.sum()),
        at_a_time=places.count,
        num_requests=workload.num_requests,
        memory=total_bytes(memory),
        layer_bytes=layers,
        run=run,
        other=other,
    )


def first_batch(llm: LLM, workload: Workload) -> tuple[Places, dict[str, dict[str, int]]]:
    """Return the batch size (``batch_size``) and the memory of these requests, tier -> part -> bytes.
    Raise InputError if not even one request fits the budgets."""
    problem, policy = llm.problem, llm.settled_policy
    places = batch_size(problem, policy, workload, MOST_AT_A_TIME)
    wave = open_batch(problem, policy, workload, places, gives=False)
    return places, memory_plan(problem, policy, buffer_sizes(wave))


def price(llm: LLM, workload: Workload, places: Places, walked_tasks: int = WALKED_TASKS) -> QueueRun | None:
    """Price a queue under the current policy; return None if the machine's profile is missing or incomplete.
    ``places``: result of ``batch_size``. ``walked_tasks``: as in ``price_queue``."""
    if llm.hardware is None:
        return None
    try:
        return price_queue(llm.problem, llm.settled_policy, workload, MOST_AT_A_TIME, places, walked_tasks)
    except InputError:  # a machine without a line for one of the policy's verbs
        return None


def plan_lines(llm: LLM, plan: Forecast, counts: str, searched: bool) -> list[str]:
    """Return the plan as five to seven lines of text; without a profile, with the reason in place of the speed.
    ``counts``: text about the number of requests. ``searched``: whether a search on this machine chose the policy."""
    policy = llm.settled_policy
    plain = searched and set(map(representation_of, policy.cache_entries)) == {"kv"}
    limits = {tier: f" of {gib(budget)}" for tier, budget in llm.problem.budgets.items() if budget}
    memory = [f"{tier} {gib(size)}{limits.get(tier, '')}" for tier, size in plan.memory.items() if size]
    alone = f" (max_batch {policy.max_batch} of the policy)" if policy.max_batch else ""
    if not alone and (
        budgets := [tier for tier, size in llm.problem.budgets.items() if size and plan.memory.get(tier)]
    ):
        fullest = max(budgets, key=lambda tier: plan.memory[tier] / (llm.problem.budgets.of(tier) or 1))
        alone = f" ({fullest} memory has no room for a second)"
    at_a_time = f"{counted(plan.at_a_time, 'answer')} at a time" + alone * (plan.at_a_time == 1 < plan.num_requests)
    if plan.seconds is None or plan.run is None:
        pace = f" at {llm.paced.link_gb_per_s:g} GB/s" if llm.paced.link_gb_per_s else ""
        unknown = f"is not profiled for this model{pace} (--policy auto does that)"
        if llm.arguments.policy == "auto":
            unknown = "is not measured, as all requests fit the device (--reprofile does that)"
        if llm.hardware is not None:
            unknown = "was profiled without some of the policy's tasks (a disk's: flexhybrid profile --disk DIR)"
        predicted, limit = f"no speed: this machine {unknown}", []
    else:
        rate = f"{plan.expected_tokens / plan.seconds:.1f} tokens/s"
        shorter = plan.other if plan.expected_tokens == plan.tokens else None
        longest = " with every answer at its limit" if shorter else ""
        predicted = f"{rate}, {predicted_time(plan.seconds)}: done by {_end(plan.seconds)}{longest}"
        limit = [f"limited by {plan.run.binding}, busy {plan.run.busy[plan.run.binding]:.0%} of the time"]
        if plan.other and predicted_time(plan.other.seconds) != predicted_time(plan.seconds):
            mean = f"answers of {counted(round(plan.other.tokens / plan.num_requests), 'token')} on average"
            words = mean if shorter else "answers that all take their limits"
            end = f"{predicted_time(plan.other.seconds)} with {words}: done by {_end(plan.other.seconds)}"
            limit.insert(0, f"or         {end}")
    unshared = sharing_limit(policy, llm.problem.shape) if llm.arguments.enable_prefix_caching else None
    note = "; a mix with recomputed context would not be faster" if plain else ""
    return [
        f"policy     {describe(policy, llm.problem)}; in {llm.problem.dtype}{note}",
        f"requests   {counts}, at most {counted(plan.tokens, 'token')} of answers in all; {at_a_time}",
        f"predicted  {predicted}",
        *limit[:-1],
        f"memory     {', '.join(memory)}",
        *limit[-1:],
        *([f"shared     {unshared}"] if unshared else []),
    ]


def _end(seconds: float) -> str:
    """Return weekday and time of day, ``seconds`` from now."""
    return time.strftime("%a %H:%M", time.localtime(time.time() + seconds))


def describe(policy: Policy, problem: Problem) -> str:
    """Return a policy as a line: shares of weights and cache by tier, schedule, bits, and work off the device."""
    shape = problem.shape

    def shares(places: Mapping[str, float]) -> str:
        return " + ".join(f"{share:.0%} {place}" for place, share in places.items() if share > 0)

    weights = shares(kept_shares(problem, policy))
    bits = "" if policy.bits.native else f", bits {policy.bits.weights}/{policy.bits.kv}/{policy.bits.act}"
    moved = (("attention", policy.attending_tier), ("hidden states", policy.hidden))
    elsewhere = "".join(f"; {what} on the {tier}" for what, tier in moved if tier != "device")
    kept = f"; context {shares(dict(policy.cache))}" if shape.attending else ""
    kept += f"; states of recurrent layers on the {policy.state_tier}" if shape.recurrent else ""
    order = f"{policy.schedule}, {policy.cut}"
    unused = dropped(policy.name, policy.attending_tier)
    return f"{policy.name}: weights {weights}{kept}; {order}{bits}{elsewhere}{unused and f'; {unused}'}"


def predicted_time(seconds: float) -> str:
    """Return predicted seconds as text; below 1 s, a run's start of about half a second matters."""
    return duration(seconds) if seconds >= 1 else "less than 1 s after its start"


def duration(seconds: float) -> str:
    """Return seconds as text, in s, min or h."""
    if seconds < 0.1:
        return "less than 0.1 s"
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def sorted_by_length(prompt_tokens: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
    """Return the indices of the requests by length, the longest first.
    Requests of like length keep batches full; with the longest first, a lack of memory shows at once."""
    return np.lexsort((prompt_tokens, max_tokens))[::-1]
