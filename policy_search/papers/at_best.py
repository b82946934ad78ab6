"""Find the batch and the options with which a system is predicted to be fastest.

FlexGen chooses by its own cost model. CAPTURE chooses by its Algorithm 1 for each batch that is tried. For the other
systems, the options of their calls are tried with all batches at once.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from policy_search.search_problem import MINI_BATCH_TOKENS, RESIDENT_MINI_BATCH_TOKENS
from policy_search.systems import SYSTEMS, Setting, System, parse, system, without_recomputing
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.simulate import SimulatedRun, simulate

#: System -> option -> values that are tried if a call does not set the option. Mini-batch sizes and the weights' device
#: share are also tried.
TRIED = {
    "token_recompute": {"ratio": (0.1, 0.2, 0.4)},
    "kvpr_row": {"split": ("paper", "pipeline")},
    "kvpr_column": {"split": ("paper", "pipeline")},
    "neo": {"host": (0.2, 0.4, 0.6, 0.8)},
    "apt_serve": {"hidden": (0.25, 0.5, 0.75)},
}
WEIGHT_SHARES = np.arange(13) / 12  #: a matrix of attention is a twelfth of an OPT layer
WALKED = 16, 8  #: most choices that are walked, by their bound: among all, and then around the best


def at_best(text: str, setting: Setting, free: bool, bits: Bits | None = None) -> tuple[System, SimulatedRun]:
    """Return a system and its run with the fastest batch and options.

    ``free``: the run has the system's batch, at most ``setting.batch``; otherwise it answers ``setting.batch`` requests
    in waves. ``bits``: replaces the bits of a system whose policy serves all batches. Raise InputError if nothing fits.
    """
    name, options = (text, {}) if text in TRIED else parse(text)
    if SYSTEMS[name].batches == "itself":
        return _run(system(text, replace(setting, own_batch=True)), setting, free)
    if SYSTEMS[name].batches == "one by one":
        return best_batch(partial(system, text), setting, free)
    call, best, plain = text, None, None
    tried = {option: values for option, values in TRIED.get(name, {}).items() if option not in options}
    for values in product(*tried.values()):
        chosen = options | dict(zip(tried, values, strict=True))
        call = f"{name}({', '.join(f'{key}={str(value).lower()}' for key, value in chosen.items())})"
        with suppress(InputError):  # no batch fits with these options
            made = system(call, replace(setting, batch=1))
            made = made if bits is None else replace(made, policy=replace(made.policy, bits=bits))
            best = _best_setting(call, made, setting, free, best)
            if made.policy.share("both") and not plain:  # KVPR's claim: never slower than loading everything
                plain = replace(made, policy=without_recomputing(made.policy))
                best = _best_setting(call, plain, setting, free, best)
    if best is None:
        return _run(system(call, replace(setting, batch=1)), setting, free)  # raises an error with the needed memory
    return _run(replace(best[1], name=text), setting, free)


def best_batch(make: Callable[[Setting], System], setting: Setting, free: bool = True) -> tuple[System, SimulatedRun]:
    """Return the system that ``make`` returns for the fastest batch, and its run; ``free`` as in ``at_best``. Powers of
    four are tried first, then batches around the best, at distances of a half, a quarter and an eighth."""
    tried: dict[int, float] = {}  # batch -> tokens/s; -1 if it does not fit at once
    waves: set[int] = set()  # wave sizes of batches that do not fit at once

    def rate(batch: int) -> float:
        if batch not in tried:
            tried[batch] = -1.0
            with suppress(InputError):
                run = _run(make(replace(setting, batch=batch)), replace(setting, batch=batch), True)[1]
                if run.num_waves > 1:
                    waves.add(run.wave)
                else:
                    tried[batch] = run.tokens_per_s
        return tried[batch]

    most = setting.batch
    coarse = [most, *(1 << power for power in range(0, most.bit_length(), 2) if 1 << power < most)]
    best = max(sorted(coarse), key=rate)
    best = max(sorted({best, *waves}), key=rate)
    for part in (2, 2, 4, 8):
        around = {best - best // part, best, best + (best if part == 2 else best // part)}
        best = max(sorted(size for size in around if 1 <= size <= most), key=rate)
    made = make(replace(setting, batch=best))
    return _run(replace(made, policy=replace(made.policy, max_batch=best)), setting, free)


def _run(made: System, setting: Setting, free: bool) -> tuple[System, SimulatedRun]:
    """Return a system and its run: with ``free`` of its own batch, otherwise of all requests in waves."""
    problem = replace(setting.problem, hardware=made.hardware)
    batch = min(made.policy.max_batch or setting.batch, setting.batch) if free else setting.batch
    return made, simulate(problem, made.policy, batch, setting.prompt_tokens, setting.max_tokens)


def _best_setting(
    call: str, made: System, setting: Setting, free: bool, known: tuple[float, System] | None
) -> tuple[float, System] | None:
    """Return (tokens/s, system) of a call with the best batch, mini-batches and device weights, or ``known`` if that is
    faster. Raise InputError if nothing fits."""
    name, options = parse(call)
    accepted = SYSTEMS[name].options
    places_weights = "weights_device" in accepted or name == "fastdecode"
    sizes = [made.policy.max_mini_batch_tokens]
    if "max_mini_batch_tokens" in accepted and "max_mini_batch_tokens" not in options:
        sizes = RESIDENT_MINI_BATCH_TOKENS if name == "resident" else MINI_BATCH_TOKENS
    shares = np.array([made.policy.weights.device])
    if places_weights and not {"weights_device", "weights_disk"} & options.keys():
        shares = WEIGHT_SHARES
    problem = replace(setting.problem, hardware=made.hardware)
    rate, batch, tokens, share = -1.0, 0.0, 0.0, 0.0
    batches = np.array(sorted({*_coarse(setting.batch), *(() if free else _waves(setting.batch))}))
    for walked in WALKED:
        axes = [axis.reshape(-1) for axis in np.meshgrid(batches, np.array(sizes), shares, indexing="ij")]
        least = max(rate, known[0]) if known and batch else rate
        found = _fastest(problem, made.policy, setting, axes, walked, least)
        rate, batch, tokens, share = found or (rate, batch, tokens, share)
        step = max(1, int(batch) // 32)
        batches = np.arange(max(1, int(batch * 0.76)), min(setting.batch, int(batch * 1.3)) + 1, step)
        sizes, shares = [tokens], np.array([share])
    on_disk = made.policy.weights.disk
    weights = Placement(device=float(share), host=1.0 - float(share) - on_disk, disk=on_disk)
    policy = replace(made.policy, weights=weights, max_mini_batch_tokens=int(tokens), max_batch=int(batch))
    return known if known and known[0] >= rate else (rate, replace(made, policy=policy))


def _coarse(most: int) -> Iterator[int]:
    """Yield batches from 1 to ``most``, in steps of about a third."""
    batch = 1
    while batch < most:
        yield batch
        batch += max(1, batch // 3)
    yield most


def _waves(requests: int) -> list[int]:
    """Return the wave sizes for cutting requests into 1, 2, 4, 8, … waves of nearly equal size."""
    return list(dict.fromkeys(-(-requests // (1 << power)) for power in range(requests.bit_length() + 1)))


def _fastest(
    problem: Problem, policy: Policy, setting: Setting, axes: list[np.ndarray], walked: int, known: float
) -> tuple[float, float, float, float] | None:
    """Return (tokens/s, batch, mini-batch tokens, device share of weights) of the fastest choice.

    ``axes``: arrays [choices] of the last three. ``known``: tokens/s to exceed; return None if no choice does. Raise
    InputError if no choice fits.
    """

    def predicted(members: np.ndarray, walk: bool):
        batch, tokens, share = (axis[members] for axis in axes)
        lengths = batch.astype(float), setting.prompt_tokens, setting.max_tokens
        shares = {"weights_device": share, "weights_disk": np.full(len(share), policy.weights.disk)}
        return predict(problem, Candidates(policy, *lengths, tokens.astype(float), **shares), walk=walk)

    bounded = predicted(np.arange(len(axes[0])), False)
    fits = problem.effective_budgets.hold(bounded.peak_bytes)
    if not fits.any():
        raise InputError(f"{policy.name}: no batch fits")
    members = np.flatnonzero(fits)
    members = members[np.argsort(-bounded.tokens_per_s[members], kind="stable")][:walked]
    most = bounded.tokens_per_s * bounded.total_s / bounded.least_s  # upper bound of tokens/s
    best, rate = -1, known
    while len(members := members[most[members] > rate]):
        # Choices with equally many mini-batches mostly share a template run.
        alike = bounded.num_mini_batches[members] == bounded.num_mini_batches[members[0]]
        rates = predicted(members[alike], True).tokens_per_s
        if rates.max() > rate:
            best, rate = int(members[alike][rates.argmax()]), float(rates.max())
        members = members[~alike]
    batch, tokens, share = (float(axis[best]) for axis in axes)
    return None if best < 0 else (rate, batch, tokens, share)
