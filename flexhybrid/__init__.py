"""flexhybrid: run language models that do not fit the GPU, and predict how fast.

``from flexhybrid import LLM, SamplingParams, Policy``. Importing this loads neither torch nor transformers.
"""

import os

# On a small machine, spinning OpenMP threads would starve the link's thread. Set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Bits",
    "InputError",
    "Placement",
    "Policy",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "flexhybrid.llm",
    "SamplingParams": "flexhybrid.sampling_params",
    "StructuredOutputsParams": "flexhybrid.structured_outputs",
    "Policy": "flexhybrid.core.policy",
    "Placement": "flexhybrid.core.policy",
    "Bits": "flexhybrid.core.policy",
    "InputError": "flexhybrid.core.errors",
}


def __getattr__(name: str):
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flexhybrid' has no attribute {name!r}")
