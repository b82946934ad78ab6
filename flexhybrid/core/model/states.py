"""What a layer keeps of a request beside keys and values: the state of a recurrence, of a fixed size.

Linear attention, gated delta nets, short convolutions and Mamba read the state of all tokens before and leave it behind
with the newest ones in it (``flexhybrid.runtime.models.states``).
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a layer's state, by its place in transformers' cache."""

    kind: str  #: conv (the last inputs of a convolution) or recurrent
    index: int  #: of the states of its kind that the layer has
    size: tuple[int, ...]  #: of one request
    wide: bool  #: float32, whatever the dtype that is computed in

    def num_bytes(self, bytes_per_element: int) -> int:
        """Return the bytes of one request's."""
        return prod(self.size) * (4 if self.wide else bytes_per_element)


@dataclass(frozen=True)
class LayerState:
    """A layer that is more, or less, than attention to keys and values."""

    tensors: tuple[StateTensor, ...]  #: wide ones first; none of a layer that only has a feed-forward network
    attends: bool  #: to keys and values, too

    def num_bytes(self, bytes_per_element: int) -> int:
        """Return the bytes of one request's state in one layer."""
        return sum(tensor.num_bytes(bytes_per_element) for tensor in self.tensors)
