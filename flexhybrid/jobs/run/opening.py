"""Opens the output files, the model and the machine's profile of a run, and checks the input."""

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

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

WHITE_BYTES = 4096  #: a JSON array is recognised if it begins within this many bytes


def open_answers(stack: contextlib.ExitStack, path: Path, output: Path) -> AnswerFile:
    """Return the file, open and locked. If the run fails before it has a manifest, a new file is removed."""
    existed = path.exists()

    def leave(error_type, *_error) -> None:
        if error_type and not existed and not manifest_path(output).exists():
            path.unlink(missing_ok=True)

    file = AnswerFile(path)
    stack.callback(file.close)
    stack.push(leave)  # runs before close, while the file is locked
    return file


def remove_partial_files(options: RunOptions) -> None:
    """Remove the partly written files of a killed run. The output must be locked by this run."""
    journals = [path for path in (options.output, options.errors) if path]
    others = filter(None, (options.table, options.trace, options.report))
    for path in [*journals, manifest_path(options.output), *others]:
        partial_file(path).unlink(missing_ok=True)


def paced_device(asked: LLMArguments) -> PacedDevice:
    """Return the device, link rate and disk that the arguments name."""
    return pick_device(asked.device, asked.link_gb_per_s, asked.disk_dir, asked.disk_gb_per_s)


def earlier_numbers(output: Path) -> dict:
    """Return the manifest's "numbers" (dtype, attention, …) of the run to continue; empty without one."""
    numbers = (load_manifest(output) or {}).get("numbers")
    return numbers if isinstance(numbers, dict) else {}


class ModelCommand(Protocol):
    """The options of a command that runs a model."""

    @property
    def llm(self) -> LLMArguments: ...

    @property
    def reprofile(self) -> bool: ...

    @property
    def quiet(self) -> bool: ...


def model_arguments(
    options: ModelCommand, earlier: dict, replicas: Replicas | None
) -> tuple[LLMArguments, Callable[[], Hardware] | None]:
    """Return the model's arguments with budgets and hardware record, and a function that measures the machine.
    Budgets that are not given are the free memory, divided by the executors of a machine. The function is None if no
    profile is needed, or if one was kept; it is to be called after all checks. ``earlier``: ``earlier_numbers``."""
    asked, paced = options.llm, paced_device(options.llm)
    named = {tier: parse_bytes(size) for tier, size in asked.budgets.items() if size is not None}
    budgets = free_budgets(paced.device, replicas.actors_per_node if replicas else 1) | named
    for note in notes_on(paced.device, Budgets(**named), asked.disk_dir):
        print(f"flexhybrid: {note}", file=sys.stderr)
    hardware, dtype, measure = asked.hardware, asked.dtype, None

    def with_scratch(known: Hardware) -> Hardware:
        """Return the machine, with the measured disk of the scratch folder if policy auto may use it."""
        uses = asked.policy == "auto" and asked.disk_dir
        return with_disk(known, measure_disk(paced.disk)[0]) if uses else known

    if hardware is None:
        shape = Checkpoint(asked.model).shape
        kept = model_profile_path(shape, dtype, paced)
        if options.reprofile or (asked.policy == "auto" and not kept.is_file()):
            # Refuse a model that cannot fit, before the machine is measured.
            stored = shape.dtype if dtype == "auto" else dtype
            in_place = AttentionPaths("", "", "", in_place=True)  # the way to attend that needs the least memory
            check_smallest(Problem(shape=shape, dtype=stored, budgets=Budgets(**named), attention=in_place))

            def measured() -> Hardware:
                steps = profile_steps(paced.device, OF_A_MODEL)
                with Progress(steps, "profile", " runs", options.quiet) as progress:
                    progress.note("measuring this machine at the model's layer sizes; later runs reuse the result")
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
    """Return whether all requests of ``begins`` fit the device with the weights, so that policy auto needs no profile.
    False with a paced link."""
    return not llm.paced.link_gb_per_s and resident_at_once(llm.problem, begins) is not None


def check_array(path: Path, lines: BinaryIO) -> None:
    """Raise InputError if the file is a single JSON array."""
    whole = None
    lines.seek(0)
    if lines.read(WHITE_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        lines.seek(0)
        with contextlib.suppress(ValueError, RecursionError):
            whole = json.load(lines)
    if isinstance(whole, list):
        raise InputError(f"{path} holds one JSON array; write one request a line, as `jq -c '.[]'` does")


def check_chats(rules: LineRules, lines: BinaryIO, llm: LLM) -> None:
    """Raise InputError for an input of chats without a template; print a note if a template is not used."""
    batch, has_template = rules.file_format == "jsonl", bool(getattr(llm.tokenizer, "chat_template", None))
    chats = first_urls(lines) == {CHAT} if batch else rules.chat.prompts
    if chats and not has_template and not rules.chat.template:
        raise InputError(
            f"{llm.checkpoint.path} has no chat template: it cannot serve {CHAT}; give one with --chat-template, or "
            "put it into the folder as chat_template.jinja"
        )
    if has_template and not chats and not batch:
        print("flexhybrid: the model has a chat template, which is not used: see --chat", file=sys.stderr)
