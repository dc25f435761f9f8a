"""What both commands share: parts by name, their tables, one JSON file."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from keyformer.selftest import about

Line = dict[str, Any]
Part = Callable[[argparse.Namespace], Iterator[Line]]  # lines of a table; None where nothing was measured


def run(parts: dict[str, Part], parser: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """Run the parts that --only names, all by default; print each line as it comes, write the JSON after each part.

    A part that fails, for want of memory or of a peer that still works, leaves its lines so far and the other parts;
    Ctrl-C leaves the lines so far. Returns the exit code: 0, 1 where a part failed, 130 after Ctrl-C.
    """
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), metavar="NAME", help=", ".join(parts))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables there")
    parser.add_argument("--tiny", action="store_true", help="sizes that show that everything runs, and nothing else")
    options = parser.parse_args(arguments)
    if options.json is not None:
        try:
            options.json.open("a").close()
        except OSError as error:
            parser.error(f"--json: expected a file that can be written, got {options.json} ({error.strerror})")
    command = f"python -m {parser.prog} {' '.join(sys.argv[1:] if arguments is None else arguments)}".strip()
    report: dict[str, Any] = {"command": command, "date": datetime.datetime.now().isoformat(timespec="seconds")}
    report |= {"about": about(), "parts": {}}
    chip = report["about"]["chip"].get("device_name", "")
    print(f"{report['date']}, {report['about']['device']} {chip}, {report['about']['versions']}", flush=True)
    code = 0
    for name in options.only:
        print(f"\n{name}: {(parts[name].__doc__ or '').splitlines()[0]}", flush=True)
        began = time.perf_counter()
        part: dict[str, Any] = {"lines": []}
        try:
            for line in parts[name](options):
                _show(line, part["lines"])
                part["lines"].append(line)
        except Exception as error:
            traceback.print_exc()
            part["failed"] = f"{type(error).__name__}: {error}"
            code = 1
        except KeyboardInterrupt:
            part["failed"] = "stopped"
            code = 130
        report["parts"][name] = part | {"seconds": time.perf_counter() - began}
        mx.clear_cache()
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if code == 130:
            break
    return code


def _show(line: Line, before: list[Line]) -> None:
    if not before or list(before[-1]) != list(line):
        print("  ".join(f"{key:>{_width(key)}}" for key in line))
    print("  ".join(f"{_shown(value):>{_width(key)}}" for key, value in line.items()), flush=True)


def _width(key: str) -> int:
    return max(len(key), 30 if key in ("cache", "case") else 9)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def skipped(why: str) -> None:
    """Say why something is not in the table."""
    print(f"  not measured: {why}", flush=True)
