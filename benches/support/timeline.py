"""Draws what kernels.cpp wrote: a GPU's kernels, copies and fills of one step, a row a stream.

    python3 benches/support/timeline.py OUT.svg [--gpu 0] TITLE=LINES.tsv[#STEP] [TITLE=LINES.tsv[#STEP] ...]

A step is what runs between two times in which the GPU is idle for longer than IDLE; that of median length is drawn of
those that hold a weight gradient, behind the first two thirds: the warm-up, and steps that the host enqueues, behind which the bench replays
captured ones. With STEP the file is one of steps that were kept (benches/results/*timeline.tsv), and that one is drawn.
All steps of a picture have one scale.
"""
import sys
from xml.sax.saxutils import escape

from kernels import kept, read

IDLE = 40_000  # Nanoseconds
LEFT, WIDTH, ROW, TOP = 70, 1130, 22, 26
KINDS = [
    ("dispatch", "#66ccee", ["nvlink_dispatch", "nvlink_groups"]),
    ("combine", "#228833", ["nvlink_combine", "add_shares"]),
    ("plan", "#4477aa", ["nvlink_exchange", "plan", "tiles"]),
    ("weight gradients", "#ee6677", ["wgrad"]),
    ("products", "#ccbb44", ["linear", "_up", "_down"]),
    ("other", "#aaaaaa", [""]),
]


def kind(name):
    return next((label, color) for label, color, parts in KINDS if any(part in name for part in parts))


def steps(spans):
    """Runs of spans without an idle time between them."""
    found, until = [], None
    for span in spans:
        if until is None or span[0] - until > IDLE:
            found.append([])
            until = span[1]
        found[-1].append(span)
        until = max(until, span[1])
    return found


def chosen(spans):
    both = [step for step in steps(spans) if any("wgrad" in span[4] for span in step)]
    both = sorted(both[2 * len(both) // 3 :], key=lambda step: max(span[1] for span in step) - step[0][0])
    if not both:
        sys.exit("timeline.py: no step with a weight gradient")
    return both[len(both) // 2]


def text(x, y, what, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(what)}</text>'


def draw(title, step, scale, y):
    first = step[0][0]
    length = max(span[1] for span in step) - first
    out = [text(8, y + 14, f"{title}: {length / 1e3:.0f} µs", 'font-weight="bold"')]
    y += TOP
    streams = sorted({span[2] for span in step}, key=lambda stream: min(s[0] for s in step if s[2] == stream))
    for row, stream in enumerate(streams):
        at = y + row * ROW
        out.append(text(LEFT - 6, at + 14, f"stream {row + 1}", 'text-anchor="end"'))
        for start, end, _, size, name in (span for span in step if span[2] == stream):
            label, color = kind(name)
            x, width = LEFT + (start - first) * scale, max((end - start) * scale, 0.5)
            out.append(f'<rect x="{x:.2f}" y="{at}" width="{width:.2f}" height="{ROW - 4}" fill="{color}" stroke="#fff" '
                       f'stroke-width="0.4"><title>{escape(name)}, {size}: {(end - start) / 1e3:.1f} µs</title></rect>')
    return out, y + len(streams) * ROW + 14


def main():
    arguments = sys.argv[1:]
    gpu = 0
    if "--gpu" in arguments:
        at = arguments.index("--gpu")
        gpu = int(arguments[at + 1])
        del arguments[at:at + 2]
    out, *inputs = arguments
    drawn = []
    for title, lines in (one.split("=", 1) for one in inputs):
        path, _, step = lines.partition("#")
        drawn.append((title, sorted(kept(path, step, gpu)) if step else chosen(sorted(read(path, gpu)))))
        if not drawn[-1][1]:
            sys.exit(f"timeline.py: {path} has no step {step!r} of GPU {gpu}")
    longest = max(max(span[1] for span in step) - step[0][0] for _, step in drawn)
    scale, y, body = WIDTH / longest, 34, []
    x = LEFT
    for label, color, _ in KINDS:
        body.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{color}"/>')
        body.append(text(x + 17, 18, label))
        x += 30 + 8 * len(label)
    for title, step in drawn:
        lines, y = draw(title, step, scale, y)
        body += lines
    with open(out, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 10}" height="{y}" '
                   f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n')
        file.write("\n".join(body) + "\n</svg>\n")


main()
