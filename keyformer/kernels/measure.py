"""How long a GPU takes for a kernel, told apart from how long Python takes to ask for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import mlx.core as mx

Chain = Callable[[int, mx.array], mx.array]  # step(number, what the step before made) -> what the next one begins with


def seconds_each(step: Chain, start: mx.array, count: int, repeats: int = 5) -> float:
    """Seconds that the GPU takes for one step of a chain of steps, the least of `repeats`.

    A chain is queued behind matrix products that take longer than queueing it does, so that the GPU never waits for
    Python; a chain twice as long gives the time of `count` steps as a difference. MLX waits for the GPU when many
    commands are queued: keep `count` to some dozens.

    Args:
        step: makes one array of another of the same shape and a floating dtype, whatever else it computes.
        start: what the first step begins with.
        count: steps to measure.
    """
    size = 2048 if mx.default_device().type == mx.DeviceType.gpu else 64
    square = mx.zeros((size, size))

    def head(products: int) -> mx.array:
        x = square
        for _ in range(products):
            x = x @ square
        return x[0, 0].astype(start.dtype)

    def chain(products: int, steps: int) -> float:
        x = start + head(products)
        for i in range(steps):
            x = step(i, x)
        began = time.perf_counter()
        mx.eval(x)
        return time.perf_counter() - began

    chain(1, 2 * count)  # compiles
    queued = chain(1, 2 * count)
    product = max((chain(33, 1) - chain(1, 1)) / 32, 1e-6)
    products = min(1 + math.ceil(1.5 * queued / product), 2000)
    times: dict[int, list[float]] = {count: [], 2 * count: []}
    for _ in range(repeats):
        for steps, taken in times.items():
            taken.append(chain(products, steps))
    return max(min(times[2 * count]) - min(times[count]), 0.0) / count


def copies(a: mx.array, count: int) -> list[mx.array]:
    """`count` copies of an array, fewer where fewer are too many for any cache of a chip (128 MiB)."""
    made = [a + 0 for _ in range(min(count, 1 + (128 << 20) // a.nbytes))]
    mx.eval(made)
    return made


def copy_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second that the GPU reads and writes while it copies."""
    a = mx.zeros((megabytes << 18,), mx.float32)
    mx.eval(a)
    return 2 * a.nbytes / max(seconds_each(lambda i, x: x + 1, a, 4), 1e-9)
