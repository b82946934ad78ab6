"""Verbs that move the states of recurrent layers, and functions with which compute verbs read and write states."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from flexhybrid.core.task import Task
from flexhybrid.runtime.executor import State
from flexhybrid.runtime.models.module import Held


def load_state(state: State, task: Task) -> None:
    """Load the states of a mini-batch's requests in a layer from the host to a device slot."""
    for room, pool, (first, place, count) in _state_copies(state, task):
        state.copies.copy_h2d(room[first : first + count], pool[place : place + count])


def store_state(state: State, task: Task) -> None:
    """Store the states that a layer wrote from a device slot to the host."""
    for room, pool, (first, place, count) in _state_copies(state, task):
        state.copies.copy_d2h(pool[place : place + count], room[first : first + count])


def _state_copies(state: State, task: Task) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]]:
    """Yield (slot's memory, pool, (first row in the slot, first place in the pool, count)) for each copy."""
    places, states = state.state_places[task.payload.step.requests], state.buffers.states
    starts = np.flatnonzero(np.r_[True, np.diff(places) != 1])
    ends = np.r_[starts[1:], len(places)]
    rooms = states.slot(task.layer, task.payload.slot, len(places))
    for room, pool in zip(rooms, states.pools[task.layer], strict=True):
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield room, pool, (start, int(places[start]), end - start)


def held_states(state: State, task: Task) -> Held:
    """Return the states [B, …] of the task's layer; None if it has none, or if a prompt begins."""
    step, states = task.payload.step, state.buffers.states
    if not step.decodes or task.layer not in states.pools:
        return None
    if states.on_host:
        return states.slot(task.layer, task.payload.slot, len(step.requests))
    places = state.state_places[step.requests]
    if _are_consecutive(places):
        return [pool[places[0] : places[0] + len(places)] for pool in states.pools[task.layer]]
    return [pool.index_select(0, state.to_device(places)) for pool in states.pools[task.layer]]


def keep_states(state: State, task: Task) -> None:
    """Copy the states that the task's layer wrote to their pool, or to the slot that ``store_state`` reads."""
    step, states = task.payload.step, state.buffers.states
    if state.modules is None or task.layer not in states.pools:
        return
    places = state.state_places[step.requests]
    if states.on_host:
        targets, first = states.slot(task.layer, task.payload.slot, len(places)), 0
    else:
        targets, first = states.pools[task.layer], int(places[0])
    for group, tensors in state.modules.left(task.payload.slot, task.layer):
        for target, tensor in zip(targets, tensors, strict=True):
            if group.members is None and (states.on_host or _are_consecutive(places)):
                own = target[first : first + len(places)]
                if own.data_ptr() != tensor.data_ptr():
                    own.copy_(tensor)
                continue
            members = np.arange(len(places)) if group.members is None else group.members
            target[state.to_device(members if states.on_host else places[members])] = tensor


def _are_consecutive(places: np.ndarray) -> bool:
    return bool((np.diff(places) == 1).all())
