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
kernel = MetalKernel("keyformer_decode", decode.INPUTS, decode.OUTPUTS, source, decode.HEADER, sanitizer=sanitizer)
for name in ("keyformer", "h2o, window", "no room left" if mistake == "" else "one sequence"):
    case = CASES[name]
    step, asked = make(case)
    outcome = decode.decode_kernel(kernel, 128, case.policy, case.layer, step, asked)
    assert outcome.free is not None and np.array(outcome.free).min() >= 0
print("ran")
