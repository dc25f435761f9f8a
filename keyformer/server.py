"""`python -m keyformer.server`: mlx_lm.server with eviction attached to whatever model it loads.

    python -m keyformer.server --model MODEL --policy keyformer --budget 2048

All options of mlx_lm.server work as they do there, except those that eviction cannot go with, which are refused:
--draft-model and --kv-bits.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from types import FunctionType, SimpleNamespace
from typing import Any

from mlx_lm import server

from . import command
from .command import Eviction
from .hook import attached

_PROGRAM = "keyformer.server"


class EvictingModelProvider(server.ModelProvider):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's provider of models; a model is served with eviction or not at all.

    Raises:
        ValueError: options that cannot work. Requests get the same for a draft model or a model that cannot evict.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        for name in ("draft_model", "kv_bits"):
            value = getattr(options, name)
            if value is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: expected none, since caches evict, got {value}; drop it."
                )
        self._eviction = Eviction.read(options).arguments()
        self._attached = ExitStack()
        super().__init__(options)

    def load_default(self) -> None:
        """Load the model of the command line. Where that fails, the command ends: exit code 2 after one message."""
        try:
            super().load_default()
        except Exception as error:  # of the same many kinds as in `command.load_model`
            print(f"{_PROGRAM}: --model: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
            # This is not the main thread, which serves already and would go on without anybody to answer.
            os._exit(2)

    def reset(self) -> None:
        """Forget the model, and mlx-lm's functions are its own again."""
        self._attached.close()
        super().reset()

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        if draft_model_path is not None:
            raise ValueError(
                f"draft_model: expected none, since caches evict and what is evicted cannot be taken back, got "
                f"{draft_model_path!r}; leave it out."
            )
        super()._load(model_path, adapter_path)
        try:
            self._attached.enter_context(attached(self.model, **self._eviction))
        except BaseException:  # whatever it is, the model must not stay and be served from full caches
            self.reset()
            raise


def main() -> int:
    """The command, with the options of the command line. Returns the exit code (`keyformer.command.run`)."""
    return command.run(_PROGRAM, _serve)


def _serve() -> None:
    parser = command.Parser(
        prog=_PROGRAM, description="mlx_lm.server with eviction: a fixed number of cache rows for every request."
    )
    command.add_eviction_options(parser)
    # mlx-lm's own main, which adds its options to our parser and serves with our provider. It is a copy with names of
    # its own: nothing of mlx_lm is changed.
    names: dict[str, Any] = {
        "argparse": SimpleNamespace(ArgumentParser=lambda **_: parser),
        "ModelProvider": EvictingModelProvider,
    }
    FunctionType(server.main.__code__, vars(server) | names)()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything has ended, but MLX (0.32.4, CPU) may abort while it takes down the generation thread's stream.
    os._exit(code)
