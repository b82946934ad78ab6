"""The process that loads FlexGen's cost model and times its search; started by ``flexgen_search``, file by file name.

It knows nothing of this project (standard library only), so that the peer meets only its own folder. A request comes
as JSON on standard input:

    peer             path of cost_model.py
    config           fields of its CostModelConfig that replace the defaults
    alpha            null, or the share of every memory that its LP may fill, instead of its own 0.8
    compress_weights whether its LP takes weights of four bits
    repeats          how often the whole search is run

One JSON object goes to standard output: "error" alone where the peer cannot be loaded, else the peer's policy as it
stands ("policy", null when it found none), what it predicts, and the seconds of every repeat.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import sys
import time
from pathlib import Path

#: Choices that the peer's command line leaves open; ``solve`` reads every one of them.
OPEN = ("wg", "wc", "cg", "cc", "hg", "hc", "percent", "gbs", "num_gb")


def load_peer(path: Path):
    """The cost model as a module. What its imports raise is raised here."""
    spec = importlib.util.spec_from_file_location("flexgen_cost_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pick_solver(peer) -> str:
    """The peer asks PuLP for CBC by name. Where PuLP brings no CBC that runs, HiGHS answers to that name."""
    pulp = peer.pulp
    bundled = getattr(pulp, "PULP_CBC_CMD", None)
    if bundled is not None and bundled(msg=False).available():
        return f"CBC, PuLP {pulp.__version__}"
    pulp.PULP_CBC_CMD = lambda msg=False: pulp.HiGHS(msg=msg)
    return f"HiGHS in place of CBC, PuLP {pulp.__version__}"


def run(peer, request: dict) -> dict:
    """Search as often as asked, then solve the winner's LP once more for the parts of its time."""
    solver = pick_solver(peer)
    config = dataclasses.replace(peer.CostModelConfig(), **request["config"])
    if request["alpha"] is not None:
        peer.alpha_g = peer.alpha_c = peer.alpha_n = request["alpha"]
    num_lps = 0

    def counted(*args, **kwargs):
        nonlocal num_lps
        num_lps += 1
        return peer.solve_lp(*args, **kwargs)

    options = {name: None for name in OPEN} | {"compress_w": request["compress_weights"]}
    samples = []
    for _ in range(request["repeats"]):
        num_lps = 0
        started = time.perf_counter()
        policy, _ = peer.solve(config, counted, options)
        samples.append(time.perf_counter() - started)
    answer = {
        "policy": None,
        "search_s_samples": samples,
        "num_lps": num_lps,
        "solver": solver,
        "alpha": [peer.alpha_g, peer.alpha_c, peer.alpha_n],
        "config": dataclasses.asdict(config),
    }
    if policy is None:
        return answer
    batch = policy.gpu_batch_size * policy.num_gpu_batches
    _, _, (tokens_per_s, prefill_s, decode_s), peaks = peer.solve_lp(
        config, batch, policy.gpu_batch_size, compress_w=request["compress_weights"], verbose=0
    )
    return answer | {
        "policy": dataclasses.asdict(policy),
        "predicted_tokens_per_s": tokens_per_s,
        "predicted_prefill_s": prefill_s,
        "predicted_decode_s": decode_s,
        "device_peak_bytes": list(peaks),
    }


def version_beside(path: Path) -> str | None:
    """The version of the package installed in the peer's folder; None for a plain checkout."""
    found = importlib.metadata.distributions(name="flexgen", path=[str(path.parent.parent)])
    return next((distribution.version for distribution in found), None)


def main() -> None:
    request = json.load(sys.stdin)
    path = Path(request["peer"])
    with contextlib.redirect_stdout(io.StringIO()):  # the peer prints as it goes
        try:
            peer = load_peer(path)
        except (ImportError, OSError, SyntaxError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        else:
            answer = run(peer, request)
            answer["peer_version"] = version_beside(path)
            answer["peer_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    json.dump(answer, sys.stdout, default=float)


if __name__ == "__main__":
    main()
