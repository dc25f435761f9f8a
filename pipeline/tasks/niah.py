"""`niah`: RULER's needle in a haystack, by RULER's own code around our haystack, at any length, without a download."""

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import BadInput
from pipeline.tasks.prompt import largest
from pipeline.tasks.prose import Prose, read_prose, sentences

_MOST_NEEDLES = 40  # RULER has so many depths


@contextlib.contextmanager
def _ruler() -> Iterator[Any]:
    """RULER's `prepare_niah` with our sentence splitter; the global random state comes back as it was.

    Importing the module (7 s: it makes six million words) downloads nltk's punkt when that is missing and reports
    success whether or not it worked; we need no punkt, so the download is left out and the report not shown.
    """
    import nltk

    state, download = random.getstate(), nltk.download
    nltk.download = lambda *args, **kwargs: False
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from lm_eval.tasks.ruler import prepare_niah
    finally:
        nltk.download = download
    split = prepare_niah.cached_sent_tokenize
    prepare_niah.cached_sent_tokenize = sentences
    try:
        yield prepare_niah
    finally:
        prepare_niah.cached_sent_tokenize = split
        random.setstate(state)


def prose(cfg: Any) -> Prose | None:
    """The prose of an essay haystack; None for the others. Raises BadInput for a prose file that would go unused."""
    if cfg.haystack == "essay":
        return read_prose(cfg.prose)
    if cfg.prose is not None:
        raise BadInput(f"expected task.prose=null with task.haystack={cfg.haystack} (no prose in it), got {cfg.prose}")
    return None


def build(cfg: Any, prose: Prose | None, measure: Callable[[str, str], int]) -> list[dict]:
    """`items` documents of `cfg.tokens` tokens, met from below to the word (essay) or the line (repeat, needle).

    `cfg.haystack`: `essay` (the prose), `repeat` (RULER's one line again and again), `needle` (other needles). RULER
    draws from the global `random`; it is seeded for each item and restored, so documents depend on the config alone.
    RULER's `generate_samples` grows the haystack in steps of 500 words; the size is found here and its builder called.
    """
    with _ruler() as ruler:
        return [_doc(cfg, i, prose, measure, ruler) for i in range(cfg.items)]


def _doc(cfg: Any, i: int, prose: Prose | None, measure: Callable[[str, str], int], ruler: Any) -> dict:
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE

    needles = cfg.needle_keys * cfg.needle_values
    if prose is not None:
        words = prose.text.split()
        if len(words) < cfg.tokens:
            raise BadInput(
                f"expected prose of at least task.tokens={cfg.tokens} words, got {len(words)}; "
                "name a longer file in task.prose or lower task.tokens"
            )
        start = random.Random(f"niah/haystack/{cfg.seed}/{i}").randrange(len(words) - cfg.tokens + 1)
        haystack, least, unit = words[start:], 1, 1
    else:
        haystack, least, unit = ruler.get_haystack(cfg.haystack), needles, 8  # a line is more than eight tokens
    one = cfg.needle_queries * cfg.needle_values == 1
    kind = cfg.value_type[:-1] if one else cfg.value_type

    def sample(size: int) -> tuple[str, list[str], str]:
        """RULER's prompt, answers and gen prefix; the needles are the same for every size."""
        random.seed(f"niah/{cfg.seed}/{i}")
        text, answers, query = ruler.generate_input_output(
            size + least,
            haystack,
            type_haystack=cfg.haystack,
            num_needle_k=cfg.needle_keys,
            type_needle_k=cfg.key_type,
            num_needle_v=cfg.needle_values,
            type_needle_v=cfg.value_type,
            template=TEMPLATE,
            num_needle_q=cfg.needle_queries,
            random_seed=cfg.seed,
        )
        prefix = f"The special magic {kind} for {query} mentioned in the provided text {'is' if one else 'are'}"
        return text, answers, prefix

    def tokens_of(size: int) -> int:
        text, _, prefix = sample(size)
        return measure(text, prefix)

    text, answers, prefix = sample(largest(cfg.tokens // unit, tokens_of, cfg.tokens))
    cut = text.rindex("\nWhat ")  # RULER's template ends with its question
    return {"context": text[:cut], "question": text[cut:], "gen_prefix": prefix, "outputs": answers}


def judge(doc: dict, results: list[str]) -> dict[str, float]:
    """RULER's metric: the share of the answers that occur in the response, in either case."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {"string_match": string_match_all(postprocess_pred(results), [doc["outputs"]])}


def config(cfg: Any) -> dict:
    """The lm-eval side, as RULER's YAML has it. Raises BadInput for haystacks and needles RULER does not know."""
    if cfg.haystack not in ("essay", "repeat", "needle"):
        raise BadInput(f"expected task.haystack to be essay, repeat or needle, got {cfg.haystack!r}")
    for field, kind in (("key_type", cfg.key_type), ("value_type", cfg.value_type)):
        if kind not in ("words", "numbers", "uuids"):
            raise BadInput(f"expected task.{field} to be words, numbers or uuids, got {kind!r}")
    if cfg.needle_queries > cfg.needle_keys or cfg.needle_keys * cfg.needle_values > _MOST_NEEDLES:
        raise BadInput(
            f"expected task.needle_queries <= task.needle_keys and needle_keys * needle_values <= {_MOST_NEEDLES}, got "
            f"{cfg.needle_queries} queries, {cfg.needle_keys} keys, {cfg.needle_values} values; lower one of them"
        )
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}{{question}}",
        "doc_to_target": "outputs",
        "gen_prefix": "gen_prefix",
        "generation_kwargs": {"until": list(cfg.until), "max_gen_toks": cfg.max_gen_toks, "do_sample": False},
        "process_results": judge,
        "metric_list": [{"metric": "string_match", "aggregation": "mean", "higher_is_better": True}],
    }
