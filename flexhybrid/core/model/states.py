"""Recurrent states: data of fixed size that a layer keeps for each request, in addition to keys and values.

Linear attention, gated delta nets, short convolutions and Mamba read the state of all earlier tokens and update it with
the newest token (``flexhybrid.runtime.models.states``).
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a layer's state, identified by its place in transformers' cache."""

    kind: str  #: conv (the last inputs of a convolution) or recurrent
    index: int  #: index among the layer's tensors of this kind
    size: tuple[int, ...]  #: shape for one request
    wide: bool  #: float32 with any compute dtype

    def num_bytes(self, bytes_per_element: int) -> int:
        """Return the bytes of the tensor for one request."""
        return prod(self.size) * (4 if self.wide else bytes_per_element)


@dataclass(frozen=True)
class WorkBytes:
    """Measured bytes of a layer's temporaries, at most, for one compute dtype."""

    element: int  #: bytes of an element of the compute dtype
    request: int  #: bytes for each request of a mini-batch
    token: int  #: bytes for each new token of a mini-batch


@dataclass(frozen=True)
class LayerState:
    """Properties of a layer that has a recurrent state, or no attention."""

    tensors: tuple[StateTensor, ...]  #: wide ones first; empty for a layer with only a feed-forward network
    attends: bool  #: the layer also attends to keys and values
    work: tuple[WorkBytes, ...] = ()  #: temporaries by dtype; empty: not measured

    def num_bytes(self, bytes_per_element: int) -> int:
        """Return the bytes of one request's state in one layer."""
        return sum(tensor.num_bytes(bytes_per_element) for tensor in self.tensors)

    def work_bytes(self, bytes_per_element: int, requests, rows):
        """Return the most bytes of the layer's temporaries, with states, for a mini-batch of ``requests`` with ``rows``
        new tokens; 0 if not measured."""
        return sum(w.request * requests + w.token * rows for w in self.work if w.element == bytes_per_element)
