"""What eviction costs on a GPU: kernels, a decoded token, a prompt, the functional API.

    python -m benchmarks.gpu [--only NAME ...] [--json FILE] [--tiny] [--ncu]

Random weights of the 8B llama's shape, random rows: times do not depend on what numbers are. About 8 minutes on an H200
with 139 GiB. VeloxQuant-MLX is measured beside where it is importable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import keyformer

from . import decode_model, functional, kernels, models, prefill
from .harness import Line, Part, run

POLICIES = ["streaming", "h2o", "keyformer", "keyformer_proxy", "tova"]


def decode_kernel(options: argparse.Namespace) -> Iterator[Line]:
    """GPU time of the decode kernel beside its definition, compiled"""
    sizes = [(64, 16), (96, 32)] if options.tiny else [(512, 64), (1024, 128), (4096, 128)]
    yield from kernels.decode_lines(sizes, 2 if options.tiny else 48, options.ncu)


def walk(options: argparse.Namespace) -> Iterator[Line]:
    """the walk over a block of new tokens, per token"""
    if options.tiny:
        yield from kernels.walk_lines([4], [(24, 8)], 32, 8)
    else:
        yield from kernels.walk_lines([8, 256], [(512, 64), (512, 128), (2048, 128)], 2048, 128)


def decode_of_a_model(options: argparse.Namespace) -> Iterator[Line]:
    """milliseconds per decoded token, 8B shape"""
    model = models.random_model(options.tiny)
    contexts = [64, 128] if options.tiny else options.context
    budget, rounds, tokens = (40, 2, 2) if options.tiny else (2048, 5, 8)
    for batch in [1, 2] if options.tiny else options.batch:
        for context in contexts:
            yield from decode_model.lines(model, batch, context, budget, options.policies, rounds, tokens)


def prefill_of_a_model(options: argparse.Namespace) -> Iterator[Line]:
    """seconds to read a prompt, 8B shape"""
    model = models.random_model(options.tiny)
    tokens, chunk, budget = (96, 32, 40) if options.tiny else (30720, 2048, 2048)
    yield from prefill.lines(model, tokens, chunk, budget, options.limit, 1 if options.tiny else 2)


def functional_api(options: argparse.Namespace) -> Iterator[Line]:
    """keyformer_update_batched, 8 rows"""
    functional.say_what_is_missing()
    D, dtype = (16, "float32") if options.tiny else (128, "float16")
    yield from functional.block_lines(*((32, 16) if options.tiny else (2048, 512)), D, dtype, 2)
    for budget in (16, 24) if options.tiny else (512, 1024, 4096):
        yield from functional.decode_lines(budget, D, dtype, budget + 16, 4 if options.tiny else 40)


def peer_decode(options: argparse.Namespace) -> Iterator[Line]:
    """milliseconds per decoded token beside the peer's cache, 8B shape, batch 1"""
    model = models.random_model(options.tiny)
    yield from decode_model.with_peer(model, *((40, 2, 2) if options.tiny else (2048, 5, 8)))


PARTS: dict[str, Part] = {
    "decode-kernel": decode_kernel,
    "walk": walk,
    "decode-model": decode_of_a_model,
    "prefill": prefill_of_a_model,
    "functional": functional_api,
    "peer-decode": peer_decode,
}


def main(arguments: list[str] | None = None) -> int:
    """The command; `arguments` are those of the command line. Returns 1 where a part failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policies", nargs="+", choices=keyformer.POLICIES, default=POLICIES, metavar="NAME", help="of decode-model"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="of decode-model")
    parser.add_argument("--context", type=int, nargs="+", default=[32768, 65536], help="of decode-model")
    parser.add_argument("--limit", type=float, default=30, metavar="SECONDS", help="of prefill: an arm stops there")
    parser.add_argument("--ncu", action="store_true", help="decode-kernel: also under Nsight Compute, if it is there")
    parser.add_argument("--dispatch", help=argparse.SUPPRESS)  # what --ncu runs: WHAT,N,D
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--dispatch")
    known, _ = first.parse_known_args(arguments)
    if known.dispatch:
        what, n, D = known.dispatch.split(",")
        kernels.dispatch(what, int(n), int(D))
        return 0
    return run(PARTS, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
