"""Derive the dependencies of tasks from their reads and writes.

Each resource runs its tasks in stream order. So if task n of a resource has ended, all earlier ones have. A dependency
is a pair (resource, ordinal). A task has at most one for each other resource, and none on its own.
"""

from collections.abc import Iterable

from flexhybrid.core.task import Access, Task

HAZARDS = ("read_after_write", "write_after_read", "write_after_write")

#: (resource, ordinal): wait until the resource has ended the task with this ordinal, counted from 0.
Mark = tuple[str, int]


class _Span:
    """Cells [lo, hi) with the same last writer and the same readers since. ``readers``: resource -> latest ordinal."""

    __slots__ = ("lo", "hi", "writer", "written", "readers")

    def __init__(self, lo: int, hi: int, writer: str | None, written: int, readers: dict[str, int]):
        self.lo, self.hi, self.readers = lo, hi, readers
        self.writer, self.written = writer, written  # resource and ordinal of the last writing task


class _Space:
    """The spans of a space, sorted by first cell, and the accesses whose spans are recorded. Spans are split where an
    access begins or ends. They are never joined, because a run repeats the same few accesses."""

    __slots__ = ("spans", "accesses")

    def __init__(self):
        self.spans: list[_Span] = []
        self.accesses: list[Access] = []


Accesses = tuple[Access, ...]
Spans = tuple[_Span, ...]

#: Most footprints that are kept, enough for 12 tasks in each of 100 layers and 100 mini-batches.
MOST_FOOTPRINTS = 1 << 17


class Dependencies:
    """Derives dependencies of tasks that are added in stream order. ``hazards``: kinds of dependencies that are
    derived. Tests leave one out, to show that the trace checker then fails."""

    def __init__(self, hazards: Iterable[str] = HAZARDS):
        hazards = set(hazards)
        self._hazards = tuple(hazard in hazards for hazard in HAZARDS)
        self._spaces: dict[tuple, _Space] = {}
        self._covered: dict[Access, Spans] = {}  # access -> the spans that it covers
        # (id(reads), id(writes)) -> (spans read, spans written, reads, writes). Tasks of one form share the tuples of
        # reads and writes. Keeping the tuples keeps their ids valid.
        self._footprints: dict[tuple[int, int], tuple[Spans, Spans, Accesses, Accesses]] = {}
        self._issued: dict[str, int] = {}  # resource -> number of its tasks

    def add(self, task: Task) -> tuple[Mark, ...]:
        """Return the dependencies of the next task of the stream."""
        own, reads, writes = task.resource, task.reads, task.writes
        ordinal = self._issued.get(own, 0)
        self._issued[own] = ordinal + 1
        footprint = self._footprints.get((id(reads), id(writes)))
        read, written, _, _ = footprint or self._footprint(reads, writes)
        after_write, after_read, write_after_write = self._hazards
        waits: dict[str, int] = {}
        for span in read:
            resource = span.writer
            if resource is not None and resource != own and after_write and waits.get(resource, -1) < span.written:
                waits[resource] = span.written
            span.readers[own] = ordinal
        for span in written:
            resource, readers = span.writer, span.readers
            if (
                resource is not None
                and resource != own
                and write_after_write
                and waits.get(resource, -1) < span.written
            ):
                waits[resource] = span.written
            if readers:
                if after_read:
                    for resource, number in readers.items():
                        if resource != own and waits.get(resource, -1) < number:
                            waits[resource] = number
                readers.clear()
            span.writer, span.written = own, ordinal
        return tuple(waits.items()) if waits else ()

    def _footprint(self, reads: Accesses, writes: Accesses) -> tuple[Spans, Spans, Accesses, Accesses]:
        """Return (spans read, spans written, reads, writes) of a task."""
        try:
            read, written = self._spans(reads), self._spans(writes)
        except KeyError:
            for access in (*reads, *writes) * 2:  # twice: one may split the other's spans
                if access not in self._covered:
                    self._cover(access)
            read, written = self._spans(reads), self._spans(writes)
        if len(self._footprints) >= MOST_FOOTPRINTS:
            self._footprints.clear()
        footprint = read, written, reads, writes
        self._footprints[id(reads), id(writes)] = footprint
        return footprint

    def _spans(self, accesses: Accesses) -> Spans:
        """Return the spans of accesses. Raise KeyError if an access is not recorded."""
        covered = self._covered
        return tuple([span for access in accesses for span in covered[access]])

    def _cover(self, access: Access) -> None:
        """Record the spans that cover an access exactly; make or split spans if needed."""
        space = self._spaces.get(access.space)
        if space is None:
            space = self._spaces[access.space] = _Space()
        if _split(space.spans, access.lo, access.hi):
            for known in space.accesses:
                del self._covered[known]
            space.accesses.clear()
            self._footprints.clear()
        space.accesses.append(access)
        self._covered[access] = tuple(span for span in space.spans if access.lo <= span.lo < access.hi)


def _split(spans: list[_Span], lo: int, hi: int) -> bool:
    """Make or split spans so that some of them cover [lo, hi) exactly; return whether a span was split."""
    if lo >= hi:
        return False
    if not spans or spans[-1].hi <= lo:
        spans.append(_Span(lo, hi, None, 0, {}))
        return False
    beyond = [
        _Span(cell, span.hi, span.writer, span.written, dict(span.readers))
        for cell in (hi, lo)  # hi first: if a span contains both, its part from lo on ends at hi
        for span in spans
        if span.lo < cell < span.hi
    ]
    position, gaps = lo, []
    for span in spans:
        if lo < span.hi and span.lo < hi:
            if position < span.lo:
                gaps.append(_Span(position, span.lo, None, 0, {}))
            position = span.hi
    if position < hi:
        gaps.append(_Span(position, hi, None, 0, {}))
    spans += [*beyond, *gaps]
    spans.sort(key=lambda span: span.lo)
    for span, following in zip(spans, spans[1:], strict=False):
        span.hi = min(span.hi, following.lo)
    return bool(beyond)
