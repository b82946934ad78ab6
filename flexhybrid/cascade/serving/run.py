"""``flexhybrid cascade run``: answers a file of requests with a cascade of local models, or serves it with Ray Serve.

Requests go through the models from small to large (``answers``), chunk by chunk. The reported energy does not include
loading the models.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from flexhybrid.arguments import options_from
from flexhybrid.cascade.data import read_requests
from flexhybrid.cascade.loading import check_source, load_model, named_path, named_policies
from flexhybrid.cascade.metering import Meter, describe_energy
from flexhybrid.cascade.models import Model
from flexhybrid.cascade.options import CascadeRunOptions, ServeOptions
from flexhybrid.cascade.routes import Cascade
from flexhybrid.cascade.serving.answers import serve
from flexhybrid.cascade.serving.counts import Counts, Tokenize
from flexhybrid.cascade.serving.ray_serve import Serving, deployed
from flexhybrid.core.errors import InputError, file_errors

CHUNK = 1024  #: number of requests that go through the models together


def run(options: CascadeRunOptions, say: Callable[[str], None] = print) -> dict:
    """Write a line of JSON per request, in the input's order; return a record of the models' answers.

    Raise InputError, before any request is answered, for wrong options or models that cannot be found.
    """
    files = (options.input, options.output)
    if None in files and (files != (None, None) or options.engine != "ray"):
        raise InputError("give files of requests and answers with -i and -o; only --engine ray serves without files")
    if options.output is not None and options.output.exists() and not options.restart:
        raise InputError(f"{options.output} exists: give another file, or overwrite it with --overwrite")
    cascade = Cascade.load(options.cascade)
    loads = _loads(cascade, options)
    is_ray = options.engine == "ray"
    opened = deployed(cascade, loads, options.serving, say) if is_ray else _local(cascade, loads)
    if options.input is None or options.output is None:
        return _serve(opened, options.serving.detach)
    if options.serving.detach:
        raise InputError("--detach serves without files: leave out -i and -o")
    requests, labels = read_requests(options.input, cascade.task)
    counts = Counts(cascade, _tokenize(loads) if cascade.task == "generation" and labels is not None else None)
    with file_errors(f"write {options.output}"), opened as at_work, options.output.open("w", encoding="utf-8") as out:
        before, _ = at_work.energy()
        for start in range(0, len(requests), CHUNK):
            answers = at_work.answer(requests[start : start + CHUNK], start)
            out.writelines(line.line() + "\n" for line in answers)
            counts.add(answers, None if labels is None else labels[start : start + CHUNK], options.max_tokens)
            if options.on_progress:
                options.on_progress(len(answers))
        after, source = at_work.energy()
    joules = None if before is None or after is None else after - before
    if joules is not None and joules < 0:
        joules, source = None, "not measured: a process with a meter was replaced"
    return {"path": str(options.output), **counts.record(joules, source)}


def _serve(opened: contextlib.AbstractContextManager[Serving], detach: bool) -> dict:
    """Serve until Ctrl-C, or with ``detach`` leave the cascade running; return its address and counts."""
    with opened as at_work:
        if detach or at_work.status is None:
            return {"url": at_work.url}
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
        return {"url": at_work.url, **at_work.status()}


def _tokenize(loads: Sequence[functools.partial]) -> Tokenize | None:
    """Return the first tokenizer of a model, without special tokens; None if no model has one."""
    from flexhybrid.requests import load_tokenizer

    folders = (Path(load.args[1]) for load in loads)
    tokenizer = next(filter(None, (load_tokenizer(folder) for folder in folders if folder.is_dir())), None)
    return None if tokenizer is None else lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def _loads(cascade: Cascade, options: CascadeRunOptions) -> list[functools.partial[Model]]:
    """Return a function for each model that loads it. Raise InputError for a model that cannot be found."""
    sources = {model.name: model.source for model in cascade.models}
    for text in options.models:
        name, source = named_path(text)
        if name not in sources:
            raise InputError(f"{options.cascade} has no model {name!r}; it has {', '.join(sources)}")
        sources[name] = source
    if missing := [name for name, source in sources.items() if source is None]:
        raise InputError(f"the path of model {missing[0]} is unknown: give it with --models {missing[0]}=PATH")
    policies, loads = named_policies(options.policies, cascade.names, cascade.task), []
    for name, source in sources.items():
        check_source(name, source or "", cascade.task)
        more = {"device": options.device, **policies.get(name, {})}
        load = functools.partial(load_model, name, source, cascade.task, options.max_tokens, cascade.top_k, **more)
        loads.append(load)
    return loads


@contextlib.contextmanager
def _local(cascade: Cascade, loads: Sequence[Callable[[], Model]]) -> Iterator[Serving]:
    """Run the models in this process within the block."""
    with contextlib.ExitStack() as stack:
        models = []
        for load in loads:
            models.append(load())
            stack.callback(models[-1].close)
        on_gpu = any(getattr(model, "device", "cpu") == "cuda" for model in models)
        meter = stack.enter_context(Meter("cuda" if on_gpu else "cpu"))
        yield Serving(functools.partial(serve, cascade, models), lambda: (meter.joules, meter.source))


def describe_run(result: dict) -> str:
    """Return the record of a run, or of serving, as text."""
    if "num_requests" not in result:
        return f"served at {result['url']} until `flexhybrid cascade stop`"
    num = result["num_requests"]
    if not num:
        return f"no requests: {result['url']}"
    lines = [f"{'model':16s} {'computes':>9s} {'answers':>8s} {'failed':>7s}"]
    for row in result["models"]:
        reason = f"  first: {row['first_failure']}" if row["failed"] else ""
        lines.append(
            f"{row['name']:16s} {row['visited'] / num:9.1%} {row['answered'] / num:8.1%} {row['failed']:7d}{reason}"
        )
    totals = [f"{num} requests, {result['unanswered']} unanswered"]
    if result["fallbacks"]:
        totals.append(f"{result['fallbacks']} answered by an unsure model because all larger ones failed")
    if result["accuracy"] is not None:
        totals.append(f"accuracy {result['accuracy']:.2%}")
    if result["cost_per_request"] is not None:
        totals.append(
            f"{result['cost']} per request {result['cost_per_request']:.4g}, {result['share_of_largest']:.1%} of the "
            "largest model's"
        )
    lines += ["", describe_energy(result)]
    return "\n".join([*lines, f"{', '.join(totals)}: {result.get('path') or result['url']}"])


def command(args) -> dict:
    """Run the command ``run``."""
    with tqdm(desc="cascade", unit="request", file=sys.stderr, disable=args.json or None, leave=False) as bar:
        serving = options_from(ServeOptions, args)
        options = options_from(CascadeRunOptions, args, serving=serving, on_progress=bar.update)
        result = run(options, say=functools.partial(print, file=sys.stderr))
    args.show(describe_run(result))
    return result
