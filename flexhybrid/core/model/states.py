"""Recurrent states: what a layer keeps of a request at fixed size, in addition to keys and values.

Linear attention, gated delta nets, short convolutions and Mamba read the state after all earlier tokens and update it
with the newest (``flexhybrid.runtime.models.states``).
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a layer's state, by its place in transformers' cache."""

    kind: str  #: conv (the last inputs of a convolution) or recurrent
    index: int  #: of the states of its kind that the layer has
    size: tuple[int, ...]  #: of one request
    wide: bool  #: float32 at any compute dtype

    def num_bytes(self, bytes_per_element: int) -> int:
        """Return the bytes of one request's."""
        return prod(self.size) * (4 if self.wide else bytes_per_element)


@dataclass(frozen=True)
class WorkBytes:
    """The most bytes that a layer has in work: of each request of a mini-batch, and of each of its new tokens."""

    element: int  #: bytes of an element of the dtype that is computed in
    request: int
    token: int


@dataclass(frozen=True)
class LayerState:
    """A layer that is more, or less, than attention to keys and values."""

    tensors: tuple[StateTensor, ...]  #: wide ones first; none of a layer that only has a feed-forward network
    attends: bool  #: to keys and values, too
    work: tuple[WorkBytes, ...] = ()  #: by dtype; empty: not measured

    def num_bytes(self, bytes_per_element: int) -> int:
        """Return the bytes of one request's state in one layer."""
        return sum(tensor.num_bytes(bytes_per_element) for tensor in self.tensors)

    def work_bytes(self, bytes_per_element: int, requests, rows):
        """Return the layer's most working bytes, with states, for these requests and new tokens; 0 if not measured."""
        return sum(of.request * requests + of.token * rows for of in self.work if of.element == bytes_per_element)
