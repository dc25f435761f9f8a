"""The decode kernel's Metal source, run on a CPU, against float64 and against the array operations.

`make test-metal` runs these; they need clang-19 and nothing else that a developer's Linux lacks.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from decode_cases import CASES, Case, check, make, truth
from emulator import BACKWARD, FORWARD, MetalError, MetalKernel, run_sanitized
from mistakes import MISTAKES

from keyformer.kernels import decode
from keyformer.kernels.build import MOST_BYTES, THREADS
from keyformer.kernels.decode import MOST_LAYERS

pytestmark = pytest.mark.metal


class Emulated:
    """The decode kernel for any number of layers."""

    def __init__(self, source: str = decode.SOURCE, header: str = decode.HEADER) -> None:
        self._text = source, header
        self._kernels: dict[int, MetalKernel] = {}

    def of(self, layers: int, schedule: int = FORWARD) -> MetalKernel:
        if layers not in self._kernels:
            source, header = self._text
            self._kernels[layers] = MetalKernel(
                "keyformer_decode", decode.inputs(layers), decode.OUTPUTS, source, decode.header(layers, header)
            )
        self._kernels[layers].schedule = schedule
        return self._kernels[layers]


@pytest.fixture(scope="module")
def kernel() -> Emulated:
    return Emulated()


def run(kernel: Emulated, case: Case, threads: int, schedule: int = FORWARD) -> int:
    given = make(case)
    assert decode.unsupported(case.policy, given.reads[0], given.now, threads) is None
    of_layers = kernel.of(len(case.layers), schedule)
    after = decode.decode_kernel(of_layers, threads, case.policy, given.reads, given.rows, given.now)
    n = max(case.rows)
    for got, before in ((after.scores, given.rows.scores), (after.positions, given.rows.positions)):
        assert (np.array(got)[0, :, n:] == np.array(before)[0, :, n:]).all()  # copied, whatever they hold
    return check(case, given, after, truth(case.policy, given))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_in_every_order(kernel: Emulated, case: Case) -> None:
    assert sum(run(kernel, case, 64, schedule) for schedule in (FORWARD, BACKWARD, 2, 3)) == 0


@pytest.mark.parametrize("threads", [32, 96, *sorted(THREADS.values())])
def test_any_number_of_threads(kernel: Emulated, threads: int) -> None:
    for name in ("several rows a thread", "ties, window"):
        assert run(kernel, CASES[name], threads) == 0
    assert kernel.of(1).threadgroup_bytes <= MOST_BYTES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_threadgroup_memory_is_what_the_dispatcher_counts(kernel: Emulated, case: Case) -> None:
    given, of_layers = make(case), kernel.of(len(case.layers))
    decode.decode_kernel(of_layers, 64, case.policy, given.reads, given.rows, given.now)
    group = case.group if case.policy.attention == "query" else 1
    counted = decode._threadgroup_bytes(decode._tiles(64, max(case.rows), group, case.size), 64)
    if case.policy.attention == "none":  # nothing is summed: the compiler drops those variables
        assert of_layers.threadgroup_bytes < counted
    else:
        assert of_layers.threadgroup_bytes == counted


def test_the_same_step_gives_the_same_bits_in_every_order(kernel: Emulated) -> None:
    case = CASES["keyformer"]
    given = make(case)
    bits = set()
    for schedule in range(6):
        of_layers = kernel.of(1, schedule)
        after = decode.decode_kernel(of_layers, 128, case.policy, given.reads, given.rows, given.now)
        bits.add((np.array(after.scores).tobytes(), np.array(after.slot).tobytes()))
    assert len(bits) == 1


def test_metal_has_buffers_for_as_many_layers_as_go_together(kernel: Emulated) -> None:
    case = replace(CASES["eight layers"], layers=tuple(range(MOST_LAYERS["metal"])))
    assert run(kernel, case, 32) == 0
    with pytest.raises(MetalError, match="buffers, Metal has 31"):
        run(kernel, replace(case, layers=tuple(range(MOST_LAYERS["metal"] + 3))), 32)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name: str) -> None:
    """The tests above are able to fail: each mistake is, by a compiler, by the runtime or by a wrong number."""
    mistake = MISTAKES[name]
    kernel = Emulated(*mistake.plant(decode.SOURCE, decode.HEADER))
    with pytest.raises(mistake.caught_by) as caught:
        for schedule in (FORWARD, BACKWARD, 2, 3):
            for case in mistake.cases:
                assert run(kernel, CASES[case], 64, schedule) == 0, "another row"
    assert mistake.says in str(caught.value)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize(
    "mistake", ["", "a barrier is missing", "numbers of one vector by several threads", "reads beyond the rows"]
)
def test_sanitizers_find_nothing_but_planted_mistakes(sanitizer: str, mistake: str) -> None:
    found_by = "address" if mistake == "reads beyond the rows" else "thread"
    run_sanitized("decode", sanitizer, mistake, bool(mistake) and sanitizer == found_by)


def test_what_is_not_metal_is_named() -> None:
    with pytest.raises(MetalError, match="double"):
        kernel = MetalKernel("k", ["a"], ["b"], "double x = 1.0f; b[thread_position_in_grid.x] = float(x) + a[0];")
        kernel(
            inputs=[mx.zeros((9,))],
            output_shapes=[(9,)],
            output_dtypes=[mx.float32],
            grid=(9, 1, 1),
            threadgroup=(9, 1, 1),
        )
