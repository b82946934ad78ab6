"""Counter-based random numbers: each depends only on its seed, request and position."""

import numpy as np

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox4x32(counter_4N: np.ndarray, key_2N: np.ndarray) -> np.ndarray:
    """Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    32-bit words are in uint64, for their products: counters [4, N] and keys [2, N] to random words [4, N].
    """
    even, odd, key = counter_4N[::2], counter_4N[1::2], key_2N
    for _ in range(10):
        product = even * _MULTIPLIERS
        even, odd = (product >> _HALF)[::-1] ^ odd ^ key, (product & _WORD)[::-1]
        key = (key + _KEY_STEPS) & _WORD
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: np.ndarray, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a uniform in [0, 1) of 53 bits for each (seed, request, position): key and counter of Philox 4x32."""
    seeds, requests, positions = (
        np.asarray(values).astype(np.uint64) for values in np.broadcast_arrays(seeds, requests, positions)
    )
    counter = np.stack([positions & _WORD, positions >> _HALF, requests & _WORD, requests >> _HALF])
    words = philox4x32(counter, np.stack([seeds & _WORD, seeds >> _HALF]))
    return ((words[0] >> np.uint64(5)) * 2.0**26 + (words[1] >> np.uint64(6))) * 2.0**-53
