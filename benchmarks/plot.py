"""SVG pictures of bench rows, written by hand: no plotting library is needed to draw bars and lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, MARGIN, TOP = 760, 400, 64, 56  # pixels
BAR_GAP = 0.2  # of a group's width
TICKS = 5
SERIES = {  # bench key: label, colour
    "eager_us": ("eager loop", "#9aa0a6"),
    "fused_us": ("fused loop", "#5b8def"),
    "call_us": ("chain with noise", "#1e8e3e"),
    "us": ("chain alone", "#7bc496"),
    "floor_us": ("floor", "#e8710a"),
}


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-family="sans-serif">{escape(text)}</text>'
    )


def _frame(title: str, top_us: float, keys: Sequence[str]) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, size=15),
    ]
    for tick in range(TICKS + 1):
        value = top_us * tick / TICKS
        y = _y(value, top_us)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN / 2}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e0e0e0"/>')
        parts.append(_text(MARGIN - 6, y + 4, f"{value:.0f}", "end"))
    parts.append(_text(MARGIN - 6, TOP - 12, "us", "end"))
    for place, key in enumerate(keys):
        label, colour = SERIES[key]
        x = MARGIN + place * (WIDTH - MARGIN) / len(keys)
        parts.append(f'<rect x="{x:.1f}" y="30" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, 39, label, "start"))
    return parts


def _y(value: float, top_us: float) -> float:
    return HEIGHT - MARGIN + (TOP - HEIGHT + MARGIN) * value / top_us


def _top(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float:
    return 1.05 * max(float(row[key]) for row in rows for key in keys)


def bars(title: str, rows: Sequence[Mapping[str, Any]], keys: Sequence[str] = tuple(SERIES)) -> str:
    """Grouped bars in microseconds, one group per bench row, labelled by its shape. Raises ValueError on no rows."""
    if not rows:
        raise ValueError("bars: expected at least one bench row, got none")
    top = _top(rows, keys)
    parts = _frame(title, top, keys)
    group = (WIDTH - 1.5 * MARGIN) / len(rows)
    bar = group * (1 - BAR_GAP) / len(keys)
    for place, row in enumerate(rows):
        left = MARGIN + place * group
        for offset, key in enumerate(keys):
            value = float(row[key])
            x, y = left + group * BAR_GAP / 2 + offset * bar, _y(value, top)
            height = HEIGHT - MARGIN - y
            colour = SERIES[key][1]
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar:.1f}" height="{height:.1f}" fill="{colour}"/>')
            parts.append(_text(x + bar / 2, y - 3, f"{value:.0f}", size=10))
        parts.append(_text(left + group / 2, HEIGHT - MARGIN + 18, f"{row['vocab_size']}, N={row['num_steps']}"))
        parts.append(_text(left + group / 2, HEIGHT - MARGIN + 34, f"rows {row['rows']}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def sweep(title: str, rows: Sequence[Mapping[str, Any]], keys: Sequence[str] = ("call_us", "us", "floor_us")) -> str:
    """Time over vocabulary size, one line per key; ``rows`` share everything but vocab_size. Raises ValueError on < 2."""
    if len(rows) < 2:
        raise ValueError(f"sweep: expected at least two bench rows, got {len(rows)}")
    ordered = sorted(rows, key=lambda row: row["vocab_size"])
    top, widest = _top(ordered, keys), ordered[-1]["vocab_size"]
    parts = _frame(title, top, keys)

    def x(vocab: int) -> float:
        return MARGIN + (WIDTH - 1.5 * MARGIN) * vocab / widest

    for key in keys:
        points = " ".join(f"{x(row['vocab_size']):.1f},{_y(float(row[key]), top):.1f}" for row in ordered)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{SERIES[key][1]}" stroke-width="2"/>')
    parts += [_text(x(row["vocab_size"]), HEIGHT - MARGIN + 18, str(row["vocab_size"]), size=10) for row in ordered]
    parts.append(_text(WIDTH / 2, HEIGHT - MARGIN + 40, "vocabulary (draft tokens)"))
    return "\n".join([*parts, "</svg>"]) + "\n"
