"""Continues the job of an earlier run, if everything that decides its results is the same."""

import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import torch
import transformers

import flexhybrid
from flexhybrid.batch.manifest import NOTHING_SERVED, check_same, load_manifest, model_record, save_manifest
from flexhybrid.core.errors import InputError
from flexhybrid.core.units import counted
from flexhybrid.jobs.run.lines import JobLines
from flexhybrid.jobs.run.opening import earlier_numbers
from flexhybrid.llm import LLM
from flexhybrid.structured_outputs import grammar_version

VERSIONED = {"flexhybrid": flexhybrid, "torch": torch, "transformers": transformers}  #: with versions in the manifest


def resume(lines: JobLines, settle: Callable[[], None], say: Callable[[str], None]) -> dict:
    """Continue an earlier run of this job, or start over if that loses no answers; return the manifest.
    ``settle`` chooses the policy; it is called after all checks that need no policy. Raise InputError if the output
    belongs to another job."""
    options, llm, files = lines.options, lines.llm, lines.files.values()
    earlier = load_manifest(options.output)
    given_input = {"sha256": lines.index.sha256, "lines": lines.index.num_lines}
    used = [file.path for file in files if not file.is_empty]
    starts_over = options.restart or not used or bool((earlier or {}).get(NOTHING_SERVED))
    states, num_tokens = lines.states.copy(), np.zeros(lines.index.num_lines, np.int32)
    if not starts_over and earlier and earlier.get("input") == given_input:
        for file in files:
            file.check(states, num_tokens)
        lines.learn(states, num_tokens)
    manifest = now = _identity(lines, given_input)
    if not starts_over:
        if earlier is None:
            raise InputError(
                f"{used[0]} is not empty, but there is no manifest next to {options.output}: it was not written by a "
                "run, or the manifest was removed; choose another output, or overwrite it with --overwrite"
            )
        if llm.policy is None:  # the search chooses these two, after the machine is measured
            now["numbers"] |= {name: earlier_numbers(options.output).get(name) for name in ("bits", "selection")}
        check_same(options.output, earlier | {"input": given_input}, now)
        if earlier.get("input") != given_input:
            _follow_input(lines, earlier, now, say)
            for file in files:
                file.check(states)
        manifest = earlier
    settle()
    now["numbers"] = numbers_of(llm)
    if starts_over:
        if (left := (earlier or {}).get("errors")) and left != now["errors"]:
            # The manifest does not name its folder: a file of that name may be another job's.
            say(f"restarted  {left}, with the refused lines of the run before, is left as it is")
        for file in files:
            file.clear()
        save_manifest(options.output, now)
        return now
    check_same(options.output, manifest, now)
    for file in files:
        file.repair()
    lines.states = states
    return manifest


def _follow_input(lines: JobLines, earlier: dict, now: dict, say: Callable[[str], None]) -> None:
    """Keep the answers to lines that the changed input still has, under their new line numbers.
    Raise InputError if it has none of them. While answers are moved, the manifest names no input, so that a run after a
    kill repeats the move."""
    output = lines.options.output
    offsets, places = lines.answers.places_in(lines.source.digests())
    num_kept, num_gone = int((places >= 0).sum()), int((places < 0).sum())
    if num_gone and not num_kept:
        check_same(output, earlier, now)
    save_manifest(output, earlier | {"input": None})
    beside = lines.answers.move_to(offsets, places, lines.source.custom_id)
    if lines.errors is not lines.answers:
        lines.errors.clear()
    earlier["input"] = now["input"]
    save_manifest(output, earlier)
    gone = f"; {counted(num_gone, 'answer')} to lines that are not in it any more: {beside}" if num_gone else ""
    say(f"changed    the input was changed: {counted(num_kept, 'answer')} kept{gone}; new lines are answered now")


def _identity(lines: JobLines, given_input: dict) -> dict:
    """Return the manifest: everything that decides the results. A run that continues this one must agree with it."""
    options, llm, chat = lines.options, lines.llm, asdict(lines.source.rules.chat)
    return {
        "created": int(time.time()),
        "input": given_input,
        "model": model_record(llm.checkpoint.path, options.verify),
        "sampling": {**options.sampling, "seed": options.seed},
        "columns": {"prompt": options.column, "custom_id": options.id_column},
        **({"chat": chat} if any(chat.values()) else {}),
        "errors": options.errors.name if options.errors else None,
        "numbers": numbers_of(llm),
        "versions": {name: module.__version__ for name, module in VERSIONED.items()} | grammar_version(),
    }


def numbers_of(llm: LLM) -> dict:
    """Return the settings that decide rounding and the attended tokens, as plain JSON."""
    bits = llm.policy.bits if llm.policy else None
    return {
        "dtype": llm.problem.dtype,
        "attention": llm.problem.attention and llm.problem.attention._asdict(),
        "device": llm.device.type,
        "bits": [bits.weights, bits.kv, bits.act] if bits else None,
        "selection": str(llm.policy.selection) if llm.policy else None,
    }
