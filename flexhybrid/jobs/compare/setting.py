"""The setting of a comparison, checked before the first measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flexhybrid import shipped
from flexhybrid.core.admission import wave_plan
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError, check
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import check_budget
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.speed import ALONE_ROUNDS
from flexhybrid.jobs.options import CompareOptions
from flexhybrid.jobs.profile.job import TIMING_SHAPE, fastest_dtype
from flexhybrid.resolve import PacedDevice, pick_device
from flexhybrid.runtime.profiling.attention_paths import fastest_paths
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.storage.loader import Checkpoint
from policy_search import systems
from policy_search.search import PLAIN, SearchResult, SearchSettings, search
from sim.array_clock import predict
from sim.candidates import candidates_of
from sim.presets import act_only, hybrid, hybrid_static, kv_only

#: Search space of the comparison without ``systems``: KV and ACT on the host, weights streamed.
MIXES = replace(PLAIN, entries=("act@host", "kv@host"))

#: Sizes of the runs: (prompt tokens, layers of the random model), the README's first. Slow machines take a later one.
SIZES = ((512, 4), (512, 2), (256, 2), (128, 2))
TABLE_SECONDS = 240.0  #: limit on the predicted seconds of the speed table

SWEEP = tuple(i / 8 for i in range(1, 8))  #: ACT shares of the sweep, between kv_only and act_only
LEAST_TOKENS = 4  #: least tokens of an answer: its decode has three iterations, of which the second is measured
OWN_NAMES = ("kv_only", "act_only", "hybrid_static", "hybrid")  #: policies of every comparison without systems


@dataclass(frozen=True)
class ComparisonSetting:
    """The model, machine and requests of a comparison."""

    options: CompareOptions
    paced: PacedDevice  #: with the link rate in use
    checkpoint: Checkpoint  #: model of the exactness runs
    problem: Problem  #: the speed runs' problem, with the hardware record after the profile
    workload: Workload
    files: dict[str, Policy]  #: policy files among ``options.systems``
    extra: list[Policy]  #: the policy of the file ``options.policy``, if given

    @property
    def machine(self) -> Hardware:
        """The hardware record. Raise ValueError before the machine is measured."""
        if self.problem.hardware is None:
            raise ValueError("the machine of the comparison is not measured yet")
        return self.problem.hardware

    @property
    def mini_batch_tokens(self) -> int:
        """The max_mini_batch_tokens that gives mini-batches of ``options.mini_batch`` requests for every mix."""
        tokens = int(self.workload.prompt_tokens[0]) + self.options.gen_len
        return self.options.mini_batch * ((-(-tokens // BLOCK_TOKENS) + 1) * BLOCK_TOKENS + 1)

    def mixes(self, searched: Policy) -> tuple[list[Policy], list[Policy]]:
        """Return the policies of the table and those of the sweep, without ``options.systems``."""
        tokens, shape = self.mini_batch_tokens, self.problem.shape
        named = [kv_only(tokens), act_only(tokens), hybrid_static(shape, tokens), searched, *self.extra]
        return named, [hybrid(share, tokens) for share in SWEEP]

    def systems(self) -> list[Policy]:
        """Return the policies of ``options.systems`` and ``options.policy`` on the measured machine.
        Raise InputError if one cannot run."""
        policies = self.resolved(self.options.systems, self.problem.shape) + self.extra
        self.check(policies)
        return policies

    def resolved(self, texts: tuple[str, ...] | list[str], shape: ModelShape) -> list[Policy]:
        """Return the policies of system names and policy files for a model."""
        problem = replace(self.problem, shape=shape)
        return [self.files.get(text) or systems.policy_here(text, problem, self.workload) for text in texts]

    def check(self, policies: list[Policy]) -> None:
        """Raise InputError for a policy that cannot be compared, or two policies of the same name."""
        options = self.options
        names = [policy.name for policy in policies]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"two of the policies to compare are called {twice!r}")
        for policy in policies:
            check_runnable(self.problem.shape, policy)
            if policy.max_batch is not None and policy.max_batch < options.batch:
                raise InputError(
                    f"policy {policy.name}: max_batch {policy.max_batch} is below the comparison's batch of "
                    f"{options.batch}"
                )
            if uses_disk(policy) and options.disk_dir is None:
                raise InputError(f"policy {policy.name} puts something on a disk: name a folder with --disk-dir")
            if self.problem.hardware or not (policy.share("both") or policy.packing == "balance"):
                subject = f"policy {policy.name} with {options.batch} requests"
                check_budget(wave_plan(self.problem, policy, self.workload), self.problem.budgets, subject)

    def table_seconds(self) -> float:
        """Return the predicted seconds of the speed table: each policy's prefill and decode rounds."""
        rounds = self.options.rounds
        if self.options.systems:
            named, sweep = self.systems(), []
        else:
            named, sweep = self.mixes(replace(hybrid(0.5, self.mini_batch_tokens), name="hybrid"))
        seconds = 0.0
        for policy in named:
            run = predict(self.problem, candidates_of(policy, self.workload))
            seconds += float(np.ravel(run.prefill_s + (rounds + ALONE_ROUNDS) * run.decode_s)[0])
        if sweep:  # these differ only in their shares, so they are priced together
            cache = {entry: np.array([policy.cache[entry] for policy in sweep]) for entry in sweep[0].cache}
            run = predict(self.problem, replace(candidates_of(sweep[0], self.workload), cache=cache))
            seconds += float(np.sum(run.prefill_s + rounds * run.decode_s))
        return seconds

    def measured(self, hardware: Hardware) -> ComparisonSetting:
        """Return this setting on a measured machine."""
        return replace(self, problem=replace(self.problem, hardware=hardware))

    def sized(self) -> ComparisonSetting:
        """Return this setting with the first of SIZES that takes at most TABLE_SECONDS, else the last one.
        With a given prompt length, or on a GPU, the setting stays as it is."""
        if self.options.prompt_len is not None or self.paced.device.type == "cuda":
            return self
        setting = self
        for prompt_len, num_layers in SIZES:
            shape = self.problem.shape if self.options.model else replace(self.problem.shape, num_layers=num_layers)
            workload = _workload(self.options, shape, prompt_len)
            setting = replace(self, problem=replace(self.problem, shape=shape), workload=workload)
            if setting.table_seconds() <= TABLE_SECONDS:
                break
        return setting

    def search(self, hardware: Hardware) -> SearchResult:
        """Return the best mix on a machine."""
        settings = SearchSettings(
            batch=self.workload.num_requests,
            objective="decode_throughput",
            space=MIXES,
            mini_batch_tokens=(self.mini_batch_tokens,),
            weights_device=0.0,
        )
        return search(replace(self.problem, hardware=hardware), self.workload, settings)

    def priced(self, result: SearchResult, policy: Policy) -> SearchResult:
        """Return the result with another policy and the prediction for that policy on this machine."""
        prediction = predict(self.problem, candidates_of(policy, self.workload)).row()
        return replace(result, policy=policy, prediction=prediction)


def settle(options: CompareOptions) -> ComparisonSetting:
    """Open the checkpoint and the policy files; return the setting without a hardware record.
    Raise InputError if the options cannot work."""
    if options.disk_gb_per_s is not None and options.disk_dir is None:
        raise InputError("--disk-gb-per-s is the rate of a disk: name its folder with --disk-dir")
    paced = pick_device(options.device, options.link_gb_per_s, options.disk_dir, options.disk_gb_per_s)
    budgets = Budgets(**{tier: parse_bytes(options.budgets.get(tier)) for tier in TIERS})
    files = {text: Policy.load(text) for text in options.systems if text.endswith(".json")}
    extra = [Policy.load(options.policy)] if options.policy else []
    checkpoint = Checkpoint(options.model or shipped.CHECKPOINT)
    shape = checkpoint.shape if options.model else options.shape or TIMING_SHAPE
    for policy in extra:
        if not options.systems and policy.name in OWN_NAMES:
            raise InputError(f"{options.policy}: the name {policy.name!r} is one of the comparison's own; rename it")
    _check_numbers(options, shape)
    workload = _workload(options, shape, options.prompt_len or SIZES[0][0])
    device, dtype = paced.device.type, fastest_dtype(shape, paced.device)
    paths = fastest_paths(device, dtype, shape.queries_per_key, shape.head_dim)
    problem = Problem(shape=shape, dtype=dtype, budgets=budgets, device=device, attention=paths)
    setting = ComparisonSetting(options, paced, checkpoint, problem, workload, files=files, extra=extra)
    setting.check(_known_policies(setting))
    return setting


def _check_numbers(options: CompareOptions, shape: ModelShape) -> None:
    least = {"--batch": (options.batch, 1), "--mini-batch": (options.mini_batch, 1)}
    least |= {"--output-len": (options.gen_len, LEAST_TOKENS), "--input-len": (options.prompt_len, 1)}
    for flag, (value, minimum) in least.items():
        check(flag, value, value is None or value >= minimum, f"at least {minimum}")
    prompt_len = options.prompt_len or 1
    if prompt_len + options.gen_len > shape.max_context:
        raise InputError(
            f"--input-len {prompt_len} and --output-len {options.gen_len} are {prompt_len + options.gen_len} tokens; "
            f"{shape.name} has room for {shape.max_context}"
        )


def _workload(options: CompareOptions, shape: ModelShape, prompt_len: int) -> Workload:
    """Return the requests, with prompts cut so that prompt and answer fit the context."""
    return Workload.uniform(options.batch, min(prompt_len, shape.max_context - options.gen_len), options.gen_len)


def _known_policies(setting: ComparisonSetting) -> list[Policy]:
    """Return the policies that do not depend on the profile. Raise InputError for systems that cannot run."""
    if not setting.options.systems:
        largest = replace(kv_only(setting.mini_batch_tokens), name="hybrid")  # the largest mix the search may choose
        return sum(setting.mixes(largest), start=[])
    for text in setting.options.systems:
        if text not in setting.files:
            systems.check_run(text)
    known = [text for text in setting.options.systems if text in setting.files or not systems.needs_lines(text)]
    for policy in setting.resolved(known, setting.checkpoint.shape):
        check_runnable(setting.checkpoint.shape, policy)
    return setting.resolved(known, setting.problem.shape) + setting.extra


def uses_disk(policy: Policy) -> bool:
    """Return whether the policy keeps weights or context on a disk."""
    return policy.weights.disk > 0 or any("@disk" in entry for entry in policy.cache_entries)
