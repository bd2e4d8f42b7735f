"""What a call of the UNet and of the transformer costs against the latents' size: milliseconds, memory, operations.

    python bench/network_cost.py --device cuda --dtype bfloat16 --batch 64 --rounds 7 --calls 20 --out out/cost

Networks have random weights, as the recipes of `pellucid train` say: a call costs the same untrained. Rounds of both
take turns, so that a machine that slows down slows both. `cost.json`, `cost.md` and `cost.png` hold the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pellucid.cli import trouble
from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.report import charts
from pellucid.evidence.report.charts import Drawing
from pellucid.evidence.report.page import Table
from pellucid.interop import source
from pellucid.interop.atomic_files import put
from pellucid.interop.weights import dtype_named
from pellucid.models import attention
from pellucid.pipeline.memory import size_text
from pellucid.pipeline.tracker import Tracker
from pellucid.train.config import parse
from pellucid.train.initial import fresh

ROOT = Path(__file__).parents[1]
RECIPES = [ROOT / "configs" / f"scenes_text_{name}.toml" for name in ("unet", "dit")]
SIDES = (16, 24, 32, 48, 64)
MOST_SIDE, MOST_COUNT = 512, 4096
# How parameters are told apart by their names; what none of these holds makes the image itself.
ROLES = {
    "text": ("attn2", "caption_projection"),
    "time": ("time_embedding", "time_emb_proj", "adaln_single", "scale_shift_table"),
    "self-attention": ("attn1",),
}
REST = "convolutions and feed-forward"
Networks = Mapping[str, nn.Module]
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Cost:
    """One network at one size of latents. Times are of one call of the whole batch; `activations` are the bytes of its
    fullest moment beside the weights; `flops` are of one image, `text_flops` those of its cross-attention."""

    network: str
    side: int
    milliseconds: float
    fastest: float
    slowest: float
    activations: int
    weights: int
    flops: int
    text_flops: int


@dataclass(frozen=True)
class Comparison:
    """Costs, and what the figures hold for."""

    device: str
    dtype: str
    batch: int
    threads: int
    tokens: int
    parameters: dict[str, int]
    roles: dict[str, dict[str, int]]  # of each network, its parameters by what they do
    costs: tuple[Cost, ...]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def networks_of(*files: str | Path) -> dict[str, nn.Module]:
    """Networks with random weights, as recipes of `pellucid train` say: a call costs the same untrained."""
    found = {}
    for file in files:
        raw = parse(Path(file)).get("task", {}).get("network")
        if not isinstance(raw, Mapping):
            raise PellucidError(rule(Path(file).name, "a recipe with a [task.network]", "none"), "config-missing")
        found["UNet" if str(raw.get("_class_name")).startswith("UNet") else "DiT"] = fresh(raw, 0)
    return found


def compare(
    networks: Networks,
    sides: Sequence[int] = SIDES,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    batch: int = 1,
    tokens: int = 64,
    rounds: int = 5,
    calls: int = 10,
) -> Comparison:
    """Rounds go from network to network, so that a machine that slows down slows all of them."""
    counts = (batch, tokens, rounds, calls)
    for name, values, most in (("sides", sides, MOST_SIDE), ("batch, tokens, rounds, calls", counts, MOST_COUNT)):
        if not values or min(values) < 1 or max(values) > most:
            raise PellucidError(rule(name, f"numbers from 1 to {most}", list(values)), "compare")
    place, kind = source.place(device), dtype_named(dtype)
    assert place is not None
    ready = {name: network.to(place, kind).eval().requires_grad_(False) for name, network in networks.items()}
    costs = []
    for side in sides:
        works = {name: call_of(network, side, batch, tokens) for name, network in ready.items()}
        took = timed(works, place, rounds, calls)
        for name, network in ready.items():
            memory = activations(works[name], place)
            flops, text = operations(network, call_of(network, side, 1, tokens))
            times = took[name]
            spread = (statistics.median(times), min(times), max(times))
            costs.append(Cost(name, side, *spread, memory, bytes_of(network), flops, text))
    return Comparison(
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        dtype=dtype,
        batch=batch,
        threads=torch.get_num_threads(),
        tokens=tokens,
        parameters={name: sum(p.numel() for p in network.parameters()) for name, network in ready.items()},
        roles={name: roles_of(network) for name, network in ready.items()},
        costs=tuple(costs),
    )


def call_of(network: nn.Module, side: int, batch: int, tokens: int) -> Call:
    """One question of the kind that a run asks: latents, a time, a text."""
    config: Any = network.config
    weight = next(network.parameters())
    width = getattr(config, "caption_channels", None) or config.cross_attention_dim
    generator = torch.Generator().manual_seed(side)
    x = torch.randn(batch, config.in_channels, side, side, generator=generator).to(weight)
    context = torch.randn(batch, tokens, width, generator=generator).to(weight)
    time_told = torch.full((batch,), 500.0, device=weight.device)

    def call() -> Tensor:
        with torch.no_grad():
            return network(x, time_told, context=context)

    return call


def timed(works: Mapping[str, Call], device: torch.device, rounds: int, calls: int) -> dict[str, list[float]]:
    """Milliseconds of a call, the mean of each round. On CUDA a call is replayed from a graph: kernels this small would
    otherwise wait for the host that starts them."""
    for work in works.values():
        for _ in range(3):  # kernels are chosen and memory is taken in the first
            work()
    if device.type == "cuda":
        works = {name: captured(work) for name, work in works.items()}
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            took[name].append(milliseconds(work, device, calls))
    return took


def captured(work: Call) -> Call:
    """The same call as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()

    def replay() -> Tensor:
        graph.replay()
        return made

    return replay


def milliseconds(work: Call, device: torch.device, calls: int) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return 1e3 * (time.perf_counter() - began) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / calls


def activations(work: Call, device: torch.device) -> int:
    """Bytes at the fullest moment of a call that were not there before it: torch's own count on CUDA, living tensors
    on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    tracker = Tracker([device.type])
    with torch.no_grad(), tracker:
        work()
    return tracker.peak.activations


def operations(network: nn.Module, work: Call) -> tuple[int, int]:
    """Floating-point operations of a call, and those within its cross-attentions. A multiplication and its addition are
    two; attention is counted as plain products, since torch does not count every fused kernel."""
    with attention.backend("math"), FlopCounterMode(display=False) as counter:
        work()
    top = type(network).__name__
    by_module = {
        name: sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if name.split(".")[-1] in ROLES["text"] and name.startswith(top)
    }
    return counter.get_total_flops(), sum(by_module.values())


def bytes_of(network: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*network.parameters(), *network.buffers()))


def roles_of(network: nn.Module) -> dict[str, int]:
    """Parameters by what they do: hear the text, hear the time, let places hear each other, or the rest."""
    found = dict.fromkeys((*ROLES, REST), 0)
    for name, parameter in network.named_parameters():
        words = set(name.split("."))
        role = next((role for role, marks in ROLES.items() if words & set(marks)), REST)
        found[role] += parameter.numel()
    return found


def tables(found: Comparison) -> list[Table]:
    where = f"{found.device}, {found.dtype}, batch {found.batch}"
    where += "" if found.device != "cpu" else f", {found.threads} thread{'s' if found.threads > 1 else ''}"
    names = list(found.parameters)
    rows = []
    for side in sorted({cost.side for cost in found.costs}):
        by = {cost.network: cost for cost in found.costs if cost.side == side}
        cells = [f"{by[n].milliseconds:.2f} ({by[n].fastest:.2f} to {by[n].slowest:.2f})" for n in names]
        cells += [size_text(by[n].activations) for n in names]
        cells += [f"{by[n].flops / 1e9:.2f}" for n in names]
        rows.append((f"{side} × {side}", *cells))
    columns = (
        "latents",
        *(f"{what}, {n}" for what in ("ms per call", "activations", "GFLOP per image") for n in names),
    )
    note = (
        "Milliseconds: the median of the rounds, and the fastest and slowest. Activations: the fullest moment of a "
        f"call of the whole batch, beside the weights. Text of {found.tokens} tokens."
    )
    shares = [
        (role, *(f"{found.roles[n][role]:,} ({100 * found.roles[n][role] / found.parameters[n]:.0f} %)" for n in names))
        for role in (*ROLES, REST)
    ]
    total = ("all", *(f"{found.parameters[n]:,}" for n in names))
    first = min(cost.side for cost in found.costs)
    heard = [cost for n in names for cost in found.costs if (cost.network, cost.side) == (n, first)]
    share = ("text's share of operations", *(f"{100 * c.text_flops / c.flops:.0f} %" for c in heard))
    end = f"Cross-attention's share of operations is at {first} × {first} latents."
    return [
        Table(f"Cost of a call: {where}", columns, tuple(rows), note),
        Table("What the parameters do", ("", *names), (*shares, total, share), end),
    ]


# --- Chart ----------------------------------------------------------------------------------------------------------

PANELS = (
    ("milliseconds", "Time of a call", "milliseconds", 1.0),
    ("activations", "Activations at the peak", "MiB", 2**20),
    ("flops", "Operations of one image", "GFLOP", 1e9),
)


def draw(found: Comparison) -> Drawing:
    """Three panels over the side of the latents, both axes logarithmic: a straight line is a power."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    figure = charts.canvas(11.5, 4.2)
    panels = figure.subplots(1, 3)
    sides = sorted({cost.side for cost in found.costs})
    for axes, (field, title, unit, scale) in zip(panels, PANELS, strict=True):
        for i, name in enumerate(found.parameters):
            own = sorted((cost for cost in found.costs if cost.network == name), key=lambda cost: cost.side)
            x = [cost.side for cost in own]
            look = {"color": charts.COLOURS[i], "marker": charts.MARKS[i], "label": label(found, name)}
            axes.plot(x, [getattr(cost, field) / scale for cost in own], linewidth=1.8, markersize=5, **look)
            if field == "milliseconds":
                low, high = [cost.fastest for cost in own], [cost.slowest for cost in own]
                axes.fill_between(x, low, high, color=charts.COLOURS[i], alpha=0.18, linewidth=0)
        charts.quiet(axes, title, "side of the latents", unit)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis, places in ((axes.xaxis, FixedLocator(sides)), (axes.yaxis, LogLocator(subs=(1.0, 2.0, 5.0)))):
            axis.set_major_locator(places)
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
            axis.set_minor_locator(NullLocator())
    threads = f", {found.threads} thread{'s' if found.threads > 1 else ''}" if found.device == "cpu" else ""
    note = f"{found.device}{threads}, {found.dtype}, batch {found.batch}, text of {found.tokens} tokens"
    charts.legend(figure, panels[0], note)
    return Drawing(figure, "Costs of a call against the size of latents")


def label(found: Comparison, name: str) -> str:
    return f"{name}, {found.parameters[name] / 1e6:.2f} M parameters"


def write(found: Comparison, folder: Path) -> Path:
    """cost.json, cost.md and cost.png."""
    charts.require()
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / "cost.json", json.dumps(found.plain(), indent=1) + "\n")
    put(folder / "cost.md", "\n".join(table.markdown() for table in tables(found)))
    return draw(found).png(folder / "cost.png")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", nargs="*", type=Path, default=RECIPES, help="configs with a [task.network]")
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, help="of the latents")
    for name, default in (("batch", 1), ("tokens", 64), ("rounds", 7), ("calls", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    given = vars(parser.parse_args(words))
    networks, sides, out = networks_of(*given.pop("recipes")), given.pop("sides"), given.pop("out")
    try:
        print(write(compare(networks, sides, **given), out))
    except PellucidError as error:
        return trouble(error.code, str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
