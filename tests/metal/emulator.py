"""Runs the Metal source that MLX generates on this machine's CPU: no Mac, no GPU.

`MetalKernel` stands where `mx.fast.metal_kernel(...)` would. It asks MLX itself for the generated source (inside
`mx.export_function` a kernel may be called on a build without Metal, and the callback is shown the kernel), and then

1. checks it as C++14 with Metal's address spaces, without changing a character of signature or body;
2. compiles the same body as C++ for OpenCL, whose address spaces are real and whose threadgroup variables may stand at
   kernel scope only, as in Metal;
3. runs it: every thread is a fiber of `runtime.cpp`, barriers and simdgroup operations are true meetings, the order of
   threads is a schedule of our choice, and threadgroup memory and outputs begin as 0xFF bytes.

It is not Apple's compiler: the functions of `shim/metal_stdlib` are the ones written there, registers are not counted,
and exp, log and tanh are the C library's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

CLANG = "clang-19"
MOST_THREADS, MOST_BYTES, MOST_BUFFERS = 1024, 32768, 31  # Metal's limits
FORWARD, BACKWARD = 0, 1  # schedules; a larger number is the seed of a random one

_FENCE = 1024  # bytes around an output that must stay as they are
_HERE = Path(__file__).resolve().parent
_BUILT = Path(tempfile.gettempdir()) / f"keyformer_metal_{os.getuid()}"
_TARGET = f"--target={platform.machine()}-linux-gnu"
# Metal has half, and neither double nor pointers without an address space
_EXTENSIONS = (
    "+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_generic_address_space,"
    "-__opencl_c_program_scope_global_variables,-__opencl_c_pipes,-__opencl_c_device_enqueue"
)
_WARNINGS = (
    "-Wall",
    "-Werror",
    "-Wno-unknown-attributes",
    "-Wno-unused-variable",
    "-Wno-unused-function",
    "-Wimplicit-float-conversion",
    "-Wfloat-conversion",
    "-Wdouble-promotion",
    "-Wshadow",
    "-Wno-c++11-narrowing-const-reference",
)
# what MLX puts in front of every kernel, as far as ours use it
_PREAMBLE = "#include <metal_stdlib>\nusing namespace metal;\ntypedef half float16_t;\ntypedef bfloat bfloat16_t;\n"
_ATTRIBUTES = {  # name: (what `kf_attribute` calls it, components)
    "thread_position_in_grid": (0, 3),
    "thread_position_in_threadgroup": (1, 3),
    "threadgroup_position_in_grid": (2, 3),
    "threads_per_grid": (3, 3),
    "threads_per_threadgroup": (4, 3),
    "threadgroups_per_grid": (5, 3),
    "thread_index_in_simdgroup": (6, 1),
    "simdgroup_index_in_threadgroup": (7, 1),
    "simdgroups_per_threadgroup": (8, 1),
    "threads_per_simdgroup": (9, 1),
    "thread_index_in_threadgroup": (10, 1),
}
_METAL_TYPE = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}
_NUMPY_TYPE = {
    mx.float32: np.float32,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,  # its bits: NumPy has no bfloat16
    mx.int32: np.int32,
    mx.uint32: np.uint32,
}

Template = Sequence[tuple[str, Any]]


class MetalError(RuntimeError):
    """The kernel is not Metal, or broke a rule of Metal's while it ran."""


@dataclass(frozen=True)
class Generated:
    """What MLX would hand to Metal."""

    name: str
    source: str  # header, template line, signature, body
    shape_infos: list[tuple[bool, bool, bool]]  # for each input: its shape, strides and number of axes are arguments


def generate(kernel: Any, inputs: list[mx.array], **call: Any) -> Generated:
    """The source of a call of a kernel of `mx.fast.metal_kernel`."""
    found = []

    def look(event: dict[str, Any]) -> None:
        if event.get("type") == "primitive" and event["name"] == "CustomKernel":
            arguments = event["arguments"]
            found.append(Generated(arguments[0], arguments[1], arguments[8]))

    mx.export_function(look, lambda *arrays: kernel(inputs=list(arrays), **call), *inputs)
    (generated,) = found
    return generated


def _clang(*arguments: str, text: str | None = None) -> None:
    try:
        done = subprocess.run([CLANG, *arguments], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise MetalError(f"expected {CLANG}, found none. Install it: apt-get install {CLANG}") from None
    if done.returncode:
        raise MetalError(f"{'C++14' if '-std=c++14' in arguments else 'OpenCL C++'}: {done.stderr[:6000]}")


def check_cxx14(generated: Generated, template: Template) -> None:
    """Syntax, types, templates and address spaces of the source as it is; MetalError where Metal would object."""
    source, name = _PREAMBLE + generated.source, generated.name
    start = source.index(f"[[kernel]] void {name}(\n")
    if template:
        start = source.rindex("template <", 0, start)
    # only a body declares threadgroup variables; there they have static storage
    static = "\n#undef threadgroup\n#define threadgroup static __attribute__((address_space(3)))\n"
    source = source[:start] + static + source[start:]
    source = re.sub(r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] ", "\ntemplate ", source)
    language = ("-x", "c++", "-std=c++14", "-fno-exceptions", "-fno-rtti", "-nostdinc", "-nostdinc++")
    _clang(*language, "-I", f"{_HERE}/shim", *_WARNINGS, "-Werror=c++17-extensions", "-fsyntax-only", "-", text=source)


def opencl(generated: Generated, template: Template) -> tuple[str, int]:
    """The kernel as C++ for OpenCL, its body unchanged, and its number of buffers."""
    source, name = generated.source, generated.name
    signature = source.index(f"[[kernel]] void {name}(\n")
    header = re.sub(r"template <[^\n]*>\n$", "", source[:signature])
    end = source.index(") {\n", signature)
    parameters = source[signature:end].split("(\n", 1)[1].split(",\n")
    body = source[end + 4 :]
    if template:
        body = body[: body.rindex("\ntemplate [[host_name")]
    body = body.rstrip().removesuffix("}")
    buffers = [re.sub(r" \[\[buffer\(\d+\)\]\]", "", p.strip()) for p in parameters if "[[buffer(" in p]
    lines = [_PREAMBLE, header, f"__kernel void {name}({', '.join(buffers)}) {{"]
    for attribute in (p.split()[1] for p in parameters if "[[buffer(" not in p):
        which, axes = _ATTRIBUTES[attribute]
        value = ", ".join(f"kf_attribute({which}, {axis})" for axis in range(axes))
        lines.append(f"const uint3 {attribute} = {{{value}}};" if axes == 3 else f"const uint {attribute} = {value};")
    # a kernel cannot be a template there
    for parameter, value in template:
        if isinstance(value, bool):
            lines.append(f"constexpr bool {parameter} = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"constexpr int {parameter} = {value};")
        else:
            lines.append(f"using {parameter} = {_METAL_TYPE[value]};")
    return "\n".join([*lines, '#line 1 "body"', body, "}"]), len(buffers)


def compile_kernel(generated: Generated, template: Template, sanitizer: str) -> Path:
    """A shared library that runs the kernel; built once for each source."""
    source, buffers = opencl(generated, template)
    if buffers > MOST_BUFFERS:
        raise MetalError(f"{buffers} buffers, Metal has {MOST_BUFFERS}")
    runtime, shim = _HERE / "runtime.cpp", sorted((_HERE / "shim").iterdir())
    texts = [file.read_text() for file in (runtime, *shim, Path(__file__))]
    parts = source, sanitizer, str(runtime), *texts
    folder = _BUILT / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    library = folder / "kernel.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        at = Path(scratch)
        (folder / "kernel.clcpp").write_text(source)
        flags = [f"-fsanitize={sanitizer}"] if sanitizer else []
        language = ("-x", "clcpp", "-cl-std=CLC++2021", "-cl-no-stdinc", _TARGET, "-Xclang", f"-cl-ext={_EXTENSIONS}")
        code = ("-ffp-contract=off", "-g1", "-O2", "-fPIC", *flags)
        _clang(*language, "-I", f"{_HERE}/shim", *_WARNINGS, *code, "-c", f"{folder}/kernel.clcpp", "-o", f"{at}/k.o")
        types, values = ", ".join(["void*"] * buffers), ", ".join(f"a[{i}]" for i in range(buffers))
        (at / "runtime.cpp").write_text(
            f'#include "{runtime}"\nextern "C" void {generated.name}({types});\n'
            f'extern "C" void kf_invoke(void** a) {{ {generated.name}({values}); }}\n'
        )
        defines = {"thread": ["-DKF_TSAN"], "address": ["-DKF_ASAN"]}.get(sanitizer, [])
        _clang("-x", "c++", "-std=c++17", "-O2", "-fPIC", *defines, "-c", f"{at}/runtime.cpp", "-o", f"{at}/r.o")
        shared = ["-shared-libsan"] if sanitizer else []
        objects = (f"{at}/k.o", f"{at}/r.o", "-lstdc++", "-lm")
        _clang("-shared", *flags, *shared, *objects, "-o", f"{at}/kernel.so")
        os.replace(at / "kernel.so", library)
    return library


class _Library:
    """A compiled kernel in this process, its threadgroup variables found."""

    def __init__(self, path: Path, name: str, sanitizer: str) -> None:
        self.run = ctypes.CDLL(str(path)).kf_run
        self.run.restype = ctypes.c_char_p
        poison = ctypes.CDLL(str(path)).kf_poison
        symbols = {}
        for line in subprocess.run(["nm", "-S", path], capture_output=True, text=True, check=True).stdout.splitlines():
            fields = line.split()
            if len(fields) == 4:
                symbols[fields[3]] = int(fields[0], 16), int(fields[1], 16)
        base = ctypes.cast(self.run, ctypes.c_void_p).value
        assert base is not None
        base -= symbols["kf_run"][0]
        variables = [at for symbol, at in symbols.items() if symbol.startswith("_ZZ") and name in symbol]
        self.bytes = sum(size for _, size in variables)
        if sanitizer != "address":  # whose sizes include what it puts between variables
            if self.bytes > MOST_BYTES:
                raise MetalError(f"{self.bytes} bytes of threadgroup memory, Metal has {MOST_BYTES}")
            for address, size in variables:
                poison(ctypes.c_void_p(base + address), ctypes.c_size_t(size))


def run_sanitized(what: str, sanitizer: str, mistake: str, finds: bool) -> None:
    """Run `sanitized.py` with clang's sanitizer "thread" or "address", which has to find something or nothing."""
    library = {"thread": "tsan", "address": "asan"}[sanitizer]
    name = f"libclang_rt.{library}-{os.uname().machine}.so"
    found = subprocess.run([CLANG, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute():
        folder = subprocess.run([CLANG, "-print-resource-dir"], capture_output=True, text=True, check=True)
        runtime = Path(folder.stdout.strip()) / "lib" / "linux" / name
    assert runtime.exists(), f"expected {name}. Install it: apt-get install libclang-rt-19-dev"
    suppressed = _HERE / "suppressed.txt"  # MLX and its BLAS are not built for the thread sanitizer
    environment = os.environ | {
        "LD_PRELOAD": str(runtime),
        "TSAN_OPTIONS": f"exitcode=66 ignore_noninstrumented_modules=1 symbolize=0 suppressions={suppressed}",
        "ASAN_OPTIONS": "detect_leaks=0 symbolize=0 exitcode=66",
    }
    command = [sys.executable, str(_HERE / "sanitized.py"), what, sanitizer, mistake]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if finds:
        assert done.returncode == 66, done.stdout + done.stderr
    else:
        assert (done.returncode, done.stdout.strip()) == (0, "ran"), done.stderr


class MetalKernel:
    """Stands where `mx.fast.metal_kernel(...)` would: the same arguments, the same call.

    Attributes:
        schedule: in which order threads run: FORWARD, BACKWARD, or the seed (2 or more) of a random order.
        threadgroup_bytes: what the last call's kernel declared.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        sanitizer: str = "",
    ) -> None:
        self._kernel = mx.fast.metal_kernel(name, input_names, output_names, source, header)
        self._sanitizer = sanitizer
        self._compiled: dict[Any, tuple[Generated, _Library]] = {}
        self.schedule = FORWARD
        self.threadgroup_bytes = 0

    def _compile(self, inputs: list[mx.array], template: Template, call: dict[str, Any]) -> tuple[Generated, _Library]:
        # fewer than 8 elements make an input `constant`, no axes make it a reference
        kinds = tuple((x.dtype, x.ndim > 0, x.size < 8) for x in inputs)
        key = kinds, tuple(call["output_dtypes"]), tuple(template)
        if key not in self._compiled:
            generated = generate(self._kernel, inputs, template=template, **call)
            check_cxx14(generated, template)
            path = compile_kernel(generated, template, self._sanitizer)
            self._compiled[key] = generated, _Library(path, generated.name, self._sanitizer)
        return self._compiled[key]

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template = (),
    ) -> list[mx.array]:
        call = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
        }
        if int(np.prod(threadgroup)) > MOST_THREADS:
            raise MetalError(f"{threadgroup} threads in a threadgroup, Metal has at most {MOST_THREADS}")
        generated, library = self._compile(inputs, template, call)
        self.threadgroup_bytes = library.bytes
        arguments: list[np.ndarray] = []
        for x, (shape, strides, axes) in zip(inputs, generated.shape_infos, strict=True):
            a = np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, order="C")
            arguments.append(a)
            if x.ndim:
                arguments += [np.array(x.shape, np.int32)] if shape else []
                arguments += [np.array([s // a.itemsize for s in a.strides], np.int64)] if strides else []
                arguments += [np.array([x.ndim], np.int32)] if axes else []
        return launch(library.run, arguments, output_shapes, output_dtypes, grid, threadgroup, self.schedule)


def launch(
    run: Any,
    arguments: list[np.ndarray],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    schedule: int,
) -> list[mx.array]:
    """Call `kf_run` of a compiled kernel; its outputs, poisoned before and fenced around."""
    given = [a.tobytes() for a in arguments]
    memory, outputs = [], []
    for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
        kind = np.dtype(_NUMPY_TYPE[dtype])
        size = int(np.prod(shape)) * kind.itemsize
        memory.append(np.full(size + 2 * _FENCE, 0xFF, np.uint8))  # NaN, -1
        outputs.append(memory[-1][_FENCE : _FENCE + size].view(kind).reshape(shape))
    buffers = [a.ctypes.data for a in (*arguments, *outputs)]
    error = run(
        (ctypes.c_void_p * len(buffers))(*buffers),
        (ctypes.c_int * 3)(*grid),
        (ctypes.c_int * 3)(*threadgroup),
        ctypes.c_int(schedule),
    )
    if error:
        raise MetalError(error.decode())
    if [a.tobytes() for a in arguments] != given:
        raise MetalError("the kernel wrote to an input")
    if any((m[:_FENCE] != 0xFF).any() or (m[-_FENCE:] != 0xFF).any() for m in memory):
        raise MetalError("the kernel wrote beyond an output")
    made = zip(outputs, output_dtypes, strict=True)
    return [mx.array(o).view(mx.bfloat16) if d == mx.bfloat16 else mx.array(o) for o, d in made]
