"""`kv_retrieval`: many lines "The code of amber anchor is 1234.", one of them asked for at the end."""

import random
from collections.abc import Callable
from typing import Any

from pipeline.errors import BadInput
from pipeline.tasks.fact import config as config  # the same prompt shape and the same judge as `fact`
from pipeline.tasks.prompt import largest

ADJECTIVES = (  # noqa: SIM905  as a list it would be a page
    "amber ancient arctic bitter bold brave bright bronze busy calm clever coral cosmic crimson crystal curious "
    "dark deep distant dusty eager early empty fancy final frozen gentle giant golden grand green happy hidden "
    "hollow humble icy ivory jolly keen late little lonely loud lucky marble mellow misty modern narrow noble odd "
    "pale plain proud quiet rapid rare royal rusty silent silver simple sleepy smooth solid stormy sunny tall tiny "
    "velvet violet warm wild wise"
).split()
NOUNS = (  # noqa: SIM905  as a list it would be a page
    "anchor apple arrow barn basket beacon bell bridge brook candle canyon castle cave cedar cloud comet copper "
    "crane crown desert drum eagle ember falcon feather fern flame forest fountain garden glacier hammer harbor "
    "hawk hill island jewel kettle ladder lake lantern leaf lion lodge maple meadow mirror moon mountain needle "
    "ocean orchard otter owl palace pebble pine planet pond rabbit raven ridge river rocket sail shell spring stone "
    "storm temple tiger tower tunnel valley"
).split()


def build(cfg: Any, measure: Callable[[str, str], int]) -> list[dict]:
    """`items` documents; the line asked for stands at the depth `cfg.depths` says, in turn.

    A prompt has `cfg.tokens` tokens, or less by no more than one line. Raises BadInput when there are not enough pairs
    of words for that many lines.
    """
    return [_doc(cfg, i, measure) for i in range(cfg.items)]


def _doc(cfg: Any, i: int, measure: Callable[[str, str], int]) -> dict:
    rng = random.Random(f"kv_retrieval/{cfg.seed}/{i}")
    keys = [f"{a} {n}" for a in ADJECTIVES for n in NOUNS]
    codes = [str(code) for code in range(1000, 10000)]
    rng.shuffle(keys)
    rng.shuffle(codes)
    depth = cfg.depths[i % len(cfg.depths)]
    (asked, *others), (answer, *wrong) = keys, codes
    question, prefix = f"\n\nQuestion: What is the code of {asked}?\nAnswer:", f"The code of {asked} is"
    lines = [f"The code of {key} is {code}." for key, code in zip(others, wrong, strict=False)]

    def context(n: int) -> str:
        at = round(depth * n)
        return "\n".join([*lines[:at], f"{prefix} {answer}.", *lines[at:n]])

    # A line is more than four tokens, so a quarter as many lines as tokens are always too many.
    most = cfg.tokens // 4
    if most > len(lines):
        raise BadInput(
            f"expected task.tokens of at most {4 * len(lines)} for kv_retrieval ({len(lines)} different lines), "
            f"got {cfg.tokens}; lower task.tokens"
        )
    n = largest(most, lambda n: measure(context(n) + question, prefix), cfg.tokens)
    return {"context": context(n), "question": question, "gen_prefix": prefix, "answer": answer, "depth": depth}
