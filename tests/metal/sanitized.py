"""python sanitized.py thread|address decode|prefill MISTAKE: small calls under a sanitizer, its runtime preloaded."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "keyformer"), str(HERE.parent.parent)]

import decode_cases  # noqa: E402
import numpy as np  # noqa: E402
import prefill_cases  # noqa: E402
from emulator import MetalKernel  # noqa: E402
from mistakes import BARRIER, nth, replaced  # noqa: E402

from keyformer.kernels import decode, prefill  # noqa: E402


def run_decode(sanitizer: str, mistake: str) -> None:
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
        case = decode_cases.CASES[name]
        step, asked = decode_cases.make(case)
        outcome = decode.decode_kernel(kernel, 128, case.policy, case.layer, step, asked)
        assert outcome.free is not None and np.array(outcome.free).min() >= 0


def run_prefill(sanitizer: str, mistake: str) -> None:
    source = {
        "": lambda s: s,
        "a barrier is missing": lambda s: nth(s, BARRIER, 1, ""),
        "another barrier is missing": lambda s: nth(s, BARRIER, 2, "{}"),
        "reads beyond the rows": lambda s: replaced(s, "size_t(min(y0 + y, most))", "size_t(y0 + y)"),
    }[mistake](prefill.SOURCE)
    tiles = prefill.Tiles(2, 2, 2)
    header, _ = prefill._headers("metal", tiles)
    kernel = MetalKernel("keyformer_prefill", prefill.INPUTS, prefill.OUTPUTS, source, header, sanitizer=sanitizer)
    prefill._ENOUGH = 1  # many tiles for each threadgroup
    for name in ("everything", "no spare rows"):
        mass = prefill.mass_kernel(kernel, tiles, prefill_cases.make(prefill_cases.CASES[name]))
        assert mistake or np.array(mass).min() >= 0


sanitizer, kernel, mistake = sys.argv[1:]
{"decode": run_decode, "prefill": run_prefill}[kernel](sanitizer, mistake)
print("ran")
