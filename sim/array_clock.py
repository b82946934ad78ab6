"""The array clock: predict whole runs of many policies at once, without their streams.

``sim.verb_seconds`` sums each resource's seconds per phase. The busiest resource's sum bounds the time from below.
``predict`` adds waiting: it walks the tasks of a template run of the same structure (``sim.template_run``) with the
durations of the real run. It skips repeated mini-batches, layers and iterations, at the rate of the walked ones.

Not modelled:

- requests of different lengths in a candidate;
- a change of the limiting resource between blocks within a stretch of the decode;
- weights on the disk in only some layers.

Tests and the bench measure the difference from the virtual clock.
"""

from dataclasses import dataclass, fields

import numpy as np

from flexhybrid.core.hardware import LAUNCHER, LINKS
from flexhybrid.core.plan import part_starts
from flexhybrid.core.problem import Problem, attends_in_place
from flexhybrid.core.task import RESOURCES
from flexhybrid.core.wave import check_planned
from sim.candidate_memory import peak_of_steps
from sim.candidates import Candidates, CandidateSteps, DecodeStretch, candidate_steps
from sim.template_run import RESIDENT_CLASSES, Loop, TaskKey, TinyKind, loops_of, structure_of, template_run
from sim.verb_seconds import AFTER_ROUTES, VerbSeconds, longest

CHUNK = 1024  #: policies walked together; arrays of this size fit a core's cache
BOUND_CHUNK = 8192  #: policies bounded together; a bound needs fewer arrays
LAUNCHING = len(RESOURCES)  #: index of the launching time, after the resources
WALKED = 2  #: least number of walked iterations per stretch of the decode
GROUPS_WALKED = 6  #: least number of groups of weights loaded in the walked iterations of a stretch


@dataclass(frozen=True)
class Prediction:
    """The array clock's prediction for each candidate: arrays [policies], seconds, shares 0..1."""

    total_s: np.ndarray
    prefill_s: np.ndarray
    decode_s: np.ndarray
    tokens_per_s: np.ndarray  #: all generated tokens / total_s
    decode_tokens_per_s: np.ndarray  #: tokens of iterations 1, 2, … / decode_s; 0 without a decode
    #: seconds of the busiest resource, summed over the prefill and the stretches of the decode. A short run can be
    #: faster, because phases overlap
    bound_s: np.ndarray
    least_s: np.ndarray  #: lower bound: the most work that a resource must finish before the last token
    num_mini_batches: np.ndarray
    #: resource -> busy share of the decode (of the run without a decode); also "launcher" if launch times are known
    busy: dict[str, np.ndarray]
    traffic_bytes: dict[str, dict[str, np.ndarray]]  #: link -> kind (weights, kv, act, hidden) -> bytes of the run
    peak_bytes: dict[str, np.ndarray]  #: tier -> bytes

    @property
    def binding(self) -> np.ndarray:
        """Return the busiest resource of each candidate, by name."""
        return np.array(list(self.busy))[np.argmax(np.stack(list(self.busy.values())), axis=0)]

    def row(self, index: int = 0) -> dict:
        """Return one candidate's fields as plain numbers, with the same nesting."""

        def plain(value):
            if isinstance(value, dict):
                return {key: plain(nested) for key, nested in value.items()}
            return value.reshape(-1)[index].item()

        row = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        return {**row, "binding": str(self.binding.reshape(-1)[index])}


def predict(problem: Problem, candidates: Candidates, walk: bool = True) -> Prediction:
    """Predict every candidate. Without ``walk``, total_s, prefill_s and decode_s are the seconds of the busiest
    resource. Raise InputError for a policy that cannot be planned or a verb without a line."""
    check_planned(candidates.policy, problem.shape)
    steps, size = candidate_steps(problem, candidates)
    chunk_size = CHUNK if walk else BOUND_CHUNK
    chunks = []
    for members, entries in steps.alike(_structure(steps) if walk else ()):
        for start in range(0, len(members), chunk_size):
            chosen = members[start : start + chunk_size]
            chunks.append((chosen, _predict_chunk(steps.take(chosen, entries), walk)))
    return _gather(chunks, size)


def _gather(chunks: list[tuple[np.ndarray, dict]], size: tuple[int, ...]) -> Prediction:
    """Join the results of chunks, (indices, fields), in the candidates' order and shape."""
    total = int(np.prod(size))

    def join(parts: list):
        if any(isinstance(part, dict) for part in parts):
            keys = dict.fromkeys(key for part in parts for key in part)
            return {key: join([part.get(key, 0.0) for part in parts]) for key in keys}
        joined = np.zeros(total)
        for (members, _), part in zip(chunks, parts, strict=True):
            joined[members] = part
        return joined.reshape(size)

    columns = {f.name: join([result[f.name] for _, result in chunks]) for f in fields(Prediction)}
    columns["num_mini_batches"] = columns["num_mini_batches"].astype(np.int64)
    return Prediction(**columns)


# ---- candidates of one structure -------------------------------------------------------------------------------------


def _structure(steps: CandidateSteps) -> list[np.ndarray]:
    """Return columns [candidates] of integers. Candidates with equal columns and cache entries share a template run."""
    num_walked = _num_walked(steps)
    counts = np.array([stretch.count for stretch in steps.stretches()])
    short = _is_short(counts, steps.generated, num_walked)
    loops = {k: loops_of(steps.policy, steps.layers, int(k)) for k in np.unique(steps.num_mini_batches)}
    loop_ids = {pair: index for index, pair in enumerate(dict.fromkeys(loops.values()))}
    columns = [num_walked, np.where(short, steps.generated, 0), *np.where(short, False, counts > 0)]
    columns += [np.array([loop_ids[loops[k]] for k in steps.num_mini_batches])]
    return [*columns, _resident_class(steps), _disk_class(steps)]


def _num_walked(steps: CandidateSteps) -> np.ndarray:
    """Return the number of iterations of a stretch to walk, [candidates]: enough loads to use up the at most four
    groups of weights that the disk has read ahead."""
    groups = steps.problem.shape.num_layers * (1 if steps.policy.schedule == "column" else steps.num_mini_batches)
    return np.maximum(WALKED, np.ceil(GROUPS_WALKED / groups)) + np.zeros(len(steps.batch))


def _is_short(counts: np.ndarray, generated: np.ndarray, num_walked) -> np.ndarray:
    """Return whether every iteration of the decode is walked, [candidates]. ``counts``: iterations of each stretch,
    [stretches, candidates]."""
    return generated - 1 <= num_walked * np.count_nonzero(counts[:-1], axis=0) + 2


def _resident_class(steps: CandidateSteps) -> np.ndarray:
    """Return the class of each candidate's resident weights (``template_run.RESIDENT_CLASSES``), [candidates]. The most
    frequent kind of layers decides; the last class needs layers of every kind to be resident. Packed weights are
    unpacked by layer, so only whole layers count."""
    complete = (steps.resident >= steps.layer_sizes).all(axis=0).astype(int)
    if steps.problem.shape.unpacks(steps.policy.bits.weights):
        return RESIDENT_CLASSES[-1] * complete
    counts = steps.problem.shape.weights_counts
    usual = counts.index(max(counts))
    layout, resident = steps.layouts[usual], steps.resident[usual]
    return (resident >= layout.kv_end).astype(int) + (resident >= layout.qkv_end) + complete


def _disk_class(steps: CandidateSteps) -> np.ndarray:
    """Return the part of the streamed weights that is on the disk, [candidates]: 0 none, 1 some, 2 all."""
    streamed = steps.layer_sizes - steps.resident
    return np.where((steps.on_disk <= 0).all(axis=0), 0, np.where((steps.on_disk >= streamed).all(axis=0), 2, 1))


def _stretches(steps: CandidateSteps, walk: bool) -> tuple[list[DecodeStretch], int]:
    """Return (stretches of the decode that any candidate has, number of iterations of each to walk)."""
    num_walked, stretches = int(np.min(_num_walked(steps))), steps.stretches()
    counts = np.array([stretch.count for stretch in stretches])
    if walk and np.all(_is_short(counts, steps.generated, num_walked)):
        contexts = [steps.prompt + i for i in range(int(np.max(steps.generated)) - 1)]
        return [DecodeStretch(context, context, np.ones_like(context)) for context in contexts], 1
    return [stretch for stretch in stretches if np.any(stretch.count)], num_walked


def _predict_chunk(steps: CandidateSteps, walk: bool) -> dict:
    """Return the fields of ``Prediction`` for candidates of one structure."""
    stretches, num_walked = _stretches(steps, walk)
    verbs = VerbSeconds(steps, stretches)
    prefill_busy, decode_busy, late = verbs.busy(0), verbs.decode_busy(), verbs.after_the_last_token()
    prefill_s, decode_s = longest(*prefill_busy.values()), verbs.decode_bound_s()
    bound_s = prefill_s + decode_s
    least_s = longest(*(np.maximum(prefill_busy[r] + decode_busy[r] - late[r], 0.0) for r in RESOURCES))
    decoded = steps.generated - 1
    if walk:
        prefill_s, total_s, launching = _TemplateWalk(verbs, num_walked).run()
        total_s = np.maximum(total_s, least_s)  # after a slow start, a skip may extrapolate too little
        prefill_s = np.where(decoded > 0, prefill_s, total_s)
        decode_s = total_s - prefill_s
    total_s = prefill_s + decode_s
    span_s = np.maximum(np.where(decoded > 0, decode_s, total_s), 1e-300)
    busy = {r: np.minimum(1.0, np.where(decoded > 0, decode_busy[r], prefill_busy[r]) / span_s) for r in RESOURCES}
    if walk and verbs.hardware.launch_s:
        of_prefill, of_run = launching
        busy[LAUNCHER] = np.minimum(1.0, np.where(decoded > 0, of_run - of_prefill, of_run) / span_s)
    traffic: dict[str, dict] = {link: {} for link in LINKS}
    for (link, cargo), num_bytes in verbs.traffic().items():
        traffic[link][cargo] = num_bytes
    return {
        "total_s": total_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "tokens_per_s": steps.batch * steps.generated / total_s,
        "decode_tokens_per_s": np.where(decoded > 0, steps.batch * decoded / np.maximum(decode_s, 1e-300), 0.0),
        "bound_s": bound_s,
        "least_s": least_s,
        "num_mini_batches": steps.num_mini_batches,
        "busy": busy,
        "traffic_bytes": traffic,
        "peak_bytes": peak_of_steps(steps),
    }


# ---- the walk --------------------------------------------------------------------------------------------------------


class _TemplateWalk:
    """Walks the template run's tasks. Durations and times are arrays, with one element for each candidate."""

    def __init__(self, verbs: VerbSeconds, num_walked: int):
        steps = verbs.steps
        policy, num_layers = steps.policy, steps.problem.shape.num_layers
        self.verbs, self.num_walked = verbs, num_walked
        self.phase_of = [0]  # phase of each walked iteration
        # Walked iteration -> number of equal iterations after it that are skipped, [candidates]; negative: so many
        # iterations were walked beyond a candidate's last one.
        self.after: dict[int, np.ndarray] = {}
        for phase, stretch in enumerate(verbs.stretches, start=1):
            self.phase_of += [phase] * (1 if stretch.entry is None else num_walked)
            if stretch.entry is not None:
                self.after[len(self.phase_of) - 1] = stretch.count - num_walked
        self.tiny = template_run(
            structure_of(policy, tuple(sorted(steps.shares)), steps.problem.shape.unpacks(policy.bits.weights)),
            *loops_of(policy, steps.layers, int(steps.num_mini_batches[0])),
            num_decode=len(self.phase_of) - 1,
            resident=int(_resident_class(steps)[0]),
            on_disk=int(_disk_class(steps)[0]),
            kinds=tuple(TinyKind(kind.state, kind.routed and bool(policy.experts.batch)) for kind in steps.kinds),
            in_place=attends_in_place(steps.problem, policy),
        )
        inner, outer = self.tiny.inner.num_rounds, self.tiny.outer.num_rounds
        # Rounds of each loop that the template run omits.
        if policy.schedule == "column":
            self.skipped_inner, self.skipped_outer = steps.num_mini_batches - inner, num_layers - outer
        else:
            self.skipped_inner, self.skipped_outer = num_layers - inner, steps.num_mini_batches - outer
        self.full = _full_mini_batches(steps, inner if policy.schedule == "column" else outer)
        self.prices: dict[tuple[int, TaskKey], tuple] = {}
        self.ends: list = [None] * (len(self.tiny.tasks) + self.tiny.num_moved)  # seconds; None: a task without work
        # For each position: the time at which each resource becomes free, and the time of the last launch.
        self.tails: list[list] = [[0.0] * (len(RESOURCES) + 1)]
        self.launch_s = verbs.hardware.launch_s

    def run(self) -> tuple[np.ndarray, np.ndarray, tuple]:
        """Return (end of the prefill, end of the run, launching seconds until each end); seconds from the first
        task."""
        tiny, ends = self.tiny, self.ends
        sampled: dict[int, np.ndarray] = {}
        launched: dict[int, np.ndarray] = {}
        begin = 0
        for position, end in enumerate(tiny.ends):
            free_at = list(self.tails[-1])
            for index in range(begin, end):
                resource, iteration, key, waits = tiny.tasks[index]
                seconds, present = self._price(iteration, key)
                free = done = free_at[resource]
                if seconds is None:
                    if tiny.barriers:
                        ends[index] = free
                    continue
                if self.launch_s:
                    free_at[LAUNCHING] = free_at[LAUNCHING] + self.launch_s * (1.0 if present is None else present)
                    done = np.maximum(done, free_at[LAUNCHING])
                for awaited in waits:
                    if ends[awaited] is not None:
                        done = np.maximum(done, ends[awaited])
                done = done + seconds
                if present is None:
                    free_at[resource] = ends[index] = done
                else:
                    free_at[resource] = np.where(present, done, free)
                    ends[index] = free_at[resource] if tiny.barriers else np.where(present, done, 0.0)
                if key.verb == "sample":
                    sampled[iteration], launched[iteration] = ends[index], free_at[LAUNCHING]
            begin = end
            self.tails.append(free_at)
            self._skip(position)
            for index in tiny.unused_after[position]:
                ends[index] = None
        return sampled[0], sampled[max(sampled)], (launched[0], launched[max(launched)])

    def _price(self, iteration: int, key: TaskKey) -> tuple:
        """Return (seconds of a task or None without work, candidates that have the task or None for all)."""
        phase = self.phase_of[iteration]
        price = self.prices.get((phase, key))
        if price is None:
            verb, first_load, all_tokens, mini_batch, kind, part = key
            if first_load:
                price = self.verbs.phases[0].first_load_s.get(verb), None
            else:
                price = self.verbs.task(phase, verb, all_tokens, kind, self.full[mini_batch])
            if kind in self.verbs.phases[phase].expert_rows and verb in AFTER_ROUTES:
                price = self._price_after_skip(phase, key, price)
            if part and price[0] is not None:
                early_s = self.verbs.phases[phase].early_load_s[kind]
                price = early_s if part == 1 else price[0] - early_s, price[1]
            self.prices[phase, key] = price
        return price

    def _price_after_skip(self, phase: int, key: TaskKey, price: tuple) -> tuple:
        """Return the price of a task that comes after all mini-batches of a part of a layer, also those skipped."""
        walked, batch = self.tiny.inner.num_rounds, self.verbs.steps.policy.experts.batch
        if key.verb != "experts":
            return price[0] * (1 + self.skipped_inner / walked), price[1]
        starts = [*part_starts(walked, batch), walked]
        share = (starts[starts.index(key.mini_batch) + 1] - key.mini_batch) / walked
        return self.verbs.experts_s(self.verbs.phases[phase], key.kind, share), None

    def _skip(self, position: int) -> None:
        """Advance the times by the rounds that the template run omits after this position."""
        inner, outer, ends = self.tiny.inner, self.tiny.outer, self.ends
        positions = inner.num_rounds * outer.num_rounds
        iteration, within = divmod(position, positions)
        at_outer, at_inner = divmod(within, inner.num_rounds)
        phase, least_s = self.phase_of[iteration], self.verbs.round_seconds
        moves_of = []
        if inner.before_skip is not None and at_inner + 1 == inner.before_skip:
            loop = "last inner" if at_outer + 1 == outer.num_rounds else "inner"
            least = least_s(phase, loop, _rated_kinds(inner) or (outer.kinds[at_outer],))
            moves_of.append(self._moves(1, inner.before_skip, self.skipped_inner, least, inner.rate_rounds))
        if outer.before_skip is not None and at_inner + 1 == inner.num_rounds and at_outer + 1 == outer.before_skip:
            least = least_s(phase, "outer", _rated_kinds(outer))
            stride, rounds = inner.num_rounds, outer.before_skip
            moves_of.append(self._moves(stride, rounds, self.skipped_outer, least, outer.rate_rounds))
        for moves in moves_of:
            for index, alias in self.tiny.moved_after.get(position, ()):
                if ends[index] is not None:
                    ends[alias] = ends[index] + moves[self.tiny.tasks[index].resource]
            self._move_on(moves)
        if within + 1 == positions and iteration in self.after:
            rounds = self.num_walked if self.num_walked > 3 else 1
            moves = self._moves(positions, rounds, self.after[iteration], least_s(phase, "iteration"))
            for index in range(self.tiny.ends[max(0, position - 2 * positions)], self.tiny.ends[position]):
                if ends[index] is not None:
                    ends[index] = ends[index] + moves[self.tiny.tasks[index].resource]
            self._move_on(moves)

    def _move_on(self, moves: list) -> None:
        self.tails[-1] = [tail + move for tail, move in zip(self.tails[-1], moves)]

    def _moves(self, stride: int, rounds: int, times, least, rate_rounds: int = 2) -> list:
        """Return the seconds by which ``times`` more rounds move each resource; the last value is for launching.

        ``stride``: positions of a round; ``rounds``: walked rounds; ``least``: seconds of a round on its busiest
        resource. The rate is the mean of the last ``rate_rounds`` walked rounds, or of the ones before them if that is
        less, so that a single late event is not repeated.
        """
        over = min(rate_rounds, rounds)

        def round_s(resource: int, back: int):
            later, earlier = self.tails[-1 - back * stride], self.tails[-1 - (back + over) * stride]
            return (later[resource] - earlier[resource]) / over

        rates = [round_s(resource, 0) for resource in range(LAUNCHING)]
        if rounds > over:
            back = min(over, rounds - over - 1)  # without the first round, which may differ
            rates = [np.minimum(rate, round_s(resource, back)) for resource, rate in enumerate(rates)]
        # An idle resource may be slow while it catches up, which does not last: limit its rate. Launching waits for no
        # resource, so its rate needs no limit.
        limit = np.maximum(rates[0], least)
        return [*(times * np.minimum(rate, limit) for rate in rates), times * round_s(LAUNCHING, 0)]


def _rated_kinds(loop: Loop) -> tuple[int, ...]:
    """Return the kinds of the layers whose mean is the rate of a loop over layers; empty for another loop."""
    return loop.kinds[: loop.before_skip][-loop.rate_rounds :] if loop.before_skip else ()


def _full_mini_batches(steps: CandidateSteps, num_walked: int) -> list[bool | np.ndarray]:
    """Return for each walked mini-batch whether it is not one of the last (``num_last``): [candidates], or one value
    if all candidates agree."""
    full = np.arange(num_walked)[:, None] < num_walked - steps.num_last
    return [bool(row[0]) if row.all() or not row.any() else row for row in full]
