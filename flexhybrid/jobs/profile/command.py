"""The command ``flexhybrid profile``."""

from argparse import Namespace

from flexhybrid.core.files import profile_file
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.jobs.compare.report import Report
from flexhybrid.jobs.paths import check_writable
from flexhybrid.jobs.profile.disk import measure_disk, with_disk
from flexhybrid.jobs.profile.job import TIMING_SHAPE, fastest_dtype, measure_hardware, profile_steps
from flexhybrid.jobs.progress import Progress
from flexhybrid.resolve import pick_device
from policy_search.fit import fit_report


def profile(args: Namespace, shape: ModelShape | None) -> dict:
    """Measure this machine at the layer sizes of a model, None: TIMING_SHAPE's; keep the record and show its lines."""
    paced = pick_device(args.device or "auto", args.link_gb_per_s, args.disk, args.disk_gb_per_s)
    path = profile_file(paced.device.type)
    check_writable(path.parent)
    disk = measure_disk(paced.disk) if args.disk else None
    shape = shape or TIMING_SHAPE
    dtype = fastest_dtype(shape, paced.device)
    with Progress(profile_steps(paced.device), "profile", "step", args.json) as progress:
        hardware, disagreements = measure_hardware(shape, dtype, paced, on_progress=progress.advance)
    if disk:
        hardware = with_disk(hardware, disk[0])
        hardware.save(path)
        disagreements += disk[1]
    Report(quiet=args.json).profile(hardware, disagreements)
    args.show(f"\nKept at {path}")
    return {"path": str(path), "lines": fit_report(hardware), "disagreements": disagreements}
