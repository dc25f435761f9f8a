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

from .join import MLFLOW_PORT, SCHEDULER_PORT

HEAD_HELP = "host or host:port of the head (default: as join.pem says)"


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

    command = commands.add_parser("head", parents=[common], help="run the scheduler and the MLflow server here")
    _add_head_options(command)
    command.set_defaults(command=_head)
    command = commands.add_parser("worker", parents=[common], help="run jobs here, one at a time")
    _add_worker_options(command)
    command.set_defaults(command=_worker)
    command = commands.add_parser("status", parents=[common], help="machines, what they run, sweeps in progress")
    command.add_argument("--head", help=HEAD_HELP)
    command.set_defaults(command=_status)
    command = commands.add_parser(
        "install-service", help="start the head or a worker with the machine (--print: show how)"
    )
    services = command.add_subparsers(title="services", required=True, metavar="head|worker")
    for name, add_options in (("head", _add_head_options), ("worker", _add_worker_options)):
        service = services.add_parser(name, parents=[common], help=f"the {name}, with these options")
        add_options(service)
        service.add_argument("--print", action="store_true", help="print the file instead of writing it")
        service.set_defaults(command=_install_service, service=name)
    command = commands.add_parser("describe", parents=[common], help="this machine, as one line of JSON")
    command.set_defaults(command=_describe)
    command = commands.add_parser("prefetch", parents=[common], help="get models and data of a sweep")
    command.add_argument("config", type=Path, help='a JSON list of {"model": {...}, "task": {...}}')
    command.set_defaults(command=_prefetch)
    return parser


def _add_head_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", help="the only address to listen on (default: that of the default route)")
    command.add_argument("--port", type=int, default=SCHEDULER_PORT, help="of the scheduler (default: %(default)s)")
    command.add_argument("--mlflow-port", type=int, default=MLFLOW_PORT, help="(default: %(default)s)")
    command.add_argument("--auth", action="store_true", help="MLflow asks for user and password")


def _add_worker_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--head", help=HEAD_HELP)
    command.add_argument("--name", help="the worker's name (default: the machine's)")


def _head(options: argparse.Namespace) -> int:
    from .head import head

    return head(options.outputs, options.host, options.port, options.mlflow_port, options.auth)


def _worker(options: argparse.Namespace) -> int:
    from .worker import worker

    return worker(options.outputs, options.head, options.name)


def _status(options: argparse.Namespace) -> int:
    from .status import status

    return status(options.outputs, options.head)


def _install_service(options: argparse.Namespace) -> int:
    from .service import install

    names = {"head": ("host", "port", "mlflow_port", "auth"), "worker": ("head", "name")}[options.service]
    arguments = [options.service, "--outputs", str(options.outputs)]
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:
            arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    install(options.service, arguments, options.outputs, only_print=options.print)
    return 0


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
