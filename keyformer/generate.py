"""`python -m keyformer.generate`: text from an mlx-lm model in a fixed amount of memory.

The text goes to standard output as it comes; what it took goes to standard error afterwards:

    python -m keyformer.generate --model MODEL --policy keyformer --budget 512 --prompt-file long.txt
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_sampler

from . import command
from .cache import KeyformerKVCache
from .command import EVICTION_OPTIONS, Eviction, Refusal, refusing, replacing, say
from .hook import attached, cache_counts, leaves, make_prompt_cache

_PROGRAM = "keyformer.generate"
_METADATA = "keyformer"  # where a cache file says which model and options it was made with


def main(arguments: list[str] | None = None) -> int:
    """The command; `arguments` are those of the command line. Returns the exit code (`keyformer.command.run`)."""
    return command.run(_PROGRAM, lambda: _generate(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = command.Parser(
        prog=_PROGRAM,
        description="Text from an mlx-lm model in a fixed amount of memory. The text goes to standard output, what it "
        "took to standard error.",
    )
    command.add_prompt_options(parser)
    command.add_eviction_options(parser)
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--max-tokens", "-m", metavar="N", type=command.whole_number, default=100, help="at most (default: 100)"
    )
    group.add_argument("--temp", metavar="T", type=_temperature, default=0.0, help="of sampling (default: 0, greedy)")
    group.add_argument("--top-p", metavar="P", type=_probability, default=1.0, help="of sampling (default: 1, off)")
    group.add_argument(
        "--seed", metavar="N", type=command.seed, help="of sampling; the seed of a policy's noise is --set seed=N"
    )
    group.add_argument(
        "--prompt-cache-file",
        metavar="FILE",
        type=Path,
        help="go on from the cache in FILE (.safetensors) where there is one; at the end, save the cache there",
    )
    return parser


def _temperature(text: str) -> float:
    return _number(text, lambda value: 0 <= value < math.inf, "a number of at least 0")


def _probability(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def _number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _generate(options: argparse.Namespace) -> None:
    file: Path | None = options.prompt_cache_file
    with ExitStack() as stack:
        begun = file is not None and stack.enter_context(_held(file))
        caches, made_with = _saved(file, options) if file is not None and begun else (None, options)
        eviction = Eviction.read(made_with)
        text = command.read_prompt(options)
        model, tokenizer = command.load_model(options.model)
        prompt = command.encode(tokenizer, text, options)
        # what a fractional budget is of; tokens that came before
        base, seen = (len(prompt), 0) if caches is None else (made_with.prompt_tokens, made_with.seen)
        with refusing():
            fresh = make_prompt_cache(model, **eviction.arguments(base))
            stack.enter_context(attached(model, **eviction.arguments(base)))
        if caches is None:
            caches = fresh
        elif list(map(_kind, leaves(caches))) != list(map(_kind, leaves(fresh))):
            raise Refusal(
                f"--prompt-cache-file: expected the caches of {options.model}, got those of another model in {file}; "
                "name another file."
            )
        if options.seed is not None:
            mx.random.seed(options.seed)
        if sys.stderr is not None and sys.stderr.isatty():  # a sign of life: minutes, on a CPU
            say(f"reading {len(prompt)} tokens\n", sys.stderr)
        for response in stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=options.max_tokens,
            sampler=make_sampler(options.temp, top_p=options.top_p),
            prompt_cache=caches,
            prefill_step_size=options.prefill_step_size,
        ):
            say(response.text)
        say("\n")
        seen += response.prompt_tokens + response.generation_tokens  # mlx-lm feeds the last token too
        if file is not None:
            kept = {name: getattr(made_with, name) for name in EVICTION_OPTIONS}
            metadata = {_METADATA: json.dumps({"model": options.model, "prompt_tokens": base, "seen": seen} | kept)}
            with replacing(file, "--prompt-cache-file") as new:
                save_prompt_cache(str(new), caches, metadata)
        lines = _figures(response, eviction.describe(base), caches, seen)
        say("".join(f"{name:<11} {value}\n" for name, value in lines), sys.stderr)


def _kind(cache: Any) -> tuple[Any, ...]:
    """What is the same in all caches that one model makes for a layer under the same options."""
    if not isinstance(cache, KeyformerKVCache):
        return (type(cache),)
    return type(cache), cache.policy, cache.budget, cache.layer, cache.prefill, cache.rope, cache.uneven, cache.readers


@contextmanager
def _held(file: Path) -> Iterator[bool]:
    """Nobody else goes on with the conversation in `file` inside the block. Yields whether it has begun.

    The file itself is what is locked; one that has not begun is empty meanwhile, and gone if nothing comes of it.
    """
    if file.suffix != ".safetensors":
        raise Refusal(f"--prompt-cache-file: expected a .safetensors file in a folder that exists, got {file}.")
    with ExitStack() as stack:
        try:
            os.fspath(file).encode()  # MLX opens no other names
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
            stack.callback(os.close, descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Refusal(f"--prompt-cache-file: expected a regular file, got {file}.")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is(file, descriptor):  # who had locked it has just put another in its place
                raise BlockingIOError
        except BlockingIOError:
            raise Refusal(
                f"--prompt-cache-file: expected a conversation that nobody else goes on with, got {file}, which "
                "another process has in use; wait for that process or name another file."
            ) from None
        except (FileNotFoundError, NotADirectoryError):
            raise Refusal(
                f"--prompt-cache-file: expected a .safetensors file in a folder that exists, got {file}."
            ) from None
        except (OSError, UnicodeError) as error:
            raise Refusal(
                f"--prompt-cache-file: expected a file that can be read and written, got {file} ({error})."
            ) from error
        begun = os.fstat(descriptor).st_size > 0
        try:
            yield begun
        finally:
            if not begun and _is(file, descriptor):  # nothing has taken its place
                file.unlink()


def _is(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _figures(response: Any, policy: str, caches: list[Any], seen: int) -> list[tuple[str, str]]:
    ours = [c for c in leaves(caches) if isinstance(c, KeyformerKVCache)]
    rows = [c.size() for c in ours]
    each = f"{rows[0]} of {seen} in every KV head"
    if len(set(rows)) > 1:
        each = f"{min(rows)} to {max(rows)} of {seen} per KV head, layer by layer: {' '.join(map(str, rows))}"
    kept, full = sum(r * c.row_bytes for r, c in zip(rows, ours, strict=True)), sum(seen * c.row_bytes for c in ours)
    counts = cache_counts(caches)
    evicting = counts[KeyformerKVCache.__name__]
    layers = f"{evicting} of {sum(counts.values())} {'evict' if ours[0].policy.evicts else 'could evict'}"
    others = [f"{n} {name}" for name, n in counts.items() if name != KeyformerKVCache.__name__]
    if others:
        layers += f"; the others keep mlx-lm's own: {', '.join(others)}"
    return [
        ("prompt", f"{response.prompt_tokens} tokens, {response.prompt_tps:.1f} tokens/s"),
        ("generation", f"{response.generation_tokens} tokens, {response.generation_tps:.1f} tokens/s"),
        ("policy", policy),
        ("layers", layers),
        ("rows kept", each),
        ("bytes kept", f"{_bytes(kept)} of the full cache's {_bytes(full)} ({kept / full:.1%}), keys and values"),
        ("allocated", f"{_bytes(sum(c.nbytes for c in ours))}, with scores and positions"),
    ]


def _bytes(n: int) -> str:
    size, unit = float(n), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{n} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def _saved(file: Path, options: argparse.Namespace) -> tuple[list[Any], argparse.Namespace]:
    """The caches in `file` and the options they were made with."""
    try:
        caches, metadata = load_prompt_cache(str(file), return_metadata=True)
        # MLX reads rows when they are needed; what happens to the file by then must not matter
        mx.eval([c.state for c in caches])
        made_with = argparse.Namespace(**json.loads(metadata[_METADATA]))
        eviction = Eviction.read(made_with)
        described = eviction.describe(made_with.prompt_tokens)
        model, base, seen = made_with.model, made_with.prompt_tokens, made_with.seen
        if not 0 < base <= seen:
            raise ValueError(f"{seen} tokens, {base} of them of the first prompt")
    except Exception as error:  # a file may hold anything, and break mlx-lm's reader or ours in any way
        raise Refusal(
            f"--prompt-cache-file: expected a cache saved by {_PROGRAM}, got {file} ({command.reason(error)}); name "
            "another file."
        ) from error
    if options.model != model:
        raise Refusal(
            f"--model: expected {model}, with which {file} was made, got {options.model}; take that model or name "
            "another --prompt-cache-file."
        )
    if options.system_prompt is not None:
        raise Refusal(
            f"--system-prompt: expected to be left out, since {file} goes on with a text that has begun, got "
            f"{options.system_prompt!r}."
        )
    for name in EVICTION_OPTIONS:
        value = getattr(options, name)
        if value is not None and not _agrees(eviction, made_with, {name: value}):
            raise Refusal(
                f"--{name}: expected the options {file} was made with ({described}), since they belong to the file, "
                f"got {value!r}; leave the options of eviction out or name another --prompt-cache-file."
            )
    return caches, made_with


def _agrees(eviction: Eviction, made_with: argparse.Namespace, given: dict[str, Any]) -> bool:
    try:
        return Eviction.read(argparse.Namespace(**vars(made_with) | given)) == eviction
    except Refusal:
        return False


if __name__ == "__main__":
    raise SystemExit(main())
