"""A picture of which rows were kept, as the bytes of a PNG: positions from left to right, layers and heads downwards.

NumPy and the standard library draw it, so that the library needs no package for pictures.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

_WIDTH = 1400  # of the plot, in pixels; more positions than that share pixels
_HEIGHT = 560  # of one panel's rows, about
_LEFT, _MARGIN, _LINE = 96, 24, 24
_STRIP = 48  # height of the bars above the rows

_Colour = tuple[int, int, int]
_PAPER, _INK, _FAINT = (255, 255, 255), (32, 36, 44), (140, 146, 156)
_EVICTED, _KEPT, _END = (236, 239, 244), (22, 92, 182), (214, 84, 32)

# 5 x 7 pixels and two for what hangs below the line, drawn for this file; capitals are written small.
_ART = (
    (
        "0123456789.,-_=:",
        """
.###....#....###...###.....#..#####...##..#####..###...###.....................................
#...#..##...#...#.#...#...##..#......#........#.#...#.#...#................................##..
#..##...#.......#.....#..#.#..####..#........#..#...#.#...#.........................#####..##..
#.#.#...#.....##....##..#..#......#.####....#....###...####..............###...................
##..#...#....#........#.#####.....#.#...#...#...#...#.....#.........................#####..##..
#...#...#...#.....#...#....#..#...#.#...#..#....#...#....#...##....##......................##..
.###...###..#####..###.....#...###...###...#.....###...##....##....##.........#####............
....................................................................#..........................
...............................................................................................
""",
    ),
    (
        "/%()abcdefghijkl",
        """
....#.##..#....#...#..........#...............#.........##........#.......#......#..#......##..
...#..##..#...#.....#.........#...............#........#..........#.................#.......#..
...#.....#...#.......#...###..####...####..####..###..####...####.####...##.....##..#..#....#..
..#.....#....#.......#......#.#...#.#.....#...#.#...#..#....#...#.#...#...#......#..#.#.....#..
.#.....#.....#.......#...####.#...#.#.....#...#.#####..#....#...#.#...#...#......#..##......#..
.#....#..##...#.....#...#...#.#...#.#.....#...#.#......#....#...#.#...#...#......#..#.#.....#..
#.....#..##....#...#.....####.####...####..####..###...#.....####.#...#..###.....#..#..#...###.
................................................................#................#.............
.............................................................###...............##..............
""",
    ),
    (
        "mnopqrstuvwxyz",
        """
...........................................#.......................................
...........................................#.......................................
##.#..####...###..####...####.#.##...####.####..#...#.#...#.#.#.#.#...#.#...#.#####
#.#.#.#...#.#...#.#...#.#...#.##....#......#....#...#.#...#.#.#.#..#.#..#...#....#.
#.#.#.#...#.#...#.#...#.#...#.#......###...#....#...#.#...#.#.#.#...#...#...#...#..
#.#.#.#...#.#...#.#...#.#...#.#.........#..#....#...#..#.#..#.#.#..#.#..#...#..#...
#.#.#.#...#..###..####...####.#.....####....##...####...#....#.#..#...#..####.#####
..................#.........#...............................................#......
..................#.........#............................................###.......
""",
    ),
)


def _glyphs() -> dict[str, np.ndarray]:
    """Each character as [9, 5] boolean."""
    glyphs = {" ": np.zeros((9, 5), bool)}
    for characters, art in _ART:
        rows = np.array([[c == "#" for c in line] for line in art.split()])
        glyphs |= {c: rows[:, 6 * i : 6 * i + 5] for i, c in enumerate(characters)}
    return glyphs


_GLYPHS = _glyphs()


@dataclass(frozen=True)
class Panel:
    """One moment: what was kept then.

    Attributes:
        title: what is said above it.
        kept: [rows, tokens written by then] boolean; a row is a KV head of a layer, in the order of `draw`'s `layers`.
    """

    title: str
    kept: np.ndarray


def draw(title: str, subtitle: str, panels: list[Panel], layers: list[tuple[int, int]], prompt: int, n: int) -> bytes:
    """The picture, a PNG file.

    Args:
        title, subtitle: the first two lines.
        panels: one below the other.
        layers: number of each layer and how many KV heads it has, from top to bottom.
        prompt: tokens of the prompt; where more follow, a line shows where it ended.
        n: positions of the axis, as many as the last panel has.
    """
    heads = len(panels[0].kept)
    scale = max(_WIDTH // n, 1)
    width = n * scale if n <= _WIDTH else _WIDTH
    height = min(max(_HEIGHT // heads, 3), 18)
    gap = 2 if height > 3 else 1
    rows = heads * height + (len(layers) - 1) * gap
    panel_height = _LINE + _STRIP + 6 + rows + 2 * _LINE
    canvas = np.empty((2 * _MARGIN + 3 * _LINE + len(panels) * panel_height, _LEFT + width + _MARGIN, 3), np.uint8)
    canvas[:] = _PAPER
    _write(canvas, _MARGIN, _MARGIN, title, _INK, 2)
    _write(canvas, _MARGIN + _LINE, _MARGIN, subtitle, _FAINT, 1)
    _legend(canvas, _MARGIN + 2 * _LINE - 4, prompt < n)
    for i, panel in enumerate(panels):
        top = _MARGIN + 3 * _LINE + i * panel_height
        _write(canvas, top + 4, _LEFT, panel.title, _INK, 2)
        seen = panel.kept.shape[1]
        # [rows, width]: of each pixel's positions, the share that was kept
        shares = _columns(np.pad(panel.kept, ((0, 0), (0, n - seen))), width)[:, : seen * width // n]
        _bars(canvas, top + _LINE, shares.mean(axis=0))
        _write(canvas, top + _LINE + _STRIP // 2 - 4, _MARGIN // 2, "heads", _FAINT, 1, right=_LEFT - 8)
        at, row, last_label = top + _LINE + _STRIP + 6, 0, -99
        for number, count in layers:
            if at - last_label >= 14:
                middle = at + max(count * height - 9, 0) // 2
                _write(canvas, middle, _MARGIN // 2, f"layer {number}", _INK, 1, right=_LEFT - 8)
                last_label = at
            for _ in range(count):
                line = height - (height > 5)  # a hair of paper between heads, where there is room
                canvas[at : at + line, _LEFT : _LEFT + shares.shape[1]] = _blend(shares[row])
                at, row = at + height, row + 1
            at += gap
        _axis(canvas, at - gap + 4, n, width)
        if prompt < n:
            x = _LEFT + prompt * width // n
            canvas[top + _LINE : at - gap, x : x + 2] = _END
    return _png(canvas)


def _columns(kept: np.ndarray, width: int) -> np.ndarray:
    """[rows, n] boolean -> [rows, width] float, the share kept of the positions that each pixel stands for."""
    n = kept.shape[1]
    if width >= n:
        return np.repeat(kept, width // n, axis=1).astype(float)
    edges = np.arange(width + 1) * n // width
    sums = np.concatenate([np.zeros((len(kept), 1)), np.cumsum(kept, axis=1)], axis=1)
    return np.asarray((sums[:, edges[1:]] - sums[:, edges[:-1]]) / np.diff(edges))


def _blend(shares: np.ndarray) -> np.ndarray:
    return np.asarray(_EVICTED + shares[:, None] * np.subtract(_KEPT, _EVICTED))


def _bars(canvas: np.ndarray, top: int, shares: np.ndarray) -> None:
    """Above each position, in how many of the heads it was kept."""
    levels = np.arange(_STRIP, 0, -1)[:, None] / _STRIP
    area = canvas[top : top + _STRIP, _LEFT : _LEFT + len(shares)]
    area[:] = np.where((levels <= shares)[..., None], _FAINT, area)


def _axis(canvas: np.ndarray, top: int, n: int, width: int) -> None:
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if n <= 12 * s * 10**e)
    for position in range(0, n, step):
        x = _LEFT + position * width // n
        canvas[top : top + 5, x] = _FAINT
        _write(canvas, top + 9, x - 3 * len(str(position)) + 1, str(position), _INK, 1)
    _write(canvas, top + 22, _LEFT, "position in the text", _FAINT, 1)


def _legend(canvas: np.ndarray, top: int, ends: bool) -> None:
    x = _MARGIN
    entries = [(_KEPT, "kept"), (_EVICTED, "evicted"), (_FAINT, "bars: share of all heads that kept the position")]
    for colour, name in [*entries, *([(_END, "end of the prompt")] if ends else [])]:
        canvas[top : top + 9, x : x + 9] = colour
        _write(canvas, top + 1, x + 16, name, _INK, 1)
        x += 16 + 6 * len(name) + 24


def _write(
    canvas: np.ndarray,
    top: int,
    left: int,
    text: str,
    colour: tuple[int, int, int],
    size: int,
    right: int | None = None,
) -> None:
    """Text, cut where the canvas ends; with `right` it ends there instead of beginning at `left`."""
    if right is not None:
        left = max(right - 6 * size * len(text), left)
    for i, character in enumerate(text.lower()):
        glyph = np.kron(_GLYPHS.get(character, _GLYPHS["_"]), np.ones((size, size), bool))
        area = canvas[top : top + 9 * size, left + 6 * size * i :][:, : 5 * size]
        area[glyph[: area.shape[0], : area.shape[1]]] = colour


def _png(pixels: np.ndarray) -> bytes:
    """[height, width, 3] uint8 -> a PNG file: signature, header, rows each behind a 0 (no filter), end."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, 3 * width)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red green blue
    body = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
