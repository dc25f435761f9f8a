"""What `keyformer.generate`, `.server` and `.inspect` share: options, prompts, and how a command ends."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, NoReturn

import mlx.nn as nn
import mlx_lm

from .policies import POLICIES, Policy, make_policy

#: The options that say what is evicted, as `add_eviction_options` names them; None where not given.
EVICTION_OPTIONS = ("policy", "budget", "set", "prefill", "positions", "allocate")


#: The first whole number that MLX has no type for; none that a command takes is as large.
_MOST = 2**64


class Refusal(ValueError):
    """Bad input: what was expected, what was got and what to change, for the person who called the command.

    Every other error of a command is a fault of ours, a ValueError too, and keeps its traceback.
    """


@contextmanager
def refusing() -> Iterator[None]:
    """Where the library judges what a person chose: its ValueErrors are refusals."""
    try:
        yield
    except ValueError as error:
        raise Refusal(str(error)) from error


class Parser(argparse.ArgumentParser):
    """An argument parser for use inside `run`: its complaints are refusals, and its help may fail to be written."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(message)

    def print_help(self, file: Any = None) -> None:
        say(self.format_help())


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
            Refusal: a value that cannot work, an option that policy "full" would ignore.
        """
        choices = dict(_choice(c) for c in options.set or ())
        if "name" in choices:
            raise Refusal(f"--set: expected a choice of the policy, got name={choices['name']}; use --policy.")
        with refusing():
            policy = make_policy(options.policy or "keyformer", **choices)
        given = [name for name in EVICTION_OPTIONS[1:] if getattr(options, name) is not None]
        if not policy.evicts and given:
            raise Refusal(
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
            Refusal: a fraction, and no prompt to take it of.
        """
        budget = self.budget
        if isinstance(budget, float):
            if tokens is None:
                raise Refusal(
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
        raise Refusal(f"--set: expected name=value as in recent=0.2, got {text!r}.")
    if value in ("true", "false"):
        return name, value == "true"
    for number in (int, float):
        try:
            parsed = number(value)
        except ValueError:
            continue
        if isinstance(parsed, int) and abs(parsed) >= _MOST:
            raise Refusal(f"--set: expected numbers below 2**64, got {name} of {len(value)} digits.")
        return name, parsed
    return name, value


def _budget(text: str | None, policy: Policy) -> int | float:
    what = "a whole number of rows like 512, or a fraction of the prompt like 0.25"
    if text is None:
        raise Refusal(f"--budget: policy {policy.name} needs {what}, got none.")
    try:
        rows = int(text)
    except ValueError:
        try:
            fraction = float(text)
        except ValueError:
            raise Refusal(f"--budget: expected {what}, got {text!r}.") from None
        with refusing():
            policy.budget_rows(fraction, 1)
        return fraction
    with refusing():
        policy.check_budget(rows)
    return rows


def _allocation(text: str) -> str | tuple[float, ...]:
    if text in ("uniform", "pyramid"):
        return text
    try:
        weights = tuple(float(w) for w in text.split(","))
    except ValueError:
        raise Refusal(
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
    return _number(text, 1, "a whole number of at least 1")


def seed(text: str) -> int:
    """An option's value: an integer that MLX's random numbers can begin with."""
    return _number(text, 0, "a whole number from 0 to 2**64 - 1")


def _number(text: str, least: int, expected: str) -> int:
    # 2**64 has 20 digits; Python reads no more than some thousands
    if not text.isdecimal() or len(text) > 20 or not least <= int(text) < _MOST:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(text)


def read_prompt(options: argparse.Namespace) -> str:
    """The prompt's text, from where the options say.

    Raises:
        Refusal: no such file, no UTF-8 text (nor a system prompt in it), nothing in it.
    """
    name = "--prompt" if options.prompt_file is None else "--prompt-file"
    source = options.prompt_file or ("standard input" if options.prompt == "-" else "other bytes")
    try:
        if options.prompt_file is not None:
            text = options.prompt_file.read_text(encoding="utf-8")
        elif options.prompt == "-":
            if sys.stdin is None:
                raise Refusal("--prompt: expected text from standard input, got none, since it is closed.")
            text = sys.stdin.buffer.read().decode()
        else:
            text = options.prompt
            text.encode()
    except (OSError, UnicodeError) as error:
        raise Refusal(f"{name}: expected text in UTF-8, got {source} ({error}).") from None
    if not text:
        raise Refusal(f"{name}: expected some text, got none.")
    try:
        (options.system_prompt or "").encode()
    except UnicodeError as error:
        raise Refusal(f"--system-prompt: expected text in UTF-8, got other bytes ({error}).") from None
    return str(text)


def load_model(name: str) -> tuple[nn.Module, Any]:
    """The model and its tokenizer, as `mlx_lm.load` makes them.

    Raises:
        Refusal: the model cannot be had or is not one that mlx-lm knows.
    """
    # a hub id is one or two names
    a_path = name.count("/") > 1 or name.startswith((".", "/", "~")) or ("/" in name and Path(name).parent.is_dir())
    if a_path and not Path(name).exists():
        raise Refusal(f"--model: expected a folder of an mlx-lm model or a hub id, got {name!r}: no such folder.")
    try:
        model, tokenizer = mlx_lm.load(name)
    except Exception as error:  # mlx-lm, the hub's client and the tokenizers raise a dozen unrelated kinds
        raise Refusal(
            f"--model: expected a folder of an mlx-lm model or a hub id, got {name!r} ({reason(error)})."
        ) from error
    return model, tokenizer


def reason(error: Exception) -> str:
    """An error in one line, whoever raised it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def encode(tokenizer: Any, text: str, options: argparse.Namespace) -> list[int]:
    """The prompt's tokens, in the model's chat template where there is one and it is not to be ignored.

    Raises:
        Refusal: a system prompt without a chat template, a template that refuses these messages, a text without tokens.
    """
    if options.ignore_chat_template or not tokenizer.has_chat_template:
        if options.system_prompt is not None:
            raise Refusal(
                "--system-prompt: needs a chat template, got none (the model has none, or it is ignored); put the text "
                "into the prompt instead."
            )
        tokens = list(tokenizer.encode(text))
    else:
        messages = [{"role": "user", "content": text}]
        if options.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": options.system_prompt})
        try:
            tokens = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        except Exception as error:  # a template raises what it likes
            roles = " and ".join(m["role"] for m in messages)
            raise Refusal(
                f"--model: expected a chat template for messages of {roles}, got one that refuses them "
                f"({reason(error)}); use --ignore-chat-template{' or no --system-prompt' if len(messages) > 1 else ''}."
            ) from error
    if not tokens:
        raise Refusal("--prompt: expected text of at least one token, got none.")
    return tokens


@contextmanager
def replacing(file: Path, name: str) -> Iterator[Path]:
    """A new file to write, which takes the place of `file` at the end of the block.

    Whatever goes wrong before that, what was in `file` stays. The permissions stay too; a link goes on pointing.

    Args:
        file: may exist or not.
        name: the option that named it, for the message.

    Raises:
        Refusal: it cannot be written, or what happened inside the block was an OSError or MLX's RuntimeError.
    """
    new = None
    try:
        target = file.resolve()
        descriptor, path = tempfile.mkstemp(file.suffix, ".unfinished-", target.parent)
        new = Path(path)
        try:
            os.fchmod(descriptor, _permissions(target))
            yield new
            os.fsync(descriptor)  # or a crash could leave the new name with nothing in it
        finally:
            os.close(descriptor)
        new.replace(target)
    except (OSError, RuntimeError) as error:
        raise Refusal(f"{name}: expected a file that can be written, got {file} ({error}).") from error
    finally:
        if new is not None:
            new.unlink(missing_ok=True)


def _permissions(file: Path) -> int:
    try:
        return file.stat().st_mode & 0o777
    except FileNotFoundError:
        os.umask(mask := os.umask(0o077))  # it can only be read by setting it
        return 0o666 & ~mask


def say(text: str, stream: IO[str] | None = None) -> None:
    """Write to standard output, or another of the standard streams, and see that it arrives.

    Raises:
        Refusal: it cannot be written, as on a full disk.
        BrokenPipeError: who read it has gone.
    """
    stream = stream or sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        # What is left in the buffer would be tried again, and complained about, when Python ends.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        name = "standard error" if stream is sys.stderr else "standard output"
        raise Refusal(f"{name}: expected that it can be written, got an error ({error}).") from error


def run(name: str, command: Callable[[], None]) -> int:
    """Run a command and return its exit code: 0; 2 after one message on bad input; 130 after Ctrl-C, quietly.

    Bad input is what is raised as `Refusal`; any other error passes.
    """
    try:
        if sys.stdout is None:
            raise Refusal("standard output: expected that it can be written, got none, since it is closed.")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # their encoding may lack a character of some text
        command()
    except Refusal as error:
        with suppress(Refusal, BrokenPipeError):
            say(f"{name}: {error}\n", sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output has gone; nothing is left to say
        return 141
    return 0
