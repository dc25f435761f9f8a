"""What eviction costs on a CPU: a decoded token, the functional API.

    python -m benchmarks.cpu [--only NAME ...] [--json FILE] [--tiny] [--quick] [--model FOLDER]

VeloxQuant-MLX is measured beside where it is importable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import mlx.core as mx

from keyformer import POLICIES

from . import decode_model, functional, models
from .harness import Line, Part, run


def functional_api(options: argparse.Namespace) -> Iterator[Line]:
    """keyformer_update_batched, 8 rows of 64, beside the peer and attention over as many rows"""
    functional.say_what_is_missing()
    if options.tiny:
        yield from functional.block_lines(32, 16, 16, "float32", 2)
        yield from functional.decode_lines(16, 16, "float32", 64, 4)
        return
    for S in (512, 2048):
        yield from functional.block_lines(S, 256, 64, "float32", 3)
    for dtype in ("float32",) if options.quick else functional.DTYPES:
        for budget in (1024, 4096):
            repeats = 5 if options.quick else budget // 8 + 10
            yield from functional.decode_lines(budget, 64, dtype, 4 * budget, repeats)


def decode_of_a_model(options: argparse.Namespace) -> Iterator[Line]:
    """milliseconds per decoded token"""
    model = models.random_model(True) if options.tiny else models.loaded(options.model)
    context, budget = (64, 40) if options.tiny else (options.context, options.budget)
    policies = [name for name, kind in POLICIES.items() if kind().evicts]
    for batch in [1, 2] if options.tiny else options.batch:
        yield from decode_model.lines(model, batch, context, budget, policies, 2, 2 if options.tiny else 5)


PARTS: dict[str, Part] = {"functional": functional_api, "decode-model": decode_of_a_model}


def main(arguments: list[str] | None = None) -> int:
    """The command; `arguments` are those of the command line. Returns 1 where a part failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="functional: the float32 lines only, few repeats")
    model = "outputs/models/smollm2-58a66dcdc4b5"
    parser.add_argument("--model", default=model, metavar="FOLDER", help=f"decode-model: of mlx-lm (default: {model})")
    parser.add_argument("--context", type=int, default=512, help="decode-model: rows of the full cache")
    parser.add_argument("--budget", type=int, default=128, help="decode-model: rows that the policies keep")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="decode-model")
    mx.set_default_device(mx.Device(mx.cpu))
    return run(PARTS, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
