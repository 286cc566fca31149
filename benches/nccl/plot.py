"""Draws one run of the bench over several GPUs: a bar a dispatcher and mode, cut into its calls.

    python3 benches/nccl/plot.py LINES.jsonl OUT.svg

LINES are what `cargo bench -p moebius --no-default-features --features nccl-ep --bench nccl` prints. Prepare is the
quickest that the dispatcher has with as many rows as it needs to know; where a line is missing, so is its piece. Low
latency has no backward.
"""
import json
import sys
from xml.sax.saxutils import escape

CALLS = [("prepare", "#4477aa"), ("dispatch", "#66ccee"), ("combine", "#228833"), ("combine_bwd", "#ccbb44"),
         ("dispatch_bwd", "#ee6677")]
PREPARES = ["prepare_deferred_static", "prepare_deferred", "prepare"]
LEFT, SCALE, BAR, TOP = 250, 620, 16, 44


def read(path):
    """Times in microseconds: workload, then dispatcher and mode, then call."""
    times = {}
    with open(path) as lines:
        for line in map(json.loads, lines):
            if line.get("impl") != "moebius" or "dispatcher" not in line:
                continue
            name = line["dispatcher"] if line["mode"] == "nccl" else f"{line['dispatcher']} {line['mode']}"
            times.setdefault(line["workload"], {}).setdefault(name, {})[line["phase"]] = 1000 * line["ms"]
    return times


def pieces(phases):
    """Time of each call that a dispatcher has, in order."""
    prepare = [phases[p] for p in PREPARES if p in phases]
    found = {"prepare": min(prepare)} if prepare else {}
    found.update({call: phases[call] for call, _ in CALLS[1:] if call in phases})
    return [(call, color, found[call]) for call, color in CALLS if call in found]


def text(x, y, what, more=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{escape(what)}</text>'


def draw(times):
    out, y = [], TOP
    for workload in sorted(times, key=lambda w: (w.rsplit("-t", 1)[0], int(w.rsplit("-t", 1)[1].split("-")[0]), w)):
        bars = {name: found for name, phases in times[workload].items() if (found := pieces(phases))}
        if not bars:
            continue
        out.append(text(10, y + 12, workload, 'font-weight="bold"'))
        y += BAR + 4
        most = max(sum(time for _, _, time in bar) for bar in bars.values())
        for name, bar in bars.items():
            out.append(text(LEFT - 8, y + BAR - 4, name, 'text-anchor="end"'))
            x = LEFT
            for call, color, time in bar:
                width = time / most * SCALE
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{color}">'
                           f'<title>{escape(call)}: {time:.0f} µs</title></rect>')
                x += width
            out.append(text(x + 6, y + BAR - 4, f"{sum(time for _, _, time in bar):.0f}"))
            y += BAR
        y += 10
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + SCALE + 70}" height="{y}" '
            'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>',
            text(10, 16, "One call after another, µs, median of the slowest rank; each workload has a scale of its own")]
    for i, (call, color) in enumerate(CALLS):
        head += [f'<rect x="{LEFT + 110 * i}" y="24" width="11" height="11" fill="{color}"/>',
                 text(LEFT + 110 * i + 16, 34, call)]
    return "\n".join(head + out + ["</svg>"]) + "\n"


def main(arguments):
    if len(arguments) != 2:
        sys.exit(__doc__)
    times = read(arguments[0])
    if not times:
        sys.exit(f"{arguments[0]}: no lines of the bench")
    with open(arguments[1], "w") as file:
        file.write(draw(times))


main(sys.argv[1:])
