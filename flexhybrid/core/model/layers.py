"""Layers that are modules of transformers: their tensors, kind by kind, as its meta modules say them."""

from dataclasses import dataclass, replace
from math import prod

from flexhybrid.core.model.states import WorkBytes


@dataclass(frozen=True)
class LayerTensor:
    """A parameter of a layer's module."""

    name: str
    size: tuple[int, ...]
    early: bool  #: used up to the layer's attention call, not behind it
    kv_gen: bool = False  #: used to recompute keys and values from ACT; early, where they are the layer's own
    #: on the device with the embedding, because later layers recompute this layer's keys and values with it; a layer
    #: that borrows them lists it too
    outside: bool = False
    #: a matrix that lies where vectors do, in the compute dtype: used before and behind the attention, or never packed
    everywhere: bool = False
    experts: bool = False  #: of several experts, of which a token takes some

    @property
    def rows(self) -> int:
        return prod(self.size[:-1]) if self.cols else prod(self.size)

    @property
    def cols(self) -> int:
        """Return the elements of a row of a matrix; 0 for a vector."""
        return self.size[-1] if len(self.size) > 1 and not self.everywhere else 0

    @property
    def elements(self) -> int:
        return prod(self.size)


@dataclass(frozen=True)
class ModuleLayers:
    """The layers of a model that runs through transformers' own modules (``flexhybrid.runtime.models.module``)."""

    folder: str  #: checkpoint whose config.json defines the modules
    kinds: tuple[tuple[LayerTensor, ...], ...]  #: the tensors of each kind of layer
    kind_of: tuple[int, ...]  #: by layer
    outer_elements: int  #: of embedding, last norm, head, and of the layers' buffers
    experts_share: float = 1.0  #: experts that a token is multiplied with
    latent: int | None = None  #: elements of what ACT blocks hold of a token; None: the layer's input
    streams: int = 1  #: hidden states per token between layers (AltUp of Gemma 3n has several)
    call_elements: int = 0  #: further arguments of layers per token (per-layer inputs)
    text_part: bool = False  #: of a model that takes pictures or sound too, which are not taken here
    untied: frozenset[str] = frozenset()  #: tensors that config.json ties to others, and the checkpoint does not
    work: tuple[WorkBytes, ...] = ()  #: that any of its layers has in work, by dtype; empty: not measured

    def only(self, kind: int) -> "ModuleLayers":
        """Return layers that all have the tensors of one kind."""
        return replace(self, kinds=(self.kinds[kind],), kind_of=(0,) * len(self.kind_of))

    def most(self, of: str, outside: bool = False) -> int:
        """Return the most elements of "vectors", or "early", "late" or "kv_gen" matrices of a layer, ``outside`` or
        not."""
        return max(
            sum(t.elements for t in kind if _belongs(t, of) and (outside or not t.outside)) for kind in self.kinds
        )

    @property
    def multiplied(self) -> float:
        """Elements of late matrices that a row of tokens is multiplied with."""
        return max(
            sum(t.elements * (self.experts_share if t.experts else 1.0) for t in kind if _belongs(t, "late"))
            for kind in self.kinds
        )

    @property
    def has_experts(self) -> bool:
        """Return whether some layer has tensors of several experts."""
        return any(tensor.experts for kind in self.kinds for tensor in kind)

    def read(self, rows):
        """Return the elements of late matrices read for this many rows of tokens; numbers or arrays. Experts count by
        the expected number that some row chooses."""
        taken = 1.0 - (1.0 - self.experts_share) ** rows
        sums = [
            (sum(t.elements for t in kind if _belongs(t, "late") and t.experts is experts) for experts in (False, True))
            for kind in self.kinds
        ]
        dense, experts = max(map(tuple, sums), key=sum)
        return dense + experts * taken if experts else dense

    @property
    def widest(self) -> int:
        """The most rows of a matrix that is used behind the attention."""
        return max((t.size[-2] for kind in self.kinds for t in kind if _belongs(t, "late")), default=1)


def _belongs(tensor: LayerTensor, of: str) -> bool:
    if of == "kv_gen":
        return bool(tensor.cols) and tensor.kv_gen
    if tensor.outside and not tensor.early:  # borrowed
        return False
    return of == ("vectors" if not tensor.cols else "early" if tensor.early else "late")
