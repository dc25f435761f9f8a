"""From a document to the text the model reads, and how long that is in the model's tokens."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from pipeline.errors import BadInput


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` as mlx-lm feeds it: special tokens are added unless the text already starts with BOS."""
    bos = tokenizer.bos_token
    return list(tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos))))


def render_chat(tokenizer: Any, history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The conversation through the tokenizer's chat template; without a generation prompt the last message stays open.

    Raises BadInput when the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "has_chat_template", tokenizer.chat_template):
        raise BadInput(
            "expected a tokenizer with a chat template for task.apply_chat_template=true, got one without; "
            "set task.apply_chat_template=false or use an instruct model"
        )
    return str(
        tokenizer.apply_chat_template(
            history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
    )


def prompt_tokens(tokenizer: Any, chat: bool) -> Callable[[str, str], int]:
    """A function (text, gen_prefix) -> tokens of the whole prompt, put together as lm-eval does it."""

    def measure(text: str, gen_prefix: str) -> int:
        if chat:
            history = [{"role": "user", "content": text}, {"role": "assistant", "content": gen_prefix}]
            return len(encode(tokenizer, render_chat(tokenizer, history, add_generation_prompt=False)))
        return len(encode(tokenizer, f"{text} {gen_prefix}"))

    return measure


def largest(most: int, tokens_of: Callable[[int], int], limit: int) -> int:
    """The largest n in 0..most with ``tokens_of(n) <= limit``; `tokens_of` grows with n.

    Raises BadInput when not even n = 0 fits.
    """
    n = bisect_right(range(most + 1), limit, key=tokens_of) - 1
    if n < 0:
        raise BadInput(
            f"expected task.tokens to hold at least the question and what it asks for ({tokens_of(0)} tokens), "
            f"got {limit}; raise task.tokens"
        )
    return n
