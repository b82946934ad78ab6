"""What a run opens before its first request: its output files, and the model with its budgets and its machine."""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from flexhybrid.arguments import LLMArguments
from flexhybrid.batch.answers import AnswerFile
from flexhybrid.batch.census import first_url
from flexhybrid.batch.manifest import NOTHING_SERVED, check_same, load_manifest, manifest_path, model_record
from flexhybrid.batch.openai import CHAT
from flexhybrid.batch.requests import LineRules
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, load_hardware
from flexhybrid.core.problem import AttentionPaths, Budgets, Problem
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.waves import check_smallest
from flexhybrid.jobs.machine import free_budgets, notes_on
from flexhybrid.jobs.profile.disk import measure_disk, with_disk
from flexhybrid.jobs.profile.job import PROFILE_STEPS, measure_for_model, model_profile_path
from flexhybrid.jobs.progress import Progress
from flexhybrid.jobs.run.options import RunOptions
from flexhybrid.llm import LLM
from flexhybrid.resolve import PacedDevice, pick_device
from flexhybrid.runtime.profiling.attention_paths import paths_of
from flexhybrid.runtime.storage.loader import Checkpoint


def open_answers(stack: contextlib.ExitStack, path: Path, output: Path) -> AnswerFile:
    """Return the file, locked. A new file is removed again when the run is refused before it has begun."""
    existed = path.exists()

    def leave(error_type, *_error) -> None:
        if error_type and not existed and not manifest_path(output).exists():
            path.unlink(missing_ok=True)

    file = AnswerFile(path)
    stack.callback(file.close)
    stack.push(leave)  # runs first, under the lock
    return file


def paced_device(asked: LLMArguments) -> PacedDevice:
    return pick_device(asked.device, asked.link_gb_per_s, asked.disk_dir, asked.disk_gb_per_s)


def earlier_numbers(output: Path) -> dict:
    """Return the dtype and the ways to attend of the run that is continued: what is measured since then must not change
    them."""
    numbers = (load_manifest(output) or {}).get("numbers")
    return numbers if isinstance(numbers, dict) else {}


def check_model(options: RunOptions) -> None:
    """Raise InputError for the output of a run of another model, before this one's machine is measured; the whole
    comparison follows once the input is read."""
    earlier = load_manifest(options.output)
    if earlier is None or options.restart or options.verify or earlier.get(NOTHING_SERVED):
        return
    if options.output.is_file() and options.output.stat().st_size:
        model = model_record(Checkpoint(options.llm.model).path, verify=False)
        check_same(options.output, {"columns": None, "model": earlier.get("model")}, {"columns": None, "model": model})


def model_arguments(options: RunOptions, earlier: dict, sharers: int) -> LLMArguments:
    """Return the arguments of the model: with a profile of this machine where the policy depends on one, and with
    budgets of the memory that is free, shared by ``sharers`` executors on each machine."""
    asked, paced = options.llm, paced_device(options.llm)
    named = {tier: parse_bytes(size) for tier, size in asked.budgets.items() if size is not None}
    budgets = free_budgets(paced.device, sharers) | named
    for note in notes_on(paced.device, Budgets(**named), asked.disk_dir):
        print(f"flexhybrid: {note}", file=sys.stderr)
    hardware, dtype = asked.hardware, asked.dtype
    check_model(options)
    if hardware is None:
        shape = Checkpoint(asked.model).shape
        kept = model_profile_path(shape, dtype, paced)
        if options.reprofile or (asked.policy == "auto" and not kept.is_file()):
            # What a measurement could not help is refused before it.
            stored = shape.dtype if dtype == "auto" else dtype
            in_place = AttentionPaths("", "", "", in_place=True)  # of which a device needs the least memory
            check_smallest(Problem(shape=shape, dtype=stored, budgets=Budgets(**named), attention=in_place))
            with Progress(PROFILE_STEPS, "profile", " runs", options.quiet) as progress:
                progress.note("measuring this machine at the model's layer sizes; later runs take the record")
                hardware = measure_for_model(shape, dtype, paced, lambda: progress.advance(1), Budgets(**budgets))
        elif kept.is_file():
            hardware = load_hardware(kept)
        if hardware is not None:
            dtype = hardware.dtype
    if asked.dtype == "auto":
        dtype = earlier.get("dtype") or dtype
    if isinstance(hardware, Hardware) and asked.policy == "auto" and asked.disk_dir:
        hardware = with_disk(hardware, measure_disk(paced.disk)[0])
    attention = paths_of(earlier.get("attention"))
    return replace(asked, hardware=hardware, dtype=dtype, budgets=budgets, attention=attention)


def check_chats(rules: LineRules, lines: BinaryIO, llm: LLM) -> None:
    """Raise InputError for chats without a template; tell of a template that completions leave unused."""
    batch, has_template = rules.file_format == "jsonl", bool(getattr(llm.tokenizer, "chat_template", None))
    chats = first_url(lines) == CHAT if batch else rules.chat.prompts
    if chats and not has_template and not rules.chat.template:
        raise InputError(
            f"{llm.checkpoint.path} has no chat template: it cannot serve {CHAT}; give one with --chat-template, or as "
            "chat_template.jinja in its folder"
        )
    if has_template and not chats and not batch:
        print("flexhybrid: the model has a chat template, which is not used: see --chat", file=sys.stderr)
