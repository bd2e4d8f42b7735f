"""The fast path on a GPU: one call, the loop, fp8, the VAE and a mixed batch, bf16, random weights, beside diffusers.

    PYTHONPATH=src:FOLDER_WITH_DIFFUSERS python3 bench/fast_gpu.py --out DIR           # beside diffusers, compiled
    PYTHONPATH=src python3 bench/fast_gpu.py --out DIR --alone --only sd15,vae         # without it
    PYTHONPATH=src:FOLDER_WITH_DIFFUSERS python3 bench/fast_gpu.py --out DIR --compile-only --only sdxl

Times are medians between CUDA events, with quartiles. diffusers runs as its guide to speed says: channels-last,
`torch.compile(mode="reduce-overhead", fullgraph=True)`, and cuDNN tries its algorithms; ours is timed without and with
that ("tried"; the pipeline does not). `--compile-only` fills the compiler's cache, so that parts compile at once before
anything is timed. Errors are ‖out − reference‖ / ‖reference‖, and the reference is the plain form in
float32. `start` is the time from a fresh process to its first image; `growth` is memory over 1,000 runs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from safetensors.torch import save_file

from networks import DIT, SD15, SDXL, VAE, tupled
from pellucid import compile_plan, schedules
from pellucid.core.batch import Batch, Entry
from pellucid.core.loop import loop
from pellucid.core.noise import Philox
from pellucid.models import attention, dit, ops, quantize, unet_config
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


@contextlib.contextmanager
def tried(on: bool = True):
    """cuDNN tries its algorithms for each new shape, or takes the one that it expects to be the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def one_call(name: str, network: Any, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Times a call of ours; returns the plain form's output in float32."""
    time_ = torch.full((len(x),), 501.0, device=DEVICE)
    reference = copy.deepcopy(network).float()
    wide = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    with ops.using(fused=False):
        exact = reference(x.float(), time_, **wide)
        plain = network(x, time_, **inputs)
        eager = clock(lambda: network(x, time_, **inputs), 6, 1)
        before, _ = graph_of(lambda: network(x, time_, **inputs))
        say(f"{name} kernels, plain form", graph=median(clock(before.replay, 8)), ms=breakdown(before.replay))
    del reference, before
    network.to(memory_format=torch.channels_last)
    attention.pack(network)
    fused_call(name, network, x, inputs, exact, eager_plain=median(eager), plain_off=off(plain, exact))
    return exact


def fused_call(name: str, network: Any, x: Tensor, inputs: dict[str, Tensor], exact: Tensor, **more: Any) -> None:
    """Times the fused form, captured, without and with cuDNN trying its algorithms."""
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
    times = median(clock(graph.replay))
    with tried():
        best, _ = graph_of(call)
    say(
        f"{name} call",
        graph=times,
        graph_tried=median(clock(best.replay)),
        eager_fused=median(clock(call, 8)),
        first_s=round(first, 2),
        capture_s=round(capture, 2),
        fused_off=off(fused, exact),
        graph_is_eager=same,
        **more,
    )
    say(f"{name} kernels", ms=breakdown(best.replay))


# --- diffusers ----------------------------------------------------------------------------------------------------


def compiled(cls: str, raw: dict[str, Any], ours: nn.Module) -> Any:
    """diffusers' network with our weights, compiled."""
    import diffusers

    with torch.device(DEVICE):
        theirs = getattr(diffusers, cls).from_config(raw).to(BF16)
    theirs.load_state_dict(ours.state_dict())
    theirs = theirs.eval().requires_grad_(False).to(memory_format=torch.channels_last)
    if cls == "AutoencoderKL":
        theirs.decode = torch.compile(theirs.decode, mode="reduce-overhead", fullgraph=True)
        return theirs
    return torch.compile(theirs, mode="reduce-overhead", fullgraph=True)


def peer_unet(name: str, raw: dict[str, Any], network: nn.Module, x: Tensor, exact: Tensor | None) -> Any:
    """A function of x and the time that calls diffusers' compiled UNet; timed."""
    theirs, inputs = compiled("UNet2DConditionModel", raw, network), prompt_of(raw, len(x))
    added = {"text_embeds": inputs["pooled"], "time_ids": inputs["sizes"]} if "pooled" in inputs else None

    def call(x: Tensor, when: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return theirs(x, when, inputs["context"], added_cond_kwargs=added, return_dict=False)[0]

    peer_call(name, lambda: call(x, torch.full((), 501.0, device=DEVICE)), exact)
    return call


def peer_call(name: str, call: Callable[[], Tensor], exact: Tensor | None) -> None:
    with tried():
        began = time.perf_counter()
        for _ in range(3):
            out = call()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        more = {} if exact is None else {"off": off(out, exact)}
        say(f"{name}, diffusers compiled", ms=median(clock(call)), three_calls_s=round(first, 1), **more)
        if exact is not None:
            say(f"{name} kernels, diffusers compiled", ms=breakdown(call))


def peer_sample(call: Callable[[Tensor, Tensor], Tensor], scheduler: Any, steps: int, side: int) -> Tensor:
    """diffusers' loop with guidance, without its pipeline's checks and bar."""
    scheduler.set_timesteps(steps, device=DEVICE)
    x = torch.randn(1, 4, side, side, device=DEVICE, dtype=BF16) * scheduler.init_noise_sigma
    for when in scheduler.timesteps:
        out = call(scheduler.scale_model_input(torch.cat([x, x]), when), when.float())
        uncond, cond = out.chunk(2)
        x = scheduler.step(uncond + 7.5 * (cond - uncond), when, x, return_dict=False)[0]
    return x


def peer_loop(name: str, call: Callable[[Tensor, Tensor], Tensor], scheduler: str, side: int, **options: Any) -> None:
    import diffusers

    made = getattr(diffusers, scheduler)(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, **options)
    times = []
    with tried():
        for _ in range(8):
            torch.cuda.synchronize()
            began = time.perf_counter()
            peer_sample(call, made, 20, side)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - began))
    say(f"{name} loop, diffusers compiled", ms=median(times[2:]))


def peer_requests(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The 16 requests of 10 to 30 steps one after another, all with DPM++ 2M."""
    import diffusers

    scheduler = diffusers.DPMSolverMultistepScheduler(beta_schedule="scaled_linear", use_karras_sigmas=True)
    seconds = []
    with tried():
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for k in range(16):
                peer_sample(call, scheduler, 10 + 20 * k // 15, 64)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    say("16 requests one by one, diffusers compiled", images_per_s=round(16 / min(seconds), 2))


# --- the loop -----------------------------------------------------------------------------------------------------


def run_loop(
    name: str, network: Any, raw: dict[str, Any], size: tuple[int, int], sampler: str, guidance: str, steps: int = 20
) -> None:
    graphs, plan = StepGraphs(), compile_plan(sampler, steps=steps, grid="karras")
    own = GuidedDenoiser(
        network, SCALED, "eps", prompt_of(raw, 1, 1), prompt_of(raw, 1, 2), Guidance.parse(guidance), dtype=BF16
    )
    noise = Philox([0])
    x = noise.first((4, *size), torch.empty(0, device=DEVICE), [0]) * plan.initial_scale

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
        f"{name} loop {sampler} '{guidance}', {steps} steps, {8 * size[0]} x {8 * size[1]}",
        ms=median(times[3:]),
        first=round(times[0]),
        second=round(times[1]),
        third=round(times[2]),
        off_plain=off(out, plain),
        finite=bool(out.isfinite().all()),
    )


# --- the VAE ------------------------------------------------------------------------------------------------------


def vae(peer: bool) -> None:
    network = filled(lambda: AutoencoderKL(VAEConfig(**tupled(VAE))))
    theirs = compiled("AutoencoderKL", VAE, network) if peer else None
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
        default = median(clock(lambda z=z: network.decode(z), 12))
        with tried():
            graph, _ = graph_of(lambda z=z: network.decode(z))
        say(
            f"VAE {8 * side}",
            default=default,
            graph_tried=median(clock(graph.replay, 12)),
            plain=median(eager),
            peak_mb=f"{peak / 2**20:.0f} (plain {peak_plain / 2**20:.0f})",
            plain_off=off(plain, exact),
            fused_off=off(fused, exact),
        )
        say(f"VAE {8 * side} kernels", ms=breakdown(graph.replay))
        if theirs is not None:

            def decoded(z=z) -> Tensor:
                torch.compiler.cudagraph_mark_step_begin()
                return theirs.decode(z, return_dict=False)[0]

            peer_call(f"VAE {8 * side}", decoded, exact)
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


# --- a fresh process, and many runs -------------------------------------------------------------------------------


def start(tiny: bool = False) -> None:
    """From the start of a process to its first image: a folder with the weights of SD 1.5, bf16, on local disk."""
    import pellucid
    from pellucid.models import config
    from pellucid.models.clip import CLIPTextEncoder
    from pellucid.models.clip_config import CLIPTextConfig

    kept = pellucid.load("scenes-128", device="cpu")
    text = {"vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    text["max_position_embeddings"] = kept.components.text_encoders[0].config.max_position_embeddings
    raw, kinds = dict(SD15), dict(VAE)
    if tiny:
        raw |= {"block_out_channels": [32, 32, 64, 64], "norm_num_groups": 8}
        kinds |= {"block_out_channels": [32, 32, 32, 32]}
    networks = {
        "unet": lambda: UNet(unet_config.read({"_class_name": "UNet2DConditionModel", **raw})),
        "vae": lambda: AutoencoderKL(VAEConfig(**tupled(kinds))),
        "text_encoder": lambda: CLIPTextEncoder(
            config.read(CLIPTextConfig, {**text, "num_attention_heads": 12}), projection=False
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "sd15"
        kept.save(place)
        (place / "unet" / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel", **raw}))
        (place / "vae" / "config.json").write_text(
            json.dumps({"_class_name": "AutoencoderKL", "scaling_factor": 0.18215, **kinds})
        )
        own = json.loads((place / "text_encoder" / "config.json").read_text())
        (place / "text_encoder" / "config.json").write_text(json.dumps(own | text | {"num_attention_heads": 12}))
        for name, build in networks.items():
            weights = {key: value.cpu().contiguous() for key, value in filled(build).state_dict().items()}
            for old in (place / name).glob("*.safetensors"):
                old.unlink()
            file = "model.safetensors" if name == "text_encoder" else "diffusion_pytorch_model.safetensors"
            save_file(weights, place / name / file, metadata={"format": "pt"})
        size = sum(path.stat().st_size for path in place.rglob("*.safetensors"))
        words = ["sample", str(place), "a red star", "--steps", "20", "--guidance", "7.5", "--json", "--overwrite"]
        for round_ in ("first", "second"):
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "pellucid.cli", *words, "--out", str(Path(folder) / "made.png")],
                capture_output=True,
                text=True,
            )
            seconds = time.perf_counter() - began
            if done.returncode != 0:
                raise RuntimeError(done.stderr[-2000:])
            told = json.loads(done.stdout)
            stages = {stage["name"]: round(stage["seconds"], 2) for stage in told["stages"]}
            say(
                f"{round_} process to its image, {size / 2**30:.2f} GiB of weights",
                seconds=round(seconds, 2),
                loading=round(told["load_seconds"], 2),
                stages=stages,
            )


SMALL = {
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 64,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}


def growth(runs: int = 1000) -> None:
    """Memory over many runs of changing shapes, samplers and numbers of images."""
    network, graphs, rng = unet_of(SMALL), StepGraphs(), random.Random(0)
    seen = []
    for k in range(1, runs + 1):
        shape = (4, rng.choice((16, 24, 32, 40, 64)), rng.choice((16, 24, 32, 40, 64)))
        plan = compile_plan(rng.choice(MIXED[:8]), steps=rng.choice((3, 5)))
        count, guidance = rng.randint(1, 4), Guidance.parse(rng.choice(("7.5", "1", "guarded 7")))
        own = GuidedDenoiser(
            network, SCALED, "eps", prompt_of(SMALL, count, 1), prompt_of(SMALL, count, 2), guidance, dtype=BF16
        )
        noise = Philox(list(range(count)))
        x = noise.first(shape, torch.empty(0, device=DEVICE), list(range(count))) * plan.initial_scale
        loop([plan] * count, own, x, noise, (), (), None, graphs.stepper([network]))
        if k in (1, runs // 10, runs // 5, runs // 2, runs):
            torch.cuda.synchronize()
            gc.collect()
            held, reserved = torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
            seen.append(f"{k}: {held:.0f} / {reserved:.0f} / {resident:.0f}")
            say("growth, runs: MB allocated / reserved / of the process", seen=seen)


# --- all of it ----------------------------------------------------------------------------------------------------


def parts(peer: bool) -> dict[str, Callable[[], None]]:
    def sd15() -> None:
        network = unet_of(SD15)
        x = torch.randn(2, 4, 64, 64, device=DEVICE, dtype=BF16)
        exact = one_call("SD 1.5", network, x, prompt_of(SD15, 2))
        for guidance in ("7.5", "7.5 + interval start=0 stop=0.7", "guarded 7"):
            run_loop("SD 1.5", network, SD15, (64, 64), "dpmpp_2m", guidance)
        call = peer_unet("SD 1.5", SD15, network, x, exact) if peer else None
        if call is not None:
            peer_loop("SD 1.5", call, "DPMSolverMultistepScheduler", 64, use_karras_sigmas=True)
            peer_requests(call)
        mixed(network, SD15)
        run_loop("SD 1.5", network, SD15, (48, 80), "dpmpp_2m", "7.5")
        for steps in (10, 40):
            run_loop("SD 1.5", network, SD15, (64, 64), "dpmpp_2m", "7.5", steps)

    def sdxl() -> None:
        network = unet_of(SDXL)
        x = torch.randn(2, 4, 128, 128, device=DEVICE, dtype=BF16)
        exact = one_call("SDXL", network, x, prompt_of(SDXL, 2))
        run_loop("SDXL", network, SDXL, (128, 128), "euler", "7.5")
        if peer:
            call = peer_unet("SDXL", SDXL, network, x, exact)
            peer_loop("SDXL", call, "EulerDiscreteScheduler", 128, use_karras_sigmas=True)
            del call
            torch._dynamo.reset()
        count = quantize.quantize(network)
        attention.pack(network)
        fused_call("SDXL fp8", network, x, prompt_of(SDXL, 2), exact, layers=count)
        run_loop("SDXL fp8", network, SDXL, (128, 128), "euler", "7.5")

    def dit_() -> None:
        network = dit_of()
        x, labels = torch.randn(2, 4, 32, 32, device=DEVICE, dtype=BF16), torch.tensor([1, 1000], device=DEVICE)
        exact = one_call("DiT-XL/2", network, x, {"labels": labels})
        if peer:
            theirs = compiled("DiTTransformer2DModel", DIT, network)
            when = torch.full((2,), 501.0, device=DEVICE)

            def call() -> Tensor:
                torch.compiler.cudagraph_mark_step_begin()
                return theirs(x, when, labels, return_dict=False)[0]

            peer_call("DiT-XL/2", call, exact)

    return {
        "sd15": sd15,
        "vae": lambda: vae(peer),
        "dit": dit_,
        "sdxl": sdxl,
        "start": start,
        "growth": growth,
    }


def compile_only(names: list[str]) -> None:
    """Fills the compiler's cache with what the parts will ask for."""
    x = {side: torch.randn(2, 4, side, side, device=DEVICE, dtype=BF16) for side in (32, 64, 128)}
    if "sd15" in names:
        peer_unet("SD 1.5", SD15, unet_of(SD15), x[64], None)
    if "sdxl" in names:
        peer_unet("SDXL", SDXL, unet_of(SDXL), x[128], None)
    if "dit" in names:
        theirs = compiled("DiTTransformer2DModel", DIT, dit_of())
        theirs(x[32], torch.full((2,), 501.0, device=DEVICE), torch.tensor([1, 1000], device=DEVICE))
    if "vae" in names:
        theirs = compiled("AutoencoderKL", VAE, filled(lambda: AutoencoderKL(VAEConfig(**tupled(VAE)))))
        for side in (64, 128):
            theirs.decode(x[side][:1], return_dict=False)


@torch.no_grad()
def main() -> None:
    global OUT
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="sd15,vae,dit,sdxl,start,growth")
    parser.add_argument("--alone", action="store_true", help="without diffusers")
    parser.add_argument("--compile-only", action="store_true", help="compile diffusers' networks and time nothing")
    asked = parser.parse_args()
    OUT, only = asked.out, asked.only.split(",")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if asked.compile_only:
        compile_only(only)
        return
    for name, part in parts(not asked.alone).items():
        if name in only:
            try:
                part()
            except Exception:  # the other parts are worth their time on a rented machine
                traceback.print_exc()
                found[f"{name} failed"] = {"error": traceback.format_exc()[-1500:]}
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
