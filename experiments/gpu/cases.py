"""The settings of mixes, of a resident run and of a partition: models, requests and budgets.

- long (M1): one context of 30,000 tokens, Llama-2-7B-32K's shape.
- at-once (M2): 16 requests of OPT-6.7B that must run together. "waves" is the other half of the truth: requests that
  may wait run some at a time, with all keys and values on the device.
- streamed (M3): OPT-6.7B's weights cross the link; "mix with tok" may recompute a prefix from token ids, too.
- partition (M4): layers of OPT-30B, whose compute runs on some of the GPU's SMs.
- resident: all on the device, some requests at a time.
- overlap: weights on the device, the cache on the host as layer inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexhybrid.core.model.shape import ModelShape, shape_of
from flexhybrid.core.units import parse_bytes


@dataclass(frozen=True)
class Case:
    """Requests of one length within budgets; ``bars``: (faster kind, slower kind) -> least ratio of their decodes."""

    model: str
    device: str
    host: str
    prompt: int
    answer: int
    most: int  #: requests at a time
    decoded: int  #: iterations of which the decode's speed is taken
    kinds: tuple[str, ...]
    bars: Mapping[tuple[str, str], float]
    together: bool = False  #: all requests run at a time ("waves" excepted), else as many as is fastest
    num_layers: int | None = None  #: of the model, the first ones alone; None: all
    cuda_graphs: bool = True
    dtype: str = "float16"

    @property
    def device_bytes(self) -> int:
        return int(parse_bytes(self.device) or 0)

    @property
    def shape(self) -> ModelShape:
        shape = shape_of(self.model)
        return replace(shape, num_layers=self.num_layers) if self.num_layers else shape


CASES = {
    "long": Case(
        *("llama-2-7b-32k", "27GiB", "64GiB", 30_000, 128, 1, 24, ("mix", "act", "kv")),
        bars={("mix", "act"): 1.4, ("mix", "kv"): 1.8},
        together=True,
    ),
    "at-once": Case(
        *("opt-6.7b", "26GiB", "64GiB", 1984, 64, 16, 24, ("mix", "act", "kv", "waves")),
        bars={("mix", "act"): 1.4, ("mix", "kv"): 1.4},
        together=True,
    ),
    "streamed": Case(
        *("opt-6.7b", "12GiB", "30GiB", 1024, 24, 256, 4, ("act", "mix with tok", "kv")),
        bars={("act", "kv"): 1.8, ("mix with tok", "act"): 1.05},
    ),
}
RESIDENT = Case("opt-6.7b", "18GiB", "96GiB", 512, 32, most=128, decoded=31, kinds=(), bars={})
PARTITION = Case(
    *("opt-30b", "14GiB", "28GiB", 1024, 24, 64, 4, ("mix", "act", "kv")),
    bars={("mix", "act"): 1.2, ("mix", "kv"): 1.2},
    num_layers=12,
    cuda_graphs=False,  # kernels are long there
)
OVERLAP = Case("opt-6.7b", "24GiB", "64GiB", 512, 48, most=32, decoded=47, kinds=(), bars={}, together=True)
