"""Settings of CUDA's caching allocator, so that it holds little more than the tensors' bytes."""

import os
import warnings

import torch

#: Alignment of tensors that share memory, as in the allocator.
ALIGNED_BYTES = 512

#: What torch's allocator reads its settings from: the first since torch 2.9, the second before.
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allow_expandable_segments(device: torch.device) -> None:
    """Allow segments of a CUDA device's memory to grow, where torch can and the user has not decided: free memory
    between tensors then becomes contiguous again. It holds for the process, and changes no results."""
    given = next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")
    if device.type != "cuda" or "expandable_segments" in given:
        return
    # New settings replace all earlier ones.
    settings = f"{given},expandable_segments:True" if given else "expandable_segments:True"
    try:
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (change or torch.cuda.memory._set_allocator_settings)(settings)
    except (AttributeError, RuntimeError, ValueError) as error:  # another allocator, or an older torch
        warnings.warn(f"CUDA memory is taken in segments of fixed size: {error}", stacklevel=2)


def release_cached(device: torch.device) -> None:
    """Release what the allocator of a CUDA device keeps for freed tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
