"""`python -m keyformer.server`: mlx_lm.server with eviction attached to whatever model it loads.

    python -m keyformer.server --model MODEL --policy keyformer --budget 2048

All options of mlx_lm.server work as they do there, except those that eviction cannot go with, which are refused:
--draft-model and --kv-bits.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from http.server import ThreadingHTTPServer
from types import FunctionType, SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm import server

from . import command
from .command import Eviction, Refusal, refusing
from .hook import attached

_PROGRAM = "keyformer.server"


class EvictingModelProvider(server.ModelProvider):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's provider of models; a model is served with eviction or not at all.

    Raises:
        Refusal: options that cannot work. Requests get the same for a draft model or a model that cannot evict.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        for name in ("draft_model", "kv_bits"):
            value = getattr(options, name)
            if value is not None:
                raise Refusal(f"--{name.replace('_', '-')}: expected none, since caches evict, got {value}; drop it.")
        self._eviction = Eviction.read(options).arguments()
        self._attached = ExitStack()
        super().__init__(options)

    def load_default(self) -> None:
        """Load the model of the command line. Where that fails, the command ends: exit code 2 after one message."""
        try:
            super().load_default()
        # This is not the main thread, which serves already and would go on without anybody to answer.
        except Refusal as error:
            print(f"{_PROGRAM}: --model: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def reset(self) -> None:
        """Forget the model, and mlx-lm's functions are its own again."""
        self._attached.close()
        super().reset()

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        if draft_model_path is not None:
            raise Refusal(
                f"draft_model: expected none, since caches evict and what is evicted cannot be taken back, got "
                f"{draft_model_path!r}; leave it out."
            )
        try:
            super()._load(model_path, adapter_path)
        except Exception as error:  # of the same many kinds as in `command.load_model`
            raise Refusal(" ".join(str(error).split())) from error
        try:
            with refusing():
                self._attached.enter_context(attached(self.model, **self._eviction))
        except BaseException:  # whatever it is, the model must not stay and be served from full caches
            self.reset()
            raise


class CheckingResponseGenerator(server.ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's answering thread, without what ends it: there, an error after `_tokenize` is the end of every answer."""

    _known: tuple[Any, int] = None, 0  # a tokenizer, and the first number that is no token of it

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """As mlx-lm's, and tries how a token of this request will be chosen.

        Raises:
            ValueError: a prompt without tokens, a bias for no token. Whatever else is wrong with the choice is raised
                as it is; all of it goes to the client.
        """
        found = super()._tokenize(tokenizer, request, args)
        prompt = found[0]
        if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
            raise ValueError("prompt: expected text of at least one token, got none.")
        self._make_state_machine(self.model_provider.model_key, tokenizer, args.stop_words)
        if self._known[0] is not tokenizer:
            self._known = tokenizer, max(*tokenizer.get_vocab().values(), *tokenizer.eos_token_ids) + 1
        tokens = self._known[1]
        wrong = [t for t in args.logits.logit_bias or () if not 0 <= t < tokens]
        if wrong:  # MLX would write outside of the logits
            raise ValueError(f"logit_bias: expected tokens from 0 to {tokens - 1}, got {wrong[0]}.")
        logits = mx.zeros((1, tokens))
        for process in server._make_logits_processors(args):
            logits = process(mx.array(prompt), logits)
        mx.eval(server._make_sampler(args, tokenizer)(logits))
        server._format_top_logprobs(logits[0], args.top_logprobs, tokenizer)
        return found


class CheckingHandler(server.APIHandler):  # type: ignore[misc]
    """mlx-lm's requests, of which more are refused before anybody waits for them."""

    def validate_model_parameters(self) -> None:
        """As mlx-lm's, and the seed and the stop words.

        Raises:
            ValueError: a value of a request that cannot work; the client gets it with status 400.
        """
        try:
            super().validate_model_parameters()
        except (TypeError, OverflowError) as error:
            raise ValueError(command.reason(error)) from error
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: expected an integer from 0 to 2**64 - 1, got {self.seed}.")
        stop = self.body.get("stop") or []
        if not isinstance(stop, (str, list)) or not all(isinstance(word, str) for word in stop):
            raise ValueError(f"stop: expected a text or a list of texts, got {stop!r}.")

    def handle_text_completions(self) -> Any:
        """As mlx-lm's.

        Raises:
            ValueError: a prompt that is no text or empty; the client gets it with status 400.
        """
        prompt = self.body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            got = "none" if prompt == "" else f"a value of type {type(prompt).__name__}"
            raise ValueError(f"prompt: expected some text, got {got}; send one request for each prompt.")
        return super().handle_text_completions()


def main() -> int:
    """The command, with the options of the command line. Returns the exit code (`keyformer.command.run`)."""
    if sys.stdout is None:  # closed, which is all the same to a server
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    return command.run(_PROGRAM, _serve)


def _serve() -> None:
    parser = command.Parser(
        prog=_PROGRAM, description="mlx_lm.server with eviction: a fixed number of cache rows for every request."
    )
    command.add_eviction_options(parser)
    # mlx-lm's own main, which adds its options to our parser and serves with our provider.
    _with(
        server.main,
        argparse=SimpleNamespace(ArgumentParser=lambda **_: parser),
        ModelProvider=EvictingModelProvider,
        run=_run,
    )()


def _run(host: str, port: int, provider: EvictingModelProvider) -> None:
    """mlx-lm's own run, at an address that is taken before a thread is started that would go on without it."""
    # of several processes that serve together, only the first one talks to clients
    listening = _listen(host, port) if mx.distributed.init().rank() == 0 else None
    serve = partial(server._run_http_server, server_class=listening, handler_class=CheckingHandler)
    _with(server.run, ResponseGenerator=CheckingResponseGenerator, _run_http_server=serve)(host, port, provider)


def _with(function: FunctionType, **names: Any) -> Callable[..., None]:
    """A copy of a function of mlx_lm.server to which these names mean something else; nothing of mlx_lm is changed."""
    return FunctionType(function.__code__, vars(server) | names, argdefs=function.__defaults__)


def _listen(host: str, port: int) -> Callable[[Any, Any], ThreadingHTTPServer]:
    """Take the address. Returns what mlx-lm takes for a class of servers: it gives the one that has the address."""

    class Server(ThreadingHTTPServer):
        pass

    try:
        if not 0 <= port < 2**16:
            raise OverflowError("ports are from 0 to 65535")  # the system would take another one, modulo 2**16
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        address: Any
        Server.address_family, _, _, _, address = found[0]
        listening = Server(address, CheckingHandler)
    except (OSError, OverflowError, UnicodeError) as error:
        raise Refusal(f"--host, --port: expected an address to listen at, got {host}, {port} ({error}).") from error

    def make(_: Any, handler: Any) -> ThreadingHTTPServer:
        listening.RequestHandlerClass = handler
        return listening

    return make


if __name__ == "__main__":
    code: object = 1
    try:
        code = main()
    except SystemExit as end:  # after --help
        code = end.code
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # MLX (0.32.4, CPU) may abort while it takes down the generation thread's stream, and after a fault that thread
    # would go on without anybody to ask it.
    os._exit(code if isinstance(code, int) else 0)
