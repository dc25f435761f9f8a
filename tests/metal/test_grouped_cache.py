"""Random lives of whole caches, layers in groups: with the Metal text on this CPU, and in array operations."""

from __future__ import annotations

from typing import Any

import pytest
from emulator import MetalKernel
from stories import Story, compare, spied

from keyformer import eviction
from keyformer.kernels import decode, prefill, walk

pytestmark = pytest.mark.metal


def build(
    back_end: str, name: str, inputs: Any, outputs: Any, source: str, header: str, cuda_header: str = ""
) -> MetalKernel:
    key = name, source, header
    if key not in _built:
        _built[key] = MetalKernel(name, inputs, outputs, source, header)
    return _built[key]


_built: dict[tuple[str, str, str], MetalKernel] = {}


@pytest.mark.parametrize(
    "kind, used",
    [
        ("keyformer", "decode prefill"),
        ("h2o, last 3", "decode"),
        ("queries, noise at the decision", "decode prefill"),
        ("keyformer_proxy", "decode walk"),
        ("proxy without noise", "decode walk"),
        ("random", "decode"),
    ],
)
def test_a_life_with_kernels_is_a_life_without(kind: str, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = spied()
    for seed in range(2):
        lives = []
        for back_end in (None, "metal"):
            for module in (decode, prefill, walk):
                monkeypatch.setattr(module, "backend", lambda back_end=back_end: back_end)
                monkeypatch.setattr(module, "build", build)
                monkeypatch.setattr(module, "_serves", {} if seed == 0 else module._serves)
            monkeypatch.setattr(decode, "THREADS", {"metal": 64})
            monkeypatch.setattr(walk, "_SIZES", {"metal": ((64, 8),)})
            monkeypatch.setattr(eviction, "on_cpu", lambda: False)
            lives.append(Story(seed, kind, (2, 3), model).tell(16))
        compare(*lives)
    served = {name: m._serves for name, m in (("decode", decode), ("prefill", prefill), ("walk", walk))}
    assert {name for name, cases in served.items() if cases} == set(used.split())
    assert all(all(cases.values()) for cases in served.values())
