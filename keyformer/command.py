"""What `keyformer.generate`, `.server` and `.inspect` share: options, prompts, and how a command ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import mlx.nn as nn
import mlx_lm

from .policies import POLICIES, Policy, make_policy

#: The options that say what is evicted, as `add_eviction_options` names them; None where not given.
EVICTION_OPTIONS = ("policy", "budget", "set", "prefill", "positions", "allocate")


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, as those of the commands themselves are."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def add_eviction_options(parser: argparse.ArgumentParser) -> None:
    """Add --policy, --budget, --set, --prefill, --positions and --allocate; `Eviction.read` understands them."""
    group = parser.add_argument_group("eviction")
    group.add_argument("--policy", metavar="NAME", help=f"one of {', '.join(POLICIES)} (default: keyformer)")
    group.add_argument(
        "--budget", metavar="ROWS", help="rows kept per KV head: a whole number, or a fraction like 0.25 of the prompt"
    )
    group.add_argument(
        "--set", metavar="NAME=VALUE", action="append", help="a choice of the policy, e.g. recent=0.2; may be repeated"
    )
    group.add_argument(
        "--prefill",
        choices=("full", "chunked"),
        help="evict once, at the end of the prompt, or after every chunk of it (default: full)",
    )
    group.add_argument(
        "--positions",
        choices=("original", "contiguous"),
        help="kept tokens stay at their true positions, or close ranks (default: original)",
    )
    group.add_argument(
        "--allocate",
        metavar="HOW",
        help="rows per layer: uniform, pyramid, or one weight per layer as in 3,2,1 (default: uniform)",
    )


@dataclass(frozen=True)
class Eviction:
    """What a command was told to evict.

    Attributes:
        policy: what ranks and protects rows.
        budget: rows per KV head (int), a fraction of the prompt (float), or None for policy "full".
        prefill, positions, allocate: as `keyformer.make_prompt_cache` takes them.
    """

    policy: Policy
    budget: int | float | None
    prefill: str
    positions: str
    allocate: str | tuple[float, ...]

    @classmethod
    def read(cls, options: argparse.Namespace) -> Eviction:
        """From the options of `add_eviction_options`.

        Raises:
            ValueError: a value that cannot work, an option that policy "full" would ignore.
        """
        choices = dict(_choice(c) for c in options.set or ())
        if "name" in choices:
            raise ValueError(f"--set: expected a choice of the policy, got name={choices['name']}; use --policy.")
        policy = make_policy(options.policy or "keyformer", **choices)
        given = [name for name in EVICTION_OPTIONS[1:] if getattr(options, name) is not None]
        if not policy.evicts and given:
            raise ValueError(
                f"--{given[0]}: expected to be left out, since policy {policy.name} keeps every row, got "
                f"{getattr(options, given[0])!r}; leave it out or take another policy."
            )
        return cls(
            policy,
            _budget(options.budget, policy) if policy.evicts else None,
            options.prefill or "full",
            options.positions or "original",
            _allocation(options.allocate or "uniform"),
        )

    def arguments(self, tokens: int | None = None) -> dict[str, Any]:
        """The keyword arguments of `make_prompt_cache` and `attached`; `tokens` of prompt are what a fraction is of.

        Raises:
            ValueError: a fraction, and no prompt to take it of.
        """
        budget = self.budget
        if isinstance(budget, float):
            if tokens is None:
                raise ValueError(
                    f"--budget: expected a whole number of rows, got {budget}: prompts are not known yet that it could "
                    "be a fraction of."
                )
            budget, _ = self.policy.budget_rows(budget, tokens)
        return {
            "policy": self.policy,
            "budget": budget,
            "prefill": self.prefill,
            "positions": self.positions,
            "allocate": self.allocate,
        }

    def describe(self, tokens: int | None = None) -> str:
        """One line, for people: the policy, its budget and how it is applied."""
        if not self.policy.evicts:
            return f"{self.policy.name}: every row is kept"
        allocate = self.allocate if isinstance(self.allocate, str) else ",".join(f"{w:g}" for w in self.allocate)
        parts = [f"prefill {self.prefill}", f"positions {self.positions}", f"allocate {allocate}"]
        rows = f"{self.arguments(tokens)['budget']} rows"
        if isinstance(self.budget, float) and tokens is not None:
            floored = self.policy.budget_rows(self.budget, tokens)[1]
            of = f"{self.budget:g} of {tokens} prompt tokens"
            rows += f" ({of}, raised to the least that this policy can work with)" if floored else f" ({of})"
        usual = type(self.policy)()
        own = {f.name: getattr(self.policy, f.name) for f in fields(self.policy)}
        changed = [f"{name}={value}" for name, value in own.items() if value != getattr(usual, name)]
        name = f"{self.policy.name} ({', '.join(changed)})" if changed else self.policy.name
        return f"{name}, budget {rows}, {', '.join(parts)}"


def _choice(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"--set: expected name=value as in recent=0.2, got {text!r}.")
    if value in ("true", "false"):
        return name, value == "true"
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            pass
    return name, value


def _budget(text: str | None, policy: Policy) -> int | float:
    what = "a whole number of rows like 512, or a fraction of the prompt like 0.25"
    if text is None:
        raise ValueError(f"--budget: policy {policy.name} needs {what}, got none.")
    try:
        rows = int(text)
    except ValueError:
        try:
            fraction = float(text)
        except ValueError:
            raise ValueError(f"--budget: expected {what}, got {text!r}.") from None
        policy.budget_rows(fraction, 1)
        return fraction
    policy.check_budget(rows)
    return rows


def _allocation(text: str) -> str | tuple[float, ...]:
    if text in ("uniform", "pyramid"):
        return text
    try:
        weights = tuple(float(w) for w in text.split(","))
    except ValueError:
        raise ValueError(
            f"--allocate: expected uniform, pyramid or one positive weight per layer as in 3,2,1, got {text!r}."
        ) from None
    return weights


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add --model and the options that make a prompt; `load_model`, `read_prompt` and `encode` understand them."""
    parser.add_argument("--model", required=True, help="folder of an mlx-lm model, or its hub id")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", "-p", metavar="TEXT", help="the prompt; - reads it from standard input")
    source.add_argument("--prompt-file", metavar="FILE", type=Path, help="a text file with the prompt")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message of the chat template")
    parser.add_argument(
        "--ignore-chat-template", action="store_true", help="the prompt as it is, without the model's chat template"
    )
    parser.add_argument(
        "--prefill-step-size",
        metavar="TOKENS",
        type=whole_number,
        default=2048,
        help="prompt tokens of one call of the model (default: 2048)",
    )


def whole_number(text: str) -> int:
    """An option's value: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def read_prompt(options: argparse.Namespace) -> str:
    """The prompt's text, from where the options say.

    Raises:
        ValueError: no such file, no UTF-8 text, nothing in it.
    """
    name = "--prompt" if options.prompt_file is None else "--prompt-file"
    try:
        if options.prompt_file is not None:
            text = options.prompt_file.read_text(encoding="utf-8")
        else:
            text = sys.stdin.buffer.read().decode() if options.prompt == "-" else options.prompt
    except (OSError, UnicodeDecodeError) as error:
        source = options.prompt_file or "standard input"
        raise ValueError(f"{name}: expected text in UTF-8, got {source} ({error}).") from None
    if not text:
        raise ValueError(f"{name}: expected some text, got none.")
    return str(text)


def load_model(name: str) -> tuple[nn.Module, Any]:
    """The model and its tokenizer, as `mlx_lm.load` makes them.

    Raises:
        ValueError: the model cannot be had or is not one that mlx-lm knows.
    """
    try:
        model, tokenizer = mlx_lm.load(name)
    except Exception as error:  # mlx-lm, the hub's client and the tokenizers raise a dozen unrelated kinds
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"--model: expected a folder of an mlx-lm model or a hub id, got {name!r} ({reason})."
        ) from error
    return model, tokenizer


def encode(tokenizer: Any, text: str, options: argparse.Namespace) -> list[int]:
    """The prompt's tokens, in the model's chat template where there is one and it is not to be ignored.

    Raises:
        ValueError: a system prompt without a chat template.
    """
    if options.ignore_chat_template or not tokenizer.has_chat_template:
        if options.system_prompt is not None:
            raise ValueError(
                "--system-prompt: needs a chat template, got none (the model has none, or it is ignored); put the text "
                "into the prompt instead."
            )
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    if options.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": options.system_prompt})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def run(name: str, command: Callable[[], None]) -> int:
    """Run a command and return its exit code: 0; 2 after one message on bad input; 130 after Ctrl-C, quietly."""
    try:
        command()
        sys.stdout.flush()
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output has gone; nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
