"""Sums what kernels.cpp wrote: GPU 0's kernels, copies and fills, by name and size.

    python3 benches/support/kernels.py OUT.tsv [GPU]

Prints milliseconds in all, launches, median microseconds, blocks or bytes, and the name, the longest first.
"""
import statistics
import sys


def main():
    gpu = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    spans = {}
    with open(sys.argv[1]) as lines:
        for line in lines:
            device, start, end, _, size, name = line.rstrip("\n").split("\t", 5)
            if int(device) == gpu:
                spans.setdefault((name, int(size)), []).append((int(end) - int(start)) / 1e3)
    for (name, size), us in sorted(spans.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(us) / 1e3:10.3f} ms {len(us):6} x {statistics.median(us):9.1f} us {size:12}  {name[:90]}")


main()
