"""LigerCute beside ours: a Mixture-of-Experts layer fused with its NVLink communication, one process a GPU.

usage: torchrun --nproc-per-node N ligercute.py [WORKLOAD:TOKENS …]      default: qwen3-30b-a3b:8192

Wants PyTorch for CUDA, liger-kernel 0.8.5, liger-cute-kernels 0.8.5, NVSHMEM 3.6.5 for CUDA 12 and apache-tvm-ffi, all from
PyPI. Multicast stays off. One JSON line a measurement goes to stdout, in the form of `cargo bench --bench nccl`.

Timed in two modes. "alone", as that bench times a layer: before every repeat all ranks meet with idle GPUs. "queued": calls are
enqueued one behind the other, so that the host's time is hidden, as a replayed graph hides ours. In both a call lies between
two events, the slowest rank of each repeat counts, 3 to warm up, the median of 15. Routing is given, so its router is not in
the time; ours is. Before anything is timed, 256 tokens of the result are compared with a plain layer over all ranks' weights.
"""
import datetime
import json
import os
import statistics
import sys

os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "16G")

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Hidden size, inner size, experts, top-k.
WORKLOADS = {"qwen3-30b-a3b": (2048, 768, 128, 8), "dsv3": (7168, 2048, 256, 8)}
WARM_UP, REPEATS, COMPARED = 3, 15, 256
MODES = "alone", "queued"
# Three products whose sums round to bf16 once each, and the sum over top-k rows: some 2^-8 of the norm; twice that.
TOLERANCE = 2.0**-7


class Case:
    """A rank's input, routing and experts."""

    def __init__(self, name, tokens, rank, ranks):
        self.name, self.tokens = name, tokens
        self.hidden, self.inner, self.experts, self.top_k = WORKLOADS[name]
        torch.manual_seed(1 + rank)
        local = self.experts // ranks
        random = lambda *dims: torch.randn(*dims, device="cuda", dtype=torch.bfloat16)
        self.x, self.d_y = random(tokens, self.hidden), random(tokens, self.hidden)
        scores = torch.rand(tokens, self.experts, device="cuda")
        self.ids = scores.topk(self.top_k).indices.to(torch.int32)
        self.weights = torch.rand(tokens, self.top_k, device="cuda").softmax(-1).to(torch.bfloat16)
        inward, outward = self.hidden**-0.5, self.inner**-0.5
        self.gate = random(local, self.inner, self.hidden) * inward
        self.up = random(local, self.inner, self.hidden) * inward
        self.down = random(local, self.hidden, self.inner) * outward
        self.leaves = (self.x, self.weights, self.gate, self.up, self.down)

    def forward(self, layer):
        args = self.x, self.ids, self.weights, self.gate, self.up, self.down
        return layer(*args, self.experts, self.top_k, None)

    def step(self, layer):
        for leaf in self.leaves:
            leaf.grad = None
        self.forward(layer).backward(self.d_y)


def relative_error(case, y, ranks):
    """Of the first tokens, against every expert's product in f32."""
    whole = []
    for part in (case.gate, case.up, case.down):
        every = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(every, part.contiguous())
        whole.append(torch.cat(every))
    gate, up, down = whole
    x = case.x[:COMPARED].float()
    expected = torch.zeros_like(x)
    for expert in range(case.experts):
        token, choice = (case.ids[:COMPARED] == expert).nonzero(as_tuple=True)
        if len(token):
            rows = x[token]
            inner = F.silu(rows @ gate[expert].float().T) * (rows @ up[expert].float().T)
            weight = case.weights[token, choice].float()[:, None]
            expected.index_add_(0, token, inner @ down[expert].float().T * weight)
    return float((y[:COMPARED].float() - expected).norm() / expected.norm())


def meet():
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def measured(call, queued):
    """Milliseconds of each repeat: the slowest rank's."""
    pairs = []
    meet()
    for _ in range(WARM_UP + REPEATS):
        if not queued:
            meet()
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    slowest = torch.tensor([start.elapsed_time(end) for start, end in pairs[WARM_UP:]], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return sorted(slowest.tolist())


def line(case, phase, mode, times, ranks):
    ms = statistics.median(times)
    flop = (1 if phase == "fwd" else 3) * 6 * case.tokens * case.top_k * case.hidden * case.inner
    print(json.dumps({
        "impl": "ligercute", "workload": f"{case.name}-t{case.tokens}-given", "phase": phase, "mode": mode,
        "ms": round(ms, 4), "p99_ms": round(times[-1], 4), "ranks": ranks, "tokens": case.tokens, "hidden": case.hidden, "inner": case.inner,
        "experts": case.experts, "top_k": case.top_k, "tflops": round(flop / ms / 1e9, 1),
        "gpu": torch.cuda.get_device_name(), "date": str(datetime.datetime.now(datetime.timezone.utc).date()),
    }), flush=True)


def main():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    cases = [(name, int(tokens)) for name, tokens in (word.split(":") for word in sys.argv[1:])]
    cases = cases or [("qwen3-30b-a3b", 8192)]
    of = lambda i: max(WORKLOADS[name][i] for name, _ in cases)

    from liger_cute_kernels import MoEConfig, configure, nvshmem

    limits = MoEConfig(
        max_tokens=max(tokens for _, tokens in cases), hidden_size=of(0), num_experts=of(2), top_k=of(3),
        num_hosts=1, gpus_per_host=ranks, group="ep", max_inflight=1,
    )
    configure(process_groups={"ep": dist.group.WORLD}, bootstrap_group=dist.group.WORLD, device=device, moe=limits)
    from liger_kernel.ops.cute.ops.moe import moe_fused

    for name, tokens in cases:
        case = Case(name, tokens, rank, ranks)
        with torch.no_grad():
            error = relative_error(case, case.forward(moe_fused), ranks)
            if not error < TOLERANCE:
                raise SystemExit(f"{name}: relative error {error:.3g} on rank {rank}, expected below {TOLERANCE:.3g}")
            forward = {mode: measured(lambda: case.forward(moe_fused), mode == "queued") for mode in MODES}
        for leaf in case.leaves:
            leaf.requires_grad_()
        both = {mode: measured(lambda: case.step(moe_fused), mode == "queued") for mode in MODES}
        for mode in MODES if rank == 0 else ():
            line(case, "fwd", mode, forward[mode], ranks)
            line(case, "fwd+bwd", mode, both[mode], ranks)
        del case
        torch.cuda.empty_cache()
    nvshmem.finalize()
    dist.destroy_process_group()


main()
