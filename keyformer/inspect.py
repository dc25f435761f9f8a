"""`python -m keyformer.inspect`: which tokens of a prompt each layer and head kept, to look at.

    python -m keyformer.inspect --model MODEL --policy keyformer --budget 512 --prompt-file long.txt --output kept

writes `kept/kept.html`, one page without any network (the text, each token the darker the more heads kept it; a map
of all heads; hover and click), and `kept/kept.png`, the map alone.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import command
from .cache import KeyformerKVCache
from .command import Eviction, Refusal, refusing, replacing, say
from .hook import attached, leaves, make_prompt_cache
from .picture import Panel, draw

_PROGRAM = "keyformer.inspect"


@dataclass(frozen=True)
class Moment:
    """What every head held at one moment.

    Attributes:
        title: when that was, for people.
        seen: tokens that had been written by then.
        kept: per evicting layer and per KV head, the positions of the stored rows, ascending.
        scores: what the next eviction would compare, for each of them.
    """

    title: str
    seen: int
    kept: list[list[list[int]]]
    scores: list[list[list[float]]]


@dataclass(frozen=True)
class Kept:
    """Which tokens the heads kept, while a prompt was read and some more tokens were written.

    Attributes:
        tokens: ids of the prompt and then of what was written.
        prompt: how many of them are the prompt's.
        layers: number of each layer that evicts.
        moments: after the prompt, and after the written tokens where there are some.
        row_bytes: per evicting layer, bytes of one token's keys and values.
    """

    tokens: list[int]
    prompt: int
    layers: list[int]
    moments: list[Moment]
    row_bytes: list[int]


def main(arguments: list[str] | None = None) -> int:
    """The command; `arguments` are those of the command line. Returns the exit code (`keyformer.command.run`)."""
    return command.run(_PROGRAM, lambda: _inspect(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = command.Parser(
        prog=_PROGRAM,
        description="Which tokens of a prompt each layer and head kept: DIR/kept.html to explore, DIR/kept.png to "
        "show.",
    )
    command.add_prompt_options(parser)
    command.add_eviction_options(parser)
    parser.add_argument(
        "--tokens", "-n", metavar="N", type=_count, default=0, help="write N tokens and look again (default: 0)"
    )
    parser.add_argument("--output", "-o", metavar="DIR", type=Path, required=True, help="folder for the two files")
    return parser


def _count(text: str) -> int:
    return 0 if text == "0" else command.whole_number(text)


def _inspect(options: argparse.Namespace) -> None:
    eviction = Eviction.read(options)
    text = command.read_prompt(options)
    folder: Path = options.output
    page_file, picture_file = folder / "kept.html", folder / "kept.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (page_file, picture_file):
            if file.exists() and not file.is_file():
                raise FileExistsError(f"{file.name} is there and no file")
    except OSError as error:
        raise Refusal(f"--output: expected a folder that can be written, got {folder} ({error}).") from error
    model, tokenizer = command.load_model(options.model)
    prompt = command.encode(tokenizer, text, options)
    arguments = eviction.arguments(len(prompt))
    with refusing(), attached(model, **arguments):
        pass  # what cannot work is refused here, so that what fails later is no bad input
    if sys.stderr is not None and sys.stderr.isatty():  # a sign of life: minutes, on a CPU
        say(f"reading {len(prompt)} tokens\n", sys.stderr)
    kept = watch(model, prompt, arguments, options.tokens, options.prefill_step_size)
    name = Path(options.model).name
    described = eviction.describe(len(prompt))
    written = {
        page_file: page(kept, token_texts(tokenizer, kept.tokens), name, described).encode(),
        picture_file: picture(kept, f"what the cache of {name} kept", described),
    }
    for file, content in written.items():
        with replacing(file, "--output") as new:
            new.write_bytes(content)
        say(f"{file}\n")


def watch(model: nn.Module, prompt: list[int], eviction: dict[str, Any], more: int = 0, step: int = 2048) -> Kept:
    """Read the prompt as mlx-lm does, write `more` tokens greedily, and say which rows were kept.

    Args:
        model: an mlx-lm model.
        prompt: its tokens, at least one.
        eviction: the keyword arguments of `make_prompt_cache`: policy, budget, ...
        more: tokens to write.
        step: prompt tokens of one call of the model.

    Raises:
        ValueError: as `make_prompt_cache` and `attached`.
    """
    caches = make_prompt_cache(model, **eviction)
    ours = [c for c in leaves(caches) if isinstance(c, KeyformerKVCache)]
    tokens, moments = list(prompt), []
    with attached(model, **eviction):
        for cache in ours:
            cache.begin_prefill()
        for first in range(0, len(prompt) - 1, step):
            model(mx.array([prompt[first : min(first + step, len(prompt) - 1)]]), cache=caches)
            mx.eval([c.state for c in caches])
        for cache in ours:
            cache.end_prefill()
        logits = model(mx.array([prompt[-1:]]), cache=caches)
        mx.eval(logits)
        moments.append(_moment("after the prompt", len(tokens), ours))
        for _ in range(more):
            tokens.append(int(np.argmax(np.array(logits[0, -1].astype(mx.float32)))))
            logits = model(mx.array([tokens[-1:]]), cache=caches)
            mx.eval(logits)
        if more:
            moments.append(_moment(f"after {more} more token{'s' * (more > 1)}", len(tokens), ours))
    return Kept(tokens, len(prompt), [c.layer for c in ours], moments, [c.row_bytes for c in ours])


def _moment(title: str, seen: int, caches: list[KeyformerKVCache]) -> Moment:
    kept = [np.array(c.kept()).tolist() for c in caches]
    scores = [np.array(c.ranks()).tolist() for c in caches]
    return Moment(title, seen, kept, scores)


def token_texts(tokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token adds to the text; "" for all but the last of the tokens that share a character."""
    texts = []
    # a token's text may depend on the one before it, so a little of what came before is decoded along
    before, done = 0, 0
    for i in range(len(tokens)):
        known = tokenizer.decode(tokens[before:done])
        text = tokenizer.decode(tokens[before : i + 1])
        if text.endswith("\ufffd") and i + 1 < len(tokens) and i - done < 8:
            texts.append("")  # bytes of a character that is not complete yet
            continue
        texts.append(text[len(known) :])
        before, done = done, i + 1
    return texts


def picture(kept: Kept, title: str, described: str) -> bytes:
    """The map of all heads as a PNG file, one panel for each moment."""
    panels = [Panel(m.title, _grid(m)) for m in kept.moments]
    heads = [(layer, len(rows)) for layer, rows in zip(kept.layers, kept.moments[0].kept, strict=True)]
    return draw(title, described, panels, heads, kept.prompt, len(kept.tokens))


def _grid(moment: Moment) -> np.ndarray:
    """[heads of all layers, seen] boolean."""
    rows = [positions for layer in moment.kept for positions in layer]
    grid = np.zeros((len(rows), moment.seen), bool)
    for row, positions in zip(grid, rows, strict=True):
        row[positions] = True
    return grid


def page(kept: Kept, texts: list[str], model: str, described: str) -> str:
    """The HTML page: self-contained, whatever the text holds."""
    last = kept.moments[-1]
    grid = _grid(last)
    fifths = -(-5 * grid.sum(axis=0) // len(grid))  # of the heads, rounded up
    spans = [f'<b class="k{k}">{html.escape(t)}</b>' for k, t in zip(fifths, texts, strict=True)]
    if kept.prompt < len(spans):
        spans.insert(kept.prompt, '<span id="end">end of the prompt</span>')
    data = {
        "prompt": kept.prompt,
        "layers": [[layer, len(rows)] for layer, rows in zip(kept.layers, last.kept, strict=True)],
        "stages": [
            {
                "title": m.title,
                "seen": m.seen,
                "kept": [positions for layer in m.kept for positions in layer],
                "scores": [[_short(s) for s in row] for layer in m.scores for row in layer],
            }
            for m in kept.moments
        ],
    }
    figures = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _figures(kept, grid))
    template = files(__package__).joinpath("inspect.html").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(f"What the cache of {model} kept"),
        "policy": html.escape(described),
        "figures": figures,
        "data": json.dumps(data, separators=(",", ":")),  # numbers, and titles of ours: nothing to escape
        "text": "".join(spans),
    }
    return re.sub(rf"@({'|'.join(parts)})@", lambda at: parts[at[1]], template)


def _short(score: float) -> float | None:
    """Four digits of it; None for a row that is ranked last for good, since JSON has no infinity."""
    return float(f"{score:.4g}") if math.isfinite(score) else None


def _figures(kept: Kept, grid: np.ndarray) -> list[tuple[str, str]]:
    last = kept.moments[-1]
    rows = [len(layer[0]) for layer in last.kept]
    each = str(rows[0]) if len(set(rows)) == 1 else f"{min(rows)} to {max(rows)}"
    held = sum(r * b for r, b in zip(rows, kept.row_bytes, strict=True))
    full = last.seen * sum(kept.row_bytes)
    return [
        ("tokens", f"{kept.prompt} <small>of prompt, {last.seen - kept.prompt} written</small>"),
        ("rows kept per head", f"{each} <small>of {last.seen}</small>"),
        ("keys and values", f"{held / full:.1%} <small>of the full cache's {full / 2**20:.1f} MiB</small>"),
        ("kept by every head", f"{int(grid.all(axis=0).sum())} <small>tokens</small>"),
        ("kept by no head", f"{int((~grid.any(axis=0)).sum())} <small>tokens</small>"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
