"""Dependencies derived from what tasks read and write: one function, no list kept by hand.

Tasks come in stream order. Each resource runs its tasks first in, first out, so "task n of resource R is complete"
implies all before it; a dependency is therefore a pair (resource, ordinal) and of several on one resource only the
latest counts. Dependencies on the task's own resource need no waiting.
"""

from collections.abc import Iterable

from flexhybrid.core.task import Access, Task

HAZARDS = ("read_after_write", "write_after_read", "write_after_write")

#: (resource, ordinal): wait until the resource has completed its task with this ordinal, counted from 0.
Mark = tuple[str, int]


class _Span:
    """Cells [lo, hi) that share a last writer and the readers since: resource -> latest ordinal."""

    __slots__ = ("lo", "hi", "writer", "readers")

    def __init__(self, lo: int, hi: int, writer: Mark | None, readers: dict[str, int]):
        self.lo, self.hi, self.writer, self.readers = lo, hi, writer, readers


class _Space:
    """The spans of a space, by their first cells, and the accesses whose spans are known.

    Spans are split where an access begins or ends and never joined again: a run names the same few extents over and
    over, and finds them as it left them.
    """

    __slots__ = ("spans", "accesses")

    def __init__(self):
        self.spans: list[_Span] = []
        self.accesses: list[Access] = []


class Dependencies:
    """Feed tasks in stream order; ``add`` returns what each must wait for.

    ``hazards`` leaves out a hazard on purpose: tests do so to see the trace checker fail.
    """

    def __init__(self, hazards: Iterable[str] = HAZARDS):
        hazards = set(hazards)
        self._raw = "read_after_write" in hazards
        self._war = "write_after_read" in hazards
        self._waw = "write_after_write" in hazards
        self._spaces: dict[tuple, _Space] = {}
        self._covered: dict[Access, tuple[_Span, ...]] = {}  # of all spaces: one look-up an access
        self._issued: dict[str, int] = {}

    def add(self, task: Task) -> tuple[Mark, ...]:
        own, covered = task.resource, self._covered
        ordinal = self._issued.get(own, 0)
        self._issued[own] = ordinal + 1
        waits: dict[str, int] = {}
        for access in task.reads:
            spans = covered.get(access)
            for span in self._cover(access) if spans is None else spans:
                if self._raw and span.writer is not None:
                    resource, number = span.writer
                    if waits.get(resource, -1) < number:
                        waits[resource] = number
                span.readers[own] = ordinal
        for access in task.writes:
            spans = covered.get(access)
            for span in self._cover(access) if spans is None else spans:
                if self._waw and span.writer is not None:
                    resource, number = span.writer
                    if waits.get(resource, -1) < number:
                        waits[resource] = number
                if self._war:
                    for resource, number in span.readers.items():
                        if waits.get(resource, -1) < number:
                            waits[resource] = number
                span.writer, span.readers = (own, ordinal), {}
        waits.pop(own, None)
        return tuple(waits.items())

    def _cover(self, access: Access) -> tuple[_Span, ...]:
        """The spans that cover the access exactly, made or split where needed."""
        space = self._spaces.get(access.space)
        if space is None:
            space = self._spaces[access.space] = _Space()
        if _split(space.spans, access.lo, access.hi):
            for known in space.accesses:
                del self._covered[known]
            space.accesses.clear()
        space.accesses.append(access)
        found = tuple(span for span in space.spans if access.lo <= span.lo < access.hi)
        self._covered[access] = found
        return found


def _split(spans: list[_Span], lo: int, hi: int) -> bool:
    """Let whole spans, in order of their cells, cover [lo, hi) and nothing beside it. Whether one had to be split."""
    if lo >= hi:
        return False
    if not spans or spans[-1].hi <= lo:  # the common case
        spans.append(_Span(lo, hi, None, {}))
        return False
    beyond = [
        _Span(cell, span.hi, span.writer, dict(span.readers))
        for cell in (hi, lo)  # hi first: where one span holds both, the part from lo on ends at hi
        for span in spans
        if span.lo < cell < span.hi
    ]
    position, gaps = lo, []
    for span in spans:
        if lo < span.hi and span.lo < hi:
            if position < span.lo:
                gaps.append(_Span(position, span.lo, None, {}))
            position = span.hi
    if position < hi:
        gaps.append(_Span(position, hi, None, {}))
    spans += [*beyond, *gaps]
    spans.sort(key=lambda span: span.lo)
    for span, following in zip(spans, spans[1:], strict=False):
        span.hi = min(span.hi, following.lo)
    return bool(beyond)
