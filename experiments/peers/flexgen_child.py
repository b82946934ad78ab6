"""The process that loads FlexGen's cost model and times its search; ``flexgen_search`` starts this file by name.

It imports only the standard library, so that the peer meets no library of this project. The request
(``experiments.peers.child``):

    peer             path of cost_model.py
    config           fields of its CostModelConfig that replace the defaults
    alpha            null, or the share of every memory that its LP may fill, instead of its own 0.8
    compress_weights whether its LP takes weights of four bits
    repeats          number of searches

The answer: "missing" alone where the peer cannot be loaded, else the peer's unchanged policy ("policy", null when it
found none), its predictions, and the seconds of every search.
"""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import sys
import time
from pathlib import Path

from experiments.peers.child import serve

#: Options without a default on the peer's command line; ``solve`` reads all of them.
OPEN = ("wg", "wc", "cg", "cc", "hg", "hc", "percent", "gbs", "num_gb")


def load_peer(path: Path):
    """Return the cost model as a module. Raise what its imports raise."""
    spec = importlib.util.spec_from_file_location("flexgen_cost_model", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def pick_solver(peer) -> str:
    """Return the LP solver. The peer names PuLP's CBC; where that does not run, HiGHS takes its name."""
    pulp = peer.pulp
    bundled = getattr(pulp, "PULP_CBC_CMD", None)
    if bundled is not None and bundled(msg=False).available():
        return f"CBC, PuLP {pulp.__version__}"
    pulp.PULP_CBC_CMD = lambda msg=False: pulp.HiGHS(msg=msg)
    return f"HiGHS in place of CBC, PuLP {pulp.__version__}"


def run(peer, request: dict) -> dict:
    """Search ``repeats`` times, then solve the best policy's LP once more for the parts of its time."""
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


def search(request: dict) -> dict:
    """Load the peer and search."""
    path = Path(request["peer"])
    try:
        peer = load_peer(path)
    except (OSError, SyntaxError) as error:
        raise ImportError(f"{type(error).__name__}: {error}") from None
    installed = importlib.metadata.distributions(name="flexgen", path=[str(path.parent.parent)])
    return run(peer, request) | {
        "peer_version": next((package.version for package in installed), None),  # None for a plain checkout
        "peer_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


if __name__ == "__main__":
    serve({"search": search})
