"""python sanitized.py KERNEL thread|address MISTAKE: small cases under a sanitizer, whose runtime is preloaded."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "keyformer"), str(HERE.parent.parent)]

import decode_cases  # noqa: E402
import numpy as np  # noqa: E402
import prefill_cases  # noqa: E402
import walk_cases  # noqa: E402
from emulator import MetalKernel  # noqa: E402
from mistakes import BARRIER, nth, replaced  # noqa: E402

from keyformer.kernels import decode, insert, prefill, walk  # noqa: E402

what, sanitizer, mistake = sys.argv[1:]
if what == "decode":
    source = {
        "": lambda s: s,
        "a barrier is missing": lambda s: nth(s, BARRIER, 3, ""),
        "numbers of one vector by several threads": lambda s: replaced(
            s, "query[i] = q;", "query[(i + tid % 3) % (HEADS * NQ)][tid % 4] = q[0];"
        ),
        "reads beyond the rows": lambda s: replaced(s, "size_t(j < n ? j : n - 1)", "size_t(j)"),
    }[mistake](decode.SOURCE)
    for name in ("keyformer", "h2o, window", "no room left" if mistake == "" else "one sequence"):
        case = decode_cases.CASES[name]
        given, L = decode_cases.make(case), len(case.layers)
        text = source, decode.header(L)
        kernel = MetalKernel("keyformer_decode", decode.inputs(L), decode.OUTPUTS, *text, sanitizer=sanitizer)
        after = decode.decode_kernel(kernel, 128, case.policy, given.reads, given.rows, given.now)
        assert np.array(after.slot).min() >= 0
elif what == "walk":
    source = {
        "": lambda s: s,
        "the same half every time": lambda s: replaced(s, "(t & 1) * NSG", "0"),
        "reads beyond the tokens": lambda s: replaced(s, "min(t + 4, final)", "(t + 4)"),
    }[mistake](walk.SOURCE)
    kernel = MetalKernel("keyformer_walk", walk.INPUTS, walk.OUTPUTS, source, walk.HEADER, sanitizer=sanitizer)
    for name in ("noise", "in tiles", "bad keys, nothing stored", "rows far above all others go", "one token"):
        one = walk_cases.CASES[name]
        block = walk_cases.make(one)
        limits = one.budget, one.n_sink, one.recent
        walk.walk_kernel(kernel, 128, block.stored, block.new, block.scores, *limits, block.gumbel, block.taus)
elif what == "prefill":
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
else:
    source, logit_source = insert.SOURCE, insert.LOGIT_SOURCE
    if mistake == "no barrier before the last choice":
        source = nth(source, BARRIER, 3, "")
    elif mistake == "reads beyond the rows":
        logit_source = replaced(logit_source, "min(j, n - 1)", "j")
    kernels = (
        MetalKernel("keyformer_row_logits", insert.LOGIT_INPUTS, insert.LOGIT_OUTPUTS, logit_source, "", sanitizer),
        MetalKernel("keyformer_insert", insert.INPUTS, insert.OUTPUTS, source, insert.HEADER, sanitizer),
    )
    for name in ("noise", "turned, odd size", "within the budget", "one head, one stored row"):
        row = walk_cases.ROW_CASES[name]
        rows, new, rule = walk_cases.make_row(row)
        arrival = row.token, row.noise_at, row.position
        for alone in (False, True):
            _, index = insert.insert_kernel(kernels, rows, new, *arrival, rule, row.tau, 128, alone)
            assert np.array(index).min() >= 0
print("ran")
