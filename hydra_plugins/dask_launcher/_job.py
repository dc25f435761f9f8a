"""One job in a process of its own: `python -m hydra_plugins.dask_launcher._job IN OUT`, started by _host.

A fresh process runs the code that is on the disk now, gives all memory back, and may die without taking the Dask worker
along. Its standard input is a pipe from the worker: when that closes, the worker is gone, and the job ends as well.
OUT is written whole, last; a process that ends without OUT has died.
"""

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from pipeline.errors import BadInput, HostUnfit, interrupted
from pipeline.gpu_lock import gpu_lock

LAST_WORDS_S = 10.0  # what an interrupted job gets to end its run


def main(given: str, result: str) -> int:
    """Run the pickled job in the file `given`; what came of it goes to the file `result`."""
    worker = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the job must not read from the worker's pipe
    threading.Thread(target=_end_with_the_worker, args=(worker,), daemon=True).start()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, _interrupt)
    try:
        with gpu_lock():  # before MLX and the rest are imported: a job that waits takes little memory
            content = pickle.dumps(_run(Path(given).read_bytes()))
    except KeyboardInterrupt:
        return 130
    except BadInput as error:  # the lock: this machine's, not the job's
        content = pickle.dumps({"kind": "unfit", "reason": str(error)})
    temporary = Path(f"{result}.part")
    temporary.write_bytes(content)
    os.replace(temporary, result)
    return 0


def _interrupt(number: int, frame: object) -> None:
    interrupted.set()
    raise KeyboardInterrupt


def _end_with_the_worker(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(LAST_WORDS_S)
    os.killpg(0, signal.SIGKILL)


def _run(payload: bytes) -> dict[str, Any]:
    """What came of the job, as plain values and pickles: reading it needs none of the job's own classes."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobStatus, run_job, setup_globals

    try:
        hydra_context, config, task_function, singletons = cloudpickle.loads(payload)
        setup_globals()
        Singleton.set_state(singletons)
        HydraConfig.instance().set_config(config)
        returned = run_job(
            hydra_context=hydra_context,
            task_function=task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if returned.status == JobStatus.COMPLETED:
            return {"kind": "completed", "returned": cloudpickle.dumps(returned)}
        error = returned._return_value
    except KeyboardInterrupt:
        raise
    except (Exception, SystemExit) as raised:
        error = raised
    except BaseException as stop:  # meant for the whole sweep, as pipeline.run.StopSweep
        return {"kind": "stop", "error": cloudpickle.dumps(stop)}
    if interrupted.is_set():
        raise KeyboardInterrupt
    if isinstance(error, HostUnfit):
        return {"kind": "unfit", "reason": str(error)}
    trace = "".join(traceback.format_exception(error))
    return {"kind": "failed", "reason": f"{type(error).__name__}: {error}", "traceback": trace}


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing that a library left running may hold the GPU, or change the exit code
