"""Mistakes to plant in the kernels, one at a time, and what has to notice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

_RATIO = "redo = redo || !(left > 1e-30f) || out > 0.5f * every;"
_SEVERAL = "several rows a thread"

WALK_MISTAKES: dict[str, Mistake] = {
    # what the threads do together
    "no barrier in a turn": Mistake(lambda s, h: (nth(s, BARRIER, 1, ""), h), MetalError, "simd"),
    "no barrier after the largest logits": _barrier(2, "noise"),
    "no barrier after the sums made again": _barrier(3, "noise"),
    "no barrier after the marks are cleared": _barrier(4),
    "no barrier after the marks": _barrier(5),
    "no barrier after the counts": Mistake(lambda s, h: (nth(s, BARRIER, 6, ""), h), MetalError, "beyond an output"),
    "no barrier before the places": Mistake(lambda s, h: (nth(s, BARRIER, 7, ""), h), MetalError, "beyond an output"),
    "a barrier in divergent flow": Mistake(
        lambda s, h: (nth(s, BARRIER, 1, f"if (tid < 32) {BARRIER}"), h), MetalError, "barrier"
    ),
    "a minimum in divergent flow": _refused("low = simd_min(low);", "if (lane < 16) low = simd_min(low);", "simd"),
    "a barrier that some simdgroups skip": _refused(
        "if (redo || !asks) {", "if (sg == 0 && (redo || !asks)) {", "barrier"
    ),
    "too much threadgroup memory": _refused(
        "threadgroup uchar alive[COLUMNS];", "threadgroup uchar alive[COLUMNS + 32000];", "bytes of threadgroup memory"
    ),
    "a simdgroup that finds nobody": _source(
        "low_at == FAR ? lane == 0 : mine == low_at", "mine == low_at && lane > 0"
    ),
    "a write beyond the output": _refused(
        "scores_out[out0 + size_t(place)] = score[i];",
        "scores_out[out0 + size_t(place)] = score[i]; scores_out[out0 + size_t(place) + 100] = 0.0f;",
        "beyond an output",
    ),
    "write to an input": _refused("scores_out[out0", "scores[out0", "C++14"),
    # rows
    "scores are lost": _source("size_t(place)] = score[i];", "size_t(place)] = 0.0f;"),
    "columns for rows": _source("= label[row0 + size_t(c)];", "= c;", "in tiles"),
    "places of the stretch before": _source("int place = starts[part];", "int place = starts[max(part - 1, 0)];"),
    "places counted from the next one": _refused(
        "c < column[i]; ++c) place", "c <= column[i]; ++c) place", "beyond an output"
    ),
    "counts of the simdgroup itself": _refused(
        "for (int g = 0; g < sg; ++g) at", "for (int g = 0; g <= sg; ++g) at", "beyond an output"
    ),
    "scores of another head": _source("= scores + size_t(row) * size_t(all);", "= scores;", "noise"),
    "logits of another head": _source("logits + size_t(row) *", "logits + size_t(0) *", "noise"),
    "the budget and one": _refused("full = here + 1 > budget", "full = here > budget", "beyond an output"),
    "a newcomer in the wrong place": _source("i == here / THREADS", "i == 0", "several rows a thread, from nothing"),
    "a newcomer with the wrong thread": _source(
        "here % THREADS == tid", "here % 32 == tid", "several rows a thread, from nothing"
    ),
    "the first row of all starts at 0": _source("coming_score = 1.0f;", "", "nothing stored, no noise"),
    "every first row starts at 1": _source("if (prior == 0 && coming_score", "if (coming_score", "no noise"),
    "a bad first row starts at 1": _source(
        "if (prior == 0 && coming_score != -INFINITY)", "if (prior == 0)", "bad keys, nothing stored"
    ),
    # the choice
    "a tie goes to the newcomer": _source("new_rank < best[0]", "new_rank <= best[0]", "bad keys all along"),
    "the newcomer never goes": _source("full && new_rank < best[0]", "false", "no recent rows"),
    "a tie in a thread goes to the last": _source(
        "rank[i] == low ? min(mine, column[i])", "rank[i] == low ? column[i]", "ties among several rows a thread"
    ),
    "a tie in a simdgroup goes to any": _source(
        "const int low_at = simd_min(mine);",
        "const int low_at = -simd_min(mine == FAR ? FAR : -mine);",
        "ties among several rows a thread",
    ),
    "a tie between simdgroups goes to the last": _source(
        "gone[o] < gone[g]", "gone[o] > gone[g]", "ties", "ties among several rows a thread"
    ),
    "NaN is not last": _source("x = x > -INFINITY ? x : -INFINITY;", "", "a score that is no number"),
    "one sink too few": _source("uint(column[i] - n_sink)", "uint(column[i] - n_sink + 1)", "one row may go"),
    "sinks may go": _source("uint(column[i] - n_sink) < free_rows", "uint(column[i]) < free_rows", "one row may go"),
    "one recent row too few": _source("here + 1 - recent - n_sink", "here + 2 - recent - n_sink", "one row may go"),
    "one recent row too many": _source(
        "here + 1 - recent - n_sink", "here - recent - n_sink", "one row may go", "ties"
    ),
    "the newcomer is not protected": _source(
        "if (uint(here - n_sink) >= free_rows) new_rank = INFINITY;", "", "no noise"
    ),
    "noise without temperature": _source("score[i] + tau * frozen[i]", "score[i] + frozen[i]", "noise"),
    "the newcomer's noise without temperature": _source(
        "new_score + tau * new_frozen", "new_score + new_frozen", "no recent rows, noise"
    ),
    "temperature of the next token": _source(
        "coming_tau = taus[after];", "coming_tau = taus[min(after + 1, final)];", "noise"
    ),
    "noise of the column": _source("noises[label[row0 + size_t(j)]]", "noises[j]", "in tiles"),
    "the newcomer's noise is the next one's": _source("noises[first + after]", "noises[first + t]", "noise"),
    "noise of another head": _source("noise + size_t(row) * size_t(numbers[7])", "noise", "noise"),
    # mass
    "logits of a token too early": _source("ahead = min(t + 3, final)", "ahead = min(t + 2, final)"),
    "the newcomer's logits of a token too early": _source(
        "min(t + 2, final) * all + fresh", "min(t + 1, final) * all + fresh"
    ),
    "the newcomer's second logits": _source("second[i] = new_second;", "second[i] = new_next;", "noise"),
    "the newcomer's third logits": _source("third[i] = new_third;", "third[i] = 0.5f * new_third;", "noise"),
    "the newcomer takes no mass": _source("e[i] = new_e;", "e[i] = 0.0f;", "noise"),
    "the newcomer is not in the sum": _source("sums[0] + new_e", "sums[0]", "noise"),
    "the row that went is in the sum": _source("left = every - out", "left = every", "noise"),
    "another row is taken out of the sum": _source(
        "f[1] = column[i] == low_at ? e[i] : f[1]", "f[1] = e[i]", "several rows a thread"
    ),
    "the newcomer that went is in the sum": _source("leaves ? new_e : full", "full", "no recent rows, noise"),
    "sums of one simdgroup": _source("sums[g] += sums[o];", "", "noise"),
    "sums are never made again": _source(_RATIO, "", "rows that took most of the mass go"),
    "sums of nothing are nothing": Mistake(
        lambda s, h: (
            replaced(
                replaced(s, _RATIO, "redo = redo || out > 0.5f * every;"),
                "share = 1.0f / left;",
                "share = left > 0.0f ? 1.0f / left : 0.0f;",
            ),
            h,
        ),
        cases=("rows far above all others go",),
    ),
    "what is left of a sum is trusted": _source(
        _RATIO, "redo = redo || !(left > 1e-30f);", "rows that took most of the mass go"
    ),
    "the first sums have a reference": _source("bool redo = t < 1;", "bool redo = t < 0;", "logits far apart"),
    "no largest logit": _source("top = max(tops[0], new_second);", "top = -90.0f;", "logits far apart"),
    "natural exponentials": _source(
        "e[i] = exp2((next[i] - top) * scale)", "e[i] = exp((next[i] - top) * scale)", "noise"
    ),
    "a bad stored key takes mass": _source("if (score[i] != -INFINITY) {", "if (there) {", "bad keys"),
    "a bad stored key takes mass later": _source(
        "score[i] != -INFINITY ? line[ahead", "column[i] != FAR ? line[ahead", "bad keys"
    ),
    "a bad new key takes mass": _source(
        "new_next = asks ? keyformer_logit(coming_next) : -INFINITY",
        "new_next = keyformer_logit(coming_next)",
        "bad keys",
        "bad keys, nothing stored",
    ),
    "a bad new key gives mass": _source("share = asks && sum > 0.0f", "share = sum > 0.0f", "bad keys"),
    "a bad new key gives what it has": _source("if (redo || !asks) {", "if (redo) {", "bad keys"),
    "NaN is a number": _header(
        "x > -INFINITY ? min(x, 3.402823466e+38f) : -INFINITY", "min(x, 3.402823466e+38f)", "a logit that is no number"
    ),
    "an infinity stays": _header("min(x, 3.402823466e+38f)", "x", "logits leave float32"),
}

INSERT_MISTAKES: dict[str, Mistake] = {
    "no barrier after the logits": _barrier(1, _SEVERAL, "noise"),
    "no barrier after the sums": _barrier(2),
    "no barrier before the last choice": _barrier(3),
    "a barrier in divergent flow": Mistake(
        lambda s, h: (nth(s, BARRIER, 3, f"if (tid < 32) {BARRIER}"), h), MetalError, "barrier"
    ),
    "a sum in divergent flow": _refused("odd = simd_sum(odd);", "if (lane < 16) odd = simd_sum(odd);", "simd"),
    "float to bfloat without a word": _refused("x = T(a);", "x = a;", "C++14", "bfloat16, turned"),
    "write to an input": _refused("scores_out[out] = x;", "scores[out] = x;", "C++14"),
    "a write beyond the output": _refused(
        "index_out[out] = source;", "index_out[out] = source; index_out[out + 100] = 0;", "beyond an output"
    ),
    # logits found by the kernel itself
    "another key asks": _source("asks = fresh * D;", "asks = size_t(row) * D;", "noise"),
    "rows of another head are scored": _source(
        "(row0 + size_t(min(j, n - 1))) * D", "size_t(min(j, n - 1)) * D", "noise"
    ),
    "own logits without a scale": _source("sum * as_type<float>(int(numbers[5]))", "sum", "noise"),
    "the last rows are not scored": _source("j - tid / 8 < n;", "j < n - n % 8;", "noise"),
    "the sum of other logits": _source("ROOM > 0 ? own[j] : logits[row0", "logits[row0", "noise"),
    "the choice of other logits": _source(
        "ROOM > 0 ? own[j] : logits[at], top, share);\n      if (tau",
        "logits[at], top, share);\n      if (tau",
        "logits far apart",
        "many heads",
        _SEVERAL,
    ),
    "the scores of other logits": _source("own[source] : logits[at]", "own[r] : logits[at]", "noise"),
    # rows
    "threadgroups move the same rows": _source("const int from = part * moves", "const int from = 0", _SEVERAL),
    "a share is left out": _source("count = min(moves, stay - from)", "count = min(moves - 1, stay - from)", _SEVERAL),
    "rows of another head": _source("row0 = size_t(row) * size_t(n), fresh", "row0 = 0, fresh", "noise"),
    "the head beside": _source(") / shares, part", ") % 2, part", _SEVERAL),
    "another new row": _source("+ size_t(step[0]);", ";", "noise"),
    "new rows of another head": _source(
        "fresh = size_t(row) * size_t(new_keys_shape[1])", "fresh = size_t(0)", "noise"
    ),
    "noise of another token": _source("+ size_t(step[1])]", "]", "noise"),
    "the last row is written for all": _source(
        "j + (j >= gone ? 1 : 0);\n    const bool", "min(j + 1, every - 1);\n    const bool"
    ),
    "values of the row that went": _source(
        "const int r = i / (DV / 4), source = from + r + (from + r >= gone ? 1 : 0);",
        "const int r = i / (DV / 4), source = from + r + (from + r > gone ? 1 : 0);",
        "noise",
    ),
    "odd values of the row that went": _source(
        "const int r = i / DV, source = from + r + (from + r >= gone ? 1 : 0);",
        "const int r = i / DV, source = from + r + (from + r > gone ? 1 : 0);",
        "odd sizes",
    ),
    "keys of the row that went": _source(
        "const int r = i / (D / 4), source = from + r + (from + r >= gone ? 1 : 0);",
        "const int r = i / (D / 4), source = from + r + (from + r > gone ? 1 : 0);",
        "noise",
    ),
    "odd keys of the row that went": _source(
        "d = i % D, j = from + r, source = j + (j >= gone ? 1 : 0);",
        "d = i % D, j = from + r, source = j + (j > gone ? 1 : 0);",
        "odd sizes",
        "turned",
    ),
    "scores before the mass": _source(
        "if (JOINS && old) x = keyformer_scored(x, ROOM > 0 ? own[source] : logits[at], top, share);\n    scores_out",
        "scores_out",
        "noise",
    ),
    "indices are not written": _source("index_out[out] = source;", ""),
    # the choice
    "a tie in a thread goes to the last": _source("x < best ||", "x <= best ||", "ties among several rows a thread"),
    "a tie in a simdgroup goes to any": _source(
        "const int low_at = simd_min(best == low ? best_at : FAR);",
        "const int low_at = -simd_min(best == low ? -best_at : FAR);",
        "ties",
        "one eviction, ties",
    ),
    "a tie between simdgroups goes to the last": _source("least_at[g] < gone", "least_at[g] > gone", "ties"),
    "one sink too few": _source("for (int j = n_sink + tid;", "for (int j = n_sink - 1 + tid;", "ties"),
    "one sink too many": _source("for (int j = n_sink + tid;", "for (int j = n_sink + 1 + tid;", "ties"),
    "recent rows may go": _source("j < every - recent;", "j < every;", "no noise", "noise"),
    "the new row may not go": _source("j < every - recent;", "j < n - recent;", "a new row that goes"),
    "noise without temperature": _source("x += tau * (old", "x += (old", "many heads"),
    "noise at temperature 0": _source("if (tau != 0.0f) x += tau *", "x +=", "no noise", "no recent rows"),
    "NaN is not last": _source("x = x > -INFINITY ? x : -INFINITY;", "", "a score that is no number"),
    # mass
    "a simdgroup's own maximum": _source("sum += sums[g] * exp(tops[g] - top);", "sum += sums[g];", "logits far apart"),
    "a thread's own maximum": _source(
        "sum = simd_sum(sum * exp(top - most));", "sum = simd_sum(sum);", "logits far apart"
    ),
    "no maximum": _source("if (l > top) {", "if (l > top && l < -1e30f) {", "logits far apart"),
    "a sum that forgets": _source("sum = sum * exp(top - l) + 1.0f;", "sum = 1.0f;", _SEVERAL),
    "a bad key takes mass": _source("if (scores[row0 + size_t(j)] != -INFINITY) {", "if (true) {", "bad keys"),
    "a bad row has a score": _header("score != -INFINITY ?", "true ?", "bad keys"),
    "a bad new key gives mass": _source("share = odd == 0.0f && sum", "share = sum", "a bad new key"),
    "a bad new key is good": _source("new_score = odd == 0.0f ? 0.0f : -INFINITY", "new_score = 0.0f", "a bad new key"),
    "an infinity stays": _header("min(x, 3.402823466e+38f)", "x", "logits leave float32"),
    # positions
    "numbered anew within the budget": _source("TURNS && every > stay", "TURNS", "within the budget, turned"),
    "positions stay": _source("turns ? j : old", "old", "turned"),
    "the new row's position": _source("positions[at] : position;", "positions[at] : j;", "noise"),
    "turned to where it was": _source(
        "angle = size_t(j) * HALF", "angle = size_t(min(source, stay - 1)) * HALF", "turned"
    ),
    "turned the other way": _source("a * cosine - b * sine :", "a * cosine + b * sine :", "turned"),
    "the second of a pair turned the other way": _source("b * sine + a * cosine)", "a * cosine - b * sine)", "turned"),
    "neighbours are a pair": _source("d < HALF ? d + HALF : d - HALF;", "d ^ 1;", "turned"),
    "rows that did not move are turned": _source(
        "(old ? positions[row0 + size_t(source)] : position) != j", "true", "turned"
    ),
    "an odd last one is the key's": _source("x = T(a);", "", "turned, odd size", "size of one, turned"),
    "keys before rotation are those of the old place": _source(
        "plain_out[out] = a;", "plain_out[out] = float(x);", "turned"
    ),
}

LOGIT_MISTAKES: dict[str, Mistake] = {
    "another new row asks": _source("+ size_t(step[0])) * D", "+ size_t(0)) * D", "noise"),
    "another head's row asks": _source("(size_t(row) * size_t(new_keys_shape[1])", "(size_t(0)", "noise"),
    "no scale": _source("sum * as_type<float>(int(numbers[0]))", "sum", "noise"),
    "half of the lanes": _source("for (int o = 4; o > 0", "for (int o = 2; o > 0", "bfloat16"),
    "odd sizes end early": _source(
        "for (int d = sub; d < D; d += 8) sum", "for (int d = sub; d + 1 < D; d += 8) sum", "odd sizes"
    ),
    "sizes of 4 end early": _source("v < D / 4; v += 8", "v < 8; v += 9", "bfloat16"),
    "a write beyond the rows": _refused("if (sub == 0 && j < n)", "if (sub == 0)", "beyond an output", "noise"),
    "a group of rows is left out": _source("group % groups * ROWS", "group % max(groups - 1, 1) * ROWS", _SEVERAL),
    "an exchange that some rows skip": _refused(
        "for (int o = 4; o > 0", "if (j < n) for (int o = 4; o > 0", "simd", "one head, one stored row"
    ),
}


@dataclass(frozen=True)
class PrefillMistake:
    """`old` becomes `new`, in the source or in a header; `enough`: threadgroups that the queries are divided among."""

    old: str
    new: str
    cases: tuple[str, ...] = ("every axis differs",)
    in_source: bool = True
    cuda: bool = False
    enough: int = 1
    caught_by: type[BaseException] = AssertionError
    says: str = ""


def _prefill(old: str, new: str, *cases: str, **more: Any) -> PrefillMistake:
    return PrefillMistake(old, new, cases or ("every axis differs",), **more)


_MASS_KEYS = "const bool unseen = CAUSAL && (MASS ? r > y + shift : y > r + shift);"
PREFILL_MISTAKES: dict[str, PrefillMistake] = {
    # what the threads do together
    "no barrier before a tile is overwritten": _prefill(
        "keyformer_arrived();\n      threadgroup_barrier(mem_flags::mem_threadgroup);", "", "many queries"
    ),
    "no barrier after a tile is read": _prefill(
        "if (STAGES == 1) threadgroup_barrier(mem_flags::mem_threadgroup);", "", "many queries"
    ),
    "a product that some lanes skip": _prefill(
        "keyformer_multiply<T, D, MF, NF>(c, a, tile + buffer * PITCH, lane);",
        "if (lane < 16) keyformer_multiply<T, D, MF, NF>(c, a, tile + buffer * PITCH, lane);",
        caught_by=MetalError,
        says="simdgroup",
    ),
    "half of a row's lanes": _prefill("o <= KEYFORMER_FAR", "o < KEYFORMER_FAR"),
    "the wrong lanes": _prefill("#define KEYFORMER_FAR 8", "#define KEYFORMER_FAR 2", in_source=False),
    "rows of the wrong lanes": _prefill("(lane / 4 & 4) + lane / 2 % 4", "lane / 4", in_source=False),
    "float to bfloat without a word": _prefill(
        "a.v[2 * k] = row[8 * k];", "a.v[2 * k] = 1.0f * row[8 * k];", "bfloat16", in_source=False, caught_by=MetalError
    ),
    "a tile that is not a vector": _prefill(
        "threadgroup uint4 tile[", "threadgroup T tile[", caught_by=MetalError, says="C++14"
    ),
    "too much threadgroup memory": _prefill(
        "tile[STAGES * COLS * PITCH];", "tile[STAGES * COLS * PITCH + 2000];", caught_by=MetalError, says="bytes"
    ),
    # rows and queries
    "the last tile is forgotten": _prefill("at < count; ++at", "at + 1 < count; ++at", "every axis differs"),
    "the block's last tile": _prefill("min(n, first + ROWS + shift)", "min(n, first + ROWS + shift - 16)"),
    "the last rows of the buffer": _prefill(
        "y0 + COLS > (MASS ? S : n)", "false", "every axis differs", "a tile of rows"
    ),
    "a row sees the next query's row": _prefill("y > r + shift);", "y > r + shift + 1);"),
    "a query is seen too early": _prefill("MASS ? r > y + shift :", "MASS ? r > y + shift + 1 :"),
    "no mask in the first pass": _prefill(_MASS_KEYS, _MASS_KEYS.replace("CAUSAL &&", "MASS && CAUSAL &&")),
    "no mask in the second pass": _prefill(_MASS_KEYS, _MASS_KEYS.replace("CAUSAL &&", "!MASS && CAUSAL &&")),
    "the diagonal is not noticed": _prefill("y0 + COLS - 1 > low + shift", "y0 > low + shift"),
    "the diagonal is not noticed, of queries": _prefill("low + HIGH - 1 > y0 + shift", "low > y0 + shift"),
    "a mask without a causal mask": _prefill("bool unseen = CAUSAL &&", "bool unseen =", "no causal mask, every row"),
    "tiles skipped that see the block": _prefill(
        "max(0, first - shift) / COLS", "(max(0, first - shift) + COLS - 1) / COLS"
    ),
    "keys of another sequence": _prefill(
        "const int batch = whose / (MASS ? kv_heads : heads);", "const int batch = 0;"
    ),
    "keys of another head": _prefill("batch * kv_heads + whose % heads / group", "batch * kv_heads"),
    "the buffer's rows are not counted": _prefill("size_t(keys_shape[2]), row0", "size_t(n), row0"),
    "one query head of a group": _prefill("(MASS ? group * tiles : tiles)", "tiles"),
    "the same query head again": _prefill("kv * group + head_next : whose;", "kv * group : whose;"),
    "a part is summed twice": _prefill(
        "head_next = part / tiles, tile_next = part % tiles",
        "head_next = part / 2 / tiles, tile_next = part / 2 % tiles",
        enough=1024,
    ),
    "the tile after": _prefill("tile_now = STAGES == 1 ? tile_next", "tile_now = STAGES == 1 ? tile_next + 1"),
    "parts that overlap": _prefill("tile_next += step;", "tile_next += 1;", "many queries", enough=20),
    "a part is lost": _prefill("- part + step - 1) / step", "- part) / step", enough=1024),
    "a barred row takes mass": _prefill(
        "bar = bar || !(bars[buffer + x] < INFINITY);", "bar = false;", "every axis differs", "most rows barred"
    ),
    "a barred row is given mass": _prefill("barred[row0 + size_t(r)] < INFINITY ? sum[i][s] : 0.0f", "sum[i][s]"),
    "a deaf query gives NaN": _prefill("gives ? top[i][s] +", "true ? top[i][s] +", "deaf queries", "blind queries"),
    "a capped deaf query": _prefill(
        "isfinite(l) ? cap * tanh(l / cap) * divisor : INFINITY",
        "cap * tanh(l / cap) * divisor",
        "deaf queries, soft cap",
    ),
    # the mass
    "no maximum": _prefill("most = fmax(top[i][s], most * unit);", "most = 0.0f;", "logits far apart"),
    "sums of another maximum": _prefill(
        "sum[i][s] = sum[i][s] * keyformer_exp2(top[i][s] - most) + added;", "sum[i][s] += added;", "logits far apart"
    ),
    "lanes of another maximum": _prefill(
        "sum[i][s] * keyformer_exp2(top[i][s] - both) + other * keyformer_exp2(most - both);",
        "sum[i][s] + other;",
        "logits far apart",
    ),
    "base e": _prefill("1.44269504f * inverse", "inverse"),
    "temperature of another sequence": _prefill("taus[batch]", "taus[0]", "temperatures"),
    "temperature forgotten": _prefill("1.0f / taus[batch]", "1.0f", "temperature"),
    "sinks undivided": _prefill("sinks[whose % heads] * divisor", "sinks[whose % heads] * 1.44269504f", "temperatures"),
    "sinks of the first heads": _prefill("sinks[whose % heads]", "sinks[whose % 2]", "sinks"),
    "sinks that count once a lane": _prefill(
        "+ keyformer_exp2(sink - both);", "+ 4.0f * keyformer_exp2(sink - both);", "sinks"
    ),
    "no weights": _prefill("WEIGHTED ? counts[x] * share : share", "share", "weights"),
    "weights of the first sequence's tile": _prefill("counts[x] * share", "counts[0] * share", "weights"),
    "cap after noise": _prefill("cap * tanh(l / cap)", "tanh(l / cap)", "soft cap"),
    # noise
    "noise of the KV head": _prefill("keyformer_head(stream, head)", "keyformer_head(stream, head / group)", "gumbel"),
    "noise of the first head": _prefill(
        "* group + head_now : whose % heads", "* group : whose % heads", "gumbel, frozen"
    ),
    "noise of the slot": _prefill("MASS ? name[i][s] : named)", "MASS ? i : j)", "gumbel"),
    "noise of the first query": _prefill("MASS ? named : name[i][s])", "names[0])", "gumbel"),
    "small noise of the GPU's logarithm": _prefill("v < 0.0625f", "v < 0.9f", "many rows, gumbel", in_source=False),
    "queries of another sequence": _prefill(
        "asking[size_t(batch) * size_t(S) + size_t(r)]", "asking[size_t(r)]", "gumbel"
    ),
    "never redrawn": _prefill("keyformer_asking(hashed, REDRAW,", "keyformer_asking(hashed, false,", "gumbel"),
    "always Gumbel": _prefill("keyformer_noise_bits(DISTRIBUTION,", "keyformer_noise_bits(0,", "gaussian"),
    "temperature before the noise": _prefill(
        "MASS ? name[i][s] : named) * inverse", "MASS ? name[i][s] : named)", "gumbel"
    ),
    # what CUDA's text says of its instructions
    "CUDA: rows of a tile": _prefill("lane / 16 * 8 + lane % 8", "lane % 16", in_source=False, cuda=True),
    "CUDA: halves of a tile's rows": _prefill("k * 2 + lane / 8 % 2", "k * 2 + lane / 16", in_source=False, cuda=True),
    "CUDA: rows of a matrix": _prefill("+ w * 8, last)", "+ w, last)", "bfloat16", in_source=False, cuda=True),
    "CUDA: words of a matrix": _prefill("a.v[k * 2 + w] =", "a.v[k + w] =", "bfloat16", in_source=False, cuda=True),
    "CUDA: two products of three": _prefill(
        "keyformer_mma(T(0.0f), c[i][j + h], over, low[h * 2], low[h * 2 + 1]);", "", in_source=False, cuda=True
    ),
    "CUDA: the tile before": _prefill(
        "buffer = at % STAGES * COLS", "buffer = next % STAGES * COLS", "many queries", cuda=True
    ),
    "CUDA: no barrier": _prefill(
        "keyformer_arrived();\n      threadgroup_barrier(mem_flags::mem_threadgroup);", "", "many queries", cuda=True
    ),
}
