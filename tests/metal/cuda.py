"""Runs the text that MLX's CUDA back-end would compile on this machine's CPU, in the emulator's fibers.

`CudaKernel` stands where `mx.fast.cuda_kernel(...)` would. Inline assembly is replaced, instruction by instruction;
indices, barriers and what each lane holds of a matrix are those of the text. It finds wrong layouts and wrong indices,
not what a GPU's memory does: a copy is done at once, whether or not the text waits for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from emulator import _BUILT, _HERE, FORWARD, MetalError, Template, _clang, launch

from keyformer.kernels import build

_TYPE = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.int32: "int32_t"}
_INSTRUCTIONS = {  # what does the instruction's work here; \1 and \2 are its first two operands
    "cp.async.cg.shared.global": r"*to = *(const uint4*)from;",
    "cp.async.ca.shared.global": r"memcpy(to, from, 4);",
    "cp.async.commit_group": "",
    "cp.async.wait_group": "",
    "ldmatrix.sync": r"kf_ldmatrix(b, row);",
    "mma.sync": r"kf_mma(type(), c, a, b0, b1);",
    "cvt.rna.tf32": r"\1 = kf_tf32(\2);",
    "ex2.approx": r"\1 = exp2f(\2);",
    "lg2.approx": r"\1 = log2f(\2);",
}


def _plain(header: str) -> str:
    """The header without assembly."""

    def replaced(found: re.Match[str]) -> str:
        operands = re.findall(r'"[=+]?[rfl]"\(([^"]*)\)', found[1])
        for instruction, text in _INSTRUCTIONS.items():
            if found[1].lstrip().startswith(f'"{instruction}'):
                for i, operand in enumerate(operands[:2]):
                    text = text.replace(f"\\{i + 1}", operand)
                return text
        raise MetalError(f"no instruction here for {found[1]}")

    header = header.replace("\\\n", " ")
    header = re.sub(r"const uint at = uint\(__cvta_generic_to_shared\(\w+\)\);", "", header)
    return re.sub(r"(?s)asm(?: volatile)?\((.*?)\);(?=\s)", replaced, header)


class CudaKernel:
    """The same arguments and the same call as those of `mx.fast.cuda_kernel(...)`; `header` is the kernel's own."""

    def __init__(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> None:
        self._name, self._inputs, self._outputs, self._source = name, input_names, output_names, source
        self._header = '#include "cuda.h"\n' + _plain(build.CUDA_HEADER + header)
        self.schedule = FORWARD

    def _text(self, inputs: list[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template) -> tuple[str, int]:
        parameters = []
        for name, x in zip(self._inputs, inputs, strict=True):
            parameters.append(f"const {_TYPE[x.dtype]}* {name}")
            if f"{name}_shape" in self._source:
                parameters.append(f"const int* {name}_sizes")
        parameters += [f"{_TYPE[d]}* {name}" for d, name in zip(output_dtypes, self._outputs, strict=True)]
        lines = [f"void {self._name}({', '.join(parameters)}) {{"]
        lines += [f"const Shape {n}_shape{{{n}_sizes}};" for n in self._inputs if f"{n}_shape" in self._source]
        for parameter, value in template:
            if isinstance(value, bool):
                lines.append(f"constexpr bool {parameter} = {str(value).lower()};")
            elif isinstance(value, int):
                lines.append(f"constexpr int {parameter} = {value};")
            else:
                lines.append(f"using {parameter} = {_TYPE[value]};")
        buffers = len(parameters)
        arguments = ", ".join(f"({p.rsplit(' ', 1)[0]})a[{i}]" for i, p in enumerate(parameters))
        invoke = f'extern "C" void kf_invoke(void** a) {{ {self._name}({arguments}); }}\n'
        return "\n".join([self._header, *lines, '#line 1 "body"', self._source, "}", invoke]), buffers

    def _library(self, text: str) -> Path:
        files = (_HERE / "runtime.cpp").read_text(), (_HERE / "cuda.h").read_text()
        folder = _BUILT / hashlib.sha256("\0".join((text, *files)).encode()).hexdigest()[:20]
        library = folder / "kernel.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                at = Path(scratch)
                flags = ("-x", "c++", "-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-w", "-I", str(_HERE))
                _clang(*flags, "-c", "-", "-o", f"{at}/k.o", text=text)
                _clang(*flags, "-c", f"{_HERE}/runtime.cpp", "-o", f"{at}/r.o")
                _clang("-shared", f"{at}/k.o", f"{at}/r.o", "-lstdc++", "-lm", "-o", f"{at}/kernel.so")
                os.replace(at / "kernel.so", library)
        return library

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
        text, _ = self._text(inputs, output_dtypes, template)
        run = ctypes.CDLL(str(self._library(text))).kf_run
        run.restype = ctypes.c_char_p
        arguments: list[np.ndarray] = []
        for name, x in zip(self._inputs, inputs, strict=True):
            arguments.append(np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, order="C"))
            if f"{name}_shape" in self._source:
                arguments.append(np.array(x.shape, np.int32))
        return launch(run, arguments, output_shapes, output_dtypes, grid, threadgroup, self.schedule)
