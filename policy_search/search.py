"""One optimisation over all that a policy says: placement of weights and cache over three tiers, representations, bits,
mini-batch and batch, row or column, where attention runs.

Every discrete choice leaves a linear program over shares (``grid``). All choices are bounded at once (``bound``); only
those whose bound is within NEAR of the incumbent have their program solved by HiGHS (``lp``), are rounded to blocks and
walked by the closed form (``rounding``), the most promising first. Then the batches between the grid's steps and the
exchanges of blocks between entries are tried around the best. The winner can be confirmed on the virtual clock, and its
program written for a reader (``audit``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy, Selection
from flexhybrid.core.problem import problem_of
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from policy_search.audit import write_lp as write_program
from policy_search.branch_and_bound import Hunt
from policy_search.grid import (
    FULL,
    LOSSLESS,
    MINI_BATCH_BOUNDS,
    NATIVE,
    PLAIN,
    Grid,
    Option,
    Program,
    Question,
    Space,
    batch_grid,
    pairs_of,
)
from policy_search.selection import UnderSelection, best_under_selection, value_of
from policy_search.shortage import shortage, tightest
from sim.array_clock import Prediction, predict
from sim.candidates import Candidates, mean_lengths
from sim.virtual_clock import RunSummary, run, summarize

__all__ = ["FULL", "LOSSLESS", "OBJECTIVES", "PLAIN", "SearchResult", "Space", "search"]

OBJECTIVES = ("throughput", "latency", "decode_throughput")
MAX_BATCH = 1024  #: requests that are tried where nothing else is said
MOST_CONFIRMED = 1_000_000  #: tasks of a run on the virtual clock: some ten seconds
TASKS_OF_A_LAYER = 12  #: of a mini-batch, more or less


@dataclass(frozen=True)
class SearchResult:
    """The best policy and what was predicted of it."""

    policy: Policy
    batch: int
    prediction: dict  #: the closed form's row (``sim.array_clock.Prediction.row``)
    act_share: float  #: of tokens
    kv_act_bytes_ratio: float  #: KV bytes / ACT bytes of a request's context; inf without ACT
    num_choices: int  #: discrete choices
    num_bounded_out: int  #: of them, left out by their bound
    num_lps: int  #: programs solved by HiGHS
    num_walked: int  #: policies priced with waiting
    gap: float  #: by what share a policy of the space could be faster at most, under the closed form's sums
    proved: bool  #: whether it came to its end: each choice that its bound did not exclude had its program solved
    search_s: float
    question: Question
    virtual: RunSummary | None = None  #: of the winner, when asked to confirm
    #: the best with the selection that was asked for, whether it won or not; counts, gap and proof are of the others
    selected: UnderSelection | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many choices and policies each step dealt with."""
        names = ("num_choices", "num_bounded_out", "num_lps", "num_walked")
        return {name.removeprefix("num_"): getattr(self, name) for name in names}

    def program(self) -> Program:
        """The linear program of the winner's discrete choice."""
        p = self.policy
        pair = np.array([float(self.batch)]), np.array([float(p.max_mini_batch_tokens)])
        return Grid(self.question, [Option.of(p)], *pair).program(0)

    @property
    def num_candidates(self) -> int:
        return self.num_choices

    @property
    def binding(self) -> str:
        """The resource that is busiest in the decode."""
        return self.prediction["binding"]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the policy needs in each tier."""
        return {tier: int(self.prediction["peak_bytes"][tier]) for tier in TIERS}


def search(
    shape: ModelShape,
    hardware: Hardware,
    bytes_per_element: int,
    workload: Workload,
    *,
    batch: int | None = None,
    max_batch: int = MAX_BATCH,
    objective: str = "throughput",
    lossless: bool = False,
    selection: Selection | None = None,
    space: Space | None = None,
    budgets: dict[str, float | None] | None = None,
    max_mini_batch_tokens: int | None = None,
    weights_device: float | None = None,
    seeds: Iterable[Policy] = (),
    time_limit: float | None = None,
    confirm: bool = False,
    write_lp=None,
    prune: bool = True,
) -> SearchResult:
    """The best policy for requests of the workload's mean lengths.

    ``batch``: None is free up to ``max_batch`` (for latency: 1). ``objective``: "throughput", generated tokens over the
    whole run's seconds; "latency", the seconds themselves; "decode_throughput", over the decode's seconds. ``space``:
    what a policy may say (FULL, LOSSLESS, PLAIN or one's own); ``lossless`` takes native bits alone. ``selection``: a
    speculative one that may be used where it is faster; none is ever used unasked. ``budgets``:
    bytes per tier; None takes the machine's, where it has none device and host are unlimited and there is no disk.
    ``max_mini_batch_tokens`` and ``weights_device`` (share of each layer) None: free. ``seeds``: policies to try
    besides; the answer is never worse than one of them that fits and that the space allows. ``time_limit``: seconds
    after which the best so far is returned, not proved. ``confirm``: walk the winner on the virtual clock, where that
    takes no more than MOST_CONFIRMED tasks. ``write_lp``: a path for the winner's program. ``prune`` False tries every
    choice.

    Raises InputError when nothing fits, naming what each tier lacks and the smallest change that would do.
    """
    started = time.perf_counter()
    _check(objective, batch, max_batch, max_mini_batch_tokens, weights_device, time_limit)
    if selection is not None and (lossless or selection.method != "speculative"):
        raise InputError("a selection that the search may use is speculative, and lossy: it cannot be lossless as well")
    space = FULL if space is None else space
    if lossless:
        space = replace(space, weights_bits=(NATIVE,), kv_bits=(NATIVE,), act_bits=(NATIVE,))
    prompt_tokens, max_tokens = mean_lengths(workload)
    question = Question(
        shape, hardware, bytes_per_element, prompt_tokens, max_tokens, _budgets(hardware, budgets), space,
        weights_device, objective,
    )  # fmt: skip
    if batch is None and objective == "latency":
        batch = 1
    batches = np.array([batch]) if batch is not None else batch_grid(max_batch)
    bounds = (max_mini_batch_tokens,) if max_mini_batch_tokens else MINI_BATCH_BOUNDS
    hunt = Hunt(question, started + time_limit if time_limit is not None else np.inf, prune)
    hunt.explore(Grid(question, question.options, *pairs_of(question, batches, bounds)))
    hunt.seed(seeds, batches, max_mini_batch_tokens)
    if hunt.best is None:
        found = tightest(question, int(batches.min()), bounds)
        if found is None or found.lacking:
            raise InputError(shortage(question, int(batches.min()), bounds, found))
        hunt.take(hunt.evaluator.price_policy(found.policy, batches[:1]))
    if prune:
        hunt.finer_batches(batches, bounds)
    hunt.exchange()
    hunt.finer_shares()
    result = _result(hunt, started, confirm, write_lp)
    return result if selection is None else _with_selection(result, selection, batches, bounds, confirm)


def _check(objective, batch, max_batch, max_mini_batch_tokens, weights_device, time_limit) -> None:
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if weights_device is not None and not 0 <= weights_device <= 1:
        raise InputError(f"weights_device is {weights_device!r}; a share is a number from 0 to 1")
    if (batch is not None and batch < 1) or max_batch < 1:
        raise InputError("a batch has at least one request")
    if batch is not None and max_batch != MAX_BATCH and batch > max_batch:
        raise InputError(f"batch is {batch}, but max_batch {max_batch}: give one of the two")
    if max_mini_batch_tokens is not None and max_mini_batch_tokens < 1:
        raise InputError(f"max_mini_batch_tokens is {max_mini_batch_tokens!r}; it must be a whole number >= 1")
    if time_limit is not None and not time_limit >= 0:
        raise InputError(f"time_limit is {time_limit!r}; it must be a number of seconds >= 0")


def _budgets(hardware: Hardware, given: dict[str, float | None] | None) -> dict[str, float]:
    """Bytes per tier: what is given, else the machine's; infinity for none, nothing for a disk that is not known."""
    sizes = {}
    for tier in TIERS:
        size = (given or {}).get(tier)
        size = hardware.usable_memory(tier) if size is None else size
        sizes[tier] = float(size) if size is not None else 0.0 if tier == "disk" else np.inf
    return sizes


def _result(hunt: Hunt, started: float, confirm: bool, lp) -> SearchResult:
    q, best = hunt.question, hunt.best
    row = _priced(q, best.policy, best.batch).row()
    stored = best.policy.bits.element_bytes(q.bytes_per_element)
    act, kv = best.policy.share("act"), best.policy.share("kv")
    both = best.policy.share("both")
    act_bytes = (act + both) * q.shape.act_token_bytes(stored.act)
    kv_bytes = (kv + both) * q.shape.kv_token_bytes(stored.kv)
    num_choices = sum(bounds.grid.num_choices for bounds in hunt.bounds)
    result = SearchResult(
        policy=best.policy,
        batch=best.batch,
        prediction=row,
        act_share=act,
        kv_act_bytes_ratio=kv_bytes / act_bytes if act_bytes else float("inf"),
        num_choices=num_choices,
        num_bounded_out=num_choices - hunt.num_solved,
        num_lps=hunt.num_lps,
        num_walked=hunt.evaluator.num_walked,
        gap=hunt.gap(),
        proved=hunt.complete,
        search_s=time.perf_counter() - started,
        question=q,
    )
    if lp is not None:
        write_program(result.program(), lp)
    return replace(result, virtual=_confirm(q, best.policy, best.batch)) if confirm else result


def _priced(q: Question, policy: Policy, batch: int) -> Prediction:
    candidates = Candidates(policy, np.array([float(batch)]), q.prompt_tokens, q.max_tokens)
    return predict(q.shape, q.hardware, q.bytes_per_element, candidates)


def _with_selection(result: SearchResult, selection: Selection, batches, bounds, confirm: bool) -> SearchResult:
    """The best with the selection in the place of the one without, where it is faster."""
    started, q = time.perf_counter(), result.question
    selected = best_under_selection(q, selection, batches, bounds)
    wins = selected.value > float(value_of(q.objective, _priced(q, result.policy, result.batch))[0])
    result = replace(result, selected=selected, search_s=result.search_s + time.perf_counter() - started)
    if not wins:
        return result
    policy, batch = selected.policy, selected.batch
    act, kv = (policy.share(one) * getattr(q.shape, f"{one}_token_bytes")(q.bytes_per_element) for one in ("act", "kv"))
    return replace(
        result, policy=policy, batch=batch, prediction=_priced(q, policy, batch).row(), act_share=policy.share("act"),
        kv_act_bytes_ratio=kv / act if act else float("inf"), virtual=_confirm(q, policy, batch) if confirm else None,
    )  # fmt: skip


def _confirm(q: Question, policy: Policy, batch: int) -> RunSummary | None:
    """The policy on the virtual clock; None for a run too long to walk."""
    lengths = Workload.uniform(batch, q.prompt_tokens, q.max_tokens)
    wave = admit(problem_of(q.shape, q.bytes_per_element, q.hardware), policy, lengths)
    tasks = len(wave.mini_batches) * q.shape.num_layers * q.max_tokens * TASKS_OF_A_LAYER
    return summarize(run(stream(wave), q.hardware)) if tasks <= MOST_CONFIRMED else None
