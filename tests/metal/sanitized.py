"""python sanitized.py thread|address MISTAKE: small decode steps under a sanitizer, whose runtime is preloaded."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "keyformer"), str(HERE.parent.parent)]

import numpy as np  # noqa: E402
from decode_cases import CASES, make  # noqa: E402
from emulator import MetalKernel  # noqa: E402
from mistakes import BARRIER, nth, replaced  # noqa: E402

from keyformer.kernels import decode  # noqa: E402

sanitizer, mistake = sys.argv[1:]
source = {
    "": lambda s: s,
    "a barrier is missing": lambda s: nth(s, BARRIER, 3, ""),
    "numbers of one vector by several threads": lambda s: replaced(
        s, "query[i] = q;", "query[(i + tid % 3) % (HEADS * NQ)][tid % 4] = q[0];"
    ),
    "reads beyond the rows": lambda s: replaced(s, "size_t(j < n ? j : n - 1)", "size_t(j)"),
}[mistake](decode.SOURCE)
for name in ("keyformer", "h2o, window", "no room left" if mistake == "" else "one sequence"):
    case = CASES[name]
    given, L = make(case), len(case.layers)
    text = source, decode.header(L)
    kernel = MetalKernel("keyformer_decode", decode.inputs(L), decode.OUTPUTS, *text, sanitizer=sanitizer)
    after = decode.decode_kernel(kernel, 128, case.policy, given.reads, given.rows, given.now)
    assert np.array(after.slot).min() >= 0
print("ran")
