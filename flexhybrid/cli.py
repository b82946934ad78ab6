"""The ``flexhybrid`` command. Errors of the user's are one clear line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from flexhybrid import __version__
from flexhybrid.core.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexhybrid",
        description="Run language models that do not fit the GPU, and know beforehand how fast.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flexhybrid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    compare = commands.add_parser(
        "compare",
        help="profile this machine, search a policy, run it beside the others",
        description="Profile this machine, search the best KV:ACT mix, run it beside the other policies, and show "
        "predicted against measured. Without --model: exactness on the shipped checkpoint, speed on a random model. "
        "Without --link-gb-per-s a CPU's link is paced at 0.4 GB/s, or faster where 0.4 leaves nothing to mix.",
        allow_abbrev=False,
    )
    _common(compare)
    compare.add_argument("--model", type=Path, help="local OPT checkpoint folder (Hugging Face layout)")
    compare.add_argument("--device-memory", help="budget of the device, like 12GiB (no limit)")
    compare.add_argument("--host-memory", default="8GiB", help="budget of the host (8GiB)")
    compare.add_argument("--policy", type=Path, help="policy JSON file to run beside the others")
    compare.add_argument("--out", type=Path, default=Path("results"), help="folder for tables and figures (results)")
    compare.set_defaults(run=_compare)

    profile = commands.add_parser(
        "profile",
        help="measure this machine for policy auto",
        description="Measure this machine under load and keep the lines where policy auto looks for them.",
        allow_abbrev=False,
    )
    _common(profile)
    profile.add_argument("--model", type=Path, help="measure at this checkpoint's layer sizes")
    profile.set_defaults(run=_profile)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        help="pace of the link on a CPU",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def _compare(args) -> dict:
    from flexhybrid.jobs.compare import compare, options_from

    return compare(options_from(args), quiet=args.json)


def _profile(args) -> dict:
    from tqdm import tqdm

    from flexhybrid.core.shape import shape_from_config
    from flexhybrid.jobs.compare import check_writable
    from flexhybrid.jobs.measure import PROFILE_STEPS, TIMING_SHAPE, fastest_dtype, measure_hardware
    from flexhybrid.jobs.report import Report
    from flexhybrid.machine import pick_device, profile_path
    from policy_search.fit import fit_report

    device = pick_device(args.device, args.link_gb_per_s)
    check_writable(profile_path(device).parent)
    shape = shape_from_config(args.model) if args.model else TIMING_SHAPE
    dtype = fastest_dtype(shape, device)
    with tqdm(total=PROFILE_STEPS, desc="profile", file=sys.stderr, disable=args.json or None, leave=False) as bar:
        hardware, disagreements = measure_hardware(shape, dtype, device, args.link_gb_per_s, None, bar.update)
    rows = fit_report(hardware)
    if not args.json:
        Report(quiet=False).profile(hardware, disagreements)
        print(f"\nKept at {profile_path(device)}")
    return {"path": str(profile_path(device)), "lines": rows, "disagreements": disagreements}


def main(argv: list[str] | None = None) -> int:
    """Parse, run, return the exit status: 0 done, 1 done but something is not as it must be, 2 wrong input."""
    args = build_parser().parse_args(argv)
    try:
        result = args.run(args)
    except InputError as error:
        print(f"flexhybrid: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("flexhybrid: stopped", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(result, default=float))
    return 1 if result.get("trace_violations") or any(not row["exact"] for row in result.get("exactness", ())) else 0
