"""One value each for what several papers' chapters have in common: PCIe's share and FlexGen's copies.

Where two chapters would have different values, both errors are here. All is computed on calibrate rows; held-out rows
choose nothing.
"""

from collections.abc import Callable

import numpy as np

from experiments import reference
from experiments.reproduce.calibrate import PCIE_SHARE, fit
from experiments.reproduce.capture import setup as capture
from experiments.reproduce.experiment import Constant, Experiment, Row
from experiments.reproduce.kvpr import setup as kvpr
from experiments.reproduce.paper import CAPTURE, FLEXGEN, context, values_of
from flexhybrid.core.hardware import Hardware

#: What each chapter's calibrate rows alone would have, the shared one, and the nearest to both.
SHARES = {"CAPTURE's own": 0.831, "all": PCIE_SHARE, "nearest to both": 0.85, "KVPR's own": 0.862}


def _off(ours, paper) -> float:
    """Return the root of the mean square of the logarithms of ours over paper, in percent."""
    return 100 * float(np.sqrt(np.mean(np.log(np.asarray(ours) / np.asarray(paper)) ** 2)))


def share_errors(share: float) -> dict[str, float]:
    """Return how far CAPTURE's six and KVPR's nine calibrate rows are off with this share of PCIe's standard, each
    chapter's other constants fitted anew."""
    link = share * kvpr.link_standard("rtx4090")
    values = values_of(capture.refit(link)) | {"link_gb_per_s": link}
    rows = reference.rows("capture_table3", role="calibrate")
    latencies = kvpr.accelerate_rows()
    host = {"host_s": kvpr.fit_host_s(share).value, "link_gb_per_s": share * kvpr.link_standard("a100-40g")}
    return {
        "CAPTURE, Table III": _off(capture.calibrate_s(values), capture.run_s(rows)),
        "KVPR, Accelerate": _off(kvpr.accelerate_s(latencies, host), latencies["value"]),
    }


def _relayed(values: dict[str, float]) -> Hardware:
    plain = kvpr.machine("rtx5000", capture.LOW_END_LINK_GB_PER_S)
    return kvpr.relayed(plain, values["flexgen_relay_gb_per_s"])


def _one_share(values: dict[str, float]) -> Hardware:
    return kvpr.machine("rtx5000", values["flexgen_share_of_standard"] * kvpr.link_standard("rtx5000"))


#: Law -> machine of a constant, the constant.
COPIES: dict[str, tuple[Callable[[dict[str, float]], Hardware], Constant]] = {
    "relay": (_relayed, CAPTURE.constant("flexgen_relay_gb_per_s", 20.0)),
    "share of the standard": (_one_share, CAPTURE.constant("flexgen_share_of_standard", 0.6)),
}


def copies_errors(law: str) -> tuple[float, float]:
    """Return how far the six FlexGen rows of KVPR's Table 5 are off under a law of FlexGen's copies: fitted on all of
    them, and each by a fit on the five others."""
    machine, free = COPIES[law]
    rows = reference.check_role(reference.rows("kvpr_table5", method="FlexGen"), "calibrate")
    paper, lengths = rows["value"].to_numpy(), (rows["prompt_len"].to_numpy(), rows["gen_len"].to_numpy())

    def ours(values: dict[str, float]) -> np.ndarray:
        run = kvpr.run_column(kvpr.shape_of("OPT-6.7B"), machine(values), kvpr.flexgen(), *lengths)
        return run.decode_tokens_per_s

    def fitted(start: tuple[Constant, ...], among: np.ndarray) -> tuple[Constant, ...]:
        return fit(start, lambda values: ours(values)[among], paper[among], "Table 5, FlexGen")

    places = np.arange(len(paper))
    together = fitted((free,), places)
    left_out = [ours(values_of(fitted(together, places[places != place])))[place] for place in places]
    return _off(ours(values_of(together)), paper), _off(left_out, paper)


def table() -> Experiment:
    """Return both as rows of context."""
    rows: list[Row] = []
    for name, share in SHARES.items():
        for chapter, off in share_errors(share).items():
            rows.append(context(f"PCIe at {share:g} of its standard ({name}): {chapter} off by", off, "%"))
    for law in COPIES:
        together, left_out = copies_errors(law)
        rows.append(context(f"FlexGen's copies, {law}: Table 5, FlexGen off by", together, "%"))
        rows.append(context(f"FlexGen's copies, {law}: each row by a fit on the others, off by", left_out, "%"))
    return FLEXGEN.experiment("flexgen-one-law", rows, (), (capture.relay_constant(),), share=PCIE_SHARE)
