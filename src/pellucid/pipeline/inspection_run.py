"""A run of a pipeline without data, for shapes and calls; and a run with its weights, for milliseconds."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pellucid.core.batch import StepSeen
from pellucid.core.errors import Cancelled, PellucidError, rule
from pellucid.interop.components import Components
from pellucid.models.attention import ImageTokens
from pellucid.models.controlnet import ControlNet
from pellucid.models.dit import PixArt
from pellucid.models.ip_adapter import IPAdapter
from pellucid.models.vae import from_diffusion
from pellucid.pipeline import images
from pellucid.pipeline.encoders import image_inputs
from pellucid.pipeline.encoders.conditions import labels_of, sizes_of, takes_labels, takes_text, wants_sizes
from pellucid.pipeline.encoders.text import Embedding
from pellucid.pipeline.inspection import GraphOptions, Shape, Times
from pellucid.pipeline.model import networks_by_name
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import STEPS, make_plan
from pellucid.pipeline.request import MAX_BATCH, Control, ImagePrompt, Request
from pellucid.pipeline.stages import STAGES

_WORD = "a"
_WINDOW = 77
_T5_WINDOWS = {"PixArtAlphaPipeline": 120, "PixArtSigmaPipeline": 300}
_NOT_RUN = ("network-input", "labels", "no-labels")  # inputs that the pipeline does not make: the graph says so


class TensorForm(NamedTuple):
    """A tensor without its numbers."""

    shape: Shape
    dtype: str

    @staticmethod
    def of(tensor: Tensor) -> TensorForm:
        return TensorForm(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _forms(value: Any) -> tuple[TensorForm, ...]:
    """The tensors of an argument, nested or not; of image tokens, keys and values."""
    leaves = tree_leaves(value, is_leaf=lambda each: isinstance(each, ImageTokens))
    flat = [t for leaf in leaves for t in ((leaf.k, leaf.v) if isinstance(leaf, ImageTokens) else (leaf,))]
    return tuple(TensorForm.of(leaf) for leaf in flat if isinstance(leaf, Tensor))


@dataclass
class Call:
    """The first call of a network: its arguments and results by name, and how often it was called in all."""

    inputs: dict[str, tuple[TensorForm, ...]]
    outputs: dict[str, tuple[TensorForm, ...]]
    count: int = 1

    def one(self, name: str) -> TensorForm | None:
        """The form of an argument or a result that is one tensor."""
        found = self.outputs.get(name) or self.inputs.get(name) or ()
        return found[0] if found else None


@dataclass
class Observation:
    """What a rehearsal saw: calls by network, the shapes that left their blocks, and the ends of the run."""

    calls: dict[str, Call] = field(default_factory=dict)
    shapes: dict[tuple[str, str], Shape] = field(default_factory=dict)
    extra: dict[str, TensorForm] = field(default_factory=dict)  # besides texts, before it is doubled
    x: TensorForm | None = None
    x0: TensorForm | None = None
    decoded: TensorForm | None = None
    problem: str | None = None

    @contextmanager
    def watching(self, networks: Mapping[str, nn.Module]) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, network in networks.items():
                hook = network.register_forward_hook(partial(self.note_call, name), with_kwargs=True)
                hooks.enter_context(hook)
                for path, module in network.named_modules():
                    if path:
                        hooks.enter_context(module.register_forward_hook(partial(self.note_block, (name, path))))
            yield

    def note_call(self, name: str, network: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if name in self.calls:
            self.calls[name].count += 1
            return
        given = inspect.signature(network.forward).bind(*args, **kwargs).arguments
        results = out._asdict() if hasattr(out, "_asdict") else {"out": out}
        self.calls[name] = Call({k: _forms(v) for k, v in given.items()}, {k: _forms(v) for k, v in results.items()})

    def note_block(self, place: tuple[str, str], module: nn.Module, args: Any, out: Any) -> None:
        found = _forms(out)
        if found:
            self.shapes.setdefault(place, found[0].shape)


@dataclass(frozen=True)
class Attachments:
    """What is inspected together with a model: ControlNets and IP-Adapters, by the names of their nodes."""

    controlnets: dict[str, ControlNet] = field(default_factory=dict)
    adapters: dict[str, IPAdapter] = field(default_factory=dict)


def all_networks(parts: Components, added: Attachments) -> dict[str, nn.Module]:
    """Every network under the name of its node."""
    return {**networks_by_name(parts), **added.adapters, **added.controlnets}


# --- the request -------------------------------------------------------------------------------------------------


def make_request(pipe: Pipeline, added: Attachments, asked: GraphOptions) -> Request:
    """A request for a batch that uses all that the model has."""
    batch = asked.batch
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
        raise PellucidError(rule("batch", f"a whole number from 1 to {MAX_BATCH}", batch), "request")
    parts = pipe.components
    wide, high = asked.size or (None, None)
    plain = Request(width=wide, height=high, steps=asked.steps, guidance=asked.guidance, seed=0)
    wide, high = pipe.size_of(plain)
    blank = Image.new("RGB", (wide, high))
    more: dict[str, Any] = {"width": wide, "height": high}
    if takes_text(parts.network):
        more |= {"prompt": [_WORD] * batch} if parts.text_encoders else _embedded(parts, batch)
    if takes_labels(parts.network):
        more["label"] = [0] * batch
    if not takes_text(parts.network) and not takes_labels(parts.network):
        more["n"] = batch
    if image_inputs.is_inpainting(parts):
        more |= {"image": blank, "mask": Image.new("L", (wide, high), 255)}
    more["controls"] = [Control(network, blank) for network in added.controlnets.values()]
    if parts.image_encoder is not None:
        more["image_prompts"] = [ImagePrompt(adapter, blank) for adapter in added.adapters.values()]
    elif added.adapters:
        raise PellucidError(
            f"image_encoder must be given for an IP-Adapter: {parts.name} has none. Name its folder.", "ip-encoder"
        )
    return replace(plain, **more)


def _embedded(parts: Components, batch: int) -> dict[str, Any]:
    """Text states in the place of a text encoder that is not here, such as PixArt's T5."""
    network: Any = parts.network
    pooled = None
    weight = next(network.parameters())
    if isinstance(network, PixArt):
        width = network.config.caption_channels or network.config.cross_attention_dim
    else:
        width = network.config.encoder_hid_dim or network.config.each("cross_attention_dim")[0]
    if wants_sizes(network):
        numbers = 5 if parts.extra.get("requires_aesthetics_score") else 6
        spare = network.config.projection_class_embeddings_input_dim - numbers * network.config.addition_time_embed_dim
        pooled = weight.new_zeros(batch, spare)
    states = Embedding(weight.new_zeros(batch, _T5_WINDOWS.get(parts.pipeline_class, _WINDOW), width), pooled)
    return {"prompt_embeds": states, "negative_prompt_embeds": states}


# --- the run -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def rehearse(pipe: Pipeline, request: Request, added: Attachments) -> Observation:
    """Runs the request on meta up to its first call of the denoiser, then the decoder."""
    seen = Observation()
    parts = pipe.components
    projections = {name: adapter.image_proj for name, adapter in added.adapters.items()}
    hints = {f"{name}.hint": network.controlnet_cond_embedding for name, network in added.controlnets.items()}
    networks = {**all_networks(parts, added), **projections, **hints}

    def keep(step: Any) -> None:
        seen.x, seen.x0 = TensorForm.of(step.x_next), TensorForm.of(step.x0)

    with seen.watching(networks):
        try:
            pipe.run(replace(request, decode=False, observers=[keep], cancelled=lambda: seen.x is not None))
        except Cancelled:
            pass
        except PellucidError as error:
            if error.code not in _NOT_RUN:
                raise
            seen.problem = str(error)
        except RuntimeError as error:  # parts that do not fit each other: the files are at fault
            seen.problem = str(error).splitlines()[0]
        encoder, vae = parts.image_encoder, parts.vae
        if encoder is not None and "image_encoder" not in seen.calls:
            side = encoder.config.image_size
            encoder(next(encoder.parameters()).new_zeros(1, encoder.config.num_channels, side, side))
        if vae is not None and seen.x is not None:
            latents = torch.zeros(seen.x.shape, device="meta").to(next(vae.parameters()).dtype)
            seen.decoded = TensorForm.of(vae.decode(from_diffusion(vae.config, latents)))
            pixels = torch.zeros(seen.decoded.shape, device="meta", dtype=latents.dtype)
            seen.calls["vae.encode"] = Call({"images": _forms(pixels)}, {"mean": _forms(vae.encode(pixels).mean)})
            mask = images.mask_to_latents(pixels[:, :1], pipe.factor)
            seen.calls["mask"] = Call({"mask": _forms(pixels[:, :1])}, {"out": _forms(mask)})
    seen.extra = _extra_inputs(pipe, request)
    return seen


def _extra_inputs(pipe: Pipeline, request: Request) -> dict[str, TensorForm]:
    """A network's inputs besides texts, for one side of the batch: doubled where it is guided."""
    parts, found = pipe.components, {}
    if isinstance(request.prompt_embeds, Embedding):
        found["context"] = request.prompt_embeds.context
    if takes_labels(parts.network):
        found["labels"] = labels_of(parts, request)
    if wants_sizes(parts.network):
        found["sizes"] = sizes_of(parts, request, pipe.size_of(request), 0)
    return {name: TensorForm.of(value) for name, value in found.items()}


# --- Milliseconds ---------------------------------------------------------------------------------------------------

_SHORT_STEPS = 2  # steps of the runs that repeat text and decoding
_REPEATS = 2  # short runs that count, after one that only warms up and before the whole one


@dataclass
class _Stopwatch:
    """Laps of the denoising rows and of the networks, each after the device has finished."""

    device: torch.device
    tick: Callable[[], None]
    rows: list[list[float]] = field(default_factory=list)  # when each row ended, run by run
    laps: dict[str, list[float]] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def see(self, _: StepSeen) -> None:
        self.rows[-1].append(self.now())
        self.tick()

    def start(self, name: str, *_: Any) -> None:
        self.begun[name] = self.now()

    def stop(self, name: str, *_: Any) -> None:
        self.laps.setdefault(name, []).append(self.now() - self.begun[name])

    @contextmanager
    def on(self, networks: Mapping[str, nn.Module]) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, network in networks.items():
                hooks.enter_context(network.register_forward_pre_hook(partial(self.start, name)))
                hooks.enter_context(network.register_forward_hook(partial(self.stop, name)))
            yield


def rows_of(pipe: Pipeline, request: Request) -> int:
    """How often `measure` ticks: once a row of every run."""
    short, whole = (make_plan(pipe.components, each).plan.nfe for each in (_shortened(request), request))
    return (1 + _REPEATS) * short + whole


def _shortened(request: Request) -> Request:
    return replace(request, steps=min(_SHORT_STEPS, STEPS if request.steps is None else request.steps))


def measure(
    pipe: Pipeline, request: Request, added: Attachments, tick: Callable[[], None] = lambda: None
) -> tuple[Times, dict[str, float]]:
    """The request short, to warm up; short again, to repeat text and decoding; then whole. Milliseconds."""
    watch = _Stopwatch(pipe.device, tick)
    watched = replace(request, observers=[watch.see])
    runs = []
    with watch.on(all_networks(pipe.components, added)):
        for number in range(2 + _REPEATS):
            watch.rows.append([])
            whole = number == 1 + _REPEATS
            made = pipe.run(watched if whole else _shortened(watched))
            if number == 0:
                watch.laps.clear()
            else:
                runs.append(made.stages)
    taken = [{name: sum(s.seconds for s in stages if s.name == name) for name in STAGES} for stages in runs]
    gaps = [after - before for ends in watch.rows[1:] for before, after in pairwise(ends)]
    steps = gaps or [run["denoise"] for run in taken]  # a plan of one row has no gaps
    middle = {name: 1000 * statistics.median(run[name] for run in taken) for name in STAGES}
    peaks = [(s.name, s.peak) for stages in runs for s in stages if s.peak is not None]
    times = Times(
        device=str(pipe.device),
        text=middle["text"],
        encode=middle["encode"],
        step=1000 * statistics.median(steps),
        decode=middle["decode"],
        whole=1000 * sum(taken[-1].values()),
        runs=len(runs),
        peaks={name: max(peak for other, peak in peaks if other == name) for name, _ in peaks},
    )
    networks = {name: 1000 * statistics.median(laps) for name, laps in watch.laps.items()}
    return times, {**networks, **({} if pipe.components.vae is None else {"vae": times.decode})}
