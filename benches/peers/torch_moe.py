"""PyTorch beside ours: a layer on torch._grouped_mm, eager and compiled; the grouped products alone; the dense rate.

usage: torch_moe.py WORKLOADS [--compile SECONDS] [--sonic] [--energy] [--shapes]

WORKLOADS is a file of JSON lines, as `cuda --workloads` prints them. One JSON line a measurement goes to stdout.
Workloads are compiled in turn until SECONDS are spent (0: none). SonicMoE runs where it is asked for; not being installed is then
an error, told at the end.
Timed as ours is: 400 ms idle, 5 calls to warm up, then 20 calls queued one behind the other, each between two events,
three input sets in turn, the median; for a forward and backward 3 and 10 calls. (A longer
burst reads the power limit: after 100 ms the dense rate falls by a tenth. The dense rate at that limit is `gemm-long`.)
With --energy each phase is repeated for a second more: milliseconds a call of that loop, and millijoules by the power between
the moves of the GPU's counter meanwhile (NVML).
With --shapes the grouped products alone.
"""
import argparse
import json
import math
import statistics
import sys
import threading
import time

import torch
import torch.nn.functional as F

SETS, PAUSE = 3, 0.4
# Seconds of a loop whose energy is taken: many moves of the GPU's counter, which come every 20 to 100 ms.
LOOP = 1.2
# Calls to warm up, and those that count: of a forward or a product, of a forward and backward, at the power limit.
# (a forward and backward, a dense product).
CALLS, STEPS, STEPS_LONG, LONG = (5, 20), (3, 10), (60, 20), (400, 20)
DEVICE, DTYPE = "cuda", torch.bfloat16


class Meter:
    """The GPU's clock and energy."""

    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        self.nvml, self.gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.sm_mhz(), self.millijoules()  # may be refused

    def sm_mhz(self):
        return self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM)

    def millijoules(self):
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu)

    def power(self):
        return Power(self.millijoules)


class Power:
    """The power while a block runs, between the first and the last move of the GPU's counter meanwhile."""

    def __init__(self, millijoules):
        self.millijoules, self.moves, self.running = millijoules, [], True
        self.thread = threading.Thread(target=self.watch)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.running = False
        self.thread.join()

    def watch(self):
        counter = self.millijoules()
        while self.running:
            time.sleep(0.001)
            now = self.millijoules()
            if now != counter:
                counter = now
                self.moves.append((time.monotonic(), now))

    def watts(self):
        """None where the counter has moved less than twice."""
        if len(self.moves) < 2:
            return None
        (began, first), (ended, last) = self.moves[0], self.moves[-1]
        return (last - first) / 1e3 / (ended - began)


class Measured:
    """Milliseconds of a call, and what was measured beside."""

    def __init__(self, ms, **beside):
        self.ms, self.beside = ms, beside


# Set by main: the meter, if there is one, and whether phases are repeated for their energy.
METER, ENERGY = None, False


def normal(*dims, deviation=1.0):
    return torch.randn(*dims, device=DEVICE, dtype=DTYPE) * deviation


def measure(call, burst=CALLS):
    warm_up, repeats = burst
    call(0)  # compiles, allocates
    torch.cuda.synchronize()
    time.sleep(PAUSE)
    for repeat in range(warm_up):
        call(repeat % SETS)
    spans = []
    for repeat in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(repeat % SETS)
        end.record()
        spans.append((start, end))
    # While the last quarter runs: all is queued, so that nothing waits for this thread.
    spans[repeats * 3 // 4][1].synchronize()
    beside = {"sm_mhz": METER.sm_mhz()} if METER else {}
    torch.cuda.synchronize()
    ms = statistics.median(start.elapsed_time(end) for start, end in spans)
    if METER and ENERGY:
        beside |= loop(call, ms)
    return Measured(ms, **beside)


def loop(call, ms):
    """Milliseconds and millijoules of a call in a loop, queued 50 ms at a time."""
    part, calls = math.ceil(50 / ms), 0
    with METER.power() as power:
        start = time.monotonic()
        while time.monotonic() < start + LOOP:
            for _ in range(part):
                call(calls % SETS)
                calls += 1
            torch.cuda.synchronize()
        ms = (time.monotonic() - start) * 1e3 / calls
    return {"loop_ms": round(ms, 4), "mj": round(power.watts() * ms, 1)} if power.watts() else {"loop_ms": round(ms, 4)}


def report(impl, workload, phase, measured, flop):
    ms = measured.ms
    line = {"impl": impl, "workload": workload, "phase": phase, "ms": round(ms, 4), "tflops": round(flop / ms / 1e9, 1)}
    print(json.dumps(line | measured.beside | {"gpu": torch.cuda.get_device_name()}), flush=True)


def note(text):
    print(text, file=sys.stderr, flush=True)


class Sizes:
    """A workload, and the operations of its parts."""

    def __init__(self, line):
        self.name = line["workload"]
        self.tokens, self.hidden, self.inner = line["tokens"], line["hidden"], line["inner"]
        self.experts, self.top_k = line["experts"], line["top_k"]
        self.routing = line.get("routing", "uniform")
        self.rows = self.tokens * self.top_k
        self.flop_down = 2 * self.rows * self.hidden * self.inner
        self.trains = self.tokens > 1000


class Experts(torch.nn.Module):
    """Routed experts with SiLU gates; ids and weights are given."""

    def __init__(self, s):
        super().__init__()
        self.up = torch.nn.Parameter(normal(s.experts, s.hidden, 2 * s.inner, deviation=s.hidden**-0.5))
        self.down = torch.nn.Parameter(normal(s.experts, s.inner, s.hidden, deviation=s.inner**-0.5))

    def forward(self, x, ids, weights):
        experts, k = self.up.shape[0], ids.shape[1]
        choices = ids.flatten()
        order = choices.argsort(stable=True)
        ends = torch.bincount(choices, minlength=experts).cumsum(0).to(torch.int32)
        token = order // k
        gate, linear = torch._grouped_mm(x[token], self.up, offs=ends).chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * linear, self.down, offs=ends)
        out = out * weights.flatten()[order].unsqueeze(1).to(out.dtype)
        return torch.zeros_like(x).index_add(0, token, out)


def choices(s):
    """Distinct experts of each token, as the workload's routing has them."""
    likely = torch.ones(s.experts, device=DEVICE)
    if s.routing == "zipf":
        likely /= torch.arange(1, s.experts + 1, device=DEVICE)
    if s.routing == "half-empty":
        likely[s.experts // 2 :] = 0
    if s.routing == "one-hot":
        likely[0] = 0
        others = torch.multinomial(likely.expand(s.tokens, -1), s.top_k - 1)
        return torch.cat([torch.zeros_like(others[:, :1]), others], dim=1)
    return torch.multinomial(likely.expand(s.tokens, -1), s.top_k)


class Inputs:
    """One input set: random choices."""

    def __init__(self, s):
        self.x = normal(s.tokens, s.hidden).requires_grad_()
        self.d_y = normal(s.tokens, s.hidden)
        self.ids = choices(s)
        self.weights = torch.rand(s.tokens, s.top_k, device=DEVICE).softmax(-1).requires_grad_()
        self.ends = torch.bincount(self.ids.flatten(), minlength=s.experts).cumsum(0).to(torch.int32)


def layer(impl, s, module, call, sets, inference=None):
    """Forward, and both. `inference`: options of a forward that nothing follows."""

    def forward(number):
        i = sets[number]
        with torch.no_grad():
            call(i.x, i.ids, i.weights, **(inference or {}))

    def both(number):
        i = sets[number]
        module.zero_grad(set_to_none=True)
        i.x.grad = i.weights.grad = None
        call(i.x, i.ids, i.weights).backward(i.d_y)

    report(impl, s.name, "fwd", measure(forward), 3 * s.flop_down)
    if s.trains:
        for phase, burst in ("fwd+bwd", STEPS), ("fwd+bwd-long", STEPS_LONG):
            report(impl, s.name, phase, measure(both, burst), 9 * s.flop_down)


def products(s, module, sets):
    """The grouped products alone, on rows that lie in order already."""
    up, down = module.up.detach(), module.down.detach()
    rows = normal(s.rows, s.hidden)
    pre, hidden = normal(s.rows, 2 * s.inner), normal(s.rows, s.inner)
    calls = {
        "gemm1": (2, lambda ends: torch._grouped_mm(rows, up, offs=ends)),
        "gemm2": (1, lambda ends: torch._grouped_mm(hidden, down, offs=ends)),
        "dgrad2": (1, lambda ends: torch._grouped_mm(rows, down.transpose(1, 2), offs=ends)),
        "dgrad1": (2, lambda ends: torch._grouped_mm(pre, up.transpose(1, 2), offs=ends)),
        "wgrad1": (2, lambda ends: torch._grouped_mm(rows.t(), pre, offs=ends)),
        "wgrad2": (1, lambda ends: torch._grouped_mm(hidden.t(), rows, offs=ends)),
    }
    for phase, (part, call) in calls.items():
        if not s.trains and phase not in ("gemm1", "gemm2"):
            continue  # Decoding has no backward.
        with torch.no_grad():
            measured = measure(lambda number: call(sets[number].ends))
        report("torch-grouped-mm", s.name, phase, measured, part * s.flop_down)


def dense():
    a, b = normal(SETS, 8192, 8192), normal(8192, 8192)
    for phase, burst in ("gemm", CALLS), ("gemm-long", LONG):
        report("cublas", "dense-8192", phase, measure(lambda number: a[number] @ b, burst), 2 * 8192**3)


def sonic(s, sets):
    """SonicMoE's layer, its router included, as the layer of ours is."""
    from sonicmoe import KernelBackendMoE, MoE
    from sonicmoe.enums import ActivationType

    module = MoE(
        num_experts=s.experts, num_experts_per_tok=s.top_k, hidden_size=s.hidden, intermediate_size=s.inner,
        activation_function=ActivationType.SWIGLU, add_bias=False, std=0.02,
    ).to(device=DEVICE, dtype=DTYPE)

    def call(x, *_, **options):
        return module(x, kernel_backend_moe=KernelBackendMoE.sonicmoe, **options)[0]

    layer("sonicmoe", s, module, call, sets, {"is_inference_mode": True})


def whole(workload, failures, run, *arguments):
    """Runs a peer; one that fails is told at the end, and the others are still measured."""
    start = time.monotonic()
    try:
        run(*arguments)
    except Exception as e:  # noqa: BLE001: whatever a compiler or a library meets
        failures.append(f"{run.__name__}, {workload}: {e!r}"[:300])
        note(failures[-1])
    return time.monotonic() - start


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("workloads")
    arguments.add_argument("--compile", type=float, default=0.0)
    arguments.add_argument("--sonic", action="store_true")
    arguments.add_argument("--energy", action="store_true")
    arguments.add_argument("--shapes", action="store_true")
    arguments = arguments.parse_args()
    torch.manual_seed(0)
    global METER, ENERGY
    ENERGY = arguments.energy
    try:
        METER = Meter()
    except Exception as e:  # noqa: BLE001: no library, no rights, another GPU
        note(f"no clocks and no energy: {e!r}")
    dense()
    compiling, failures = 0.0, []
    with open(arguments.workloads) as lines:
        workloads = [Sizes(json.loads(line)) for line in lines if line.strip()]
    for s in workloads:
        module, sets = Experts(s), [Inputs(s) for _ in range(SETS)]
        whole(s.name, failures, products, s, module, sets)
        if arguments.shapes:
            del module, sets
            torch.cuda.empty_cache()
            continue
        whole(s.name, failures, layer, "torch-eager", s, module, module, sets)
        if compiling < arguments.compile:
            # What was compiled for other sizes does not count against this module's.
            torch._dynamo.reset()
            spent = whole(s.name, failures, layer, "torch-compile", s, module, torch.compile(module, dynamic=False), sets)
            compiling += spent
            note(f"torch-compile, {s.name}: {spent:.0f} s with its compilation")
        elif arguments.compile > 0:
            note(f"torch-compile, {s.name}: not run, {compiling:.0f} s spent on others")
        if arguments.sonic:
            whole(s.name, failures, sonic, s, sets)
        del module, sets
        torch.cuda.empty_cache()
    dense()
    if failures:
        sys.exit("torch_moe.py: not measured:\n  " + "\n  ".join(failures))


if __name__ == "__main__":
    main()
