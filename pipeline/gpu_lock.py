"""One job at a time on this machine's GPU, whichever sweep or worker started it."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import BadInput

_held = False  # by this process


def lock_path() -> Path:
    """The file that is locked: KEYFORMER_GPU_LOCK, else one in /tmp for each user and choice of CUDA devices.

    Not in the folder for temporary files: on macOS a service has another one than a terminal.
    """
    if chosen := os.environ.get("KEYFORMER_GPU_LOCK"):
        return Path(chosen)
    devices = re.sub(r"[^\w,-]", "", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return Path("/tmp") / f"keyformer-gpu-{os.getuid()}{'-' if devices else ''}{devices}.lock"


@contextmanager
def gpu_lock() -> Iterator[None]:
    """Wait, saying so, until no other process has the GPU; the system lets go of it however this one ends.

    Within a process that has it already it does nothing. Raises BadInput for a lock file that cannot be written.
    """
    global _held
    if _held:
        yield
        return
    try:
        file = open(lock_path(), "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise BadInput(
            f"KEYFORMER_GPU_LOCK: expected a file that can be written, got {lock_path()} ({error.strerror}); name "
            "another one, the same for all who use this machine's GPU"
        ) from error
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another job works on this machine's GPU; waiting", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        _held = True
        try:
            yield
        finally:
            _held = False
