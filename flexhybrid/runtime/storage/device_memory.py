"""Settings of CUDA's caching allocator that keep its memory close to the tensors' bytes."""

import os
import warnings

import torch

#: Alignment of tensors in shared memory, the same as the allocator's.
ALIGNED_BYTES = 512

#: Environment variables with the allocator's settings: since torch 2.9, and before.
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allow_expandable_segments(device: torch.device) -> None:
    """Allow segments of CUDA memory to grow, unless the user has set this: it avoids fragmentation.

    The setting applies to the whole process. It changes no results.
    """
    given = next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")
    if device.type != "cuda" or "expandable_segments" in given:
        return
    # New settings replace all earlier ones.
    settings = f"{given},expandable_segments:True" if given else "expandable_segments:True"
    try:
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (change or torch.cuda.memory._set_allocator_settings)(settings)
    except (AttributeError, RuntimeError, ValueError) as error:  # another allocator, or an old version of torch
        warnings.warn(f"CUDA memory is allocated in segments of fixed size: {error}", stacklevel=2)


def release_cached(device: torch.device) -> None:
    """Release the memory that a CUDA device's allocator keeps of freed tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
