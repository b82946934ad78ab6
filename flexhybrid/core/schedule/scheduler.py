"""Continuous batching: which requests run in each iteration. Waiting requests take the places of ended ones.

While a batch runs, each mini-batch keeps its places, its part of every pool, its position in the stream and its limits
(``Wave.limits``); only its requests change. A joining request's prompt is computed in the same pass of the weights as
the others' decode, in a separate step after theirs. It decodes with them from the next iteration on. CAPTURE (IV.B)
forms mini-batches again in each iteration; here a request stays in the mini-batch that has its blocks. Policies with
state of a whole mini-batch (see ``joins_singly``) refill a mini-batch when its last request has left.

If requests take blocks on demand (``Wave.grows``), a pool may become full. Then the youngest requests of the mini-batch
are preempted: their blocks are freed, and they return when there is room, with their answer so far as part of the
prompt. The oldest request is never preempted, and the mini-batch's part of the pools holds it alone, so it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.context.packing import chunk_tokens, longest_piece, num_chunks
from flexhybrid.core.context.prefixes import Build, PrefixOrder, build_steps, padded_rows
from flexhybrid.core.context.selection import kept_tokens
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Policy
from flexhybrid.core.schedule.buffer_sizes import (
    build_sizes,
    first_builds,
    holds_lengths,
    mini_batch_sizes,
    running_sizes,
    shared_lengths,
)
from flexhybrid.core.wave import Wave, give_blocks, leave_place, take_blocks_back, trim_blocks

LOOKED_AT = 64  #: least number of waiting requests that a mini-batch considers
MOST_FAILURES = 8  #: the search for fitting requests stops after this many without room
FIRST_RUN = 4  #: blocks that a request takes in advance at first; the number doubles each time
NO_REQUESTS = np.zeros(0, dtype=np.int64)


def state_of_all(policy: Policy) -> str | None:
    """Return in words which part of a policy is state of a whole mini-batch; None if it has no such state."""
    kinds = {representation_of(entry) for entry in policy.cache_entries}
    reasons = (
        (policy.selection.method != "none", f"selection {policy.selection.method}"),
        ("both" in kinds, "a cache of both(…)"),
        ("tok" in kinds, "a cache of token ids (tok)"),
        (policy.static_cache, "a static cache"),
        (policy.hidden != "device", "hidden states off the device"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def joins_singly(policy: Policy) -> bool:
    """Return whether a request may join a decoding mini-batch. Otherwise all its places are filled together."""
    return state_of_all(policy) is None


def stores_exactly(policy: Policy) -> bool:
    """Return whether the cache is stored in native bits."""
    return all(getattr(policy.bits, representation_of(entry), "native") == "native" for entry in policy.cache_entries)


def may_grow(policy: Policy) -> bool:
    """Return whether requests may take blocks on demand. Then they may be preempted and recompute their answers as part
    of the prompt, which gives the same tokens only with native bits."""
    return joins_singly(policy) and stores_exactly(policy)


def may_share(policy: Policy, shape: ModelShape) -> bool:
    """Return whether equal prompt beginnings share blocks. With recurrent layers they cannot: a state depends on the
    whole prompt."""
    return joins_singly(policy) and not shape.recurrent


def sharing_limit(policy: Policy, shape: ModelShape) -> str | None:
    """Return in words what equal prompt beginnings do not share, and why; None if they share everything."""
    if shape.recurrent:
        return "prompts that begin alike share nothing: a recurrent layer's state is that of the whole prompt"
    if reason := state_of_all(policy):
        return f"prompts that begin alike share nothing: with {reason}, a mini-batch begins and ends together"
    if not stores_exactly(policy):
        kept = "prompts that begin alike are kept and loaded once, but each is computed as a whole"
        return f"{kept}: it attends to native keys and values, not to the few bits that are kept"
    return None


def _without(places: np.ndarray, others: np.ndarray) -> list[int]:
    """Return the places that are not in ``others``, sorted."""
    return sorted({*places.tolist()}.difference(others.tolist()))


class AnswerLengths:
    """Expected answer lengths, estimated from ended answers. ``share``: expected length / limit before any answer has
    ended. ``longest``: most tokens of an answer. ``earlier``: numbers of answers that ended in earlier batches, by
    tokens."""

    def __init__(self, share: float, longest: int, earlier: np.ndarray | None = None):
        self.share = share
        self.ended = np.zeros(longest + 2, dtype=np.int64)  # number of ended answers by tokens
        if earlier is not None:
            np.add.at(self.ended, np.minimum(np.arange(len(earlier)), longest), earlier)

    def end(self, tokens: int) -> None:
        """Record the length of an ended answer."""
        self.ended[tokens] += 1

    def remaining(self, ages: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Return the expected remaining tokens of answers with ``ages`` tokens and these ``limits``: the mean over
        longer ended answers and one assumed answer of ``share``."""
        counts = np.cumsum(self.ended[::-1])[::-1]
        sums = np.cumsum((self.ended * np.arange(len(self.ended)))[::-1])[::-1]
        longer = np.minimum(ages, len(self.ended) - 2) + 1
        left = self.share * (limits - ages)
        return np.minimum((sums[longer] - counts[longer] * ages + left) / (counts[longer] + 1), limits - ages)


def shorter(prompts: np.ndarray, tokens: np.ndarray, ordered: bool) -> list[int]:
    """Return the indices of requests with a shorter prompt or fewer tokens than the first, which has no room.
    ``ordered``: sort them by tokens."""
    found = np.flatnonzero((prompts < prompts[0]) | (tokens < tokens[0]))
    return (found[np.argsort(tokens[found], kind="stable")] if ordered else found).tolist()


class Scheduler:
    """Chooses the requests of a wave's mini-batches in each iteration. Changes the wave's arrays as requests join."""

    def __init__(self, wave: Wave):
        self.wave, self.groups = wave, [NO_REQUESTS if wave.empty else group for group in wave.mini_batches]
        self.limits = wave.limits
        self.now = 0  # current iteration
        if wave.queue is None:
            return
        self.queue, self.singly = wave.queue, joins_singly(wave.policy)
        longest = int(wave.queue.workload.max_tokens.max())
        self.answers = AnswerLengths(wave.expected_share, longest, wave.queue.ended)
        self.not_before: dict[int, int] = {}  # preempted request -> first iteration in which it may return
        self.full = [False] * len(self.groups)  # mini-batch -> no waiting request fits until a request leaves
        self.num_back = 0  # number of preemptions
        self.sharing = wave.sharing
        self.steering = PrefixOrder(wave.sharing.tree) if wave.sharing else None
        self.first = [wave.workload.select(group) for group in wave.mini_batches]
        if not self.singly:
            self.of_group = list(mini_batch_sizes(wave))
            self.most_kept = [self._kept(group).max() for group in wave.mini_batches]

    def steps(
        self, iteration: int, stopped: Collection[int], among: Collection[int] | None = None
    ) -> Iterator[tuple[int, int, int, np.ndarray | None, np.ndarray]]:
        """Yield each step: (mini-batch, ``MiniBatchStep.chunk``, chunk of the prompts, shared blocks to compute,
        places).

        ``stopped``: requests that have ended, or that never run. ``among``: mini-batches whose requests may change; the
        others decode (None: all may change).
        """
        if self.wave.queue and self.wave.queue.on_iteration():
            self.full = [False] * len(self.groups)
        members = list(self._members(iteration, stopped, among))
        builds = self._builds(members) if self.wave.sharing else {}
        behind = int(any(len(running) for _, running, _ in members))
        first_chunk = sum(map(len, builds.values())) + behind
        for k, running, joining in members:
            if len(running):
                yield k, 0, 0, None, running
            for chunk, built in builds.get(k, ()):
                spans = np.array([build[1:3] for build in built])
                yield k, chunk + behind, 0, spans, np.array([build.place for build in built])
            if len(joining):
                own = self.wave.workload.prompt_tokens[joining] - self.wave.skipped_tokens(joining)
                pieces = num_chunks(self.wave.policy, own)
                first = first_chunk if builds or len(running) else 0
                yield from ((k, first + piece, piece, None, joining) for piece in range(pieces))

    def _builds(self, members) -> dict[int, list[tuple[int, list[Build]]]]:
        """Return mini-batch -> (order in the iteration, builds) of the steps that compute shared blocks. A step comes
        after the steps whose blocks it attends to."""
        sharing, steps = self.wave.shared, []
        builds = sharing.take_builds({place for _, _, joining in members for place in joining.tolist()})
        for k, _, joining in members if sharing.exact else ():
            places = set(joining.tolist())
            for step in build_steps([b for b in builds if b.place in places], self.wave.policy.max_mini_batch_tokens):
                together = self.wave.queue is None or self.limits.holds(build_sizes(self.wave, step))
                steps += [(k, step)] if together else [(k, [build]) for build in step]
        numbered: dict[int, list] = {}
        for chunk, (k, step) in enumerate(sorted(steps, key=lambda step: step[1][0].level)):
            numbered.setdefault(k, []).append((chunk, step))
        sharing.num_tokens -= sum(build.last - build.first for build in builds) * BLOCK_TOKENS
        for _, _, joining in members:
            sharing.num_tokens += int(self.wave.shared_blocks(joining).sum()) * BLOCK_TOKENS
        return numbered

    def _members(
        self, iteration: int, stopped: Collection[int], among: Collection[int] | None
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (mini-batch, places that decode, places whose prompts are computed)."""
        wave = self.wave
        for k, group in enumerate(self.groups):
            if among is not None and k not in among:
                yield k, group, NO_REQUESTS
                continue
            running = group[wave.workload.max_tokens[group] > iteration - wave.joined[group]]
            if stopped:
                running = running[[request not in stopped for request in wave.request[running].tolist()]]
            joining = NO_REQUESTS
            if wave.queue is not None:
                running, joining = self._change(k, iteration, running, stopped)
            self.groups[k] = np.concatenate([running, joining])
            ages = iteration - wave.joined[self.groups[k]]  # negative for requests that a prediction lets join later
            yield k, self.groups[k][ages > 0], self.groups[k][ages == 0]

    # ---- leaving requests

    def _change(self, k: int, iteration: int, running: np.ndarray, stopped) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of mini-batch ``k`` that continue, and those that get new requests now. ``running``: places
        whose requests have not ended."""
        wave, group, self.now = self.wave, self.groups[k], iteration
        for place in _without(group, running) if len(running) < len(group) else ():
            request = int(wave.request[place])
            leave_place(wave, k, place)
            self.answers.end(self._sampled(place, iteration))
            self._forget(request, iteration)
        if wave.grows and iteration > 0:
            running = self._grow(k, iteration, running)
        if len(running) < len(group):
            self.full[k] = False
        if self.full[k] or self.queue.is_closed or (len(running) and not self.singly):
            return running, NO_REQUESTS
        return running, self._join(k, iteration, running, stopped)

    def _sampled(self, place: int, iteration: int) -> int:
        """Return the answer tokens of the request in a place, with those from before a preemption."""
        return self.queue.given.get(int(self.wave.request[place]), 0) + iteration - int(self.wave.joined[place])

    def _forget(self, request: int, iteration: int) -> None:
        """Remove a request that has ended, and report it to the queue."""
        self.queue.given.pop(request, None)
        self.not_before.pop(request, None)
        self.queue.on_leave(request, iteration)
        if self.sharing:
            self.sharing.tree.forget(request)

    def _grow(self, k: int, iteration: int, running: np.ndarray) -> np.ndarray:
        """Give each request the blocks for its next token; return the places that continue. If there is no room, free
        blocks that were taken in advance, then preempt the youngest requests."""
        wave, workload = self.wave, self.wave.workload

        def blocks(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Return (needed blocks, held blocks), both [places, pool]."""
            context = workload.prompt_tokens[places] + iteration - wave.joined[places]
            have = np.stack([wave.num_blocks[pool.name][places] for pool in wave.pools], axis=1)
            return wave.own_blocks(places, context), have

        if not np.greater(*blocks(running)).any():  # in most iterations no request needs more blocks
            return running
        running = running[np.argsort(wave.joined[running], kind="stable")]  # the oldest first
        need, have = blocks(running)
        lengths = workload.prompt_tokens, workload.cached_tokens
        prompts, at_most = (wave.own_blocks(running, tokens[running]) for tokens in lengths)
        run = np.maximum(have - prompts, FIRST_RUN)  # as many as it took beyond its prompt, so the number doubles
        wanted = np.where(need > have, np.clip(have + run, need, at_most), have)
        for index in np.flatnonzero((need > have).any(axis=1)).tolist():
            while index < len(running):
                if self._give(k, int(running[index]), wanted[index].tolist(), need[index].tolist()):
                    break
                if not self._trim(k, running, need):
                    running = self._preempt(k, iteration, running)
        return np.sort(running)

    def _give(self, k: int, place: int, wanted: list[int], need: list[int]) -> bool:
        """Extend a request to ``wanted`` blocks of each pool, or to fewer, at least ``need``. Return False, and change
        nothing, without room."""
        counts, pools = [], self.wave.blocks[k].pools
        for pool, most, least in zip(self.wave.pools, wanted, need, strict=True):
            held = int(self.wave.num_blocks[pool.name][place])
            room = held + pools[pool.name].num_free
            if least > room:
                return False
            counts.append(min(max(most, least, held), room))
        give_blocks(self.wave, k, place, counts)
        return True

    def _trim(self, k: int, running: np.ndarray, need: np.ndarray) -> bool:
        """Free the blocks of a mini-batch's requests beyond ``need`` [places, pool]; return whether any were freed."""
        held = np.stack([self.wave.num_blocks[pool.name][running] for pool in self.wave.pools], axis=1)
        beyond = np.flatnonzero((held > need[: len(running)]).any(axis=1))
        for index in beyond.tolist():
            trim_blocks(self.wave, k, int(running[index]), need[index])
        return bool(len(beyond))

    def _preempt(self, k: int, iteration: int, running: np.ndarray) -> np.ndarray:
        """Preempt the last request, the youngest: free its blocks and queue it first. Return the other places."""
        wave, place = self.wave, int(running[-1])
        request = int(wave.request[place])
        self.queue.put_back(request, self._sampled(place, iteration))
        self.not_before[request] = iteration + 1  # its last token is known by then
        self.num_back += 1
        self.full = [False] * len(self.groups)  # another mini-batch may have room for it
        leave_place(wave, k, place)
        return running[:-1]

    # ---- joining requests

    def _join(self, k: int, iteration: int, running: np.ndarray, stopped) -> np.ndarray:
        """Give free places of mini-batch ``k`` to waiting requests, in order; return these places.

        Requests are checked together, because checking 100 takes as long as checking one: first as many as there are
        places, then half as many, and so on. ``too_many``: the last number that did not fit.
        """
        wave, queue = self.wave, self.queue
        free = np.array(_without(wave.mini_batches[k], running), dtype=np.int64)
        first = queue.first(max(LOOKED_AT, len(free)))
        if queue.closes():
            first = [request for request in first if request in queue.given]
        taken = {request for request in first if request in stopped} if stopped else set()
        for request in taken:
            if request in queue.given:
                self.answers.end(queue.given[request])
            self._forget(request, iteration)
        ready = first
        if taken or self.not_before:
            ready = [one for one in first if self.not_before.get(one, 0) <= iteration and one not in taken]
        self.full[k] = len(ready) + len(taken) == len(first)
        if self.sharing and self.steering:
            for request in ready:
                self.sharing.tree.path(request)
            members = Counter(block for place in running.tolist() for block in self.sharing.path(place))
            ready = self.steering.order(ready, members)
        joining, too_many, computed, failures = NO_REQUESTS, 0, True, 0
        while ready and len(free) and failures < MOST_FAILURES:
            if too_many != 1:
                size = too_many // 2 or min(len(free), len(ready))
                places = free[:size]
                before = self._enter(places, ready[:size], iteration)
                together = np.concatenate([joining, places])
                prefills = not self.singly or self._prefills(together)
                if prefills and self._has_room(k, running, together):
                    count = self._reserve(k, places)
                    self._restore(places[count:], {name: values[count:] for name, values in before.items()})
                    joining, free = np.concatenate([joining, places[:count]]), free[count:]
                    taken.update(ready[:count])
                    failures += count < size
                    ready, too_many = ready[count + (count < size) :], max(0, too_many - size) if count == size else 0
                    continue
                self._restore(places, before)
                too_many, computed = size, prefills
            if too_many > 1:
                continue
            too_many = 0
            if not computed:
                self.full[k] = False  # the request may join in the next iteration
                break
            failures, tree = failures + 1, self.sharing.tree if self.sharing else None
            shared = BLOCK_TOKENS * np.array([len(tree.shared(request)) if tree else 0 for request in ready])
            lengths = queue.workload.select(ready)
            tokens = lengths.cached_tokens - shared
            prompts = lengths.prompt_tokens - (shared if self.sharing and self.sharing.exact else 0)
            ready = [ready[place] for place in shorter(prompts, tokens, failures == 1)]
        for request in wave.request[joining].tolist():
            queue.on_join(request, k)
        if self.steering:
            self.steering.passed += len(joining)
        if taken:
            queue.remove(taken)
        return joining

    def resume(self, k: int, requests: list[int]) -> None:
        """Give places of mini-batch ``k`` to requests of a batch in progress, in which all tokens of their prompts
        except the last are cached. Requests without room wait before all others."""
        places, lengths = self.wave.mini_batches[k][: len(requests)], self.wave.workload
        self.groups[k] = NO_REQUESTS
        if not requests:
            return
        before = self._enter(places, requests, -1)
        lengths.prompt_tokens[places] -= 1
        lengths.max_tokens[places] += 1
        count = self._reserve(k, places)
        self._restore(places[count:], {name: values[count:] for name, values in before.items()})
        self.groups[k], self.queue.passed_over = places[:count], requests[count:] + self.queue.passed_over
        if self.sharing:
            self.sharing.take_builds(places.tolist())

    def _enter(self, places: np.ndarray, requests: list[int], iteration: int) -> dict[str, np.ndarray]:
        """Write requests to places; return the previous values of ``_arrays`` there."""
        arrays, lengths = self._arrays(), self.queue.workload
        before = {name: array[places] for name, array in arrays.items()}
        recomputed = self._recomputed(requests)
        arrays["prompt"][places] = lengths.prompt_tokens[requests] + recomputed
        arrays["max"][places] = lengths.max_tokens[requests] - recomputed
        arrays["joined"][places] = iteration
        arrays["request"][places] = requests
        if self.sharing:
            for place, request in zip(places.tolist(), requests, strict=True):
                self.sharing.attach(place, self.sharing.tree.shared(request))
        return before

    def _recomputed(self, requests: list[int]) -> np.ndarray:
        """Return the answer tokens that are recomputed as part of the prompt, [requests]."""
        given = self.queue.given
        if not given:
            return np.zeros(len(requests), dtype=np.int64)
        return np.array([given.get(request, 0) for request in requests])

    def _restore(self, places: np.ndarray, before: dict[str, np.ndarray]) -> None:
        """Undo ``_enter`` for these places."""
        if self.sharing:
            for place in reversed(places.tolist()):
                self.sharing.detach(place)
        for name, array in self._arrays().items():
            array[places] = before[name]

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays over places that depend on their requests."""
        wave = self.wave
        lengths = {"prompt": wave.workload.prompt_tokens, "max": wave.workload.max_tokens}
        return lengths | {"joined": wave.joined, "request": wave.request}

    def _has_room(self, k: int, running: np.ndarray, joining: np.ndarray) -> bool:
        """Return whether the buffers suffice for a mini-batch with these places until its last request ends. With
        blocks on demand, its pools must also suffice until half of the expected tokens have come."""
        wave, lengths = self.wave, self.wave.workload
        group = np.concatenate([running, joining])
        if not self.singly:
            sizes, chunks = next(mini_batch_sizes(wave, [group]))
            limit, most_chunks = self.of_group[k]
            room = chunks <= most_chunks and limit.holds(sizes) and self._kept(group).max() <= self.most_kept[k]
            if wave.whole:
                whole, _ = next(mini_batch_sizes(wave.whole, [group]))
                room = room and self.limits.holds(whole)
            return room
        if wave.grows and len(group) > 1:
            expected = wave.own_blocks(group, self._expected(group)).sum(axis=0)
            if (expected > [wave.blocks[k].pools[pool.name].num_blocks for pool in wave.pools]).any():
                return False
        cached, prompts = lengths.cached_tokens[group], lengths.prompt_tokens[joining]
        piece = chunk_tokens(wave.policy.max_mini_batch_tokens)
        if not self.sharing and holds_lengths(self.first[k], cached, prompts, piece):
            return True
        return self.limits.holds(running_sizes(wave, cached, prompts, shared_lengths(wave, group, joining)))

    def _kept(self, group: np.ndarray) -> np.ndarray:
        """Return the most tokens that a selection keeps of the requests in these places."""
        lengths = self.wave.workload.select(group)
        cached = lengths.cached_tokens
        return kept_tokens(self.wave.policy.selection, lengths.prompt_tokens, cached, cached)

    def _prefills(self, joining: np.ndarray) -> bool:
        """Return whether the rows of these prompts fit a step's buffers, and those of an iteration, in which shared
        blocks are also computed."""
        wave = self.wave
        prompts = wave.workload.prompt_tokens[joining] - wave.skipped_tokens(joining)
        rows = len(prompts) * longest_piece(wave.policy, prompts)
        builds = first_builds(wave, joining) if self.sharing else []
        in_all = sum(map(padded_rows, builds)) + rows * num_chunks(wave.policy, prompts)
        most = (self.limits.hidden_rows - wave.workload.num_requests) // len(wave.mini_batches)
        return rows <= self.limits.step_rows and in_all <= most

    def _reserve(self, k: int, places: np.ndarray) -> int:
        """Give joining requests their blocks, in order; return the number of requests that had room."""
        wave, lengths = self.wave, self.wave.workload
        prompts, cached = lengths.prompt_tokens[places], lengths.cached_tokens[places]
        if wave.grows:
            need = wave.own_blocks(places, prompts)
            wanted = np.minimum(need + FIRST_RUN, wave.own_blocks(places, cached))
        elif self.sharing:
            need = wanted = wave.own_blocks(places, cached)
        else:
            first = prompts
            if wave.entries.keeps_ids:  # blocks are held as such until the first chunk is stored
                first = np.array([longest_piece(wave.policy, prompt[None]) for prompt in prompts])
            need = wanted = wave.by_pool(wave.entries.most_blocks(first, self._kept(places)))
        for count, place in enumerate(places.tolist()):
            if not self._give(k, place, wanted[count].tolist(), need[count].tolist()):
                return count
            if wave.whole:  # under a selection that keeps all tokens in some layers
                of_all = wave.entries.most_blocks(prompts[count], cached[count])
                pools = wave.whole.blocks[k].pools
                if any(size > pools[name].num_free for name, size in wave.entries.by_entry(of_all).items()):
                    take_blocks_back(wave, k, place)
                    return count
                give_blocks(wave.whole, k, place, of_all)
        return len(places)

    def _expected(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens that requests are expected to cache half-way to their ends, [places]."""
        lengths, ages = self.wave.workload, self.now - self.wave.joined[places]
        recomputed = self._recomputed(self.wave.request[places].tolist())
        left = self.answers.remaining(ages + recomputed, lengths.max_tokens[places] + recomputed)
        tokens = lengths.prompt_tokens[places] + ages + np.ceil(left / 2).astype(np.int64) + BLOCK_TOKENS
        return np.minimum(tokens, lengths.cached_tokens[places])
