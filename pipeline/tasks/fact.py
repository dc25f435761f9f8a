"""`fact`: one fact ("Alice lives in the city of Paris.") somewhere in prose, asked for at the end."""

import random
import re
from collections.abc import Callable
from typing import Any

from pipeline.errors import BadInput
from pipeline.tasks.prompt import largest
from pipeline.tasks.prose import Prose, ends_sentence

NAMES = (  # noqa: SIM905  as a list it would be a page
    "Alice Anna Arthur Barbara Ben Carla Charles Clara Daniel David Diana Edward Elena Emma Eric Felix Fiona Frank "
    "George Grace Hannah Harry Helen Henry Irene Isaac Jack Jane Julia Karen Kevin Laura Leo Linda Lucy Maria Mark "
    "Martin Mary Michael Nancy Nina Oliver Oscar Paul Peter Rachel Robert Rosa Samuel Sarah Simon Sophie Susan "
    "Thomas Victor Vera Walter"
).split()
CITIES = (  # noqa: SIM905  as a list it would be a page
    "Amsterdam Athens Baghdad Bangkok Barcelona Beijing Berlin Boston Brussels Budapest Cairo Chicago Copenhagen "
    "Dallas Damascus Delhi Denver Detroit Dublin Edinburgh Florence Geneva Hamburg Havana Helsinki Houston Istanbul "
    "Jakarta Jerusalem Lisbon London Madrid Melbourne Milan Montreal Moscow Mumbai Munich Naples Nairobi Oslo Paris "
    "Prague Rome Seattle Seoul Shanghai Singapore Stockholm Sydney Tehran Tokyo Toronto Venice Vienna Warsaw Zurich"
).split()


def build(cfg: Any, prose: Prose, measure: Callable[[str, str], int]) -> list[dict]:
    """`items` documents whose prompt has `cfg.tokens` tokens or a few less.

    Item i depends on `cfg.seed` and i alone: fewer items are a prefix of more. `measure(text, gen_prefix)` is the
    length of the whole prompt in tokens. Raises BadInput when the prose is too short for one prompt.
    """
    pieces = prose.pieces
    return [_doc(cfg, i, pieces, measure) for i in range(cfg.items)]


def _doc(cfg: Any, i: int, pieces: list[str], measure: Callable[[str, str], int]) -> dict:
    rng = random.Random(f"fact/{cfg.seed}/{i}")
    name, city, depth = rng.choice(NAMES), rng.choice(CITIES), cfg.depths[i % len(cfg.depths)]
    fact = f"{name} lives in the city of {city}."
    question = f"\n\nQuestion: In which city does {name} live?\nAnswer:"
    prefix = f"{name} lives in the city of"
    ends = [n for n, piece in enumerate(pieces, 1) if n >= cfg.tokens and ends_sentence(piece)]
    if not ends:
        raise BadInput(
            f"expected prose of more than task.tokens={cfg.tokens} words, got {len(pieces)}; "
            "name a longer file in task.prose or lower task.tokens"
        )
    end = rng.choice(ends)

    def context(words: int) -> str:
        return place(fact, pieces[end - words : end], depth)

    # A word is at least one token, so `tokens` words are always too many.
    words = largest(cfg.tokens, lambda n: measure(context(n) + question, prefix), cfg.tokens)
    return {"context": context(words), "question": question, "gen_prefix": prefix, "answer": city, "depth": depth}


def place(fact: str, pieces: list[str], depth: float) -> str:
    """The text of `pieces` with `fact` put in at the sentence end nearest to `depth` (0 = start, 1 = end)."""
    at = min(
        (n for n in range(len(pieces) + 1) if n in (0, len(pieces)) or ends_sentence(pieces[n - 1])),
        key=lambda n: abs(n - depth * len(pieces)),
    )
    return " ".join(part for part in ("".join(pieces[:at]).strip(), fact, "".join(pieces[at:]).strip()) if part)


def config(cfg: Any) -> dict:
    """The lm-eval side: how a document becomes a prompt and how the answer is judged."""
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}{{question}}",
        "doc_to_target": "answer",
        "gen_prefix": "gen_prefix",
        "generation_kwargs": {"until": list(cfg.until), "max_gen_toks": cfg.max_gen_toks, "do_sample": False},
        "process_results": contains,
        "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
    }


def contains(doc: dict, results: list[str]) -> dict[str, float]:
    """1 when the answer stands in the response as whole words, in either case; else 0."""
    found = re.search(rf"(?<!\w){re.escape(doc['answer'])}(?!\w)", results[0], re.IGNORECASE)
    return {"contains": float(found is not None)}
