"""Inputs for the prefill kernel, made from a seed: prompt chunks of every kind, for the self-test and the tests.

Rows past a call's own hold huge finite numbers. Rows that are not usable hold NaN or infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..scores import LogitNoise
from .prefill import Call


@dataclass(frozen=True)
class Case:
    """One call. `barred`: how much of the rows is not usable; `blind`: so are the first rows, and the first queries see
    none; `deaf`: some queries hold a NaN or an infinity; `overflow`: one has a logit that leaves float32."""

    batch: int = 1
    heads: int = 2
    group: int = 2
    queries: int = 37
    rows: int = 50
    size: int = 16
    spare: int = 3  # rows of the buffer past those that count
    dtype: mx.Dtype = mx.float32
    causal: bool = True
    barred: float = 0.1
    blind: bool = False
    deaf: bool = False
    overflow: bool = False
    noise: str = ""
    redraw: bool = True
    taus: tuple[float, ...] = (1.0,)
    decay: float = 1.0
    sinks: float | None = None  # their size
    soft_cap: float | None = None
    width: float = 1.0  # of the queries
    seed: int = 0


CASES: dict[str, Case] = {
    "every axis differs": Case(batch=2, heads=3, size=32),
    "whole prompt": Case(queries=70, rows=70, spare=0, heads=1, group=3),
    "no spare rows": Case(spare=0),
    "one query": Case(queries=1, rows=40),
    "two queries": Case(queries=2, rows=2, group=4, heads=1),
    "one of everything": Case(heads=1, group=1, queries=1, rows=1, spare=0, barred=0.0),
    "a matrix of queries": Case(queries=8, rows=64, group=1),
    "a block of queries": Case(queries=64, rows=64, group=1, heads=1, barred=0.0),
    "a tile of rows": Case(queries=9, rows=32, barred=0.0),
    "many rows": Case(queries=5, rows=300, heads=1),
    "many queries": Case(queries=200, rows=230, heads=1, group=2),
    "group of 3": Case(group=3, queries=33, rows=65, batch=2, heads=1),
    "no causal mask": Case(causal=False, queries=41, rows=33),
    "no causal mask, every row": Case(causal=False, barred=0.0, batch=2, heads=1),
    "float16": Case(dtype=mx.float16, size=64),
    "bfloat16": Case(dtype=mx.bfloat16, size=48, group=3, queries=45),
    "bfloat16, larger heads": Case(dtype=mx.bfloat16, size=128, heads=1, rows=80),
    "bfloat16, largest heads": Case(dtype=mx.bfloat16, size=256, heads=1, group=1, rows=45),
    "float32, larger heads": Case(size=144, heads=1, queries=20),
    "float32, largest heads": Case(size=256, heads=1, group=1, queries=20, rows=40),
    "logits far apart": Case(width=30.0),
    "blind queries": Case(blind=True, barred=0.0),
    "blind queries, sinks": Case(blind=True, sinks=1.0),
    "most rows barred": Case(barred=0.9, rows=90),
    "deaf queries": Case(deaf=True),
    "deaf queries, no causal mask": Case(deaf=True, causal=False, barred=0.0, sinks=1.0),
    "deaf queries, soft cap": Case(deaf=True, soft_cap=2.0),
    "overflow": Case(overflow=True),
    "weights": Case(decay=0.8, batch=2),
    "small weights": Case(decay=0.05),
    "temperature": Case(taus=(1.7,)),
    "temperatures": Case(taus=(0.6, 1.3, 2.0), batch=3, heads=1, sinks=1.0),
    "sinks": Case(sinks=1.0, group=3, batch=2),
    "large sinks": Case(sinks=200.0),
    "soft cap": Case(soft_cap=1.5, width=3.0),
    "gumbel": Case(noise="gumbel", batch=2, taus=(1.0, 1.4)),
    "gumbel, frozen": Case(noise="gumbel", redraw=False, heads=3),
    "many rows, gumbel": Case(noise="gumbel", queries=9, rows=700, heads=1),
    "gaussian": Case(noise="gaussian", queries=70, rows=70, heads=1),
    "gaussian, frozen": Case(noise="gaussian", redraw=False),
    "constant": Case(noise="constant", sinks=1.0),
    "gumbel, bfloat16, no causal mask": Case(noise="gumbel", dtype=mx.bfloat16, causal=False),
    "everything": Case(
        noise="gumbel", batch=2, group=3, taus=(0.8, 1.9), decay=0.95, sinks=1.0, soft_cap=4.0, width=2.0, deaf=True
    ),
}


def make(case: Case) -> Call:
    """The same case makes the same numbers."""
    rng = np.random.default_rng(2000 + case.seed)
    B, H, S, n, D = case.batch, case.heads, case.queries, case.rows, case.size
    queries = rng.normal(size=(B, H * case.group, S, D)) * case.width
    keys = rng.normal(size=(B, H, n + case.spare, D))
    usable = rng.random((B, H, n)) >= case.barred
    if case.blind:
        usable[..., : n - S + 4] = False
    if case.deaf:
        queries[0, 0, S // 2, 1] = math.nan
        queries[-1, -1, S // 3, D - 1] = math.inf
        queries[-1, -1, S - 1] = -math.inf
    if case.overflow:
        keys[0, 0, 1], queries[0, 1, S // 2] = 1e20, 1e20
        usable[0, 0, 1] = True
    keys[:, :, :n][~usable] = np.where(rng.random((~usable).sum()) < 0.5, math.nan, math.inf)[:, None]
    keys[:, :, n:] = 6e4 if case.dtype == mx.float16 else 3e38
    noise = None
    if case.noise:
        rows = np.stack([[rng.permutation(2 * n)[:n] for _ in range(H)] for _ in range(B)]).astype(np.int32)
        asking = np.arange(S)[None] + 2 * n + 100 * np.arange(B)[:, None]
        asked_by = mx.array(asking.astype(np.int32)) if case.redraw else None
        noise = LogitNoise(2**35 + case.seed, 3, mx.array(rows), asked_by, case.noise)
    sinks = None
    if case.sinks is not None:
        sinks = mx.array((rng.normal(size=H * case.group) * case.sinks).astype(np.float32)).astype(case.dtype)
    taus = mx.array(case.taus, mx.float32)[:, None, None, None]
    return Call(
        mx.array(queries.astype(np.float32)).astype(case.dtype),
        mx.array(keys.astype(np.float32)).astype(case.dtype),
        n,
        D**-0.5,
        case.causal,
        mx.array(usable),
        noise,
        taus if len(case.taus) > 1 else case.taus[0],
        mx.array(case.decay ** np.arange(S - 1, -1, -1), mx.float32) if case.decay < 1 else None,
        sinks,
        case.soft_cap,
    )
