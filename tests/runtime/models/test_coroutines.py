"""Test functions that are interrupted and resumed: their results, errors, leftovers, and the C stack below them."""

import ctypes
import gc
import platform
import weakref
from typing import Any, cast

import pytest
import torch

pytest.importorskip("greenlet")
from flexhybrid.runtime.models.coroutines import hosted, interrupt, started


def called_deeper(depth: int, function):
    """Return a function's result; ``depth`` calls that take room on the C stack lie below it."""
    return next(map(lambda _: called_deeper(depth - 1, function), [0])) if depth else function()


def test_a_function_is_interrupted_resumed_and_ends():
    def function():
        return interrupt(1) + interrupt(2)

    def use():
        run, given = started(function)
        assert given == 1 and run.resume(10) == 2 and not run.ended
        assert run.resume(20) == 30 and run.ended
        with pytest.raises(RuntimeError, match="ended"):
            run.resume(0)
        return "hosted"

    assert hosted(use) == "hosted"


def test_interruptions_may_be_nested():
    def inner():
        return interrupt("inner") + 1

    def outer():
        run, given = started(inner)
        return run.resume(interrupt(given)) + 1

    def use():
        run, given = started(outer)
        other, _ = started(outer)
        assert given == "inner" and run.resume(5) == 7 and other.resume(6) == 8

    hosted(lambda: hosted(use))


@pytest.mark.parametrize("before", [False, True])
def test_what_a_function_raises_is_raised_where_it_was_started_or_resumed(before):
    def function():
        if not before:
            interrupt(None)
        raise KeyError("of its own")

    def use():
        for _ in range(3):
            with pytest.raises(KeyError, match="of its own"):
                started(function)[0].resume(None)
        assert started(lambda: 3)[1] == 3

    hosted(use)


def test_a_function_that_is_left_runs_its_finally_blocks():
    closed = []

    def function():
        try:
            interrupt(None)
            closed.append("not left")
        finally:
            closed.append("closed")

    def use():
        run, _ = started(function)
        run.leave()
        assert run.ended and closed == ["closed"]
        started(function)  # nobody holds it
        gc.collect()
        assert closed == ["closed", "closed"]

    hosted(use)


def test_no_object_of_an_ended_function_is_held():
    class Held:
        pass

    def use():
        held = [Held(), Held(), Held()]
        kept = [weakref.ref(item) for item in held]
        argument, result, error = held
        held.clear()
        started(lambda given=argument: interrupt(None) or given)[0].resume(None)

        def failing(given=error):
            interrupt(None)
            raise ValueError(given)

        with pytest.raises(ValueError):
            started(failing)[0].resume(None)
        assert started(lambda given=result: given)[1] is result
        del argument, result, error, failing
        gc.collect()
        assert [item() for item in kept] == [None] * 3

    hosted(use)


def test_starting_needs_a_host_and_interrupting_needs_a_function():
    with pytest.raises(RuntimeError, match="hosted"):
        started(lambda: None)
    with pytest.raises(RuntimeError, match="could be resumed"):
        interrupt(None)
    with pytest.raises(RuntimeError, match="could be resumed"):
        hosted(lambda: interrupt(None))
    with pytest.raises(ZeroDivisionError):
        hosted(lambda: 1 // 0)
    assert hosted(lambda: started(lambda: 4)[1]) == 4


def return_addresses() -> list[int]:
    """Return the return addresses of the C stack, the innermost first, as torch does for an error."""
    addresses = (ctypes.c_void_p * 1000)()
    count = ctypes.CDLL(None).backtrace(addresses, len(addresses))
    return [address or 0 for address in addresses[:count]]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="walks the stack with glibc's backtrace()")
def test_the_stack_below_a_function_is_that_of_its_host():
    """Otherwise torch's walk over the stack would end the process: the last resumer's frames may be gone."""

    def function():
        stacks = [return_addresses()]
        while interrupt(None):
            stacks.append(return_addresses())
        return stacks

    def use():
        outside, stacks = return_addresses(), []
        runs = [called_deeper(depth, lambda: started(function))[0] for depth in (1, 30, 5)]
        for depth in (20, 1, 60):
            for run in runs:
                called_deeper(depth, lambda run=run: run.resume(True))
        for run in runs:  # and those that run in greenlets used again
            stacks += run.resume(False)
            stacks += called_deeper(9, lambda: started(function))[0].resume(False)
        return outside, stacks

    (outside, stacks), below = hosted(use), return_addresses()
    assert len(stacks) == 3 * (4 + 1)
    outermost = [stack[-len(below) // 2 :] for stack in (outside, *stacks)]
    assert all(stack == outermost[0] for stack in outermost)


def test_errors_of_torch_are_raised_at_any_depth():
    def function():
        for _ in range(2):
            with pytest.raises(TypeError):
                torch.add(torch.ones(2), cast(Any, None))
            with pytest.raises(RuntimeError):
                torch.dot(torch.ones(2), torch.ones(3))
            interrupt(None)

    def use():
        for begun, resumed in ((1, 40), (40, 1), (7, 90)):
            run, _ = called_deeper(begun, lambda: started(function))
            called_deeper(resumed, lambda run=run: run.resume(None))
            called_deeper(begun, lambda run=run: run.resume(None))

    hosted(use)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_a_function_computes_as_if_the_default_dtype_were_float32(default):
    """Transformers' modules make tensors and convert integers without naming a dtype."""
    places = torch.arange(4097, 4100)

    def function():
        first = [torch.ones(2), torch.full((2,), 0.1), torch.tensor(1 / 3), torch.linspace(0, 1, 7), places / 7]
        interrupt(None)
        named = [places.to(default), torch.ones(2, dtype=default), places.half().to(default), places.new_ones(2)]
        return [*first, *named, places * 0.1, torch.arange(0.0, 1.0, 0.3), places > 0, places.float() / 3, 2.0**places]

    def use():
        run, _ = started(function)
        assert not torch.overrides._get_current_function_mode_stack()
        return run.resume(None)

    expected = hosted(use)
    torch.set_default_dtype(default)
    try:
        made = hosted(use)
        assert torch.ones(1).dtype == default
    finally:
        torch.set_default_dtype(torch.float32)
    assert [tensor.dtype for tensor in made] == [tensor.dtype for tensor in expected]
    assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))
