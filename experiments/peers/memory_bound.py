"""The private memory of a child of ``accelerate_disk``: its limit and its peak.

RLIMIT_DATA bounds both sides: an allocation beyond it fails. It counts private memory without the page cache, so
neither side may use the cache: ours reads with O_DIRECT (the run is refused where that does not work), and accelerate's
files are dropped from the cache before every forward pass. ``read_bytes``, the kernel's count of bytes that the process
read from the disk, is the evidence.

The request of both sides (``experiments.peers.children``):

    side          "ours", "accelerate" or "prepare" (write accelerate's offload folder)
    checkpoint    folder in Hugging Face layout
    folder        accelerate's offload folder, or where our scratch file may lie
    prompts       token ids, all prompts of one length
    gen_tokens    tokens to generate for each, at least 3
    memory_bytes  what the process may take beyond what it holds once its libraries are loaded
    dtype         "float32" or "bfloat16"
    threads       of torch
    policy        of ours, as a dictionary
    embeddings    of accelerate: "disk", as disk_offload keeps them, or "memory"

The answer: "error" alone where the run was not possible, else seconds, bytes and tokens; of ours also the seconds of
the disk alone and of the computation alone.
"""

import resource
import threading
import time
from pathlib import Path

import torch

from experiments.peers.children import Side

#: Of a thread. The system's default counts eight times this against the bound and is never used.
STACK_BYTES = 1 << 20


def proc_bytes(file: str, field: str) -> int:
    """Return a field of /proc/self/status (in kB there) or /proc/self/io, in bytes."""
    for line in Path(f"/proc/self/{file}").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * (1024 if value.endswith("kB") else 1)
    raise KeyError(field)


class Bound:
    """Private memory of this process beyond what it holds now: its limit and its resident peak."""

    def __init__(self):
        self._held = proc_bytes("status", "VmData")
        self._resident = proc_bytes("status", "RssAnon")
        self.peak_bytes = 0
        threading.stack_size(STACK_BYTES)
        threading.Thread(target=self._watch, daemon=True).start()

    def limit(self, num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._held + num_bytes, resource.RLIM_INFINITY))

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, proc_bytes("status", "RssAnon") - self._resident)
            time.sleep(0.02)


def bounded(run: Side) -> Side:
    """Lift the memory bound after ``run``: the answer, and the end of the process, need memory as well."""

    def side(request: dict) -> dict:
        try:
            return run(request)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return side


def start_threads(threads: int) -> None:
    """Start torch's threads, so that their stacks count with the libraries."""
    torch.set_num_threads(threads)
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))
