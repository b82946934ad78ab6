"""Dependencies derived from what tasks read and write: one function, no list kept by hand.

Tasks come in stream order. Each resource runs its tasks first in, first out, so "task n of resource R is complete"
implies all before it; a dependency is therefore a pair (resource, ordinal) and of several on one resource only the
latest counts. Dependencies on the task's own resource need no waiting.
"""

from __future__ import annotations

from collections.abc import Iterable

from flexhybrid.core.task import Access, Task

KINDS = ("read_after_write", "write_after_read", "write_after_write")

#: (resource, ordinal): wait until the resource has completed its task with this ordinal, counted from 0.
Mark = tuple[str, int]


class _Span:
    """Cells [lo, hi) that share a last writer and the readers since: resource -> latest ordinal."""

    __slots__ = ("lo", "hi", "writer", "readers")

    def __init__(self, lo: int, hi: int, writer: Mark | None, readers: dict[str, int]):
        self.lo, self.hi, self.writer, self.readers = lo, hi, writer, readers


class Dependencies:
    """Feed tasks in stream order; ``add`` returns what each must wait for.

    ``kinds`` leaves out a kind of dependency on purpose: tests do so to see the trace checker fail.
    """

    def __init__(self, kinds: Iterable[str] = KINDS):
        kinds = set(kinds)
        self._raw = "read_after_write" in kinds
        self._war = "write_after_read" in kinds
        self._waw = "write_after_write" in kinds
        self._spaces: dict[tuple, list[_Span]] = {}
        self._issued: dict[str, int] = {}

    def add(self, task: Task) -> tuple[Mark, ...]:
        own = task.resource
        ordinal = self._issued.get(own, 0)
        self._issued[own] = ordinal + 1
        waits: dict[str, int] = {}
        for access in task.reads:
            for span in self._spans(access):
                if self._raw and span.writer is not None:
                    resource, number = span.writer
                    if waits.get(resource, -1) < number:
                        waits[resource] = number
                span.readers[own] = ordinal
        for access in task.writes:
            spans = self._spans(access)
            for span in spans:
                if self._waw and span.writer is not None:
                    resource, number = span.writer
                    if waits.get(resource, -1) < number:
                        waits[resource] = number
                if self._war:
                    for resource, number in span.readers.items():
                        if waits.get(resource, -1) < number:
                            waits[resource] = number
            self._overwrite(access, spans, (own, ordinal))
        waits.pop(own, None)
        return tuple(waits.items())

    def _spans(self, access: Access) -> list[_Span]:
        """The spans that cover the access exactly, made or split where needed."""
        space, lo, hi = access
        spans = self._spaces.get(space)
        if spans is None:
            spans = self._spaces[space] = []
        for span in spans:  # the common case: this very access was made before
            if span.lo == lo and span.hi == hi:
                return [span]
        if lo >= hi:
            return []
        touched, rest, position, changed = [], [], lo, False
        for span in spans:  # sorted by lo, disjoint
            if span.hi <= lo or span.lo >= hi:
                rest.append(span)
                continue
            if span.lo < lo or span.hi > hi:
                changed = True
                if span.lo < lo:
                    rest.append(_Span(span.lo, lo, span.writer, dict(span.readers)))
                if span.hi > hi:
                    rest.append(_Span(hi, span.hi, span.writer, dict(span.readers)))
                span = _Span(max(span.lo, lo), min(span.hi, hi), span.writer, dict(span.readers))
            if span.lo > position:
                changed = True
                touched.append(_Span(position, span.lo, None, {}))
            touched.append(span)
            position = span.hi
        if position < hi:
            changed = True
            touched.append(_Span(position, hi, None, {}))
        if changed:
            self._spaces[space] = sorted([*rest, *touched], key=lambda span: span.lo)
        return touched

    def _overwrite(self, access: Access, spans: list[_Span], writer: Mark) -> None:
        """One write makes the access one span again, so that spans never pile up."""
        if len(spans) == 1:
            spans[0].writer, spans[0].readers = writer, {}
        elif spans:
            dropped = set(map(id, spans))
            kept = [span for span in self._spaces[access.space] if id(span) not in dropped]
            kept.append(_Span(access.lo, access.hi, writer, {}))
            self._spaces[access.space] = sorted(kept, key=lambda span: span.lo)
