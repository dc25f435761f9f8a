"""`python -m keyformer.selftest`: whether this GPU computes what the definitions say, and how fast.

Each kernel runs a spread of cases beside its definition in array operations, computed on the CPU; then a small random
model generates with kernels and without. Exit code 0: all agree. 1: a difference, or a kernel that does not run; please
send the whole output as an issue. 2: nothing was tested, because MLX computes on a CPU here or an option is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from . import command
from .cache import KeyformerKVCache
from .command import Refusal, replacing, say
from .hook import attached, make_prompt_cache
from .kernels.build import backend
from .kernels.checks import ALLOWED, CHECKS, NEAR, Check, difference
from .kernels.measure import copy_bandwidth
from .policies import H2O, Keyformer, KeyformerProxy, Policy, Random, Tova

_PROGRAM = "keyformer.selftest"
_PACKAGES = ("keyformer-mlx", "mlx", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-cpu", "mlx-lm", "numpy")

LOGITS = 1e-4  # of the small model, kernels on and off: its products are the same, only kept rows could differ


@dataclass
class Report:
    """What one kernel did: see `Compared`. `failed` has one line per case that is wrong, the first row in it."""

    cases: int = 0
    rows: int = 0
    worst: float = 0.0
    differing: int = 0
    near: int = 0
    failed: list[str] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)


def examine(check: Check, back_end: str, quick: bool) -> Report:
    """All cases of a kernel; what a compiler or the GPU objects to is a failed case like any other."""
    report, objection = Report(), ""
    for name in check.quick if quick else check.cases:
        report.cases += 1
        try:
            one = check.compare(back_end, check.cases[name])
        except (RuntimeError, ValueError) as error:
            known, objection = objection, str(error)
            report.failed.append(f"case {name!r}: does not run: {'as above' if objection == known else objection}")
            continue
        report.rows += one.rows
        report.worst = max(report.worst, one.worst)
        report.differing += one.differing
        report.near += one.near
        if one.wrong:
            report.failed.append(f"case {name!r}: {one.wrong}")
    return report


# -- end to end --------------------------------------------------------------------------------------------------------

END_TO_END: dict[str, tuple[Policy, str]] = {
    "keyformer": (Keyformer(seed=1), "full"),
    "keyformer, chunked": (Keyformer(seed=1), "chunked"),
    "keyformer_proxy": (KeyformerProxy(seed=2, recent=0.25), "full"),
    "keyformer_proxy, chunked": (KeyformerProxy(seed=2, recent=0.25), "chunked"),
    "h2o": (H2O(), "full"),
    "tova": (Tova(), "full"),
    "random": (Random(seed=3), "full"),
}


def end_to_end(policy: Policy, prefill: str) -> str:
    """A small random model with kernels and without, one sequence and a ragged batch; what is wrong, in words."""
    model = _model()
    runs: list[list[_Generated]] = []
    with _warnings() as warned:
        for wanted in "10":
            with _kernels(wanted):
                runs.append([_generate(model, policy, prefill, prompts) for prompts in ((70,), (61, 40))])
    if warned:
        return warned[0].splitlines()[0]
    for (kept, logits), (right, expected) in zip(runs[0], runs[1], strict=True):
        for layer, (mine, theirs) in enumerate(zip(kept, right, strict=True)):
            for b, (one, two) in enumerate(zip(mine, theirs, strict=True)):
                if one.shape != two.shape or (one != two).any():
                    return f"layer {layer}, sequence {b}: other rows are kept than without kernels"
        far = float(difference(logits, expected).max())
        if far > LOGITS:
            return f"logits differ by {far:.1e} from those without kernels, {LOGITS:.0e} allowed"
    return ""


_Generated = tuple[
    list[list[np.ndarray]], np.ndarray
]  # kept positions [KV heads, rows] of each layer and sequence, logits


def _generate(model: nn.Module, policy: Policy, prefill: str, prompts: tuple[int, ...], tokens: int = 24) -> _Generated:
    """Read a prompt for each sequence, then feed all of them some tokens."""
    rng = np.random.default_rng(17)
    with attached(model):
        rows = []
        for length in prompts:
            caches: list[Any] = make_prompt_cache(model, policy, budget=24, prefill=prefill)
            for cache in caches:
                cache.begin_prefill()
            prompt = mx.array(rng.integers(0, 256, (1, length)))
            for first in range(0, length, 32):
                mx.eval(model(prompt[:, first : first + 32], cache=caches))
            for cache in caches:
                cache.end_prefill()
            rows.append(caches)
        together = (
            rows[0] if len(rows) == 1 else [KeyformerKVCache.merge(list(layer)) for layer in zip(*rows, strict=True)]
        )
        logits = []
        for _ in range(tokens):
            logits.append(model(mx.array(rng.integers(0, 256, (len(prompts), 1))), cache=together)[:, -1])
            mx.eval(logits[-1])
    kept = [[np.array(cache.kept(b)) for b in range(len(prompts))] for cache in together]
    return kept, np.array(mx.stack(logits))


def _model() -> nn.Module:
    """Two layers, 4 query heads on 2 KV heads of 16, float32; weights so wide that logits depend on the context."""
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5}
    model: nn.Module = llama.Model(llama.ModelArgs(model_type="llama", tie_word_embeddings=True, **shape))
    rng = np.random.default_rng(5)
    parameters: Any = tree_flatten(model.parameters())
    weights = [
        (name, mx.array(rng.normal(0, 2 * p.shape[-1] ** -0.5, p.shape), mx.float32) if p.ndim > 1 else p)
        for name, p in parameters
    ]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


@contextmanager
def _kernels(wanted: str) -> Iterator[None]:
    before = os.environ.get("KEYFORMER_KERNELS")
    os.environ["KEYFORMER_KERNELS"] = wanted
    try:
        yield
    finally:
        del os.environ["KEYFORMER_KERNELS"]
        if before is not None:
            os.environ["KEYFORMER_KERNELS"] = before


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the library warns of: a kernel that it found wrong, and does not use."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger(__package__), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


# -- the command -------------------------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """The machine and the versions, for a report."""
    device = mx.default_device()
    info = {name: value for name, value in mx.device_info(device).items() if isinstance(value, str | int | float)}
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "device": str(device),
        "chip": info,
        "system": platform.platform(),
        "macos": platform.mac_ver()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),  # on macOS too
        "python": platform.python_version(),
        "versions": versions,
    }


def main(arguments: list[str] | None = None) -> int:
    """The command; `arguments` are those of the command line. Returns the exit code: 0, 1 or 2, see the module."""
    codes: list[int] = []
    refused = command.run(_PROGRAM, lambda: codes.append(_selftest(_parser().parse_args(arguments))))
    return refused or codes[0]


def _parser() -> argparse.ArgumentParser:
    parser = command.Parser(prog=_PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report there, for machines")
    parser.add_argument("--quick", action="store_true", help="a few cases of each kernel and short timings, for CI")
    return parser


def _selftest(options: argparse.Namespace) -> int:
    facts = about()
    try:
        back_end = backend()
    except ValueError as error:  # what the environment asks for
        raise Refusal(str(error)) from error
    content: dict[str, Any] = {"about": facts, "back_end": back_end, "quick": options.quick}
    if back_end is None:
        _write(options.json, content | {"result": _no_gpu(facts)})
        raise Refusal(_no_gpu(facts))
    # now, before minutes are spent for a file that cannot be written
    _write(options.json, content | {"result": "Not finished."})
    _say_about(facts, back_end)
    bandwidth = copy_bandwidth(64 if options.quick else 512)
    say(f"copies: {bandwidth / 1e9:.0f} GB/s\n")
    reports = {}
    for check in CHECKS:
        reports[check.name] = report = examine(check, back_end, options.quick)
        _say_report(check, report)
        if not report.failed:
            _time(check, back_end, bandwidth, 32 if options.quick else 48, report)
    models = {}
    for name, (policy, prefill) in END_TO_END.items():
        models[name] = wrong = end_to_end(policy, prefill)
        say(f"small model, {name}: {wrong or 'the same kept rows and logits with kernels and without'}\n")
    bad = [f"kernel {name}" for name, report in reports.items() if report.failed]
    bad += [f"small model, {name}" for name, wrong in models.items() if wrong]
    result = f"WRONG: {'; '.join(bad)}. Please send this whole output as an issue." if bad else "All good."
    content |= {"copy_bytes_per_second": bandwidth, "models": models, "result": result}
    say(f"{result}\n")
    _write(options.json, content | {"kernels": {name: asdict(report) for name, report in reports.items()}})
    return int(bool(bad))


def _write(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        with replacing(file, "--json") as new:
            new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _no_gpu(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    found = f"{facts['device']} on {facts['system']}, Python {facts['python']}, {versions}"
    if os.environ.get("KEYFORMER_KERNELS") == "0":
        return f"expected kernels to be on, got KEYFORMER_KERNELS=0 ({found}); unset it."
    return (
        f"expected a GPU that MLX computes on, got {found}. A CPU cannot test kernels. On Apple silicon take macOS 14 "
        "or newer and an arm64 Python: pip install mlx. On Linux with an NVIDIA GPU: pip install 'mlx[cuda13]' (or "
        "'mlx[cuda12]' for an older driver)."
    )


def _say_about(facts: dict[str, Any], back_end: str) -> None:
    chip = ", ".join(f"{name} {value}" for name, value in facts["chip"].items())
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    macos = f", macOS {facts['macos']}" if facts["macos"] else ""
    say(f"device: {facts['device']} ({back_end}), {chip}\n")
    say(f"system: {facts['system']}{macos}, memory {facts['memory_bytes'] / 2**30:.0f} GiB\n")
    say(f"versions: Python {facts['python']}, {versions}\n")


def _say_report(check: Check, report: Report) -> None:
    say(
        f"kernel {check.name}: {report.cases} cases, {report.rows} rows chosen; worst difference {report.worst:.1e} "
        f"({ALLOWED:.0e} allowed); {report.differing} choices differ, {report.near} of them between ranks closer than "
        f"{NEAR:.0e}; {len(report.failed)} cases wrong\n"
    )
    for line in report.failed[:10]:
        say(f"  {line}\n")


def _time(check: Check, back_end: str, bandwidth: float, count: int, report: Report) -> None:
    for name, measure in check.timings.items():
        took = measure(back_end, count)
        floor = took.bytes / bandwidth
        report.timings.append({"case": name, "seconds": took.seconds, "floor": floor, "ratio": took.seconds / floor})
        say(
            f"  {name}: {took.seconds * 1e6:.1f} us; reading {took.bytes / 2**20:.1f} MiB of keys takes "
            f"{floor * 1e6:.1f} us: {took.seconds / floor:.1f} times that\n"
        )


if __name__ == "__main__":
    sys.exit(main())
