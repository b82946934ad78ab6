"""What a comparison is about, settled and checked before the first measurement."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flexhybrid import shipped
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import check_budget, parse_bytes
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import NO_BUDGETS, Budgets, Problem
from flexhybrid.core.waves import wave_plan
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.speed import ALONE_ROUNDS
from flexhybrid.jobs.profile.job import TIMING_SHAPE, fastest_dtype
from flexhybrid.resolve import pick_device
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import DiskPlace
from policy_search import systems
from policy_search.search import PLAIN, SearchResult, SearchSettings, search
from sim.array_clock import predict
from sim.candidates import candidates_of
from sim.presets import act_only, hybrid, hybrid_static, kv_only

#: What the comparison without ``systems`` is about: KV and ACT on the host, weights streamed.
MIXES = replace(PLAIN, entries=("act@host", "kv@host"))

#: (context, layers of the random model), from the README's run down: a machine whose products are slow gets less to do.
SIZES = ((512, 4), (512, 2), (256, 2), (128, 2))
TABLE_SECONDS = 240.0  #: predicted, for all policies of the speed table

SWEEP = tuple(i / 8 for i in range(1, 8))  #: its ends are kv_only and act_only
LEAST_TOKENS = 3  #: of an answer: a step is measured from the end of a decode iteration to that of a later one
OWN_NAMES = ("kv_only", "act_only", "hybrid_static", "hybrid")


@dataclass(frozen=True)
class CompareOptions:
    """What the command line can change; the other defaults are the README's run on two cores."""

    model: Path | None = None  #: None: the shipped checkpoint for exactness, a random model for speed
    device: str = "auto"
    link_gb_per_s: float | None = None  #: on a CPU; None: the slowest rate at which the best policy is a mix
    device_memory: str | None = None
    host_memory: str | None = "8GiB"
    disk_memory: str | None = None
    disk_dir: Path | None = None  #: scratch space of policies that use a disk, which is measured there
    disk_gb_per_s: float | None = None
    systems: tuple[str, ...] = ()  #: in place of the KV:ACT mixes: systems by name, policy files
    policy: Path | None = None
    out: Path = Path("results")
    batch: int = 32
    context: int | None = None  #: None: the longest of ``SIZES`` that this machine gets through in ``TABLE_SECONDS``
    max_tokens: int = 6
    mini_batch: int = 8  #: requests a mini-batch in the speed runs; systems have bounds of their own
    rounds: int = 3
    exact_tokens: int = 24
    exact_prompts: int = 48  #: at most, evenly over the shipped ones
    shape: ModelShape = TIMING_SHAPE


def split_names(texts: list[str]) -> tuple[str, ...]:
    """Names from the command line: separated by spaces, or by commas outside parentheses."""
    parts = [part.strip() for text in texts for part in re.split(r",(?![^()]*\))", text)]
    return tuple(part for part in parts if part)


class Setting:
    """Everything that is known before the first measurement. Raises InputError for whatever cannot work."""

    def __init__(self, options: CompareOptions):
        self.options = options
        self.device = pick_device(options.device, options.link_gb_per_s)
        self.budgets = Budgets(**{tier: parse_bytes(getattr(options, f"{tier}_memory")) for tier in TIERS})
        if options.disk_gb_per_s is not None and options.disk_dir is None:
            raise InputError("--disk-gb-per-s is the pace of a disk: name its folder with --disk-dir")
        self.disk = DiskPlace(options.disk_dir, options.disk_gb_per_s)
        self.files = {text: Policy.load(text) for text in options.systems if text.endswith(".json")}
        self.extra = [Policy.load(options.policy)] if options.policy else []
        self.checkpoint = Checkpoint(options.model or shipped.CHECKPOINT)
        self.shape = self.checkpoint.shape if options.model else options.shape
        for policy in self.extra:
            if not options.systems and policy.name in OWN_NAMES:
                raise InputError(
                    f"{options.policy}: the name {policy.name!r} is one of the comparison's own; rename it"
                )
        self._check_numbers()
        context = options.context or self._fitting(SIZES[0][0])
        self.workload = Workload.uniform(options.batch, context, options.max_tokens)
        self.dtype = fastest_dtype(self.shape, self.device)
        self.bytes_per_element = DTYPE_BYTES[self.dtype]
        # The bound that makes mini-batches of ``mini_batch`` requests at every mix (one block of padding).
        blocks = -(-(context + options.max_tokens) // BLOCK_TOKENS) + 1
        self.bound = options.mini_batch * (blocks * BLOCK_TOKENS + 1)
        self._check(self._known_before())

    def _check_numbers(self) -> None:
        options = self.options
        for flag, value, least in (
            ("--batch", options.batch, 1), ("--mini-batch", options.mini_batch, 1),
            ("--gen-len", options.max_tokens, LEAST_TOKENS), ("--prompt-len", options.context, 1),
        ):  # fmt: skip
            if value is not None and value < least:
                raise InputError(f"{flag} is {value}; it must be at least {least}")
        length = (options.context or 1) + options.max_tokens
        if length > self.shape.max_context:
            raise InputError(
                f"--prompt-len {options.context or 1} and --gen-len {options.max_tokens} are {length} tokens; "
                f"{self.shape.name} has room for {self.shape.max_context}"
            )

    def _fitting(self, context: int) -> int:
        """A context of our own choice, cut to what the model has room for beside the answers."""
        return min(context, self.shape.max_context - self.options.max_tokens)

    def _known_before(self) -> list[Policy]:
        """The policies that do not wait for the profile."""
        if not self.options.systems:
            return sum(self.mixes(replace(kv_only(self.bound), name="hybrid")), start=[])  # the largest that it may be
        for text in self.options.systems:
            if text not in self.files:
                systems.check_run(text)
        free = [text for text in self.options.systems if text in self.files or not systems.needs_lines(text)]
        for policy in self._resolved(free, self.checkpoint.shape, None):
            check_runnable(self.checkpoint.shape, policy)
        return self._resolved(free, self.shape, None) + self.extra

    def _resolved(self, texts, shape: ModelShape, hardware: Hardware | None) -> list[Policy]:
        problem = replace(self.problem(hardware, self.budgets), shape=shape)
        return [self.files.get(text) or systems.policy_here(text, problem, self.workload) for text in texts]

    def _check(self, policies: list[Policy], hardware: Hardware | None = None) -> None:
        names = [policy.name for policy in policies]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"two of the policies to compare are called {twice!r}")
        for policy in policies:
            check_runnable(self.shape, policy)
            if policy.max_batch is not None and policy.max_batch < self.options.batch:
                raise InputError(
                    f"policy {policy.name}: max_batch {policy.max_batch} is below the comparison's batch of "
                    f"{self.options.batch}"
                )
            if uses_disk(policy) and self.options.disk_dir is None:
                raise InputError(f"policy {policy.name} puts something on a disk: name a folder with --disk-dir")
            if hardware or not policy.share("both"):
                plan = self.memory_plan(policy, hardware)
                check_budget(plan, self.budgets, f"policy {policy.name} with {self.options.batch} requests")

    def memory_plan(self, policy: Policy, hardware: Hardware | None = None) -> dict[str, dict[str, int]]:
        return wave_plan(self.problem(hardware), policy, self.workload)

    def problem(self, hardware: Hardware | None, budgets: Budgets = NO_BUDGETS) -> Problem:
        """Return what is run, on the machine of this hardware record."""
        return Problem(shape=self.shape, dtype=self.dtype, hardware=hardware, budgets=budgets, device=self.device.type)

    def mixes(self, searched: Policy) -> tuple[list[Policy], list[Policy]]:
        """(policies of the table, those of the sweep) where no systems are named."""
        bound = self.bound
        named = [kv_only(bound), act_only(bound), hybrid_static(self.shape, bound), searched, *self.extra]
        return named, [hybrid(share, bound) for share in SWEEP]

    def systems(self, hardware: Hardware) -> list[Policy]:
        """The systems that were named, on this machine; each as it bounds its own mini-batches. Raises InputError."""
        policies = self._resolved(self.options.systems, self.shape, hardware) + self.extra
        self._check(policies, hardware)
        return policies

    def table_seconds(self, hardware: Hardware) -> float:
        """Predicted seconds of the speed table: of each policy a prefill and its decode rounds."""
        rounds = self.options.rounds
        if self.options.systems:
            counted = [(policy, rounds + ALONE_ROUNDS) for policy in self.systems(hardware)]
        else:
            named, sweep = self.mixes(replace(hybrid(0.5, self.bound), name="hybrid"))
            counted = [(policy, rounds + ALONE_ROUNDS) for policy in named] + [(policy, rounds) for policy in sweep]
        seconds = 0.0
        for policy, times in counted:
            run = predict(self.shape, hardware, self.bytes_per_element, candidates_of(policy, self.workload))
            seconds += float(np.ravel(run.prefill_s + times * run.decode_s)[0])
        return seconds

    def sized(self, hardware: Hardware) -> Setting:
        """This setting, at the first of ``SIZES`` that this machine gets through in ``TABLE_SECONDS``, or the last;
        unchanged where the options say a context or the device is a GPU."""
        if self.options.context is not None or self.device.type == "cuda":
            return self
        setting = self
        for context, num_layers in SIZES:
            shape = self.shape if self.options.model else replace(self.shape, num_layers=num_layers)
            setting = Setting(replace(self.options, context=self._fitting(context), shape=shape))
            if setting.table_seconds(hardware) <= TABLE_SECONDS:
                break
        return setting

    def asked_as(self, policy: Policy) -> Policy | str:
        """As ``LLM`` takes it for another model: by its name, where it has one."""
        return policy.name if policy.name in self.options.systems else policy

    def search(self, hardware: Hardware) -> SearchResult:
        settings = SearchSettings(
            batch=self.workload.num_requests,
            objective="decode_throughput",
            space=MIXES,
            mini_batch_tokens=(self.bound,),
            weights_device=0.0,
        )
        return search(self.problem(hardware, self.budgets), self.workload, settings)


def uses_disk(policy: Policy) -> bool:
    """Whether a run of it needs scratch space."""
    return policy.weights.disk > 0 or any("@disk" in kind for kind in policy.cache_kinds)


def is_lossless(policy: Policy) -> bool:
    """Whether it must give the very tokens of every other such policy."""
    return policy.selection.method == "none" and policy.bits.native
