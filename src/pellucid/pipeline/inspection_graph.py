"""From a model to its graph: read without its weights, rehearsed without data, then described as nodes and flows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.core.filters import Clip, Filter
from pellucid.interop import source, weights
from pellucid.interop.components import class_of, text_parts
from pellucid.interop.family import family_of
from pellucid.models import ip_adapter
from pellucid.models.controlnet import ControlNet
from pellucid.models.guidance import Guidance
from pellucid.models.ip_adapter import IPAdapter
from pellucid.models.quantize import dtype_name
from pellucid.pipeline.encoders import image_inputs
from pellucid.pipeline.encoders.conditions import takes_text
from pellucid.pipeline.ghost import META, Shadows
from pellucid.pipeline.inspection import (
    Flow,
    Graph,
    GraphOptions,
    Node,
    Role,
    Stage,
    StoredWeights,
    blocks_of,
    stored_component,
    stored_in,
)
from pellucid.pipeline.inspection_run import (
    Attachments,
    Call,
    Observation,
    TensorForm,
    all_networks,
    make_request,
    measure,
    rehearse,
    rows_of,
)
from pellucid.pipeline.load import STORED, PathLike, load
from pellucid.pipeline.model import networks_of
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.prepare import RunPlan, make_plan
from pellucid.pipeline.request import Request
from pellucid.pipeline.shelf import adapter_file

# --- Nodes and flows ------------------------------------------------------------------------------------------------

_INPUT_NAMES = {
    "context": "context",
    "pooled": "pooled",
    "sizes": "size ids",
    "labels": "labels",
    "guidance_embedding": "guidance",
    "context_mask": "mask",
}


@dataclass
class _GraphBuilder:
    """A graph in the making, from what a rehearsal saw."""

    pipe: Pipeline
    added: Attachments
    seen: Observation
    planned: RunPlan
    guidance: Guidance
    asked: GraphOptions
    held: Mapping[str, StoredWeights]
    nodes: list[Node] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def build(self) -> None:
        parts = self.pipe.components
        self.networks = all_networks(parts, self.added)
        self.main = next(name for name in ("unet", "transformer") if name in self.networks)
        self.text()
        self.image_prompts()
        self.painting()
        self.conditions()
        self.controls()
        self.loop()
        self.decode()
        if self.seen.problem is not None:
            self.notes.append(f"shapes are missing, for the network was not run: {self.seen.problem}")

    # what is written down

    def put(self, name: str, role: Role, stage: Stage | None = None, **more: Any) -> None:
        self.nodes.append(Node(name, role, stage=stage, **more))

    def flow(self, source: str, goal: str, what: str, found: TensorForm | Sequence[TensorForm] | None = None) -> None:
        listed = [found] if isinstance(found, TensorForm) else list(found or ())
        dtype = listed[0].dtype if listed else None
        self.flows.append(Flow(source, goal, what, tuple(form.shape for form in listed), dtype))

    def call(self, name: str) -> Call:
        return self.seen.calls.get(name, Call({}, {}, 0))

    def network(self, name: str, role: Role, stage: Stage, **facts: Any) -> None:
        """A node that holds weights."""
        network = self.networks[name]
        tensors = {id(t): t for t in (*network.parameters(), *network.buffers())}.values()
        shapes = {path: shape for (owner, path), shape in self.seen.shapes.items() if owner == name}
        times = self.planned.plan.nfe if stage == "denoise" else 1
        self.put(
            name,
            role,
            stage,
            kind=type(network).__name__,
            peer=f"IP-Adapter, {network.kind}" if isinstance(network, IPAdapter) else class_of(network),
            parameters=sum(weight.numel() for weight in network.parameters()),
            dtype=dtype_name(network),
            memory=sum(tensor.nbytes for tensor in tensors),
            stored=self.held.get(name),
            calls=self.call(name).count * times if name != "vae" else 1,
            facts=facts,
            blocks=blocks_of(network, self.asked.depth, shapes),
        )

    # the stations, in the order in which they act

    def text(self) -> None:
        parts = self.pipe.components
        names = text_parts(parts)
        if names:
            self.put("prompt", "input", facts={"texts": self.asked.batch})
        for name, encoder, tokenizer in zip(names, parts.text_encoders, parts.tokenizers, strict=True):
            words = name.replace("text_encoder", "tokenizer")
            call = self.call(name)
            facts = {"entries": tokenizer.size, "window": tokenizer.length}
            self.put(words, "tokenizer", "text", kind="CLIP BPE" if tokenizer.clip else "BPE", facts=facts)
            last = parts.text_encoders[-1].text_projection is None
            layers = encoder.config.num_hidden_layers
            read = "last layer" if last else "last layer but one"
            self.network(name, "text", "text", layers=layers, width=encoder.config.hidden_size, reads=read)
            self.flow("prompt", words, "text")
            self.flow(words, name, "token ids", call.one("tokens"))
            self.flow(name, "conditions", "states", call.one("last"))
        if names and self.call(self.main).inputs.get("pooled"):
            self.flow(names[-1], "conditions", "pooled", self.call(names[-1]).one("pooled"))
        if not names and "context" in self.seen.extra:
            self.put("text states", "input", facts={"why": "no text encoder is here"})
            self.flow("text states", "conditions", "context", self.seen.extra["context"])
            tokens = self.seen.extra["context"].shape[1]
            self.notes.append(f"no text encoder is here: prompt_embeds of {tokens} tokens are assumed.")

    def image_prompts(self) -> None:
        encoder = self.pipe.components.image_encoder
        if encoder is None:
            return
        call = self.call("image_encoder")
        self.put("image prompt", "input")
        self.network("image_encoder", "image", "encode", side=encoder.config.image_size)
        self.flow("image prompt", "image_encoder", "pixels", call.one("pixels"))
        for name, adapter in self.added.adapters.items():
            inner = self.call(name)
            tokens = inner.one("out")
            count = None if tokens is None else tokens.shape[1]
            self.network(name, "image", "encode", tokens=count, reads=adapter.wants)
            self.flow("image_encoder", name, adapter.wants, next(iter(inner.inputs.values()), ()))
            self.flow(name, self.main, "keys and values", self.call(self.main).inputs.get("image"))
        if not self.added.adapters:
            self.notes.append("image_encoder is not used without an IP-Adapter.")

    def painting(self) -> None:
        """The mask and the masked image that an inpainting network sees beside x."""
        parts = self.pipe.components
        if not image_inputs.is_inpainting(parts) or parts.vae is None:
            return
        inner = self.call("vae.encode")
        half = sum(weight.numel() for weight in parts.vae.encoder.parameters())
        self.put("masked image", "input")
        self.put("mask", "input")
        kind = type(parts.vae.encoder).__name__
        dtype = str(next(parts.vae.parameters()).dtype).removeprefix("torch.")
        self.put("vae encoder", "vae", "encode", kind=kind, parameters=half, dtype=dtype, half_of="vae")
        self.flow("masked image", "vae encoder", "pixels", inner.one("images"))
        self.flow("vae encoder", self.main, "masked latents", inner.one("mean"))
        self.flow("mask", self.main, "mask", self.call("mask").one("out"))

    def conditions(self) -> None:
        """Where texts, labels and numbers become the inputs of one batch, with and without the prompt."""
        extra, given = self.seen.extra, self.call(self.main).inputs
        inputs = {name: given[name][0] for name in _INPUT_NAMES if given.get(name)}
        if not inputs and not extra and not self.pipe.components.text_encoders:
            return
        if "labels" in extra:
            names = self.pipe.components.labels
            self.put("class label", "input", facts={"named": len(names)} if names else {})
            self.flow("class label", "conditions", "labels", extra["labels"])
        if "sizes" in extra:
            words = (
                "original size, crop, target size" if extra["sizes"].shape[1] == 6 else "size, crop, aesthetic score"
            )
            self.put("size ids", "input", facts={"numbers": words})
            self.flow("size ids", "conditions", "size ids", extra["sizes"])
        if "guidance_embedding" in inputs:
            self.put("guidance scale", "input")
            self.flow("guidance scale", "conditions", "guidance", inputs["guidance_embedding"])
        self.put("conditions", "condition", "text", facts={"sides": self.sides})
        for name, form in inputs.items():
            self.flow("conditions", self.main, _INPUT_NAMES[name], form)

    @property
    def doubled(self) -> bool:
        """Whether one call of the denoiser asks for both sides of guidance."""
        x = self.call(self.main).one("x")
        return x is not None and x.shape[0] == 2 * self.asked.batch

    @property
    def sides(self) -> str:
        """What the denoiser is asked in one call."""
        side = "prompt" if takes_text(self.pipe.components.network) else "class"
        return f"without and with the {side}" if self.doubled else f"with the {side}"

    def controls(self) -> None:
        for number, name in enumerate(self.added.controlnets):
            call, image = self.call(name), "control image" if not number else f"control image {number + 1}"
            self.put(image, "input")
            self.network(name, "control", "denoise")
            self.flow(image, name, "pixels", self.call(f"{name}.hint").one("image"))
            self.flow("sampler", name, "x", call.one("x"))
            if call.one("context") is not None:
                self.flow("conditions", name, "context", call.one("context"))
            residuals = [form for found in call.outputs.values() for form in found]
            self.flow(name, self.main, "residuals", residuals)

    def loop(self) -> None:
        seen, call, parts, plan = self.seen, self.call(self.main), self.pipe.components, self.planned.plan
        config, x, out = parts.network.config, call.one("x"), call.one("out")
        facts = {
            "channels in": config.in_channels,
            "channels out": getattr(config, "channels_out", config.out_channels),
        }
        if x is not None and seen.x is not None and x.shape[1] != seen.x.shape[1]:
            facts["sees"] = x.shape  # x with the mask and the masked latents beside it
            x = TensorForm((x.shape[0], *seen.x.shape[1:]), x.dtype)
        self.network(self.main, "network", "denoise", **facts, trained_at=config.sample_size)
        learned = out is not None and seen.x is not None and out.shape[1] == 2 * seen.x.shape[1]
        goal = "guidance" if self.doubled else "sampler"
        self.flow(self.main, goal, parts.target + (", variance" if learned else ""), out)
        if self.doubled:
            self.put("guidance", "guidance", "denoise", kind="Guidance", calls=plan.nfe, facts=self.guidance_facts())
            self.flow("guidance", "sampler", "x0", seen.x0)
        self.put("noise", "input")
        self.flow("noise", "sampler", "noise", seen.x)
        peer = str(parts.scheduler.get("_class_name", ""))
        facts = self.sampler_facts()
        self.put("sampler", "sampler", "denoise", kind=plan.name, peer=peer, calls=plan.nfe, facts=facts)
        self.flow("sampler", self.main, "x", x)
        self.flow("sampler", self.main, "time", call.one("time"))

    def guidance_facts(self) -> dict[str, Any]:
        """The rules in words, and the space in which each acts."""
        way = self.guidance.as_diffusers() if self.planned.plan.dialect == "diffusers" else self.guidance
        rules = (way.combination, *way.corrections)
        return {"guidance": self.guidance.text(), "spaces": {rule.name: rule.space for rule in rules}}  # type: ignore[attr-defined]

    def sampler_facts(self) -> dict[str, Any]:
        plan, parts = self.planned.plan, self.pipe.components
        return {
            "sampler": plan.name,
            "schedule": parts.schedule.name,
            "target": parts.target,
            "dialect": plan.dialect,
            "grid": plan.grid.get("name"),
            "steps": plan.grid.get("steps"),
            "calls": plan.nfe,
            "noise": "fresh noise in its steps" if plan.stochastic else "none after the first",
            "x0 filter": _filter_words(self.planned.x0_filter),
        }

    def decode(self) -> None:
        vae, seen = self.pipe.components.vae, self.seen
        self.put("images", "output")
        if vae is None:
            self.flow("sampler", "images", "pixels", seen.x)
            return
        facts: dict[str, Any] = {"factor": vae.config.factor, "latent channels": vae.config.latent_channels}
        facts["scaling"] = getattr(vae.config, "scaling_factor", 1.0)
        last = self.nodes.pop()
        self.network("vae", "vae", "decode", **facts)
        self.nodes.append(last)
        self.flow("sampler", "vae", "latents", seen.x)
        self.flow("vae", "images", "pixels", seen.decoded)


def _filter_words(found: Filter | None) -> str:
    if found is None:
        return "none"
    kept = {f.name: getattr(found, f.name) for f in fields(found)}  # type: ignore[arg-type]
    name = "clip" if isinstance(found, Clip) else "dynamic threshold"
    return f"{name} {', '.join(f'{value:g}' for value in kept.values() if isinstance(value, float))}"


# --- The whole graph ------------------------------------------------------------------------------------------------

Watch = Callable[[int], Callable[[], None]]
_SPARE_SAMPLER = "dpmpp_2m"  # where the model's own does not run here


def inspect(where: PathLike, asked: GraphOptions | None = None, **loading: Any) -> Graph:
    """The graph of a model that `load` can open, without loading a weight. `loading`: the options of `load`."""
    asked = asked or GraphOptions()
    pipe = sketch(where, **loading)
    name, variant = os.fspath(where), loading.get("variant")
    held = stored_in(source.locate(name, revision=loading.get("revision"), variant=variant), variant)
    for part in ("vae", "image_encoder"):
        if loading.get(part) is not None:
            held[part] = stored_component(source.locate(os.fspath(loading[part])))
    return graph_of(pipe, asked, held)


def with_times(graph: Graph, where: PathLike, asked: GraphOptions, watch: Watch | None = None, **loading: Any) -> Graph:
    """The graph with milliseconds, for which the weights are loaded and run. `watch(rows)` gives a tick a row."""
    pipe = load(where, **loading)
    added = _attach(pipe, asked, {})
    request, _, _ = _plan_for(pipe, make_request(pipe, added, asked))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `graph_of`, whose notes the graph has
        tick = (lambda: None) if watch is None else watch(rows_of(pipe, request))
        return graph.timed(*measure(pipe, request, added, tick))


def sketch(where: PathLike, **loading: Any) -> Pipeline:
    """The pipeline on the meta device: all files are found and checked, names and shapes too, and no weight is read."""
    try:
        return load(where, device=META, **loading)
    except NotImplementedError:  # a DiT compares the values of its embedders, which meta has not: it is mapped instead
        return _without_data(load(where, device="cpu", **{**loading, "dtype": loading.get("dtype") or STORED}))


def _without_data(pipe: Pipeline) -> Pipeline:
    """The same pipeline without data; itself where it has none."""
    parts = pipe.components
    if all(next(network.parameters()).is_meta for network in networks_of(parts)):
        return pipe
    return Pipeline(Shadows("cuda").of(parts), device=META)  # the shapes are those of any device


def graph_of(
    pipe: Pipeline, asked: GraphOptions | None = None, stored: Mapping[str, StoredWeights] | None = None
) -> Graph:
    """The graph of a pipeline, loaded or only sketched."""
    asked, held = asked or GraphOptions(), dict(stored or {})
    pipe = _without_data(pipe)
    parts = pipe.components
    added = _attach(pipe, asked, held)
    request, planned, notes = _plan_for(pipe, make_request(pipe, added, asked))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler's keys, which the loader's notes say
        seen = rehearse(pipe, request, added)
    builder = _GraphBuilder(pipe, added, seen, planned, pipe.guidance_of(request), asked, held)
    builder.build()
    family = family_of(parts.network)
    return Graph(
        name=parts.name,
        pipeline=parts.pipeline_class,
        family=None if family is None else family.name,
        size=pipe.size_of(request),
        batch=asked.batch,
        steps=int(planned.plan.grid.get("steps") or planned.plan.nfe),
        calls=planned.plan.nfe,
        nodes=tuple(builder.nodes),
        flows=tuple(builder.flows),
        notes=(*parts.notes, *builder.guidance.notes, *notes, *builder.notes),
    )


def _plan_for(pipe: Pipeline, request: Request) -> tuple[Request, RunPlan, list[str]]:
    """The plan of the model's own sampler, or of another where that one does not run here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return request, make_plan(pipe.components, request), []
        except PellucidError as error:
            spare = replace(request, sampler=_SPARE_SAMPLER)
            try:
                planned = make_plan(pipe.components, spare)
            except PellucidError:
                raise error from None
            return spare, planned, [f"drawn with {_SPARE_SAMPLER}, for the model's own sampler does not run: {error}"]


def _attach(pipe: Pipeline, asked: GraphOptions, held: dict[str, StoredWeights]) -> Attachments:
    """The ControlNets and IP-Adapters of the folder and those asked for, where the model is; files go to `held`."""
    weight = next(pipe.components.network.parameters())
    controls: list[tuple[ControlNet, StoredWeights | None]] = []
    for number, network in enumerate(pipe.components.controlnets):
        controls.append((network, held.pop(f"controlnet_{number}" if number else "controlnet", None)))
    for path in asked.controlnets:
        controls.append((pipe.read_controlnet(path), stored_component(source.locate(path))))
    adapters = [(_read_adapter(path, weight), stored_component(adapter_file(path))) for path in asked.ip_adapters]
    found: list[dict[str, Any]] = []
    for kind, listed in (("controlnet", controls), ("ip_adapter", adapters)):
        named = {kind if not number else f"{kind}_{number}": pair for number, pair in enumerate(listed)}
        held |= {name: store for name, (_, store) in named.items() if store is not None}
        found.append({name: network for name, (network, _) in named.items()})
    return Attachments(*found)


def _read_adapter(path: PathLike, like: Tensor) -> IPAdapter:
    with like.device:
        held = {key: tensor.to(like.device) for key, tensor in weights.read(adapter_file(path)).items()}
        return ip_adapter.from_state(held).to(like.dtype).eval().requires_grad_(False)
