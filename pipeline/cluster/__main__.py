"""The command `python -m pipeline.cluster`; exit codes: 0 done, 2 bad input, 1 something broke."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pipeline.errors import BadInput


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: expected to read and write files in {options.outputs}, got {error}; choose another folder with "
            "--outputs",
            file=sys.stderr,
        )
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.cluster", description="One sweep over many machines; docs/cluster.md says how."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--outputs", type=Path, default=Path("outputs"), help="the folder of everything that is made")

    command = commands.add_parser("describe", parents=[common], help="this machine, as one line of JSON")
    command.set_defaults(command=_describe)
    command = commands.add_parser("prefetch", parents=[common], help="get models and data of a sweep")
    command.add_argument("config", type=Path, help='a JSON list of {"model": {...}, "task": {...}}')
    command.set_defaults(command=_prefetch)
    return parser


def _describe(options: argparse.Namespace) -> int:
    with _only_results_on_stdout() as out:
        from .host import describe  # MLX and the whole pipeline: only these two commands need them

        print(json.dumps(describe(options.outputs)), file=out, flush=True)
    return 0


def _prefetch(options: argparse.Namespace) -> int:
    with _only_results_on_stdout() as out:
        from .host import prefetch

        for line in prefetch(options.config, options.outputs):
            print(json.dumps(line), file=out, flush=True)
    return 0


@contextmanager
def _only_results_on_stdout() -> Iterator[TextIO]:
    """The real stdout; what libraries, C code and child processes print there meanwhile goes to stderr."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    with open(real, "w", encoding="utf-8") as out:
        try:
            yield out
        finally:
            sys.stdout.flush()
            out.flush()
            os.dup2(real, 1)


if __name__ == "__main__":
    sys.exit(main())
