"""Sums what kernels.cpp wrote: GPU 0's kernels, copies and fills, by name and size.

    python3 benches/support/kernels.py OUT.tsv [GPU]

Prints milliseconds in all, launches, median microseconds, blocks or bytes, and the name, the longest first.
"""
import statistics
import sys


def read(path, gpu):
    """What ran on a GPU: start, end, stream, size and name of each, in no order."""
    with open(path) as lines:
        for line in lines:
            device, start, end, stream, size, name = line.rstrip("\n").split("\t", 5)
            if int(device) == gpu:
                yield int(start), int(end), int(stream), int(size), name


def kept(path, step, gpu):
    """The same of a step in a file of steps that were kept: microseconds by name, the step's first, under a line of names."""
    with open(path) as lines:
        names = next(lines).rstrip("\n").split("\t")
        for line in lines:
            span = dict(zip(names, line.rstrip("\n").split("\t")))
            if span["step"] == step and int(span.get("gpu", gpu)) == gpu:
                start, end = (round(float(span[of]) * 1e3) for of in ("start_us", "end_us"))
                yield start, end, int(span["stream"]), int(span["blocks"]), span["kernel"]


def main():
    gpu = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    spans = {}
    for start, end, _, size, name in read(sys.argv[1], gpu):
        spans.setdefault((name, size), []).append((end - start) / 1e3)
    for (name, size), us in sorted(spans.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(us) / 1e3:10.3f} ms {len(us):6} x {statistics.median(us):9.1f} us {size:12}  {name[:90]}")


if __name__ == "__main__":
    main()
