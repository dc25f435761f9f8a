"""The decode kernel's Metal source, run on a CPU, against float64 and against the array operations.

`make test-metal` runs these; they need clang-19 and nothing else that a developer's Linux lacks.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from decode_cases import CASES, Case, check, make, truth
from emulator import BACKWARD, FORWARD, MetalError, MetalKernel, sanitized
from mistakes import MISTAKES

from keyformer.kernels import decode
from keyformer.kernels.build import MOST_BYTES, THREADS

pytestmark = pytest.mark.metal


def new_kernel(source: str = decode.SOURCE, header: str = decode.HEADER) -> MetalKernel:
    return MetalKernel("keyformer_decode", decode.INPUTS, decode.OUTPUTS, source, header)


@pytest.fixture(scope="module")
def kernel() -> MetalKernel:
    return new_kernel()


def run(kernel: MetalKernel, case: Case, threads: int, schedule: int = FORWARD) -> int:
    step, asked = make(case)
    assert decode.unsupported(case.policy, step, asked, threads) is None
    kernel.schedule = schedule
    outcome = decode.decode_kernel(kernel, threads, case.policy, case.layer, step, asked)
    capacity = np.array(outcome.scores)[0, :, max(step.rows) :]
    assert (capacity == np.array(step.scores)[0, :, max(step.rows) :]).all()  # copied, whatever they hold
    return check(case, step, outcome, truth(case.policy, case.layer, step, asked))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_in_every_order(kernel: MetalKernel, case: Case) -> None:
    assert sum(run(kernel, case, 64, schedule) for schedule in (FORWARD, BACKWARD, 2, 3)) == 0


@pytest.mark.parametrize("threads", [32, 96, *sorted(THREADS.values())])
def test_any_number_of_threads(kernel: MetalKernel, threads: int) -> None:
    for name in ("several rows a thread", "ties, window"):
        assert run(kernel, CASES[name], threads) == 0
    assert kernel.threadgroup_bytes <= MOST_BYTES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_threadgroup_memory_is_what_the_dispatcher_counts(kernel: MetalKernel, case: Case) -> None:
    step, asked = make(case)
    decode.decode_kernel(kernel, 64, case.policy, case.layer, step, asked)
    group = 1 if asked is None else case.group
    tiles = decode._tiles(64, max(case.rows), group, case.size)
    counted = decode._threadgroup_bytes(tiles, 64)
    if case.policy.attention == "none":  # nothing is summed: the compiler drops those variables
        assert kernel.threadgroup_bytes < counted
    else:
        assert kernel.threadgroup_bytes == counted


def test_the_same_step_gives_the_same_bits_in_every_order(kernel: MetalKernel) -> None:
    case = CASES["keyformer"]
    step, asked = make(case)
    bits = set()
    for schedule in range(6):
        kernel.schedule = schedule
        outcome = decode.decode_kernel(kernel, 128, case.policy, case.layer, step, asked)
        assert outcome.free is not None
        bits.add((np.array(outcome.scores).tobytes(), np.array(outcome.free).tobytes()))
    assert len(bits) == 1


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name: str) -> None:
    """The tests above are able to fail: each mistake is, by a compiler, by the runtime or by a wrong number."""
    mistake = MISTAKES[name]
    kernel = new_kernel(*mistake.plant(decode.SOURCE, decode.HEADER))
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
    done = sanitized(sanitizer, "decode", mistake)
    found_by = "address" if mistake == "reads beyond the rows" else "thread"
    if mistake and sanitizer == found_by:
        assert done.returncode == 66, done.stdout + done.stderr
    else:
        assert (done.returncode, done.stdout.strip()) == (0, "ran"), done.stderr


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
