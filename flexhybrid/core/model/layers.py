"""Layers that are modules of transformers: the tensors of each kind of layer, as transformers defines them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from flexhybrid.core.model.packing import PackedRun
from flexhybrid.core.model.states import WorkBytes


@dataclass(frozen=True)
class LayerTensor:
    """A parameter of a layer's module."""

    name: str
    size: tuple[int, ...]
    early: bool  #: used before the layer's attention call, not after it
    kv_gen: bool = False  #: used to recompute keys and values from ACT; then also early, unless they are borrowed
    #: kept on the device with the embedding, because later layers recompute this layer's keys and values with it. A
    #: layer that borrows these lists the tensor, too
    outside: bool = False
    #: a matrix that is stored among the vectors, in the compute dtype: used before and after attention, or never packed
    everywhere: bool = False
    experts: bool = False  #: weights of several experts, of which a token uses some
    stored: tuple[PackedRun, ...] = ()  #: packed matrices that fill it; empty: it is plain
    turned: bool = False  #: packed matrices are stored with rows and columns exchanged

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

    folder: str  #: folder of the checkpoint whose config.json defines the modules
    kinds: tuple[tuple[LayerTensor, ...], ...]  #: the tensors of each kind of layer
    kind_of: tuple[int, ...]  #: index into ``kinds`` of each layer
    outer_elements: int  #: elements of embedding, last norm and head, and of the layers' buffers
    experts_share: float = 1.0  #: share of the experts that a token is multiplied with
    latent: int | None = None  #: elements of a token's ACT if it is a latent row; None: ACT is the layer's input
    streams: int = 1  #: hidden states per token between layers (several with AltUp of Gemma 3n)
    call_elements: int = 0  #: elements per token of further arguments of layers (per-layer inputs)
    text_part: bool = False  #: the model also takes pictures or sound; only its text part runs here
    untied: frozenset[str] = frozenset()  #: tensors that are tied in config.json, but separate in the checkpoint
    work: tuple[WorkBytes, ...] = ()  #: temporaries of the layers, by dtype; empty: not measured

    def with_runs(self, runs_of: Callable[[int, LayerTensor], tuple[PackedRun, ...]]) -> "ModuleLayers":
        """Return the layers with packed tensors. ``runs_of`` takes a layer's index and a tensor, and returns the runs
        that fill it."""
        layers = []
        for layer, kind in enumerate(self.kind_of):
            packed = ((t, () if t.outside or not t.cols else runs_of(layer, t)) for t in self.kinds[kind])
            layers.append(tuple(replace(t, stored=runs, turned=_turned(runs)) for t, runs in packed))
        kinds = tuple(dict.fromkeys(layers))
        return replace(self, kinds=kinds, kind_of=tuple(map(kinds.index, layers)))

    @property
    def unpacked(self) -> "ModuleLayers":
        """Return the layers with plain tensors."""
        kinds = tuple(tuple(replace(t, stored=(), turned=False) for t in kind) for kind in self.kinds)
        return replace(self, kinds=kinds)

    def only(self, kind: int) -> "ModuleLayers":
        """Return the same number of layers, all with the tensors of one kind."""
        return replace(self, kinds=(self.kinds[kind],), kind_of=(0,) * len(self.kind_of))

    def most(self, part: str, outside: bool = False) -> int:
        """Return the most elements of a part of a layer: "vectors", or "early", "late" or "kv_gen" matrices.
        ``outside``: also count tensors outside the layer."""
        kinds = ([t for t in kind if _belongs(t, part) and (outside or not t.outside)] for kind in self.kinds)
        return max(sum(tensor.elements for tensor in tensors) for tensors in kinds)

    @property
    def multiplied(self) -> float:
        """Return the most elements of a layer's late matrices that a token is multiplied with."""
        return max(
            sum(t.elements * (self.experts_share if t.experts else 1.0) for t in kind if _belongs(t, "late"))
            for kind in self.kinds
        )

    @property
    def has_experts(self) -> bool:
        """Return whether a layer has experts."""
        return any(tensor.experts for kind in self.kinds for tensor in kind)

    @property
    def late(self) -> tuple[int, int]:
        """Return the elements of late matrices of the layer with the most: (those of no expert, those of experts)."""
        sums = []
        for kind in self.kinds:
            late = [tensor for tensor in kind if _belongs(tensor, "late")]
            experts = sum(tensor.elements for tensor in late if tensor.experts)
            sums.append((sum(tensor.elements for tensor in late) - experts, experts))
        return max(sums, key=sum)

    def touched(self, rows):
        """Return the expected share of experts that any of ``rows`` tokens chooses; numbers or arrays."""
        return 1.0 - (1.0 - self.experts_share) ** rows

    def read(self, rows):
        """Return the elements of late matrices that are read for ``rows`` tokens; numbers or arrays. Experts count with
        the expected number of those that any token chooses."""
        dense, experts = self.late
        return dense + experts * self.touched(rows) if experts else dense

    @property
    def num_experts(self) -> int:
        """Return the most experts of a layer; 0 without experts."""
        return max((tensor.size[0] for kind in self.kinds for tensor in kind if tensor.experts), default=0)

    @property
    def widest(self) -> int:
        """Return the most rows of a matrix that is used after attention."""
        return max((t.size[-2] for kind in self.kinds for t in kind if _belongs(t, "late")), default=1)


def _turned(runs: tuple[PackedRun, ...]) -> bool:
    """Return whether packed matrices have the tensor's rows as columns. gpt-oss' experts alone are stored so."""
    return bool(runs) and runs[0].packing.format == "mxfp4"


def _belongs(tensor: LayerTensor, part: str) -> bool:
    """Return whether a tensor belongs to a part of a layer (``ModuleLayers.most``)."""
    if part == "kv_gen":
        return bool(tensor.cols) and tensor.kv_gen
    if tensor.outside and not tensor.early:  # another layer's tensor
        return False
    return part == ("vectors" if not tensor.cols else "early" if tensor.early else "late")
