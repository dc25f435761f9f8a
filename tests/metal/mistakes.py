"""Mistakes to plant in the decode kernel, one at a time, and what has to notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emulator import MetalError

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def replaced(text: str, old: str, new: str) -> str:
    """`text` with one place changed; an error where there is none."""
    assert old in text, f"the kernel no longer has {old!r}"
    return text.replace(old, new, 1)


def nth(text: str, old: str, number: int, new: str) -> str:
    """`text` with the place of that number, from 1 on, changed."""
    at = -1
    for _ in range(number):
        at = text.index(old, at + 1)
    return text[:at] + new + text[at + len(old) :]


@dataclass(frozen=True)
class Mistake:
    """`plant` makes (source, header) out of the right ones; `caught_by` with a message that `says` something."""

    plant: Callable[[str, str], tuple[str, str]]
    caught_by: type[BaseException] = AssertionError
    says: str = ""
    cases: tuple[str, ...] = ("several rows a thread",)


def _source(old: str, new: str, *cases: str) -> Mistake:
    """Seen as a wrong number."""
    return Mistake(lambda s, h: (replaced(s, old, new), h), cases=cases or ("several rows a thread",))


def _header(old: str, new: str, *cases: str) -> Mistake:
    """The same in a function of the header."""
    return Mistake(lambda s, h: (s, replaced(h, old, new)), cases=cases)


def _refused(old: str, new: str, says: str, *cases: str) -> Mistake:
    """Refused by a compiler or the runtime."""
    return Mistake(lambda s, h: (replaced(s, old, new), h), MetalError, says, cases or ("several rows a thread",))


def _barrier(number: int, *cases: str) -> Mistake:
    return Mistake(lambda s, h: (nth(s, BARRIER, number, ""), h), cases=cases or ("several rows a thread",))


def _helper(text: str, says: str, old: str = "", new: str = "") -> Mistake:
    return Mistake(lambda s, h: (replaced(s, old, new) if old else s, h + text), MetalError, says)


MISTAKES: dict[str, Mistake] = {
    # what the threads do together
    "no barrier after the query": _barrier(1),
    "no barrier after the sums": _barrier(2),
    "no barrier after the sums, heads in turns": _barrier(2, "more heads than at once"),
    "no barrier before the last choice": _barrier(3),
    "a simdgroup barrier": Mistake(
        lambda s, h: (nth(s, BARRIER, 2, "simdgroup_barrier(mem_flags::mem_threadgroup);"), h)
    ),
    "a barrier in divergent flow": Mistake(
        lambda s, h: (nth(s, BARRIER, 1, f"if (tid < 32) {BARRIER}"), h), MetalError, "barrier"
    ),
    "a sum in divergent flow": _refused("s = simd_sum(s);", "if (lane < 16) s = simd_sum(s);", "simd"),
    "a maximum in a loop of uneven length": _refused(
        "m[g] = simd_max(m[g]);", "for (int j = lane; j < 40; j += 32) m[g] = simd_max(m[g]);", "simd"
    ),
    "an exchange that some rows skip": _refused(
        "for (int o = LANES / 2; o > 0; o /= 2) {", "if (first + part < n) for (int o = LANES / 2; o; o /= 2) {", "simd"
    ),
    "threadgroup memory nobody wrote": _source("query[i] = q;", "if (i != 1) query[i] = q;"),
    "too much threadgroup memory": _refused(
        "threadgroup float least[NSG];", "threadgroup float least[NSG + 9000];", "bytes of threadgroup memory"
    ),
    # Metal's language
    "double": _refused("float s = 0.0f;", "double s = 0.0f;", "double"),
    "a literal without f": _refused("float odd = 0.0f;", "float odd = 0.1 * float(lane);", "double"),
    "float to bfloat without a word": _refused("vec<float, 4> query", "vec<T, 4> query", "C++14", "bfloat16"),
    "a 64-bit reduction": _refused(
        "const int low_row = simd_min(best ==",
        "const int low_row = (int)simd_min((long)best_row) + simd_min(best ==",
        "ambiguous",
    ),
    "a helper of device memory, given a small input": _helper(
        "inline int first_of(const device int* p) { return p[0]; }\n", "C++14", "= fixed[0]", "= first_of(fixed)"
    ),
    "a pointer without address space": _refused("const device vec<T, 4>* rows =", "const vec<T, 4>* rows =", "C++14"),
    "a threadgroup variable in a helper": _helper(
        "inline float kept(float x) { threadgroup float z[2]; z[0] = x; return z[0]; }\n", "address space"
    ),
    "a threadgroup variable in an inner scope": _refused(
        "  if (sg == 0) {", "  if (sg == 0) {\n threadgroup float inner[2]; inner[0] = 1.0f;", "OpenCL"
    ),
    "a variable that lasts": _helper("int keyformer_count = 3;\n", "OpenCL"),
    "write to an input": _refused("scores_out[at] = x;", "scores[at] = x;", "C++14"),
    "write to an input by force": _refused(
        "scores_out[at] = x;", "((device float*)scores)[at] = x; scores_out[at] = x;", "wrote to an input"
    ),
    "a write beyond the output": _refused(
        "if (lane == 0) slot_out[row] =",
        "if (lane == 0) slot_out[row + 64] = 0; if (lane == 0) slot_out[row] =",
        "beyond an output",
    ),
    "max of int and uint": _refused("max(offset - position, 1)", "max(offset - position, 1u)", "ambiguous"),
    "exp of an int": _refused("exp(mine - all)", "exp(lane)", "ambiguous"),
    "a local named like an attribute": _refused(
        "const int tid =", "const uint thread_index_in_simdgroup = 0u;\n  const int tid =", "C++14"
    ),
    "C++17": _refused("const int tid =", "struct P { int a, b; }; auto [p, q] = P{1, 2};\n  const int tid =", "C++14"),
    "no function of that name": _refused("tanh(l / cap)", "erf(l / cap)", "erf"),
    # rows
    "an output is not written": _source("if (lane == 0) slot_out[row] = n <= budget ? n : r_all;", ""),
    "a tie goes to the higher position": _source("position < best_at", "position > best_at", "ties", "ties, window"),
    "a tie goes to the lowest slot": _source("best_at = position;", "best_at = j;", "ties", "ties, window"),
    "a tie between simdgroups": _source(
        "simd_min(l == l_all ? a : FAR)", "simd_min(l == l_all ? lane * 100 : FAR)", "ties, window"
    ),
    "rows of another sequence": _source("n = now[its]", "n = now[4]", "proxy", "keyformer"),
    "offset of another sequence": _source("offset = now[its + 1]", "offset = now[5]", "keyformer"),
    "recent rows of another sequence": _source("recent = now[its + 2]", "recent = now[6]", "proxy, no noise"),
    "temperature of another sequence": _source("now[its + 3]", "now[7]", "keyformer"),
    "rows past the end compete": _source(
        "    if (j < n) {\n      const size_t at = at0",
        "    if (j < capacity) {\n      const size_t at = at0",
        "h2o, per query",
    ),
    "budget of another sequence": _source("budget = now[its + 4]", "budget = now[8]", "some below the budget"),
    "rows past the end give mass": _source("j < n ? scores[at0", "j < capacity ? scores[at0", "h2o"),
    "queries of the first layer": Mistake(
        lambda s, h: (replaced(s, "= QUERIES_OF_LAYER", "= queries0"), h), cases=("two layers",)
    ),
    "keys of the first layer": _source("= KEYS_OF_LAYER", "= keys0", "three layers, proxy"),
    "noise of the first layer": _source("fixed[6 + layer]", "fixed[6]", "two layers"),
    "sinks of the first layer": _source("sinks[(layer * kv_heads + kv)", "sinks[(kv)", "three layers"),
    "rows of a layer beside those of another": _source(
        "key0 = size_t(of_layer)", "key0 = size_t(row)", "three layers, proxy"
    ),
    "layers and sequences in turn": _source(
        "batch = row / kv_heads % sequences, layer = row / kv_heads / sequences",
        "layer = row / kv_heads % 2, batch = row / kv_heads / 2",
        "two layers of three sequences",
    ),
    # the new row
    "the score of the row that went": _source("before = j == fresh ? start : scores", "before = scores", "h2o"),
    "mass of the row that went": _source("j == fresh ? 0.0f : masses", "masses", "h2o, window"),
    "position of the row that went": _source(
        "const int position = j == fresh ? offset - 1 : positions[at];", "const int position = positions[at];", "h2o"
    ),
    "noise at the position of the row that went": _source(
        "const int position = j == fresh ? offset - 1 : positions[at0",
        "const int position = positions[at0",
        "keyformer",
    ),
    "mass by the score of the row that went": _source(
        "its_score = j == fresh ? start", "its_score = j == fresh ? 0.0f", "bad keys, last queries"
    ),
    "a new bad key is like any other": _source("? 0.0f : -INFINITY;\n\n", "? 0.0f : 0.0f;\n\n", "all keys are bad"),
    "the last number of a new key is not looked at": _source(
        "d < D; d += 32) broken", "d < D - 1; d += 32) broken", "a late NaN"
    ),
    "a new position that nobody writes": _source(
        "positions_out[at] = position;", "if (j != fresh) positions_out[at] = position;", "h2o"
    ),
    "spare positions are lost": _source(
        "positions_out[at] = positions[at];", "positions_out[at] = 0;", "below the budget"
    ),
    "a row is freed below the budget": _source("n <= budget ? n : r_all", "r_all", "below the budget"),
    "none is freed at the budget": _source("n <= budget ? n : r_all", "n <= budget + 1 ? n : r_all", "proxy"),
    "spare rows are lost": _source("scores_out[at] = scores[at];", "scores_out[at] = 0.0f;"),
    "the buffer's rows are not the scores'": _source("size_t(key_rows)", "size_t(capacity)", "keys of their own"),
    "the last row is forgotten": _source("if (first < n) {", "if (first < n - 1) {", "a simdgroup of rows"),
    "the wrong lane's row": _source("const int j = first + sub * RPS + part;", "const int j = first + lane;", "h2o"),
    "the query goes on past its head": _source(
        "if (d + x < D && g < GROUP)", "if (g < GROUP)", "sizes of 4 do not fill the lanes"
    ),
    # protection
    "one sink too few": _source("position < n_sink", "position < n_sink - 1", "ties, window"),
    "one sink too many": _source("position < n_sink", "position <= n_sink", "ties, window"),
    "one recent row too few": _source("offset - recent)", "offset - recent + 1)", "one recent row"),
    # mass
    "no maximum": _source("exp(e[i][g] - m[g])", "exp(e[i][g])", "logits far apart"),
    "the simdgroup's maximum for all": _source("exp(m[g] - all) / total", "1.0f / total", "logits far apart"),
    "a row masked by its own noise": _source("l += keyformer_noise", "l -= keyformer_noise", "keyformer"),
    "one head's noise for all": _source("kv * GROUP + g0 + g);\n        asking", "kv);\n        asking", "keyformer"),
    "noise of the second heads": _source(
        "kv * GROUP + g0 + g);\n        asking", "kv * GROUP + g);\n        asking", "more heads than at once"
    ),
    "redrawn for the next query": _source("REDRAW, offset - 1)", "REDRAW, offset)", "keyformer"),
    "never redrawn": _source("(head_stream[g], REDRAW", "(head_stream[g], false", "keyformer"),
    "always redrawn": _source("(head_stream[g], REDRAW", "(head_stream[g], true", "keyformer, frozen"),
    "temperature before the noise": _source("e[i][g] = l / divisor;", "e[i][g] = l;", "keyformer"),
    "temperature twice": _source("BY_QUERY && !AT_SELECTION ? tau", "BY_QUERY ? tau", "query, select"),
    "sinks undivided": _source("GROUP + g0 + g])) / divisor", "GROUP + g0 + g]))", "sinks, temperature"),
    "sinks of the first head": _source(
        "sinks[(layer * kv_heads + kv) * GROUP", "sinks[layer * kv_heads * GROUP", "sinks"
    ),
    "a sink above all rows": _source("all = max(all, sink);", "", "a large sink"),
    "cap after noise": _source(
        "if (SOFT_CAP) l = cap * tanh(l / cap);", "if (SOFT_CAP) l = tanh(l / cap);", "soft cap"
    ),
    "the new key scores itself": _source("&& !(BY_KEY && j == fresh)", "", "proxy"),
    "the new key starts at 1 always": _source("j == fresh && offset == 1", "j == fresh", "proxy"),
    "the first row of all starts at 0": _source("j == fresh && offset == 1", "false", "one row of all"),
    "a bad key takes mass": _source("its_score != -INFINITY", "j < n", "bad keys", "bad keys, proxy"),
    "a deaf query deafens its group": _source("asks[g] ? dots[g][0] : 0.0f", "dots[g][0]", "a deaf query"),
    "a deaf query counts": _source("asks[g] && total", "total", "a deaf query"),
    "overflow is not noticed": _source("if (!(total < INFINITY)) dead = true;", "", "overflow"),
    "the decay forgotten": _source("DECAY ? before * decay : before", "before", "h2o, decay"),
    "the window does not move": _source("size_t(c + 1)", "size_t(c)", "h2o, window"),
    "the last query is not in the window": _source("in_window + given;", "in_window;", "tova"),
    # rank
    "the position counts": _source("max(offset - position, 1)", "max(position, 1)", "h2o, per query"),
    "the window does not bound the count": _source(
        "seen = min(seen, int(WINDOW))", "seen = max(seen, int(WINDOW))", "h2o, window, per query"
    ),
    "an inexact sum of decays": _source("keyformer_fallen(count", "1.0f - exp(count", "h2o, slow decay"),
    "noise of the query head at the decision": _source(
        "keyformer_head(stream, kv);", "keyformer_head(stream, kv * 2);", "random"
    ),
    "noise without temperature": _source("x += tau * keyformer_noise", "x += keyformer_noise", "query, select"),
    "half of the stream": Mistake(
        lambda s, h: (s, replaced(h, "h ^ (h >> 16))", "h ^ (h >> 15))")), cases=("keyformer",)
    ),
    "noise of 24 bits": Mistake(lambda s, h: (s, replaced(h, "h >> 9", "h >> 8")), cases=("keyformer",)),
    "a Gaussian's tail": Mistake(
        lambda s, h: (s, replaced(h, "sqrt(w) - 3.0f", "w - 3.0f")), cases=("Gaussian tails",)
    ),
}
