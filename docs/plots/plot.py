#!/usr/bin/env python3
"""Draws what `ostinato bench --json` printed as an SVG, with nothing but Python's standard library.

    plot.py streams --out streams.svg "Ostinato=ours.jsonl" "another engine=theirs.jsonl"
    plot.py context --out context.svg "Qwen3-8B=context.jsonl"
    plot.py step    --out step.svg    "Qwen3-8B=streams.jsonl"

streams: tokens/s against concurrent streams; --value says which: while all decode (decode), or of the whole time
         output (output) or prompt + output (total).
context: tokens/s of one stream against the tokens of context that it decodes behind.
step:    microseconds of a decode step against its rows: the device's own time where it was measured, else the rows
         over their tokens/s.

A file holds one JSON object a line; lines of other tests are passed over, and of several rows at one place the median
is drawn. Numbers of another program can be drawn from lines such as {"streams": 16, "tokens_per_second": 900}.
"""

import argparse
import json
import math
import statistics
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 500
LEFT, RIGHT, BOTTOM = 92, 24, 62
# Between light and dark, so that each is seen on both, as the words are: a picture in a page does not know which of the
# two the page is, only what its reader's system prefers. Marks differ too, for those who see no colours.
COLOURS = ["#2e86de", "#e0621b", "#1fa67a", "#c061a6", "#b8860b", "#6c7ae0", "#d04a4a", "#4a9aa8"]
STYLE = """
    text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #787d85 }
    .title { font-size: 17px; font-weight: 600 }
    .grid { stroke: #808080; stroke-opacity: 0.28; stroke-width: 1 }
    .axis { stroke: #808080; stroke-width: 1.2 }
    .line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
"""


def fail(message):
    sys.exit(f"plot.py: {message}")


def number(row, *keys):
    """The value at a path of keys, if it is a number."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return float(row) if isinstance(row, (int, float)) and not isinstance(row, bool) else None


def decode_rate(row):
    return number(row, "decode_tokens_per_second") if row.get("test") == "load" else number(row, "tokens_per_second")


def streams_point(row, value):
    if row.get("test") not in ("decode", "load", None):
        return None
    y = decode_rate(row) if value == "decode" else number(row, f"{value}_tokens_per_second")
    if y is None and value == "output" and number(row, "streams") == 1:
        # A stream alone decodes without a prompt: all its time is output.
        y = number(row, "tokens_per_second")
    return number(row, "streams"), y


def context_point(row, _):
    if row.get("test") not in ("decode", "load", None) or number(row, "streams") not in (1.0, None):
        return None
    if row.get("test") == "load":
        return number(row, "prompt"), decode_rate(row)
    x = number(row, "context")
    return (number(row, "depth") if x is None else x), decode_rate(row)


def step_point(row, _):
    if row.get("test") not in ("decode", "load", None):
        return None
    rows, rate, measured = number(row, "streams"), decode_rate(row), number(row, "per_token", "gpu_us")
    if measured:
        return rows, measured
    return rows, (1e6 * rows / rate if rows and rate else None)


KINDS = {
    "streams": (streams_point, "concurrent streams", "tokens/s"),
    "context": (context_point, "tokens of context", "tokens/s"),
    "step": (step_point, "rows of a step", "µs a step"),
}


def read(label, path, kind, value):
    """The points of a file: x → median y, ascending."""
    point, found = KINDS[kind][0], {}
    try:
        with open(path, encoding="utf-8") as file:
            for at, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    fail(f"{path}:{at}: not JSON: {error}")
                x, y = (point(row, value) if isinstance(row, dict) else None) or (None, None)
                # There is no place for 0 on a logarithmic axis.
                if x and y is not None and x > 0 and y > 0:
                    found.setdefault(x, []).append(y)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    if not found:
        fail(f"{path} has no row to draw for \"{label}\" ({kind}, {value})")
    return [(x, statistics.median(ys)) for x, ys in sorted(found.items())]


def short(value):
    """1024 → 1k, 131072 → 128k, 1500 → 1,500."""
    if value >= 1024 and value % 1024 == 0:
        return f"{int(value) // 1024}k"
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def linear_ticks(most):
    step = 10 ** math.floor(math.log10(most / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if most / (step * factor) <= 6)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def log_ticks(least, most):
    return [10.0**e for e in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]


def mark(index, x, y, colour):
    shapes = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" fill="{colour}"/>',
        f'<rect x="{x - 3.9:.1f}" y="{y - 3.9:.1f}" width="7.8" height="7.8" fill="{colour}"/>',
        f'<path d="M{x:.1f} {y - 5:.1f}l4.8 8.6h-9.6z" fill="{colour}"/>',
        f'<path d="M{x:.1f} {y - 5.4:.1f}l5.4 5.4l-5.4 5.4l-5.4 -5.4z" fill="{colour}"/>',
    ]
    return shapes[index % len(shapes)]


def draw(series, title, x_label, y_label, log_y):
    """The picture of `series`, [(label, [(x, y)])]."""
    xs = sorted({x for _, points in series for x, _ in points})
    ys = [y for _, points in series for _, y in points]
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    if high == low:
        low, high = low - 1, high + 1
    ticks_y = log_ticks(min(ys), max(ys)) if log_y else linear_ticks(max(ys))
    if log_y and len(ticks_y) == 1:
        ticks_y.append(ticks_y[0] * 10)

    # The legend's rows first: they say where the picture begins.
    rows, at = [[]], LEFT
    for index, (label, _) in enumerate(series):
        width = 34 + 7.6 * len(label)
        if rows[-1] and at + width > WIDTH - RIGHT:
            rows, at = rows + [[]], LEFT
        rows[-1].append((index, label, at))
        at += width + 14
    top = 52 + 22 * len(rows)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def to_x(x):
        return LEFT + (right - LEFT) * (0.02 + 0.96 * (math.log2(x) - low) / (high - low))

    def to_y(y):
        a, b = (math.log10(ticks_y[0]), math.log10(ticks_y[-1])) if log_y else (ticks_y[0], ticks_y[-1])
        return bottom - (bottom - top) * ((math.log10(y) if log_y else y) - a) / (b - a)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="30">{escape(title)}</text>',
    ]
    for row, entries in enumerate(rows):
        for index, label, x in entries:
            colour, y = COLOURS[index % len(COLOURS)], 54 + 22 * row
            out.append(f'<path class="line" stroke="{colour}" d="M{x:.1f} {y}h24"/>')
            out.append(mark(index, x + 12, y, colour))
            out.append(f'<text x="{x + 31:.1f}" y="{y + 5}">{escape(label)}</text>')
    for y in ticks_y:
        out.append(f'<path class="grid" d="M{LEFT} {to_y(y):.1f}H{right}"/>')
        out.append(f'<text x="{LEFT - 10}" y="{to_y(y) + 5:.1f}" text-anchor="end">{y:,.10g}</text>')
    # A tick at every power of two, and where a single place is not one.
    ticks_x = [2.0**e for e in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    while len(ticks_x) > 12:
        ticks_x = ticks_x[::2]
    for x in ticks_x or xs:
        out.append(f'<path class="grid" d="M{to_x(x):.1f} {top}V{bottom}"/>')
        out.append(f'<text x="{to_x(x):.1f}" y="{bottom + 21}" text-anchor="middle">{short(x)}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {top}V{bottom}H{right}" fill="none"/>')
    out.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (top + bottom) / 2
    out.append(
        f'<text x="20" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 20 {middle:.0f})">{escape(y_label)}</text>'
    )
    for index, (_, points) in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        path = "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in points)
        out.append(f'<path class="line" stroke="{colour}" d="M{path}"/>')
        out.extend(mark(index, to_x(x), to_y(y), colour) for x, y in points)
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("series", nargs="+", metavar="LABEL=FILE", help="what to call the rows of a file")
    parser.add_argument("--out", required=True, metavar="FILE", help="the SVG to write")
    parser.add_argument("--title", help="above the picture")
    parser.add_argument("--value", choices=["decode", "output", "total"], default="decode", help="of streams")
    parser.add_argument("--log-y", action="store_true", help="a logarithmic y axis")
    args = parser.parse_args()
    series = []
    for argument in args.series:
        label, equals, path = argument.partition("=")
        if not (label and equals and path):
            fail(f"\"{argument}\" is not LABEL=FILE")
        series.append((label, read(label, path, args.kind, args.value)))
    _, x_label, y_label = KINDS[args.kind]
    if args.kind == "streams":
        y_label = {"decode": "tokens/s while all decode", "output": "output tokens/s", "total": "prompt + output tokens/s"}[
            args.value
        ]
    picture = draw(series, args.title or f"{y_label} by {x_label}", x_label, y_label, args.log_y)
    try:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(picture)
    except OSError as error:
        fail(f"cannot write {args.out}: {error.strerror}")


if __name__ == "__main__":
    main()
