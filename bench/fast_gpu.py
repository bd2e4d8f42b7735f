"""The fast path on a GPU: one call, the loop, the VAE, and a mixed batch, bf16, random weights, as ratios in one run.

    PYTHONPATH=src:FOLDER_WITH_DIFFUSERS python3 bench/fast_gpu.py --out DIR           # beside diffusers, compiled
    PYTHONPATH=src python3 bench/fast_gpu.py --out DIR --alone --only sd15,vae         # without it

Times are medians between CUDA events, with quartiles. diffusers runs as its guide to speed says: channels-last,
`torch.compile(mode="reduce-overhead", fullgraph=True)`. Errors are ‖out − reference‖ / ‖reference‖, and the reference
is the plain form in float32.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from networks import DIT, SD15, SDXL, VAE, tupled
from pellucid import compile_plan, schedules
from pellucid.core.batch import Batch, Entry
from pellucid.core.loop import loop
from pellucid.core.noise import Philox
from pellucid.models import attention, dit, ops, unet_config
from pellucid.models.captured import StepGraphs
from pellucid.models.guidance import Guidance
from pellucid.models.guided import GuidedDenoiser
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL, VAEConfig

BF16, DEVICE = torch.bfloat16, torch.device("cuda")
SCALED = schedules.make("scaled_linear")
MIXED = (
    *("dpmpp_2m", "euler", "heun", "unipc", "ddim", "euler_a", "dpmpp_2m_sde", "deis"),
    *("dpmpp_3m", "lms", "ipndm", "dpmpp_2s_a", "res_multistep", "dpm2", "sa_solver", "er_sde"),
)
found: dict[str, Any] = {}
OUT = Path()


def say(key: str, **values: Any) -> None:
    found[key] = values
    print(
        f"{time.perf_counter() - BEGAN:6.1f} s  {key}: " + "  ".join(f"{k} {v}" for k, v in values.items()), flush=True
    )
    (OUT / "fast.json").write_text(json.dumps(found, indent=1))


BEGAN = time.perf_counter()


def median(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def clock(call: Callable[[], Any], rounds: int = 25, warm: int = 3) -> list[float]:
    """Milliseconds of each round."""
    for _ in range(warm):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


def graph_of(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def filled(build: Callable[[], nn.Module]) -> Any:
    """A network on the device with random weights that keep the size of what passes through."""
    with torch.device("meta"):
        network = build()
    network = network.to(BF16).to_empty(device=DEVICE)
    for weight in network.parameters():
        fan = max(weight[0].numel(), 1) if weight.ndim > 1 else 1
        weight.normal_(0, fan**-0.5 if weight.ndim > 1 else 0.02)
    for module in network.modules():
        if isinstance(module, nn.GroupNorm | nn.LayerNorm) and module.weight is not None:
            module.weight.add_(1.0)
    for name, buffer in network.named_buffers():  # positions are computed, not drawn
        buffer.copy_(dict(build().named_buffers())[name])
    return network.eval().requires_grad_(False)


def off(one: Tensor, reference: Tensor) -> str:
    return f"{float((one.float() - reference.float()).norm() / reference.float().norm()):.1e}"


KINDS = {
    "attention": ("sdpa", "flash", "fmha", "cudnn_generated"),
    "conv": ("fprop", "implicit", "conv2d"),
    "layout": ("nchwtonhwc", "nhwctonchw"),
    "gemm": ("gemm", "cutlass", "nvjet", "splitk"),
    "copy": ("copy", "cat", "memcpy", "memset"),
}


def kind_of(name: str) -> str:
    lower = name.lower()
    for kind, words in KINDS.items():
        if any(word in lower for word in words):
            return kind
    return name[:44]


def breakdown(call: Callable[[], Any]) -> str:
    """Milliseconds and counts of the kernels of one call, by kind."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    by: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by[kind_of(event.name)][0] += event.device_time / 3000
            by[kind_of(event.name)][1] += 1 / 3
    rows = sorted(by.items(), key=lambda row: -row[1][0])[:14]
    total = sum(row[0] for row in by.values())
    return f"total {total:.3f}; " + ", ".join(f"{name} {ms:.3f} ({count:.0f})" for name, (ms, count) in rows)


# --- one call -----------------------------------------------------------------------------------------------------


def prompt_of(raw: dict[str, Any], batch: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    more = {"generator": generator, "device": DEVICE}
    inputs = {"context": torch.randn(batch, 77, raw["cross_attention_dim"], **more).to(BF16)}
    if "addition_embed_type" in raw:
        sizes = torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]], device=DEVICE)
        inputs |= {"pooled": torch.randn(batch, 1280, **more).to(BF16), "sizes": sizes.repeat(batch, 1)}
    return inputs


def unet_of(raw: dict[str, Any]) -> UNet:
    return filled(lambda: UNet(unet_config.read({"_class_name": "UNet2DConditionModel", **raw})))


def dit_of() -> Any:
    return filled(lambda: dit.build(dit.read({"_class_name": "DiTTransformer2DModel", **DIT})))


def one_call(name: str, network: Any, x: Tensor, inputs: dict[str, Tensor]) -> None:
    time_ = torch.full((len(x),), 501.0, device=DEVICE)
    reference = copy.deepcopy(network).float()
    wide = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with ops.using(fused=False):
        exact = reference(x.float(), time_, **wide)
        plain = network(x, time_, **inputs)
        eager = clock(lambda: network(x, time_, **inputs), 10)
    del reference
    network.to(memory_format=torch.channels_last)
    attention.pack(network)
    hoisted = network.hoist(torch.tensor([501.0], device=DEVICE), inputs)
    rows = hoisted.table[hoisted.index.expand(len(x), -1)[:, 0]]
    x = x.contiguous(memory_format=torch.channels_last)

    def call() -> Tensor:
        return network(x, hoisted=rows, **hoisted.inputs)

    began = time.perf_counter()
    fused = call()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    began = time.perf_counter()
    graph, out = graph_of(call)
    capture = time.perf_counter() - began
    graph.replay()
    same = bool(torch.equal(out, call()))
    say(
        f"{name} call",
        graph=median(clock(graph.replay)),
        eager_plain=median(eager),
        eager_fused=median(clock(call, 10)),
        first_s=round(first, 2),
        capture_s=round(capture, 2),
        plain_off=off(plain, exact),
        fused_off=off(fused, exact),
        graph_is_eager=same,
    )
    say(f"{name} kernels", ms=breakdown(graph.replay))


# --- the loop -----------------------------------------------------------------------------------------------------


def run_loop(
    name: str, network: Any, raw: dict[str, Any], side: int, sampler: str, guidance: str, steps: int = 20
) -> None:
    graphs, plan = StepGraphs(), compile_plan(sampler, steps=steps, grid="karras")
    own = GuidedDenoiser(
        network, SCALED, "eps", prompt_of(raw, 1, 1), prompt_of(raw, 1, 2), Guidance.parse(guidance), dtype=BF16
    )
    noise = Philox([0])
    x = noise.first((4, side, side), torch.empty(0, device=DEVICE), [0]) * plan.initial_scale

    def once(stepper: Any = None) -> Tensor:
        return loop([plan], own, x, noise, (), (), None, stepper)

    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = once(graphs.stepper([network]))
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    with ops.using(fused=False):
        plain = once()
    say(
        f"{name} loop {sampler} '{guidance}'",
        ms=median(times[3:]),
        first=round(times[0]),
        second=round(times[1]),
        third=round(times[2]),
        off_plain=off(out, plain),
        finite=bool(out.isfinite().all()),
    )


# --- the VAE ------------------------------------------------------------------------------------------------------


def vae() -> None:
    network = filled(lambda: AutoencoderKL(VAEConfig(**tupled(VAE))))
    for side in (64, 128):
        z = torch.randn(1, 4, side, side, device=DEVICE, dtype=BF16)
        network.to(memory_format=torch.contiguous_format)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with ops.using(fused=False):
            exact = copy.deepcopy(network).float().decode(z.float())
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            plain = network.decode(z)
            peak_plain = torch.cuda.max_memory_allocated() - before
            eager = clock(lambda z=z: network.decode(z), 8)
        network.to(memory_format=torch.channels_last)
        network.decode(z)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused = network.decode(z)
        peak = torch.cuda.max_memory_allocated() - before
        graph, _ = graph_of(lambda z=z: network.decode(z))
        say(
            f"VAE {8 * side}",
            fused=median(clock(lambda z=z: network.decode(z), 12)),
            graph=median(clock(graph.replay, 12)),
            plain=median(eager),
            peak_mb=f"{peak / 2**20:.0f} (plain {peak_plain / 2**20:.0f})",
            plain_off=off(plain, exact),
            fused_off=off(fused, exact),
        )
        say(f"VAE {8 * side} kernels", ms=breakdown(graph.replay))
        del graph, exact, plain, fused


# --- a mixed batch ------------------------------------------------------------------------------------------------


class Nothing(nn.Module):
    """A network of one kernel: what is left of a step's time is the step's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.5, device=DEVICE, dtype=BF16))

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        return x * self.weight


def entries_of(network: Any, raw: dict[str, Any], guidance: str) -> list[Entry]:
    made = []
    for k, name in enumerate(MIXED):
        plan = compile_plan(name, steps=10 + 20 * k // 15)
        noise = Philox([k])
        x = noise.first((4, 64, 64), torch.empty(0, device=DEVICE), [0]) * plan.initial_scale
        cond, uncond = prompt_of(raw, 1, k), prompt_of(raw, 1, 100)
        own = GuidedDenoiser(network, SCALED, "eps", cond, uncond, Guidance.parse(guidance), dtype=BF16)
        made.append(Entry([plan], own, x, noise))
    return made


def drain(entries: list[Entry], stepper: Any, one_by_one: bool = False) -> int:
    """Runs entries to their ends; returns the steps."""
    steps = 0
    for group in [[e] for e in entries] if one_by_one else [entries]:
        batch = Batch(stepper=stepper)
        for entry in group:
            batch.join(entry)
        while batch.entries:
            batch.step()
            steps += 1
        stepper.close()
    for entry in entries:
        if entry.error is not None:
            raise entry.error
    return steps


def mixed(network: Any, raw: dict[str, Any]) -> None:
    graphs, nothing = StepGraphs(64), Nothing()
    for guidance in ("7.5", "guarded 7"):
        drain(entries_of(nothing, raw, guidance), graphs.stepper([nothing]))
        drain(entries_of(nothing, raw, guidance), graphs.stepper([nothing]))
        made = entries_of(nothing, raw, guidance)
        batch = Batch(stepper=graphs.stepper([nothing]))
        for entry in made:
            batch.join(entry)
        batch.step()
        program = batch.stepper.program[1]  # type: ignore[union-attr]
        if program.graph is None:
            batch.step()
        times = clock(program.graph.replay, 20, 1)
        host = time.perf_counter()
        for _ in range(5):
            batch.step()
        host = (time.perf_counter() - host) / 5
        say(f"row of 16 samplers, '{guidance}'", graph_us=median([1000 * t for t in times]), host_us=round(1e6 * host))
    graphs = StepGraphs(64)
    results = {}
    for label, alone in (("together", False), ("one by one", True)):
        seconds = []
        for _ in range(3):
            made = entries_of(network, raw, "7.5")
            torch.cuda.synchronize()
            began = time.perf_counter()
            steps = drain(made, graphs.stepper([network]), alone)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        results[label] = torch.cat([entry.result for entry in made])
        say(
            f"16 requests {label}",
            images_per_s=round(16 / min(seconds[1:]), 2),
            seconds=[round(s, 2) for s in seconds],
            steps=steps,
        )
    say("16 requests", together_off_alone=off(results["together"], results["one by one"]))


@torch.no_grad()
def main() -> None:
    global OUT
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="sd15,sdxl,dit,vae,mixed")
    parser.add_argument("--alone", action="store_true", help="without diffusers")
    asked = parser.parse_args()
    OUT, only = asked.out, asked.only.split(",")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if "sd15" in only or "mixed" in only:
        network = unet_of(SD15)
        x = torch.randn(2, 4, 64, 64, device=DEVICE, dtype=BF16)
        one_call("SD 1.5", network, x, prompt_of(SD15, 2))
        if "sd15" in only:
            for guidance in ("7.5", "7.5 + interval start=0 stop=0.7", "guarded 7"):
                run_loop("SD 1.5", network, SD15, 64, "dpmpp_2m", guidance)
        if "mixed" in only:
            mixed(network, SD15)
        del network
    if "dit" in only:
        x = torch.randn(2, 4, 32, 32, device=DEVICE, dtype=BF16)
        one_call("DiT-XL/2", dit_of(), x, {"labels": torch.tensor([1, 1000], device=DEVICE)})
    if "vae" in only:
        vae()
    if "sdxl" in only:
        network = unet_of(SDXL)
        one_call("SDXL", network, torch.randn(2, 4, 128, 128, device=DEVICE, dtype=BF16), prompt_of(SDXL, 2))
        run_loop("SDXL", network, SDXL, 128, "euler", "7.5")


if __name__ == "__main__":
    main()
