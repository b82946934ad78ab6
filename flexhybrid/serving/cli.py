"""The command ``serve``."""

import os
from dataclasses import fields, replace
from importlib import import_module

from flexhybrid.arguments import LLMArguments, add_budgets, add_options, budgets_from, options_from
from flexhybrid.core.model.generation_config import default_sampling
from flexhybrid.core.model.shape import checkpoint_folder
from flexhybrid.jobs.run.cli import add_sampling, sampling_from
from flexhybrid.serving.options import ServerOptions, check_server_options

WITHOUT_EFFECT = {"enable_prefix_caching"}  #: a server computes all prompts separately


def add_serve(commands) -> None:
    """Add the command ``serve``."""
    parser = commands.add_parser(
        "serve",
        help="answer requests over HTTP as OpenAI's API does; for throughput, not for latency",
        description="Serve /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics, and with "
        "--files-dir also /v1/files and /v1/batches. All requests join one running batch. SIGTERM and Ctrl-C refuse "
        "new requests and wait for those that run.",
    )
    add_options(parser, ServerOptions)
    add_options(parser, LLMArguments, {one.name for one in fields(LLMArguments)} - WITHOUT_EFFECT)
    add_budgets(parser, "what is free")
    add_sampling(parser)
    parser.set_defaults(run=_serve)


def _serve(args) -> dict:
    llm = options_from(LLMArguments, args, budgets=budgets_from(args))
    sampling = default_sampling(checkpoint_folder(args.model), llm.generation_config) | sampling_from(args)
    options = options_from(ServerOptions, args, llm=llm, sampling=sampling, quiet=args.quiet or args.json)
    if options.api_key is None:
        options = replace(options, api_key=os.environ.get("FLEXHYBRID_API_KEY") or None)
    check_server_options(options)  # before imports that take seconds

    serve = import_module("flexhybrid.serving.server").serve
    return serve(options, (lambda text: None) if options.quiet else args.show)
