"""Our policy search beside FlexGen's: the seconds of both searches, and both policies priced by our cost model.

    python -m experiments.peers.compare_search                # needs the peer, see experiments.peers.flexgen_search
    python -m experiments.peers.compare_search --recorded     # takes its policies from the committed run

A ratio above 1 means that our policy is predicted to be faster than the peer's on the same machine. The peer's policy
is priced unchanged (cut into waves where our stricter account of memory requires it).
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from experiments.peers import children, flexgen_search
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from policy_search.search import LOSSLESS, SearchSettings, search
from sim import catalogue
from sim.simulate import simulate

RECORDED = Path(__file__).parent.parent / "results" / "peers" / "flexgen-0.1.8.json"
PROMPT, GENERATED = 512, 32


def compare(model: str, hardware_name: str, peer_result: dict, repeats: int = 3) -> dict:
    """Compare the peer's result (``flexgen_search.search``, or a recorded run) with our search."""
    shape, hardware = shape_by_name(model), catalogue.load(hardware_name)
    theirs = flexgen_search.to_policy(peer_result, shape)
    batch = peer_result["gpu_batch_size"] * peer_result["num_gpu_batches"]
    priced = simulate(Problem(shape=shape, hardware=hardware), theirs, batch, PROMPT, GENERATED)
    workload = Workload.uniform(1, PROMPT, GENERATED)
    problem, settings = Problem(shape=shape, hardware=hardware), SearchSettings(space=LOSSLESS)
    searches = [search(problem, workload, settings) for _ in range(repeats)]
    lossless, full = searches[0], search(problem, workload)
    search_s = statistics.median(result.search_s for result in searches)
    row = {"model": model, "hardware": hardware_name, "constants": peer_result["constants"]}
    for name, result, seconds in (("lossless", lossless, search_s), ("full", full, full.search_s)):
        row |= {f"{name}_tokens_per_s": result.prediction["tokens_per_s"], f"{name}_search_s": seconds}
        row |= {f"{name}_counts": result.counts, f"{name}_batch": result.batch}
    return row | {
        "peer_tokens_per_s": priced.tokens_per_s,
        "peer_own_prediction": peer_result["predicted_tokens_per_s"],
        "peer_search_s": peer_result["search_s"],
        "peer_waves": priced.num_waves,
        "ratio": row["lossless_tokens_per_s"] / priced.tokens_per_s,
    }


def compare_cases(options: argparse.Namespace) -> dict:
    rows = []
    for model, hardware in flexgen_search.MACHINES:
        for result in _peer_results(model, hardware, options):
            row = compare(model, hardware, result)
            print(
                f"{model} on {hardware}, peer's rates from {row['constants']}: "
                f"lossless {row['lossless_tokens_per_s']:.3g} tokens/s in {row['lossless_search_s']:.2f} s, "
                f"with bits {row['full_tokens_per_s']:.3g} in {row['full_search_s']:.2f} s; "
                f"peer's policy {row['peer_tokens_per_s']:.3g} (its own prediction {row['peer_own_prediction']:.3g}) "
                f"in {row['peer_search_s']:.1f} s: ratio {row['ratio']:.2f}"
            )
            rows.append(row)
    return {"rows": rows}


def main(arguments: list[str] | None = None) -> int:
    parser = children.command_parser("experiments.peers.compare_search", __doc__)
    parser.add_argument("--recorded", action="store_true", help="take the peer's policies from the committed run")
    parser.add_argument("--peer", help="folder or file of the peer")
    return children.run_command(parser, arguments, compare_cases)


def _peer_results(model: str, hardware: str, options) -> list[dict]:
    if options.recorded:
        runs = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
        return [run for run in runs if (run["model"], run["hardware"]) == (model, hardware)]
    asked = [flexgen_search.PeerOptions(options.peer, constants=constants) for constants in flexgen_search.CONSTANTS]
    return [flexgen_search.search(model, hardware, PROMPT, GENERATED, each) for each in asked]


if __name__ == "__main__":
    sys.exit(main())
