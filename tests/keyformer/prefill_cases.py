"""The mass of each call of `keyformer.kernels.prefill_cases` in float64: for array operations, GPU and emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import oracle

from keyformer.kernels.prefill import Call
from keyformer.kernels.prefill_cases import CASES, Case, make

__all__ = ["CASES", "Case", "check", "make", "truth"]

EXACT = 1e-5  # of a mass: float32 logits, exponentials and noise; 16-bit numbers are multiplied exactly


def truth(call: Call) -> np.ndarray:
    """[B, Hkv, n] in float64."""
    queries, keys = (np.array(a.astype(mx.float32), np.float64) for a in (call.queries, call.keys[:, :, : call.n]))
    B, Hq, S, _ = queries.shape
    H, n = keys.shape[1:3]
    usable = np.array(call.usable)
    allowed = np.broadcast_to(np.repeat(usable, Hq // H, axis=1)[:, :, None], (B, Hq, S, n)).copy()
    if call.causal:
        allowed &= np.arange(n) <= np.arange(S)[:, None] + n - S
    keys[~usable] = 0.0
    # a query that holds what is no number gives nothing, nor does one with a logit that float32 cannot hold
    finite = np.isfinite(queries).all(axis=-1)
    queries[~finite] = 0.0
    logits = queries @ np.repeat(keys, Hq // H, axis=1).swapaxes(2, 3)
    finite &= ~((np.abs(logits) > 3.4e38) & allowed).any(axis=-1)
    queries[~finite] = 0.0
    allowed &= finite[..., None]
    g = np.zeros((B, Hq, S, n))
    if call.noise is not None:
        noise, rows = call.noise, np.array(call.noise.rows)
        if noise.queries is None:
            for b, h, r in np.ndindex(B, Hq, n):
                position = int(rows[b, h * H // Hq, r])
                g[b, h, :, r] = oracle.draw(noise.distribution, noise.seed, noise.layer, h, position)
        else:
            asking = np.array(noise.queries)
            for b, h, t, r in np.ndindex(B, Hq, S, n):
                position = int(rows[b, h * H // Hq, r])
                query = int(asking[b, t])
                g[b, h, t, r] = oracle.draw(noise.distribution, noise.seed, noise.layer, h, position, query)
    taus = np.array(call.tau, np.float64).reshape(-1)
    masses = [
        oracle.mass(
            queries[b : b + 1],
            keys[b : b + 1],
            call.scale,
            allowed[b : b + 1],
            np.zeros((1, Hq, S, n)),
            g[b : b + 1],
            float(taus[b % len(taus)]),
            None if call.weight is None else np.array(call.weight, np.float64)[None],
            None if call.sinks is None else np.array(call.sinks.astype(mx.float32), np.float64),
            call.soft_cap,
        ).sum(axis=2)
        for b in range(B)
    ]
    return np.concatenate(masses)


def check(got: mx.array, true: np.ndarray) -> None:
    assert got.dtype == mx.float32 and got.shape == true.shape
    np.testing.assert_allclose(np.array(got), true, rtol=EXACT, atol=1e-6)
