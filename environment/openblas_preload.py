"""Loads OpenBLAS before MLX, at every start of this environment's Python (its .pth file imports this module).

On Linux, MLX's CPU back-end brings a reference BLAS. The dynamic linker takes a symbol from the global scope before
the library's own dependencies, so an OpenBLAS loaded with RTLD_GLOBAL before MLX takes its place, as LD_PRELOAD would
do, but for every entry point. Float32 matrix products become about 50 times faster.
`environment/install.py` writes which libraries to load, in order, to .venv/openblas.txt and copies this file.
"""

import ctypes
import os
import sys

_LIST = os.path.join(sys.prefix, "openblas.txt")

if os.path.exists(_LIST):
    with open(_LIST) as _lines:
        _paths = _lines.read().splitlines()
    try:
        for _path in _paths:
            ctypes.CDLL(_path, mode=ctypes.RTLD_GLOBAL)
    except OSError as _error:
        _mend = "generation is about 35 times slower; mend it with: rm .venv/ready; make setup"
        print(f"OpenBLAS is gone ({_error}): {_mend}", file=sys.stderr)
