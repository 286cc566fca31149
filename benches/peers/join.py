"""Joins the lines of one run of ours and the peers: ratios, a table, a plot.

usage: join.py LINES OUT

LINES is a file of JSON lines. Writes OUT.jsonl (ours and the peers', with ratios), OUT.md and OUT.svg.

ratio_best_peer: our time over that of the best peer of the same run. Below 1, ours is faster. What did not run counts nowhere;
the table says which peers ran.
best_peer_mj: the least energy of a call of a peer in the same run, where loops were measured for it (--energy).
sum_of_parts_ms: of a forward and backward, the time of its six products alone.
ratio_cublas: the rate over that of a dense product of the same run; of a phase at the power limit (`-long`), over that there.
"""
import json
import statistics
import sys

# Which of the peers' phases ours is beside.
SAME = {
    "gemm1+pre": "gemm1",
    "fwd-no-router": "fwd",
    "fwd-graph": "fwd",
    "fwd+bwd-no-router": "fwd+bwd",
    "fwd+bwd-graph": "fwd+bwd",
    "fwd+bwd-f32-add": "fwd+bwd",
    "wgrad1-f32-add": "wgrad1",
    "wgrad2-f32-add": "wgrad2",
}


def best_peer(lines, workload, phase):
    """(ms, whose) of the fastest peer, or None."""
    found = [
        (line["ms"], line["impl"])
        for line in lines
        if line["workload"] == workload and line["phase"] == phase and line["impl"] not in ("moebius", "cublas", "copy")
    ]
    return min(found, default=None)


def least_energy(lines, workload, phase):
    """Millijoules a call of the thriftiest peer, or None."""
    found = [
        line["mj"]
        for line in lines
        if line["workload"] == workload and line["phase"] == phase and line["impl"] not in ("moebius", "cublas", "copy") and "mj" in line
    ]
    return min(found, default=None)


# The products of a forward and backward.
PARTS = ("gemm1+pre", "gemm2", "dgrad2", "dgrad1", "wgrad1", "wgrad2")


def sum_of_parts(lines, workload):
    """Milliseconds of our products alone, or None."""
    found = [line["ms"] for line in lines if line["impl"] == "moebius" and line["workload"] == workload and line["phase"] in PARTS]
    return round(sum(found), 4) if len(found) == len(PARTS) else None


def dense_rate(lines, phase):
    """TFLOP/s of the dense product, in a burst (`gemm`) or at the power limit (`gemm-long`)."""
    rates = [line["tflops"] for line in lines if line["impl"] == "cublas" and line["phase"] == phase]
    return statistics.mean(rates) if rates else None


def rated(lines):
    """The lines with their ratios."""
    dense = dense_rate(lines, "gemm")
    copies = [line["gb_s"] for line in lines if line["impl"] == "copy"]
    copy = max(copies, default=None)
    dates = [line["date"] for line in lines if "date" in line]
    for line in lines:
        line.setdefault("date", dates[0] if dates else None)
        beside = dense_rate(lines, "gemm-long") if line["phase"].endswith("-long") else dense
        line["ratio_cublas"] = round(line["tflops"] / beside, 3) if beside and "tflops" in line else None
        line["ratio_best_peer"] = None
        if line["impl"] != "moebius":
            continue
        best = best_peer(lines, line["workload"], SAME.get(line["phase"], line["phase"]))
        if best:
            line["ratio_best_peer"] = round(line["ms"] / best[0], 3)
            line["best_peer"], line["best_peer_ms"] = best[1], round(best[0], 4)
        line["best_peer_mj"] = least_energy(lines, line["workload"], SAME.get(line["phase"], line["phase"]))
        if line["phase"] == "fwd+bwd":
            line["sum_of_parts_ms"] = sum_of_parts(lines, line["workload"])
        if copy and "bytes" in line:
            line["floor_bytes_ms"] = round(line["bytes"] / copy / 1e6, 4)
            line["ratio_floor_bytes"] = round(line["ms"] / line["floor_bytes_ms"], 2)
    return dense, copy


def table(lines, dense, copy):
    ours = [line for line in lines if line["impl"] == "moebius"]
    gpu, date = (ours[0]["gpu"], ours[0]["date"]) if ours else ("?", "?")
    shown = lambda value, form: "–" if value is None else format(value, form)  # noqa: E731
    peers = sorted({line["impl"] for line in lines} - {"moebius", "cublas", "copy"})
    out = [f"{gpu}, {date}; dense cuBLAS {shown(dense, '.0f')} TFLOP/s, copy {shown(copy, '.0f')} GB/s"]
    out.append(f"peers of this run: {', '.join(peers) or 'none'}\n")
    clocks, energy = (any(key in line for line in ours) for key in ("sm_mhz", "mj"))
    head = ["workload", "phase", "ms", "TFLOP/s", "of cuBLAS", "best peer", "its ms", "ours / best"]
    head += ["SM MHz"] * clocks + ["ms in a loop", "mJ", "least mJ of a peer"] * energy
    out.append("| " + " | ".join(head) + " |")
    out.append("|---" * len(head) + "|")
    for line in ours:
        cells = [line["workload"], line["phase"], f"{line['ms']:.3f}", f"{line['tflops']:.0f}"]
        cells += [shown(line["ratio_cublas"], ".2f"), line.get("best_peer", "–")]
        cells += [shown(line.get("best_peer_ms"), ".3f"), shown(line["ratio_best_peer"], ".2f")]
        if clocks:
            cells.append(shown(line.get("sm_mhz"), "d"))
        if energy:
            cells += [shown(line.get("loop_ms"), ".3f"), shown(line.get("mj"), ".0f"), shown(line.get("best_peer_mj"), ".0f")]
        out.append("| " + " | ".join(cells) + " |")
    for line in ours:
        if line.get("sum_of_parts_ms"):
            out.append(f"\n{line['workload']}: forward and backward {line['ms']:.3f} ms, its products alone {line['sum_of_parts_ms']:.3f}.")
    for line in ours:
        # Where weights are read for few tokens each, the memory bounds the time.
        if line.get("ratio_floor_bytes") and line["workload"].startswith("decode"):
            out.append(
                f"\n{line['workload']}, {line['phase']}: {line['bytes'] / 1e9:.3f} GB of used experts' weights, "
                f"{line['floor_bytes_ms']:.3f} ms at the copy rate; {line['ratio_floor_bytes']:.2f} times that."
            )
    return "\n".join(out) + "\n"


def beside(line, name):
    """What a bar's label has behind its time: whose it is, energy of a call in a loop, the SM clock of the burst."""
    if name == "at the dense rate":
        return ""
    ours = name == "ours"
    energy, clock = line.get("mj" if ours else "best_peer_mj"), line.get("sm_mhz") if ours else None
    parts = [] if ours else [line["best_peer"]]
    if energy is not None:
        parts.append(f"{energy:.0f} mJ" if ours else f"least energy of a peer {energy:.0f} mJ")
    if clock is not None:
        parts.append(f"{clock} MHz")
    return f" ({', '.join(parts)})" if parts else ""


def plot(lines, dense):
    """Bars of forward, and both, for each workload: ours, the best peer, the floor at the dense rate; with energy and clock."""
    ours = [line for line in lines if line["impl"] == "moebius" and line["phase"] in ("fwd", "fwd+bwd")]
    ours = [line for line in ours if line["ratio_best_peer"]]
    width, left, top, bar = 1000, 210, 40, 14
    height = top + len(ours) * (3 * bar + 14) + 10
    colors = {"ours": "#0b6e4f", "best peer": "#c5a880", "at the dense rate": "#b8b8b8"}
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">']
    svg.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for i, (name, color) in enumerate(colors.items()):
        svg.append(f'<rect x="{left + 170 * i}" y="12" width="12" height="12" fill="{color}"/>')
        svg.append(f'<text x="{left + 170 * i + 18}" y="22">{name}</text>')
    for row, line in enumerate(ours):
        floor = line["ms"] * line["ratio_cublas"] if line["ratio_cublas"] else 0.0
        times = [("ours", line["ms"]), ("best peer", line["best_peer_ms"]), ("at the dense rate", floor)]
        # Each row has a scale of its own: ratios are what counts.
        scale = (width - left - 300) / max(time for _, time in times)
        y = top + row * (3 * bar + 14)
        svg.append(f'<text x="{left - 10}" y="{y + 1.7 * bar}" text-anchor="end">{line["workload"]}, {line["phase"]}</text>')
        for i, (name, time) in enumerate(times):
            label = f"{time:.2f} ms" + beside(line, name)
            svg.append(f'<rect x="{left}" y="{y + i * bar}" width="{time * scale:.1f}" height="{bar - 2}" fill="{colors[name]}"/>')
            svg.append(f'<text x="{left + time * scale + 5:.1f}" y="{y + (i + 0.8) * bar}" font-size="11">{label}</text>')
    svg.append("</svg>")
    return "\n".join(svg) + "\n"


def main():
    source, out = sys.argv[1:3]
    with open(source) as file:
        lines = [json.loads(line) for line in file if line.startswith("{")]
    dense, copy = rated(lines)
    with open(out + ".jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    shown = table(lines, dense, copy)
    with open(out + ".md", "w") as file:
        file.write(shown)
    with open(out + ".svg", "w") as file:
        file.write(plot(lines, dense))
    print(shown)


if __name__ == "__main__":
    main()
