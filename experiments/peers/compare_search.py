"""Our policy search beside FlexGen's, in one run: seconds, and both policies priced by our cost model.

    python -m experiments.peers.compare_search                # needs the peer, see experiments.peers.flexgen_search
    python -m experiments.peers.compare_search --recorded     # takes its policies from the committed run instead

A ratio above 1 means that our policy is predicted to be faster than the peer's on the same machine. The peer's policy
is priced as it stands (cut into waves where our stricter account of memory wants so).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from experiments.peers import flexgen_search
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import write_by_rename
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.workload import Workload
from policy_search.search import search
from sim import catalogue
from sim.simulate import simulate

RECORDED = Path(__file__).parent.parent / "results" / "peers" / "flexgen-0.1.8.json"
PROMPT, GENERATED = 512, 32
CASES = (("opt-30b", "t4"), ("opt-30b", "rtx4090"), ("opt-175b", "t4"))


def compare(model: str, hardware_name: str, peer_result: dict, repeats: int = 3) -> dict:
    """One case: the peer's result (``flexgen_search.search``, or a recorded run) beside our search."""
    shape, hardware = shape_by_name(model), catalogue.load(hardware_name)
    theirs = flexgen_search.to_policy(peer_result, shape)
    batch = peer_result["gpu_batch_size"] * peer_result["num_gpu_batches"]
    priced = simulate(shape, hardware, theirs, batch, PROMPT, GENERATED)
    workload = Workload.uniform(1, PROMPT, GENERATED)
    found = [search(shape, hardware, 2, workload, lossless=True) for _ in range(repeats)]
    found.append(search(shape, hardware, 2, workload))
    lossless, full = found[0], found[-1]
    search_s = sorted(one.search_s for one in found[:-1])[repeats // 2]
    return {
        "model": model, "hardware": hardware_name, "constants": peer_result["constants"],
        "peer_tokens_per_s": priced.tokens_per_s, "peer_own_prediction": peer_result["predicted_tokens_per_s"],
        "peer_search_s": peer_result["search_s"], "peer_waves": priced.num_waves,
        "lossless_tokens_per_s": lossless.prediction["tokens_per_s"], "lossless_search_s": search_s,
        "lossless_counts": lossless.counts, "lossless_batch": lossless.batch,
        "full_tokens_per_s": full.prediction["tokens_per_s"], "full_search_s": full.search_s,
        "full_counts": full.counts, "full_batch": full.batch,
        "ratio": lossless.prediction["tokens_per_s"] / priced.tokens_per_s,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="the peer's policies of the committed run")
    parser.add_argument("--peer", help="folder or file of the peer")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args(arguments)
    try:
        rows = []
        for model, hardware in CASES:
            for result in _peer_results(model, hardware, options):
                row = compare(model, hardware, result)
                rows.append(row)
                print(_line(row))
        if options.out:
            write_by_rename(options.out, json.dumps(rows, indent=1))
    except InputError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, flexgen_search.PeerUnavailable) else 2
    return 0


def _line(row: dict) -> str:
    return (
        f"{row['model']} on {row['hardware']}, peer's rates from {row['constants']}: "
        f"lossless {row['lossless_tokens_per_s']:.3g} tokens/s in {row['lossless_search_s']:.2f} s, "
        f"with bits {row['full_tokens_per_s']:.3g} in {row['full_search_s']:.2f} s; "
        f"peer's policy {row['peer_tokens_per_s']:.3g} (its own word {row['peer_own_prediction']:.3g}) "
        f"in {row['peer_search_s']:.1f} s: ratio {row['ratio']:.2f}"
    )


def _peer_results(model: str, hardware: str, options) -> list[dict]:
    if options.recorded:
        runs = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
        return [run for run in runs if (run["model"], run["hardware"]) == (model, hardware)]
    return [
        flexgen_search.search(model, hardware, PROMPT, GENERATED, peer=options.peer, constants=constants)
        for constants in flexgen_search.CONSTANTS
    ]


if __name__ == "__main__":
    sys.exit(main())
