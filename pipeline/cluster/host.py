"""What a machine can do for a sweep, and what it has to have at hand before the sweep starts."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline import models, run
from pipeline.errors import BadInput
from pipeline.load import load

_LOCK = Path(__file__).parent.parent.parent / "requirements.lock"


def describe(outputs: Path) -> dict[str, Any]:
    """This machine as a launcher sees it: where jobs fit and whether it runs the same code as others."""
    backend = models.detect_backend()
    return {
        "host": socket.gethostname(),
        "chip": run.chip(),
        "backend": backend,
        "memory_bytes": _usable_memory(backend),
        "free_disk_bytes": _free_disk(outputs),
        "python": platform.python_version(),
        "commit": run.git_commit(),
        "code": run.code_hash(),
        "lock": hashlib.sha256(_LOCK.read_bytes()).hexdigest() if _LOCK.is_file() else "none",
        "versions": run.versions() | run.versions("distributed", "cloudpickle"),
    }


def _usable_memory(backend: str) -> int:
    """Bytes that a job may take: what Metal recommends, a CUDA device's own memory, or this machine's."""
    if backend == "metal":
        return int(mx.device_info()["max_recommended_working_set_size"])
    if backend == "cuda":
        return int(mx.device_info()["total_memory"])
    return int(psutil.virtual_memory().total)


def _free_disk(outputs: Path) -> int:
    outputs = outputs.absolute()
    return shutil.disk_usage(next(p for p in (outputs, *outputs.parents) if p.exists())).free


def prefetch(config: Path, outputs: Path) -> Iterator[dict[str, str]]:
    """Make models and data of a sweep available here; one line for each entry of `config`, in order.

    config: a JSON list of {"model": <config group>, "task": <config group>}, resolved. Gives {revision, dtype, backend,
    data (the hash)}, as models.resolve and load say. Raises BadInput as they do, and for a file that is no such list.
    """
    try:
        wanted = json.loads(config.read_text(encoding="utf-8"))
        pairs = [(OmegaConf.create(dict(entry["model"])), OmegaConf.create(dict(entry["task"]))) for entry in wanted]
    except (OSError, ValueError, TypeError, KeyError, OmegaConfBaseException) as error:
        raise BadInput(
            f'expected a JSON list of {{"model": {{...}}, "task": {{...}}}} in {config}, got '
            f"{type(error).__name__}: {error}; correct the file"
        ) from error
    found: dict[str, Any] = {}
    for model, task in pairs:
        name = json.dumps(OmegaConf.to_container(model), sort_keys=True)
        if name not in found:
            folder = models.resolve(model, outputs / "models")
            found[name] = folder, models.load_tokenizer(folder)
        folder, tokenizer = found[name]
        data = load(task, tokenizer, folder.context, outputs / "data")
        yield {"revision": folder.revision, "dtype": folder.dtype, "backend": folder.backend, "data": data.hash}
