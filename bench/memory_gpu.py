"""Memory predicted and measured, stage by stage: SD 1.5 at 512² and SDXL at 1024², random weights, bf16, on a GPU.

    PYTHONPATH=src python3 bench/memory_gpu.py --out DIR        (--tiny --device cpu: the same with tiny models here)

Every row is one stage of one policy: predicted / measured bytes of the whole, and the same of what comes on top of the
weights, which is the harder figure. Then a probe: what convolutions borrow beside their tensors, against the rule that
the prediction uses.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from networks import SD15, SDXL, VAE
from pellucid.core.schedule import make as make_schedule
from pellucid.interop.components import Components
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models import config, unet_config
from pellucid.models.clip import CLIPTextEncoder
from pellucid.models.clip_config import CLIPTextConfig
from pellucid.models.controlnet import ControlNet
from pellucid.models.unet import UNet
from pellucid.models.vae import AutoencoderKL, VAEConfig
from pellucid.pipeline import tracker
from pellucid.pipeline.compare import Strategy, arrange, measure
from pellucid.pipeline.memory import predict, request_for
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.policy import Policy

TEXT_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT_G = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
TINY_UNET = {
    "sample_size": 16, "block_out_channels": [32, 64], "layers_per_block": 1, "cross_attention_dim": 32,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 2,
}  # fmt: skip
TINY_VAE = {
    "block_out_channels": [32, 32], "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2, "layers_per_block": 1,
}  # fmt: skip
TINY_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {"vocab_size": 49408, "max_position_embeddings": 77}


@dataclass(frozen=True)
class Kind:
    """A model by its configs."""

    name: str
    unet: dict[str, Any]
    vae: dict[str, Any]
    texts: tuple[dict[str, Any], ...]
    side: int  # pixels
    hint: tuple[int, ...] = (16, 32, 96, 256)  # widths of a ControlNet's image embedding: an eighth of the side


KINDS = (
    Kind("SD 1.5", SD15, VAE, (TEXT_L,), 512),
    Kind("SDXL", SDXL, VAE, (TEXT_L, {**TEXT_G, "projection": True}), 1024),
)
TINY = (Kind("tiny", TINY_UNET, TINY_VAE, (TINY_TEXT,), 64, (16, 32)),)


@dataclass(frozen=True)
class Row:
    """One stage of one run: bytes."""

    model: str
    batch: int
    policy: str
    stage: str
    weights: int
    predicted: int
    measured: int
    owner: str
    seconds: float

    @property
    def ratio(self) -> float:
        return self.predicted / max(self.measured, 1)

    @property
    def ratio_beyond(self) -> float:
        """Of what comes on top of the weights."""
        return (self.predicted - self.weights) / max(self.measured - self.weights, 1)


def text_encoder(raw: dict[str, Any]) -> CLIPTextEncoder:
    values = {**CLIP, **raw}
    projection = values.pop("projection", False)
    return CLIPTextEncoder(config.read(CLIPTextConfig, values), projection=projection)


def pipeline_of(kind: Kind, device: torch.device, dtype: torch.dtype) -> Pipeline:
    """A model of random weights, without any file."""
    torch.manual_seed(0)
    with device:
        network = UNet(unet_config.read(kind.unet))
        vae = AutoencoderKL(config.read(VAEConfig, kind.vae))
        encoders = tuple(text_encoder(raw) for raw in kind.texts)
    networks: list[nn.Module] = [network, vae, *encoders]
    for part in networks:
        part.to(dtype).eval().requires_grad_(False)
    words = Tokenizer.from_merges([])
    parts = Components(
        kind.name, "StableDiffusionPipeline", network, vae, encoders, (words,) * len(encoders), None, (), {},
        make_schedule("scaled_linear"), "eps",
    )  # fmt: skip
    return Pipeline(parts, Policy(), device)


def controlnet_of(kind: Kind, pipe: Pipeline) -> ControlNet:
    made = {name: value for name, value in kind.unet.items() if name not in ("up_block_types", "sample_size")}
    raw = {"_class_name": "ControlNetModel", **made, "conditioning_embedding_out_channels": kind.hint}
    with pipe.device:
        network = ControlNet(unet_config.read(raw))
    return network.to(next(pipe.components.network.parameters()).dtype).eval().requires_grad_(False)


def policies(device: torch.device, tile: int) -> list[Policy]:
    found = [Policy(), Policy(vae_tile=tile), Policy(channels_last=True)]
    if device.type != "cpu":
        found += [Policy(offload="component"), Policy(offload="block")]
    return found


def rows_of(kind: Kind, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    pipe = pipeline_of(kind, device, dtype)
    for policy in policies(device, 16 if kind.side < 512 else 64):
        yield from run(pipe, kind, 1, policy)
    for policy in (Policy(), Policy(vae_slicing=True)):
        yield from run(pipe, kind, 2, policy)
    if kind.side <= 512:  # beyond it, the maps are tens of GB
        yield from run(pipe, kind, 1, Policy(attention="math"))
    yield from run(pipe, kind, 1, Policy(), controlnet_of(kind, pipe))


def run(pipe: Pipeline, kind: Kind, batch: int, policy: Policy, controlnet: ControlNet | None = None) -> Iterator[Row]:
    controls = [] if controlnet is None else [controlnet]
    request = request_for(pipe, size=(kind.side, kind.side), batch=batch, controlnets=controls)
    with arrange(pipe, Strategy("", policy, request)) as (ready, asked, _):
        forecast = predict(ready, asked)
        free()
        found = measure(ready, asked)
    name = policy.text() + (", ControlNet" if controls else "")
    for stage, peak in forecast.stages.items():
        figures = (peak.weights, peak.total, found.peaks[stage], peak.owner, found.seconds[stage])
        yield Row(kind.name, batch, name, stage, *figures)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- what convolutions borrow ---------------------------------------------------------------------------------------

# (batch, channels in, channels out, side, kernel): of the VAE's decoder at 512² and 1024², of the UNets.
CONVOLUTIONS = (
    (1, 512, 512, 64, 3), (1, 256, 256, 512, 3), (1, 256, 128, 512, 3), (1, 128, 128, 512, 3), (1, 128, 3, 512, 3),
    (1, 256, 128, 512, 1), (1, 256, 256, 1024, 3), (1, 128, 128, 1024, 3), (2, 320, 320, 64, 3), (2, 960, 320, 64, 3),
    (2, 320, 320, 64, 1), (2, 320, 320, 128, 3), (2, 1280, 1280, 32, 3),
)  # fmt: skip


@torch.no_grad()
def probe(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Bytes that a convolution takes beside input, weights and result, measured and by the prediction's rule."""
    found = []
    for batch, inner, outer, side, kernel in CONVOLUTIONS:
        for channels_last in (False, True):
            layout = torch.channels_last if channels_last else torch.contiguous_format
            conv = nn.Conv2d(inner, outer, kernel, padding=kernel // 2).to("cuda", dtype, memory_format=layout)
            x = torch.randn(batch, inner, side, side, device="cuda", dtype=dtype).to(memory_format=layout)
            out = conv(x)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            again = conv(x)
            torch.cuda.synchronize()
            borrowed = torch.cuda.max_memory_allocated() - before - tracker.rounded_bytes(out)
            rule = tracker.borrowed_bytes(channels_last)(torch.ops.aten.convolution.default, (x, conv.weight), out)
            tensors = {
                "in": tracker.rounded_bytes(x),
                "out": tracker.rounded_bytes(out),
                "weight": tracker.rounded_bytes(conv.weight),
            }
            shape = {"batch": batch, "in_channels": inner, "out_channels": outer, "side": side, "kernel": kernel}
            found.append({**shape, "channels_last": channels_last, "borrowed": borrowed, "rule": rule, **tensors})
            del conv, x, out, again
        free()
    return found


# --- printing -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    head = ("model", "batch", "policy", "stage", "weights", "predicted", "measured", "ratio", "beyond weights", "owner")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        sizes = [f"{size / 2**20:,.1f}" for size in (row.weights, row.predicted, row.measured)]
        cells = (
            row.model,
            str(row.batch),
            row.policy,
            row.stage,
            *sizes,
            f"{row.ratio:.3f}",
            f"{row.ratio_beyond:.3f}",
        )
        lines.append("| " + " | ".join((*cells, row.owner or "the stage itself")) + " |")
    return "\n".join(lines) + "\n(MiB)\n"


def worst(rows: Sequence[Row]) -> str:
    """The farthest prediction of a run's peak, over all models and policies."""
    runs: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row.model, row.batch, row.policy), []).append(row)
    ratios = {key: max(r.predicted for r in stages) / max(r.measured for r in stages) for key, stages in runs.items()}
    key = max(ratios, key=lambda k: abs(ratios[k] - 1))
    return f"peak of a run, predicted / measured: farthest {ratios[key]:.3f} ({', '.join(map(str, key))})"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(words)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    began, rows = time.perf_counter(), []
    for kind in TINY if args.tiny else KINDS:
        for row in rows_of(kind, device, dtype):
            rows.append(row)
            beyond = f"{row.ratio_beyond:.3f} beyond weights"
            print(f"{row.model} ×{row.batch} {row.policy}: {row.stage} {row.ratio:.3f} ({beyond})", flush=True)
        free()
    found = probe(dtype) if device.type == "cuda" else []
    for one in found:
        print({**one, "borrowed / rule": round(one["borrowed"] / max(one["rule"], 1), 3)}, flush=True)
    print(table(rows))
    print(worst(rows), f"· {time.perf_counter() - began:.0f} s")
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    whole = {"torch": torch.__version__, "machine": machine, "rows": [asdict(row) for row in rows], "probe": found}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "memory.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    (args.out / "memory.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
