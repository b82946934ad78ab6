"""What this executor runs. The plan maker lays out more: every system of the papers, for the simulator."""

from __future__ import annotations

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Policy

#: Cache entries that the executor's pools hold.
RUNNABLE_KINDS = ("act@device", "act@host", "kv@device", "kv@host")


def check_runnable(policy: Policy) -> None:
    """Refuse what the executor does not run, by name (InputError)."""
    for key in policy.cache_kinds:
        if key not in RUNNABLE_KINDS:
            raise InputError(f"policy {policy.name}: cache entry {key} cannot be run; can: {', '.join(RUNNABLE_KINDS)}")
    refusals = (
        (policy.schedule != "column", f"schedule {policy.schedule}"),
        (policy.weights.disk > 0, "weights on disk"),
        (policy.embedding.device < 1, "embedding and head off the device"),
        (policy.hidden != "device", f"hidden states on the {policy.hidden}"),
        (not policy.bits.native, "bits other than native"),
        (policy.selection.method != "none", f"selection {policy.selection.method}"),
        (policy.attention != "device", f"attention on the {policy.attention}"),
        (policy.weight_order != "kv_first", f"weight_order {policy.weight_order}"),
        (policy.static_cache, "a static cache"),
        (policy.overlap is not True, f"overlap {str(policy.overlap).lower()}"),
    )
    for refused, what in refusals:
        if refused:
            raise InputError(f"policy {policy.name}: {what} cannot be run by this version; `flexhybrid simulate` can")
