"""`python -m pipeline.cluster.child FOLDER MODULE ARGS...`: MODULE as `python -m` runs it, in FOLDER, and only as long
as whoever started it lives.

The starter holds the other end of stdin; the system closes it however the starter ends. Then this process group ends,
at once and whole: a scheduler without its supervisor would keep the port that the next one needs.
"""

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    threading.Thread(target=_end_with_starter, daemon=True).start()
    folder, module, *arguments = sys.argv[1:]
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_starter() -> None:
    while os.read(0, 4096):  # not sys.stdin: a thread blocked in it breaks the interpreter's shutdown
        pass
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)  # started by hand, in the group of a shell


if __name__ == "__main__":
    main()
