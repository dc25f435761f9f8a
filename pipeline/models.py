"""Models: from a hub id, a folder or a PyPI wheel to a model in memory, with the right number type for this machine.

`resolve` makes a model available on disk and identifies it without loading weights; `load_model` loads what it found.
Number types (`dtype: auto`): on a GPU the wheel's model is bfloat16 and others stay as stored; on the CPU, where half
precision is emulated and many times slower, every un-quantized model is float32. Quantized models stay quantized.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from mlx_lm.tokenizer_utils import TokenizerWrapper
from omegaconf import DictConfig, OmegaConf

from pipeline.errors import BadInput
from pipeline.gguf_to_mlx import convert

log = logging.getLogger(__name__)

_FORMAT = 1  # of a converted folder: raise it when gguf_to_mlx writes something else, and old folders are left alone
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names and MLX's
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk, checked and identified; nothing of it is in memory."""

    path: Path
    name: str
    revision: str  # the hub's commit, or "sha256:<hash of the weights>" for a wheel and a local folder
    backend: str  # what computes here: cpu | metal | cuda
    dtype: str  # what load_model makes of it: float32 | bfloat16 | float16, or "4bit" and the like where quantized
    context: int  # the longest sequence, in tokens, that the model was made for


def resolve(model: DictConfig, cache: Path) -> ModelFolder:
    """Make the model that the config group `model` names available on disk, check and identify it.

    A wheel's model is converted into `cache` once, a hub model goes to the hub's own cache; both work offline from then
    on. Weights are hashed in full once and again only when a file's size or time has changed (`cache/checksums.json`).

    Raises BadInput where the model cannot be had (unknown source, no such folder, hub or registry not reachable, no
    such revision) or is not whole (missing, truncated or changed files), naming the file.
    """
    name, source = _option(model, "name"), _option(model, "source")
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise BadInput(
            f"expected model.name of letters, digits and _ . - (it names a folder), got {name!r}. Correct model.name."
        )
    cache = cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    if source == "wheel":
        path = _from_wheel(model, cache)
    elif source == "local":
        path = Path(_option(model, "path")).expanduser().absolute()
        if not path.is_dir():
            raise BadInput(f"expected a model folder at model.path, got {path}, which is not one. Correct model.path.")
    elif source == "hub":
        path = _from_hub(_option(model, "repo"), model.get("revision"))
    else:
        raise BadInput(
            f"expected model.source wheel, local or hub, got {source!r}. Correct conf/model or the override."
        )

    config = _read_json(path / "config.json")
    headers = {file: _safetensors_header(file) for file in _weight_files(path)}
    _check_tokenizer_files(path)
    if source == "hub":
        revision = path.name  # snapshots/<commit>
    else:
        hashes = _checksums(list(headers), cache / "checksums.json")
        whole = "\n".join(f"{file.name} {digest}" for file, digest in hashes.items())
        one = next(iter(hashes.values())) if len(hashes) == 1 else hashlib.sha256(whole.encode()).hexdigest()
        wanted = model.get("weights_sha256")
        if wanted and one != wanted:
            raise BadInput(
                f"expected weights with sha256 {wanted} in {path}, got {one}: {' '.join(f.name for f in headers)} was "
                f"changed or damaged. Delete {path} and run again; it is converted anew."
            )
        revision = f"sha256:{one}"
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    if not isinstance(context, int):
        raise BadInput(
            f"expected max_position_embeddings (the context length) in {path / 'config.json'}, got none. "
            f"{_remedy(path)}"
        )
    backend = detect_backend()
    dtype = _dtype(str(model.get("dtype") or "auto"), config, _stored_dtype(headers), backend, source)
    return ModelFolder(path, name, revision, backend, dtype, context)


def load_tokenizer(folder: ModelFolder) -> TokenizerWrapper:
    """The model's tokenizer. `has_chat_template` tells whether it can render a chat; a base model's cannot.

    Raises BadInput where the files do not make a tokenizer or make one for another model's vocabulary.
    """
    config = _read_json(folder.path / "config.json")
    try:
        # As mlx_lm.load does it: generation_config.json may name further end tokens.
        ends = mlx_lm.utils.load_config(folder.path).get("eos_token_id")
        tokenizer = mlx_lm.utils.load_tokenizer(folder.path, eos_token_ids=ends)
        ids = tokenizer.encode("The quick brown fox, 12345.")
    except Exception as error:  # tokenizers and transformers raise bare Exceptions for damaged files
        raise BadInput(
            f"expected the files of a tokenizer in {folder.path}, got: {_short(error)}. {_remedy(folder.path)}"
        ) from error
    vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    beyond = [i for i in [*ids, *tokenizer.eos_token_ids] if vocabulary and i >= vocabulary]
    if beyond or not ids:
        # MLX would read past the embedding table and go on with garbage.
        raise BadInput(
            f"expected a tokenizer with ids below vocab_size {vocabulary} in {folder.path}, got {beyond or 'no ids'}: "
            f"it belongs to another model. {_remedy(folder.path)}"
        )
    return tokenizer


def load_model(folder: ModelFolder) -> tuple[nn.Module, TokenizerWrapper]:
    """The model, its weights in memory as `folder.dtype`, and its tokenizer.

    Raises BadInput where the files are not a model that mlx-lm knows, or do not fit each other.
    """
    tokenizer = load_tokenizer(folder)
    if folder.backend == "cpu":
        _prepare_cpu()
    try:
        model, _ = mlx_lm.utils.load_model(folder.path, lazy=True)
        stored = _stored_dtype({file: _safetensors_header(file) for file in _weight_files(folder.path)})
        if folder.dtype in _FLOATS.values() and (folder.dtype != stored or folder.dtype == "float32"):
            if stored != folder.dtype:
                log.info("%s: weights stored as %s are computed with as %s.", folder.name, stored, folder.dtype)
            model.set_dtype(getattr(mx, folder.dtype))
        elif folder.backend == "cpu" and folder.dtype not in _FLOATS.values():
            log.warning(
                "%s is quantized: on the CPU it prefills about 20 times slower than a float32 model.", folder.name
            )
        mx.eval(model.parameters())
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, FileNotFoundError) as error:
        raise BadInput(
            f"expected a model that mlx-lm can load in {folder.path}, got: {_short(error)}. "
            f"{_remedy(folder.path)} Or take another."
        ) from error
    return model, tokenizer


def _option(model: DictConfig, key: str) -> str:
    if OmegaConf.is_missing(model, key) or not model.get(key):
        raise BadInput(f"expected model.{key}, got nothing. Name it: model.{key}=...")
    return str(model[key])


def _short(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# -- where a model comes from ------------------------------------------------------------------------------------------


def _from_wheel(model: DictConfig, cache: Path) -> Path:
    """The folder that the wheel's GGUF file was converted to; made on the first call, whole or not at all."""
    package, file, digest = _option(model, "package"), _option(model, "file"), _option(model, "sha256")
    key = hashlib.sha256(f"{_FORMAT} {digest}".encode()).hexdigest()[:12]
    folder = cache / f"{model.name}-{key}"
    if folder.is_dir():
        return folder
    work = cache / f".{folder.name}"
    with _locked(cache / f".{folder.name}.lock"):
        if folder.is_dir():  # another process made it while this one waited
            return folder
        shutil.rmtree(work, ignore_errors=True)  # what a killed process left
        try:
            (work / "model").mkdir(parents=True)
            log.info("fetching %s from the package registry and converting it, once.", package)
            _fetch_package(package, work / "wheel")
            source = work / "wheel" / file
            if not source.is_file():
                raise BadInput(
                    f"expected {file} in the package {package}, got a package without it. Correct model.file."
                )
            got = _sha256(source)
            if got != digest:
                raise BadInput(
                    f"expected {file} of {package} with sha256 {digest}, got {got}: not the file this config was "
                    "written for. Run again for a damaged download, or correct model.sha256."
                )
            convert(source, work / "model")
            _flush_to_disk(work / "model")
            (work / "model").rename(folder)
        except Exception as error:
            if not _disk_full(error):
                raise
            raise BadInput(
                f"expected about 1 GB free for {folder}, got a full disk. Make room and run again."
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _fetch_package(package: str, target: Path) -> None:
    """Unpack a package without its dependencies into `target`, by pip or, in an environment without it, by uv."""
    if find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    elif shutil.which("uv"):
        command = ["uv", "pip", "install", "--python", sys.executable]
    else:
        raise BadInput(
            f"expected pip or uv to fetch {package} with, got neither. Make the environment again: make setup"
        )
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(target), package]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode != 0:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise BadInput(
            f"expected to download the package {package}, got: {_last_line(done.stderr)} "
            "Check the name and the network, or take a model that is already here: model=local model.path=..."
        )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message."


def _from_hub(repo: str, revision: str | None) -> Path:
    """The hub's snapshot folder of `repo` at `revision`, downloaded where it is not there yet."""
    at = f"{repo} at revision {revision}" if revision else repo
    other = "Or take a model that is already here: model=local model.path=..."
    try:
        patterns = mlx_lm.utils.DEFAULT_ALLOW_PATTERNS
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except hub_errors.RevisionNotFoundError as error:
        raise BadInput(f"expected {at} on the hub, got no such revision. Correct model.revision.") from error
    except hub_errors.GatedRepoError as error:
        raise BadInput(
            f"expected leave to download {repo}, got none: accept its licence on the hub and log in."
        ) from error
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError) as error:
        raise BadInput(f"expected the hub model {repo}, got: {_short(error)}. Correct model.repo. {other}") from error
    except (
        Exception
    ) as error:  # offline, proxies, time-outs, a half-filled cache: each has an exception class of its own
        if _disk_full(error):
            raise BadInput(f"expected room for {repo}, got a full disk. Make room and run again.") from error
        raise BadInput(
            f"expected {at} from the hub or its local cache, got: the hub is not reachable and the cache does not hold "
            f"all of it ({_short(error)}). Check the network and HF_HUB_OFFLINE. {other}"
        ) from error


def _disk_full(error: Exception) -> bool:
    """By the system's words: safetensors and pip report a full disk with them, but not as an OSError."""
    return os.strerror(errno.ENOSPC) in str(error)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush_to_disk(folder: Path) -> None:
    """So that a rename never outlives, in a power cut, the contents it stands for."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


# -- whether it is whole -----------------------------------------------------------------------------------------------


def _remedy(path: Path, otherwise: str = "Fetch the model again.") -> str:
    """What to do about a model folder that is not whole; a converted one is known by the lock file beside it."""
    if (path.parent / f".{path.name}.lock").exists():
        return f"Delete {path} and run again; it is converted anew."
    return otherwise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"expected the file {path.name} in {path.parent}, got none. {_remedy(path.parent)}") from error
    except ValueError as error:
        raise BadInput(f"expected JSON in {path}, got a damaged file ({error}). {_remedy(path.parent)}") from error
    if not isinstance(content, dict):
        raise BadInput(f"expected a JSON object in {path}, got {type(content).__name__}. {_remedy(path.parent)}")
    return content


def _weight_files(path: Path) -> list[Path]:
    """The weight files that mlx-lm will load, sorted; every file that an index names must be there."""
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        remedy = _remedy(path, "Give a model in mlx-lm's format.")
        raise BadInput(f"expected weights (model*.safetensors) in {path}, got none. {remedy}")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(set(_read_json(index).get("weight_map", {}).values()) - {file.name for file in files})
        if missing:
            raise BadInput(f"expected {missing[0]} in {path} ({index.name} names it), got none. {_remedy(path)}")
    return files


def _safetensors_header(path: Path) -> dict[str, Any]:
    """The file's table of tensors; its offsets must end where the file ends, so that truncation is seen."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 8 + length <= size else b""
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max(entry["data_offsets"][1] for entry in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"expected a safetensors file, got {path}, which is damaged. {_remedy(path.parent)}") from None
    if size != expected:
        raise BadInput(
            f"expected {expected} bytes in {path}, got {size}: it is truncated or damaged. {_remedy(path.parent)}"
        )
    return tensors


def _check_tokenizer_files(path: Path) -> None:
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise BadInput(f"expected a tokenizer ({' or '.join(_TOKENIZERS)}) in {path}, got none. {_remedy(path)}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file():
            _read_json(path / name)


def _checksums(files: list[Path], record: Path) -> dict[Path, str]:
    """The SHA-256 of each file; taken from `record` where the size and the time of change are still those in it."""
    try:
        known = json.loads(record.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    hashes, fresh = {}, {}
    for file in files:
        state = file.stat()
        seen = {"size": state.st_size, "mtime_ns": state.st_mtime_ns}
        match known.get(str(file.absolute())):
            case {"sha256": str(digest), **rest} if rest == seen and re.fullmatch("[0-9a-f]{64}", digest):
                hashes[file] = digest
            case _:
                hashes[file] = _sha256(file)
                fresh[str(file.absolute())] = seen | {"sha256": hashes[file]}
    if fresh:
        # Renamed into place: a reader sees the old or the new one. Two writers at once cost a hash taken twice.
        part = record.with_name(f".{record.name}.{os.getpid()}")
        part.write_text(json.dumps(known | fresh, indent=1))
        part.replace(record)
    return hashes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- what computes, and in which numbers -------------------------------------------------------------------------------


def detect_backend() -> str:
    """What computes here: cpu | metal | cuda."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _stored_dtype(headers: dict[Path, dict[str, Any]]) -> str:
    """The number type of most of the weights' bytes, in MLX's name where it has one."""
    sizes: dict[str, int] = {}
    for tensors in headers.values():
        for entry in tensors.values():
            start, end = entry["data_offsets"]
            sizes[entry["dtype"]] = sizes.get(entry["dtype"], 0) + end - start
    most = max(sizes, key=lambda dtype: sizes[dtype])
    return _FLOATS.get(most, most.lower())


def _dtype(wanted: str, config: dict[str, Any], stored: str, backend: str, source: str) -> str:
    """What `dtype: <wanted>` means for this model here (see the top of this file)."""
    quantization = config.get("quantization") or config.get("quantization_config")
    if wanted not in ("auto", *_FLOATS.values()):
        raise BadInput(f"expected model.dtype auto, {', '.join(_FLOATS.values())}, got {wanted!r}. Correct it.")
    if quantization:
        if wanted != "auto":
            raise BadInput(f"expected model.dtype=auto for a quantized model, got {wanted}. Leave model.dtype out.")
        bits = quantization.get("bits")
        return f"{bits}bit" if bits else str(quantization.get("quant_method", "quantized"))
    if wanted != "auto":
        return wanted
    if backend == "cpu":
        return "float32"
    return "bfloat16" if source == "wheel" else stored


@functools.cache
def _prepare_cpu() -> None:
    """MLX compiles fused CPU kernels with g++ while it runs; without one it must not try. Said once a process."""
    if shutil.which("g++") is None:
        mx.disable_compile()
        log.warning(
            "found no C++ compiler (g++): MLX runs without fused kernels, a little slower, with the same results."
        )
