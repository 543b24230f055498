"""Charts as SVG, and as PNG with Pillow: one kind of picture for all commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from fleetfoot.cli.command import UsageError, check_output_file

_COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_AXIS, _GRID = "#334155", "#e2e8f0"
_WIDTH, _HEIGHT = 640, 320
"""Pixels of one chart."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 48, 48
"""Between its border and its axes."""
_ZOOM = 2
"""Pixels of a PNG for one of an SVG."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one kind in a chart."""

    name: str
    """In the legend; empty: it is not in it."""
    points: Sequence[Point]
    style: str = "line"
    """``line`` through the points, ``marked`` line with dots, ``dots`` alone, ``dashed`` line, or ``bars`` from 0,
    0.8 wide."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves in one pair of axes. A logarithmic axis leaves out values up to 0."""

    title: str
    x_title: str
    curves: Sequence[Curve]
    x_is_log: bool = False
    y_is_log: bool = False
    x_labels: dict[float, str] = field(default_factory=dict)
    """Labels by place, instead of numbers."""


class Picture:
    """Lines, boxes and words on white, in pixels from the top left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self._shapes: list[tuple[str, list[Point], str, dict[str, Any]]] = []

    def line(self, points: Sequence[Point], color: str, width: float = 1.0, *, is_dashed: bool = False) -> None:
        self._shapes.append(("line", [*points], color, {"width": width, "is_dashed": is_dashed}))

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self._shapes.append(("box", [(x, y), (x + width, y + height)], color, {}))

    def dot(self, x: float, y: float, color: str, radius: float = 2.5) -> None:
        self._shapes.append(("dot", [(x, y)], color, {"radius": radius}))

    def words(self, x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> None:
        """``anchor``: where ``x`` is in the text, ``start``, ``middle`` or ``end``; ``y`` is its base line."""
        self._shapes.append(("words", [(x, y)], "black", {"text": text, "anchor": anchor, "size": size}))

    def svg(self) -> str:
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>{"".join(self._svg_shapes())}'
            "</svg>\n"
        )

    def _svg_shapes(self) -> Iterator[str]:
        for kind, points, color, more in self._shapes:
            (x, y), (right, bottom) = points[0], points[-1]
            if kind == "line":
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                dashes = ' stroke-dasharray="6 4"' if more["is_dashed"] else ""
                yield (
                    f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{more["width"]:g}"{dashes}/>'
                )
            elif kind == "box":
                size = f'width="{right - x:.1f}" height="{bottom - y:.1f}"'
                yield f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color}"/>'
            elif kind == "dot":
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{more["radius"]:g}" fill="{color}"/>'
            else:
                place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{more["anchor"]}" font-size="{more["size"]}"'
                yield f"<text {place}>{escape(more['text'])}</text>"

    def save_png(self, path: Path) -> None:
        """Write a PNG of twice as many pixels. Needs Pillow, whose own font it has."""
        from PIL import Image, ImageDraw, ImageFont

        width, height = self.size
        image = Image.new("RGB", (_ZOOM * width, _ZOOM * height), "white")
        draw = ImageDraw.Draw(image)
        anchors = {"start": "ls", "middle": "ms", "end": "rs"}
        for kind, places, color, more in self._shapes:
            points = [(_ZOOM * x, _ZOOM * y) for x, y in places]
            if kind == "line":
                for part in _dashes(points) if more["is_dashed"] else [points]:
                    draw.line(part, fill=color, width=max(1, round(_ZOOM * more["width"])), joint="curve")
            elif kind == "box":
                draw.rectangle(points, fill=color)
            elif kind == "dot":
                (x, y), radius = points[0], _ZOOM * more["radius"]
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
            else:
                font = ImageFont.load_default(_ZOOM * more["size"])
                draw.text(points[0], more["text"], fill=color, font=font, anchor=anchors[more["anchor"]])
        image.save(path)


def _dashes(points: list[Point], length: float = 12.0) -> Iterator[list[Point]]:
    """Every second piece of ``length`` pixels."""
    for (x, y), (right, bottom) in pairwise(points):
        pieces = max(1, round(math.hypot(right - x, bottom - y) / length))
        for piece in range(0, pieces, 2):
            begin, end = piece / pieces, min(1.0, (piece + 1) / pieces)
            yield [(x + share * (right - x), y + share * (bottom - y)) for share in (begin, end)]


def check_plot_file(flag: str, file: str | None) -> None:
    """Raise UsageError unless a picture of this name can be made; None: there is none to make."""
    if file is None:
        return
    if (suffix := Path(file).suffix) not in (".svg", ".png"):
        raise UsageError(f"{flag} {file}: a picture is SVG or PNG; end the name in .svg or .png")
    if suffix == ".png":
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise UsageError(
                f"{flag} {file}: a PNG needs Pillow (pip install 'fleetfoot[plots]'); or write .svg"
            ) from None
    check_output_file(flag, file)


def draw(title: str, charts: Sequence[Chart], file: str) -> None:
    """Write charts, in two columns if there are more than two, to a file that `check_plot_file` has accepted."""
    columns = 1 if len(charts) <= 2 else 2
    picture = Picture(_WIDTH * columns, 28 + _HEIGHT * -(-len(charts) // columns))
    picture.words(_WIDTH * columns / 2, 20, title, "middle", 13)
    for number, chart in enumerate(charts):
        _draw_chart(picture, chart, _WIDTH * (number % columns), 28 + _HEIGHT * (number // columns))
    path = Path(file)
    if path.suffix == ".png":
        picture.save_png(path)
    else:
        path.write_text(picture.svg(), encoding="utf-8")


def _draw_chart(picture: Picture, chart: Chart, corner: int, top: int) -> None:
    curves = [
        Curve(
            one.name,
            [(x, y) for x, y in one.points if _fits(x, chart.x_is_log) and _fits(y, chart.y_is_log)],
            one.style,
        )
        for one in chart.curves
    ]
    points = [point for curve in curves for point in curve.points] or [(1.0, 1.0)]
    x_scale = _Scale(
        [x for x, _ in points], corner + _LEFT, corner + _WIDTH - _RIGHT, is_log=chart.x_is_log, labels=chart.x_labels
    )
    floor = [] if chart.y_is_log else [0.0]
    y_scale = _Scale([y for _, y in points] + floor, top + _HEIGHT - _BOTTOM, top + _TOP, is_log=chart.y_is_log)
    left, right, bottom = corner + _LEFT, corner + _WIDTH - _RIGHT, top + _HEIGHT - _BOTTOM
    picture.words(left, top + 16, chart.title)
    picture.words((left + right) / 2, bottom + 36, chart.x_title, "middle")
    for value, label in y_scale.ticks():
        picture.line([(left, y_scale(value)), (right, y_scale(value))], _GRID)
        picture.words(left - 6, y_scale(value) + 4, label, "end", 11)
    for value, label in x_scale.ticks():
        picture.line([(x_scale(value), top + _TOP), (x_scale(value), bottom)], _GRID)
        picture.words(x_scale(value), bottom + 16, label, "middle", 11)
    picture.line([(left, top + _TOP), (left, bottom), (right, bottom)], _AXIS)
    legend = float(left)
    for curve, color in zip(curves, _COLORS * (1 + len(curves) // len(_COLORS)), strict=False):
        _draw_curve(picture, curve, color, x_scale, y_scale)
        if curve.name:
            picture.box(legend, top + 27, 10, 10, color)
            picture.words(legend + 14, top + 36, curve.name, size=11)
            legend += 26 + 6.2 * len(curve.name)


def _draw_curve(
    picture: Picture, curve: Curve, color: str, x_scale: Callable[[float], float], y_scale: Callable[[float], float]
) -> None:
    places = [(x_scale(x), y_scale(y)) for x, y in curve.points]
    if not places:
        return
    if curve.style == "bars":
        width = 0.8 * (x_scale(1.0) - x_scale(0.0))
        for x, y in places:
            picture.box(x - width / 2, y, width, y_scale(0.0) - y, color)
        return
    if curve.style != "dots" and len(places) > 1:
        picture.line(places, color, 2.0, is_dashed=curve.style == "dashed")
    if curve.style in ("dots", "marked"):
        for x, y in places:
            picture.dot(x, y, color)


def _fits(value: float, is_log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not is_log)


class _Scale:
    """From values to pixels, from ``begin`` to ``end``."""

    def __init__(
        self, values: Sequence[float], begin: float, end: float, *, is_log: bool, labels: dict[float, str] | None = None
    ) -> None:
        self._is_log, self._labels = is_log, labels or {}
        low, high = min(values), max(values)
        if is_log:  # whole decades, or at least one
            self._low, self._high = math.log10(low), math.log10(high)
            if not self._labels:
                self._low, self._high = float(math.floor(self._low)), float(math.ceil(self._high))
        else:
            self._step = _nice_step((high - low) or abs(high) or 1.0)
            self._low = math.floor(low / self._step) * self._step if not self._labels else low
            self._high = math.ceil(high / self._step) * self._step if not self._labels else high
        if self._high <= self._low:
            self._high = self._low + 1
        self._begin, self._size = begin, end - begin

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self._is_log else value
        return self._begin + self._size * (place - self._low) / (self._high - self._low)

    def ticks(self) -> list[tuple[float, str]]:
        if self._labels:
            return [*self._labels.items()]
        if self._is_log:
            return [(value := 10.0**power, _short(value)) for power in range(int(self._low), int(self._high) + 1)]
        count = round((self._high - self._low) / self._step)
        return [(value := self._low + number * self._step, _short(value)) for number in range(count + 1)]


def _nice_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, of which ``span`` has 4 to 10."""
    power: float = 10.0 ** math.floor(math.log10(span / 4))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= span / 4 * (1 + 1e-9))


def _short(value: float) -> str:
    """``0.02``, ``150``, ``20k``, ``3M``."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:g}{letter}"
    return f"{0.0 if abs(value) < 1e-12 else value:.4g}"
