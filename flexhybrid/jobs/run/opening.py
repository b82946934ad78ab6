"""What a run opens before its first request: output files, the model with its budgets, the machine."""

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from flexhybrid.arguments import LLMArguments
from flexhybrid.batch.answers import AnswerFile
from flexhybrid.batch.manifest import load_manifest, manifest_path
from flexhybrid.batch.openai import CHAT
from flexhybrid.batch.request_index import first_urls
from flexhybrid.batch.requests import LineRules
from flexhybrid.core.admission import check_smallest
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import partial_file
from flexhybrid.core.hardware import Hardware, load_hardware
from flexhybrid.core.problem import AttentionPaths, Budgets, Problem
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.machine import free_budgets, notes_on
from flexhybrid.jobs.profile.disk import measure_disk, with_disk
from flexhybrid.jobs.profile.job import OF_A_MODEL, measure_for_model, model_profile_path, profile_steps
from flexhybrid.jobs.progress import Progress
from flexhybrid.jobs.ray_cluster import Replicas
from flexhybrid.jobs.run.options import RunOptions
from flexhybrid.llm import LLM
from flexhybrid.resolve import PacedDevice, pick_device, pick_dtype, resident_at_once
from flexhybrid.runtime.profiling.attention_paths import paths_of
from flexhybrid.runtime.storage.loader import Checkpoint

WHITE_BYTES = 4096  #: in which a JSON array begins


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


def remove_partial_files(options: RunOptions) -> None:
    """Remove files that a killed run was writing; the output is locked by this one."""
    journals = [path for path in (options.output, options.errors) if path]
    others = filter(None, (options.parquet, options.trace, options.report))
    for path in [*journals, manifest_path(options.output), *others]:
        partial_file(path).unlink(missing_ok=True)


def paced_device(asked: LLMArguments) -> PacedDevice:
    return pick_device(asked.device, asked.link_gb_per_s, asked.disk_dir, asked.disk_gb_per_s)


def earlier_numbers(output: Path) -> dict:
    """Return the dtype and attention of the continued run, which later measurements must not change."""
    numbers = (load_manifest(output) or {}).get("numbers")
    return numbers if isinstance(numbers, dict) else {}


def model_arguments(
    options: RunOptions, earlier: dict, replicas: Replicas | None
) -> tuple[LLMArguments, Callable[[], Hardware] | None]:
    """Return the model's arguments, with budgets of the free memory, shared by the executors of each machine, and a
    kept profile of this machine; and a function that measures the machine if needed, after all checks."""
    asked, paced = options.llm, paced_device(options.llm)
    named = {tier: parse_bytes(size) for tier, size in asked.budgets.items() if size is not None}
    budgets = free_budgets(paced.device, replicas.actors_per_node if replicas else 1) | named
    for note in notes_on(paced.device, Budgets(**named), asked.disk_dir):
        print(f"flexhybrid: {note}", file=sys.stderr)
    hardware, dtype, measure = asked.hardware, asked.dtype, None

    def with_scratch(known: Hardware) -> Hardware:
        """Return the machine with the disk of the scratch folder that policy auto may use."""
        uses = asked.policy == "auto" and asked.disk_dir
        return with_disk(known, measure_disk(paced.disk)[0]) if uses else known

    if hardware is None:
        shape = Checkpoint(asked.model).shape
        kept = model_profile_path(shape, dtype, paced)
        if options.reprofile or (asked.policy == "auto" and not kept.is_file()):
            # What a measurement could not help is refused before it.
            stored = shape.dtype if dtype == "auto" else dtype
            in_place = AttentionPaths("", "", "", in_place=True)  # of which a device needs the least memory
            check_smallest(Problem(shape=shape, dtype=stored, budgets=Budgets(**named), attention=in_place))

            def measured() -> Hardware:
                steps = profile_steps(paced.device, OF_A_MODEL)
                with Progress(steps, "profile", " runs", options.quiet) as progress:
                    progress.note("measuring this machine at the model's layer sizes; later runs take the record")
                    found = measure_for_model(shape, asked.dtype, paced, progress.advance, Budgets(**budgets))
                return with_scratch(found)

            measure, dtype = measured, pick_dtype(dtype, shape, paced.device)
        elif kept.is_file():
            hardware = with_scratch(load_hardware(kept))
            dtype = hardware.dtype
    elif isinstance(hardware, Hardware):
        hardware = with_scratch(hardware)
    if asked.dtype == "auto":
        dtype = earlier.get("dtype") or dtype
    attention = paths_of(earlier.get("attention"))
    return replace(asked, hardware=hardware, dtype=dtype, budgets=budgets, attention=attention), measure


def needs_no_search(llm: LLM, begins: Workload) -> bool:
    """Return whether all requests of ``begins`` fit the device with the weights: policy auto keeps them there at any
    rates. With a paced link, False."""
    return not llm.paced.link_gb_per_s and resident_at_once(llm.problem, begins) is not None


def check_array(path: Path, lines: BinaryIO) -> None:
    """Raise InputError for a file that is one JSON array, in one line or in many."""
    whole = None
    lines.seek(0)
    if lines.read(WHITE_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        lines.seek(0)
        with contextlib.suppress(ValueError, RecursionError):
            whole = json.load(lines)
    if isinstance(whole, list):
        raise InputError(f"{path} holds one JSON array; write one request a line, as `jq -c '.[]'` does")


def check_chats(rules: LineRules, lines: BinaryIO, llm: LLM) -> None:
    """Raise InputError for chats alone without a template; tell of a template that completions leave unused."""
    batch, has_template = rules.file_format == "jsonl", bool(getattr(llm.tokenizer, "chat_template", None))
    chats = first_urls(lines) == {CHAT} if batch else rules.chat.prompts
    if chats and not has_template and not rules.chat.template:
        raise InputError(
            f"{llm.checkpoint.path} has no chat template: it cannot serve {CHAT}; give one with --chat-template, or as "
            "chat_template.jinja in its folder"
        )
    if has_template and not chats and not batch:
        print("flexhybrid: the model has a chat template, which is not used: see --chat", file=sys.stderr)
