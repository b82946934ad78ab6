"""Search the best policy: placement of weights and cache, representations, bits, batch sizes, schedule and attention.

1. Each discrete choice leaves a linear program over shares (``grid``).
2. All choices are bounded at once (``lower_bound``).
3. Choices near the incumbent have their programs solved (``lp``), rounded to blocks (``rounding``) and priced by
   ``sim.array_clock``, the most promising first (``branch_and_bound``).
4. Batches between the grid's steps, and both(…) entries, are tried near the best policy.

The winner can be confirmed on the virtual clock. Its program can be written as a readable file (``audit``).
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from flexhybrid.core.admission import Places
from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, TIERS
from flexhybrid.core.errors import InputError, check, unknown
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from policy_search.audit import write_lp
from policy_search.branch_and_bound import BranchAndBound
from policy_search.grid import ChoiceGrid
from policy_search.rounding import EvaluatedPolicy, whole_tensors
from policy_search.search_problem import (
    FULL,
    LOSSLESS,
    MINI_BATCH_TOKENS,
    PLAIN,
    RESIDENT_MINI_BATCH_TOKENS,
    Option,
    SearchProblem,
    Space,
    batch_grid,
    pairs_of,
)
from policy_search.selection import UnderSelection, best_under_selection, value_of
from policy_search.shortage import shortage, tightest
from sim.array_clock import Prediction, predict
from sim.candidates import mean_lengths
from sim.cost import hardware_of_wave
from sim.queue_clock import QueueRun, price_queue
from sim.virtual_clock import SimulatedSummary, run, summarize

__all__ = ["FULL", "LOSSLESS", "OBJECTIVES", "PLAIN", "SearchResult", "SearchSettings", "Space", "search"]

OBJECTIVES = ("throughput", "latency", "decode_throughput")
MAX_BATCH = 1024  #: largest batch that is tried by default
#: Possible relative error of a prediction: the largest error of the array clock in the committed comparisons
#: (``error_closed`` of experiments/results/*/speed.csv), rounded up.
MODEL_ERROR = 0.14
#: If tensors must not be cut, possible shares of the weights that differ by less are not searched separately.
LEAST_APART = 0.01
MOST_CONTENDERS = 12  #: most kinds of policies that are reported besides the winner's
MOST_CONFIRMED = 8192  #: most positions of a run that the virtual clock walks completely, in half a second


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Choices, objective and limits of a search."""

    batch: int | None = None  #: number of requests; None: free up to ``max_batch`` (for latency: 1)
    max_batch: int = MAX_BATCH
    #: "throughput": generated tokens / the run's seconds; "latency": the run's seconds; "decode_throughput": generated
    #: tokens / the decode's seconds
    objective: str = "throughput"
    space: Space = FULL
    #: a speculative selection that is used if it is faster; None: no selection
    selection: Selection | None = None
    mini_batch_tokens: tuple[int, ...] = MINI_BATCH_TOKENS  #: sizes of a mini-batch that are tried
    weights_device: float | None = None  #: share of each layer on the device; None: free
    weights_disk: float | None = None  #: share of each layer on the disk; None: free
    max_ttft_s: float | None = None  #: most seconds from the start of a wave to its requests' first tokens; None: any
    max_tpot_s: float | None = None  #: most seconds between two tokens of a request; None: any
    seeds: Iterable[Policy] = ()  #: policies that are also tried; the result is at least as good as these
    #: the policy with everything on the device wins unless another one is faster by more than this share
    margin: float = MODEL_ERROR
    time_limit: float | None = None  #: seconds after which the best policy so far is returned, without a proof
    confirm: bool = False  #: run the winner on the virtual clock, see ``confirmed``
    write_lp: Path | None = None  #: file to write the winner's program to
    prune: bool = True  #: False tries every choice

    def __post_init__(self):
        batch, tokens = self.batch, self.mini_batch_tokens
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        for name, share in {"weights_device": self.weights_device, "weights_disk": self.weights_disk}.items():
            check(name, share, share is None or 0 <= share <= 1, "a share, from 0 to 1")
        if (batch is not None and batch < 1) or self.max_batch < 1:
            raise InputError("a batch has at least one request")
        if batch is not None and self.max_batch != MAX_BATCH and batch > self.max_batch:
            raise InputError(f"batch is {batch}, but max_batch {self.max_batch}: give one of the two")
        for name in ("max_ttft_s", "max_tpot_s"):
            check(name, getattr(self, name), getattr(self, name) is None or getattr(self, name) > 0, "seconds above 0")
        check("margin", self.margin, self.margin >= 0, "a share >= 0")
        if not tokens or min(tokens) < 1:
            raise InputError(f"mini_batch_tokens is {tokens!r}; each must be a whole number >= 1")
        check("time_limit", self.time_limit, self.time_limit is None or self.time_limit >= 0, "seconds >= 0")
        if self.selection is not None and (self.space.lossless or self.selection.method != "speculative"):
            raise InputError("the search may use only a speculative selection; it is lossy, so lossless must be false")

    @property
    def batches(self) -> np.ndarray:
        """Return the batches that are tried."""
        if self.batch is None and self.objective == "latency":
            return np.array([1])
        return batch_grid(self.max_batch) if self.batch is None else np.array([self.batch])


@dataclass(frozen=True)
class SearchResult:
    """The best policy, its prediction, and the search's counts and optimality gaps."""

    policy: Policy
    batch: int
    prediction: dict  #: ``sim.array_clock.Prediction.row`` of the policy
    num_choices: int  #: discrete choices
    num_bounded_out: int  #: choices that their lower bound excluded
    num_lps: int  #: programs solved to their optimum
    num_walked: int  #: policies priced with waiting
    #: place of attention -> optimality gap: no policy of the space, with the batches and mini-batches tried, is
    #: predicted to be faster by more than this share. The bound ignores waiting, which is much of the gap with
    #: attention on the host. Rounding to blocks can make a policy 0.1 % or so faster than its bound
    gaps: dict[str, float]
    complete: bool  #: False if the time limit ended the search
    search_s: float
    problem: SearchProblem
    largest_mini_batch: int  #: tokens of the largest mini-batch that was tried
    #: the best policies of other kinds: with other cache entries, bits, tiers of weights or place of attention
    contenders: tuple[EvaluatedPolicy, ...] = ()
    #: ``SearchSettings.margin`` if the policy with everything on the device won, else None
    margin: float | None = None
    virtual: SimulatedSummary | QueueRun | None = None  #: the winner's run on the virtual clock, with ``confirm``
    #: the best policy with the settings' selection, even if it did not win; None if none fits. Counts and gaps are
    #: without it
    selected: UnderSelection | None = None

    @property
    def proof(self) -> str:
        """Return the optimality gaps in a sentence."""
        shared = ", alone or with the host" * (ATTENDED_ENTRY in self.problem.entries)
        words = {"device": f"device{shared}"}
        gaps = ", ".join(
            f"{gap:.1%} with attention on the {words.get(at, at)}" for at, gap in sorted(self.gaps.items())
        )
        tried = f"for mini-batches of up to {self.largest_mini_batch:,} tokens, by a bound that ignores waiting"
        return f"optimality gap: {gaps} ({tried})" + "; the time limit ended the search" * (not self.complete)

    @property
    def gap(self) -> float:
        """Return the largest of the gaps."""
        return max(self.gaps.values(), default=0.0)

    @property
    def counts(self) -> dict[str, int]:
        """Return the numbers of choices, excluded choices, solved programs and walked policies, by name."""
        names = ("num_choices", "num_bounded_out", "num_lps", "num_walked")
        return {name.removeprefix("num_"): getattr(self, name) for name in names}

    @property
    def act_share(self) -> float:
        """Return the ACT share of the tokens."""
        return self.policy.share("act")

    @property
    def kv_act_bytes_ratio(self) -> float:
        """Return KV bytes / ACT bytes of a request's context; infinity without ACT. A both(…) entry has both."""
        shape, both = self.problem.shape, self.policy.share("both")
        stored = self.problem.stored(self.policy.bits)
        act_bytes = (self.policy.share("act") + both) * shape.act_token_bytes(stored.act)
        kv_bytes = (self.policy.share("kv") + both) * shape.kv_token_bytes(stored.kv)
        return kv_bytes / act_bytes if act_bytes else float("inf")


def search(problem: Problem, workload: Workload, settings: SearchSettings | None = None) -> SearchResult:
    """Return the best policy for requests of the workload's mean lengths, within the problem's effective budgets.

    Raise InputError if nothing fits; the message has each tier's shortage and the smallest sufficient change. Raise
    TooSlowError if no fitting policy is predicted to keep the limits of TTFT and TPOT.
    """
    started = time.perf_counter()
    settings = settings or SearchSettings()
    prompt_tokens, max_tokens = mean_lengths(workload)
    given = {field.name: getattr(problem, field.name) for field in fields(Problem)}
    asked = ("space", "weights_device", "weights_disk", "objective", "max_ttft_s", "max_tpot_s")
    given |= {name: getattr(settings, name) for name in asked}
    searched = SearchProblem(**given, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    batches, tokens = settings.batches, settings.mini_batch_tokens
    deadline = np.inf if settings.time_limit is None else started + settings.time_limit
    solver = BranchAndBound(searched, deadline, settings.prune)
    of_resident = RESIDENT_MINI_BATCH_TOKENS if tokens == MINI_BATCH_TOKENS else tokens
    solver.favour_resident(batches, of_resident, settings.margin)
    solver.explore(ChoiceGrid(searched, searched.options, *pairs_of(searched, batches, tokens)))
    solver.seed(settings.seeds, batches, tokens[0] if len(tokens) == 1 else None)
    if solver.best is None:
        smallest = int(batches.min())
        least = tightest(searched, smallest, tokens)
        if least is None or least.lacking:
            raise InputError(shortage(searched, smallest, tokens, least))
        solver.take(solver.evaluator.evaluate_policy(least.policy, batches[:1]))
        if solver.best is None:
            soonest = [_soonest(searched, name, batches[:1], tokens, least.policy) for name in ("ttft", "tpot")]
            for known in soonest:
                evaluated = solver.evaluator.evaluate_policy(known.policy, batches[:1])
                solver.take([replace(one, unplaced=known.unplaced) for one in evaluated])
            if solver.best is None:
                limits = (("TTFT", searched.max_ttft_s), ("TPOT", searched.max_tpot_s))
                asked = " and ".join(f"{name} of at most {limit:.4g} s" for name, limit in limits if limit)
                if settings.selection is not None:  # a selection may be fast enough; the gaps are then without limits
                    free = replace(settings, selection=None, max_ttft_s=None, max_tpot_s=None, confirm=False)
                    found = replace(search(problem, workload, free), problem=searched)
                    found = _with_selection(found, settings.selection, settings)
                    if found.policy.selection == settings.selection:
                        return replace(found, virtual=confirmed(found)) if settings.confirm else found
                least = "TTFT {:.4g} s and TPOT {:.4g} s".format(*(known.seconds for known in soonest))
                raise TooSlowError(f"no policy is predicted to have {asked}; the least, each by itself: {least}")
    solver.refine(batches, tokens)
    if settings.weights_device is None and "device" in settings.space.weights:
        # The programs' weight shares are continuous. If only a few are possible, each is searched separately.
        for share in whole_tensors(searched, settings.space.weights_bits, LEAST_APART):
            solver.absorb(replace(searched, weights_device=float(share)), batches, tokens)
    if solver.best is None:
        raise RuntimeError("the tightest policy fits, but was not evaluated")
    result = _result(solver, solver.best, started, tokens)
    if settings.write_lp is not None:
        pair = np.array([float(result.batch)]), np.array([float(result.policy.max_mini_batch_tokens)])
        write_lp(ChoiceGrid(searched, [Option.of(result.policy)], *pair).program(0), settings.write_lp)
    if settings.selection is not None:
        result = _with_selection(result, settings.selection, settings)
    return replace(result, virtual=confirmed(result)) if settings.confirm else result


class TooSlowError(InputError):
    """No fitting policy keeps the limits of TTFT and TPOT."""


def _soonest(
    problem: SearchProblem, latency: str, batches: np.ndarray, tokens: tuple[int, ...], fitting: Policy
) -> EvaluatedPolicy:
    """Return the policy with the least ``latency`` ("ttft" or "tpot") if latencies have no limits. ``fitting``: a
    policy that fits."""
    solver = BranchAndBound(replace(problem, objective=latency, max_ttft_s=None, max_tpot_s=None))
    solver.explore(ChoiceGrid(solver.problem, problem.options, *pairs_of(problem, batches, tokens)))
    if solver.best is None:
        solver.take(solver.evaluator.evaluate_policy(fitting, batches))
    solver.refine(batches, tokens)
    if solver.best is None:
        raise RuntimeError("the tightest policy fits, but was not evaluated")
    return solver.best


def _result(solver: BranchAndBound, best: EvaluatedPolicy, started: float, tokens: tuple[int, ...]) -> SearchResult:
    problem = solver.problem
    num_choices = sum(known.grid.num_choices for known in solver.lower_bounds)
    return SearchResult(
        policy=best.policy,
        batch=best.batch,
        prediction=_predicted(problem, best.policy, best.batch).row(),
        num_choices=num_choices,
        num_bounded_out=num_choices - solver.num_solved,
        num_lps=solver.num_lps,
        num_walked=solver.evaluator.num_walked,
        gaps=solver.gaps(),
        complete=solver.complete,
        margin=solver.margin if solver.stays else None,
        search_s=time.perf_counter() - started,
        problem=problem,
        largest_mini_batch=max(tokens),
        contenders=_contenders(solver, best),
    )


def _contenders(solver: BranchAndBound, best: EvaluatedPolicy) -> tuple[EvaluatedPolicy, ...]:
    """Return the best policy of each kind except the winner's, the fastest kinds first."""
    kinds: dict[tuple, EvaluatedPolicy] = {_kind(best.policy): best}
    for known in sorted(solver.evaluated, key=lambda known: known.seconds):
        kinds.setdefault(_kind(known.policy), known)
    return tuple(kinds.values())[1 : 1 + MOST_CONTENDERS]


def _kind(policy: Policy) -> tuple:
    """Return what distinguishes contenders: place of attention, cache entries, tiers of the weights, and bits."""
    tiers = tuple(tier for tier in TIERS if getattr(policy.weights, tier) > 0)
    return policy.attention, policy.cache_entries, tiers, policy.bits


def _predicted(problem: SearchProblem, policy: Policy, batch: int) -> Prediction:
    return predict(problem, problem.candidates(policy, np.array([float(batch)])))


def _with_selection(result: SearchResult, selection: Selection, settings: SearchSettings) -> SearchResult:
    """Return the result with the best policy under the selection, if one fits and is faster; else with its own."""
    started, problem = time.perf_counter(), result.problem
    try:
        selected = best_under_selection(problem, selection, settings.batches, settings.mini_batch_tokens)
    except InputError:
        return result
    plain = _predicted(problem, result.policy, result.batch)
    own = float(value_of(problem.objective, plain)[0]) if problem.in_time(plain).all() else -np.inf
    result = replace(result, selected=selected, search_s=result.search_s + time.perf_counter() - started)
    if selected.value <= own:
        return result
    prediction = _predicted(problem, selected.policy, selected.batch).row()
    return replace(result, policy=selected.policy, batch=selected.batch, prediction=prediction)


def confirmed(result: SearchResult) -> SimulatedSummary | QueueRun:
    """Return the winner's run on the virtual clock. If it has more than MOST_CONFIRMED positions, only some iterations
    are walked (``price_queue``)."""
    problem = result.problem
    lengths = Workload.uniform(result.batch, problem.prompt_tokens, problem.max_tokens)
    wave = admit(problem, result.policy, lengths)
    if len(wave.mini_batches) * problem.shape.num_layers * problem.max_tokens > MOST_CONFIRMED:
        return price_queue(problem, result.policy, lengths, result.batch, Places(result.batch))
    return summarize(run(stream(wave), hardware_of_wave(wave)))
