"""From a model to its graph: read without its weights, rehearsed without data, then told as nodes and flows."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.core.filters import Clip, Filter
from pellucid.interop import source, weights
from pellucid.interop.components import class_of
from pellucid.interop.family import family_of
from pellucid.models import ip_adapter
from pellucid.models.controlnet import ControlNet
from pellucid.models.guidance import Guidance
from pellucid.models.ip_adapter import IPAdapter
from pellucid.pipeline import pictures_in
from pellucid.pipeline.inspection import Block, Flow, Graph, Node, Role, Stage, Stored
from pellucid.pipeline.inspection_files import stored_component, stored_in
from pellucid.pipeline.inspection_run import (
    Added,
    Call,
    Form,
    Seen,
    make_request,
    networks_by_name,
    rehearse,
    text_names,
)
from pellucid.pipeline.inspection_time import measure, rows_of
from pellucid.pipeline.load import PathLike, load
from pellucid.pipeline.pipeline import Pipeline, networks_of
from pellucid.pipeline.planning import Planned, make_plan
from pellucid.pipeline.request import Request

Watch = Callable[[int], Callable[[], None]]
META = torch.device("meta")
SPARE_SAMPLER = "dpmpp_2m"  # where the model's own does not run here
GUIDED = ("context", "labels")  # inputs that differ with and without the prompt
WORDS = {
    "context": "context",
    "pooled": "pooled",
    "sizes": "size ids",
    "labels": "labels",
    "guidance_embedding": "guidance",
    "context_mask": "mask",
}


@dataclass(frozen=True)
class Asked:
    """What the graph is drawn for. `depth`: levels of blocks inside of each network; None leaves to the model."""

    size: tuple[int, int] | None = None
    batch: int = 1
    steps: int | None = None
    guidance: Any = None
    depth: int = 1
    controlnets: tuple[PathLike, ...] = ()
    ip_adapters: tuple[PathLike, ...] = ()


def inspect(where: PathLike, asked: Asked | None = None, **loading: Any) -> Graph:
    """The graph of a model that `load` can open, without loading a weight. `loading`: the options of `load`."""
    asked = asked or Asked()
    pipe = sketch(where, **loading)
    name, variant = os.fspath(where), loading.get("variant")
    held = stored_in(source.locate(name, revision=loading.get("revision"), variant=variant), variant)
    for part in ("vae", "image_encoder"):
        if loading.get(part) is not None:
            held[part] = stored_component(source.locate(os.fspath(loading[part])))
    return graph_of(pipe, asked, held)


def time(graph: Graph, where: PathLike, asked: Asked, watch: Watch | None = None, **loading: Any) -> Graph:
    """The graph with milliseconds: this loads the weights and runs. `watch(rows)` is told the rows, and gives a tick."""
    pipe = load(where, **loading)
    added = add(pipe, asked, {})
    request, _, _ = plan_for(pipe, request_for(pipe, added, asked))
    tick = (lambda: None) if watch is None else watch(rows_of(pipe, request))
    return graph.timed(*measure(pipe, request, added, tick))


def sketch(where: PathLike, **loading: Any) -> Pipeline:
    """The pipeline on the meta device: all files are found and checked, names and shapes too, and no weight is read."""
    try:
        return load(where, device=META, **loading)
    except NotImplementedError:  # a DiT compares the values of its embedders, which meta has not: it is mapped instead
        return hollow(load(where, device="cpu", **loading))


def hollow(pipe: Pipeline) -> Pipeline:
    """The same pipeline without data; itself where it has none."""
    parts = pipe.components
    if all(next(network.parameters()).is_meta for network in networks_of(parts)):
        return pipe
    made = replace(
        parts,
        network=ghost(parts.network),
        vae=None if parts.vae is None else ghost(parts.vae),
        text_encoders=tuple(ghost(encoder) for encoder in parts.text_encoders),
        image_encoder=None if parts.image_encoder is None else ghost(parts.image_encoder),
        controlnets=tuple(ghost(network) for network in parts.controlnets),
    )
    return Pipeline(made, device=META)


def ghost(network: nn.Module) -> Any:
    """A copy of a network without data; what is shared in it stays shared."""
    held = {id(tensor): tensor.detach().to(META) for tensor in (*network.parameters(), *network.buffers())}
    known = {id(weight): nn.Parameter(held[id(weight)], requires_grad=False) for weight in network.parameters()}
    return copy.deepcopy(network, {**held, **known})


def graph_of(pipe: Pipeline, asked: Asked | None = None, stored: Mapping[str, Stored] | None = None) -> Graph:
    """The graph of a pipeline, loaded or only sketched."""
    asked, held = asked or Asked(), dict(stored or {})
    pipe = hollow(pipe)
    parts = pipe.components
    added = add(pipe, asked, held)
    request, planned, notes = plan_for(pipe, request_for(pipe, added, asked))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler's keys, which the loader's notes say
        seen = rehearse(pipe, request, added)
    draft = Draft(pipe, added, seen, planned, pipe.guidance_of(request), asked, held)
    draft.tell()
    family = family_of(parts.network)
    return Graph(
        name=parts.name,
        pipeline=parts.pipeline_class,
        family=None if family is None else family.name,
        size=pipe.size_of(request),
        batch=asked.batch,
        steps=int(planned.plan.grid.get("steps") or planned.plan.nfe),
        calls=planned.plan.nfe,
        nodes=tuple(draft.nodes),
        flows=tuple(draft.flows),
        notes=(*parts.notes, *notes, *draft.notes),
    )


def request_for(pipe: Pipeline, added: Added, asked: Asked) -> Request:
    return make_request(pipe, added, size=asked.size, batch=asked.batch, steps=asked.steps, guidance=asked.guidance)


def plan_for(pipe: Pipeline, request: Request) -> tuple[Request, Planned, list[str]]:
    """The plan of the model's own sampler, or of another where that one does not run here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return request, make_plan(pipe.components, request), []
        except PellucidError as error:
            spare = replace(request, sampler=SPARE_SAMPLER)
            try:
                planned = make_plan(pipe.components, spare)
            except PellucidError:
                raise error from None
            return spare, planned, [f"drawn with {SPARE_SAMPLER}, for the model's own sampler does not run: {error}"]


def add(pipe: Pipeline, asked: Asked, held: dict[str, Stored]) -> Added:
    """The ControlNets and IP-Adapters of the folder and those asked for, where the model is; files go to `held`."""
    weight = next(pipe.components.network.parameters())
    controls: list[tuple[ControlNet, Stored | None]] = []
    for number, network in enumerate(pipe.components.controlnets):
        controls.append((network, held.pop(f"controlnet_{number}" if number else "controlnet", None)))
    for path in asked.controlnets:
        network = source.load_component(path, dtype=weight.dtype, device=weight.device)
        if not isinstance(network, ControlNet):
            raise PellucidError(rule("ControlNet", "a folder or file of one", type(network).__name__), "control-kind")
        controls.append((network, stored_component(source.locate(path))))
    adapters = [(read_adapter(path, weight), stored_component(Path(path))) for path in asked.ip_adapters]
    found: list[dict[str, Any]] = []
    for kind, listed in (("controlnet", controls), ("ip_adapter", adapters)):
        named = {kind if not number else f"{kind}_{number}": pair for number, pair in enumerate(listed)}
        held |= {name: store for name, (_, store) in named.items() if store is not None}
        found.append({name: network for name, (network, _) in named.items()})
    return Added(*found)


def read_adapter(path: PathLike, like: Tensor) -> IPAdapter:
    with like.device:
        held = {key: tensor.to(like.device) for key, tensor in weights.read(Path(path)).items()}
        return ip_adapter.from_state(held).to(like.dtype).eval().requires_grad_(False)


# --- a network's blocks ------------------------------------------------------------------------------------------


def blocks_of(network: nn.Module, depth: int, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Block, ...]:
    """The parts of a network, `depth` levels of them. Shared weights count once, in the first part that holds them."""
    total = sum(weight.numel() for weight in network.parameters())
    return Dissection(total, shapes or {}).parts(network, "", depth, set())


@dataclass(frozen=True)
class Dissection:
    total: int
    shapes: Mapping[str, tuple[int, ...]]

    def parts(self, module: nn.Module, path: str, depth: int, counted: set[int]) -> tuple[Block, ...]:
        if depth < 1:
            return ()
        found = []
        for name, inner in limbs(module, path):
            fresh = {id(w): w.numel() for w in inner.parameters() if id(w) not in counted}
            below = self.parts(inner, name, depth - 1, set(counted))
            counted |= set(fresh)
            count = sum(fresh.values())
            kind = type(inner).__name__
            found.append(Block(name, kind, count, count / self.total, self.shapes.get(name), below))
        for name, weight in module.named_parameters(path, recurse=False):
            if id(weight) not in counted:
                found.append(Block(name, "Parameter", weight.numel(), weight.numel() / self.total))
                counted.add(id(weight))
        return tuple(found)


def limbs(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children with weights. A list stands for its items, and what holds all weights alone for its children."""
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    children = [(name, child) for name, child in children if next(child.parameters(), None) is not None]
    own = next(module.parameters(recurse=False), None)
    if len(children) == 1 and own is None and next(children[0][1].children(), None) is not None:
        yield from limbs(children[0][1], children[0][0])
        return
    for name, child in children:
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for key, item in child.named_children():
                if next(item.parameters(), None) is not None:
                    yield f"{name}.{key}", item
        else:
            yield name, child


# --- nodes and flows ---------------------------------------------------------------------------------------------


@dataclass
class Draft:
    """A graph in the making, from what a rehearsal saw."""

    pipe: Pipeline
    added: Added
    seen: Seen
    planned: Planned
    guidance: Guidance
    asked: Asked
    held: Mapping[str, Stored]
    nodes: list[Node] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def tell(self) -> None:
        parts = self.pipe.components
        self.networks = networks_by_name(parts, self.added)
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

    def flow(self, source: str, goal: str, what: str, found: Form | Sequence[Form] | None = None) -> None:
        listed = [found] if isinstance(found, Form) else list(found or ())
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
            dtype=str(next(network.parameters()).dtype).removeprefix("torch."),
            memory=sum(tensor.nbytes for tensor in tensors),
            stored=self.held.get(name),
            calls=self.call(name).count * times if name != "vae" else 1,
            facts=facts,
            blocks=blocks_of(network, self.asked.depth, shapes),
        )

    # the stations, in the order in which they act

    def text(self) -> None:
        parts = self.pipe.components
        names = text_names(parts)
        if names:
            self.put("prompt", "input", facts={"texts": self.asked.batch})
        for name, encoder, tokenizer in zip(names, parts.text_encoders, parts.tokenizers, strict=True):
            words = name.replace("text_encoder", "tokenizer")
            call = self.call(name)
            facts = {"entries": tokenizer.size, "window": tokenizer.length}
            self.put(words, "tokenizer", "text", kind="Tokenizer", facts=facts)
            last = parts.text_encoders[-1].text_projection is None
            layers = encoder.config.num_hidden_layers
            read = "last layer" if last else "last layer but one"
            self.network(name, "text", "text", layers=layers, width=encoder.config.hidden_size, reads=read)
            self.flow("prompt", words, "text")
            self.flow(words, name, "token ids", call.one("tokens"))
            self.flow(name, "conditions", "states", call.one("last"))
        if names and self.call(self.main).inputs.get("pooled"):
            self.flow(names[-1], "conditions", "pooled", self.call(names[-1]).one("pooled"))
        if not names and "context" in self.seen.told:
            self.put("text states", "input", facts={"why": "no text encoder is here"})
            self.flow("text states", "conditions", "context", self.seen.told["context"])

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
            self.notes.append("image_encoder waits for an IP-Adapter: without one nothing reads what it says.")

    def painting(self) -> None:
        """The mask and the masked picture that an inpainting network sees beside x."""
        parts = self.pipe.components
        if not pictures_in.is_inpainting(parts) or parts.vae is None:
            return
        inner = self.call("vae.encode")
        half = sum(weight.numel() for weight in parts.vae.encoder.parameters())
        self.put("masked picture", "input")
        self.put("mask", "input")
        kind = type(parts.vae.encoder).__name__
        dtype = str(next(parts.vae.parameters()).dtype).removeprefix("torch.")
        self.put("vae encoder", "vae", "encode", kind=kind, parameters=half, dtype=dtype, half_of="vae")
        self.flow("masked picture", "vae encoder", "pixels", inner.one("images"))
        self.flow("vae encoder", self.main, "masked latents", inner.one("mean"))
        self.flow("mask", self.main, "mask", self.call("mask").one("out"))

    def conditions(self) -> None:
        """Where texts, labels and numbers become the inputs of one batch, with and without the prompt."""
        told, given = self.seen.told, self.call(self.main).inputs
        inputs = {name: given[name][0] for name in WORDS if given.get(name)}
        if not inputs and not told and not self.pipe.components.text_encoders:
            return
        if "labels" in told:
            names = self.pipe.components.labels
            self.put("class label", "input", facts={"named": len(names)} if names else {})
            self.flow("class label", "conditions", "labels", told["labels"])
        if "sizes" in told:
            words = "original size, crop, target size" if told["sizes"].shape[1] == 6 else "size, crop, aesthetic score"
            self.put("size ids", "input", facts={"numbers": words})
            self.flow("size ids", "conditions", "size ids", told["sizes"])
        if "guidance_embedding" in inputs:
            self.put("guidance scale", "input")
            self.flow("guidance scale", "conditions", "guidance", inputs["guidance_embedding"])
        self.put("conditions", "condition", "text", facts={"sides": self.sides})
        for name, form in inputs.items():
            self.flow("conditions", self.main, WORDS[name], form)

    @property
    def sides(self) -> str:
        """What the denoiser is asked in one call."""
        x = self.call(self.main).one("x")
        doubled = x is not None and x.shape[0] == 2 * self.asked.batch
        return "without and with the prompt" if doubled else "with the prompt"

    def controls(self) -> None:
        for number, name in enumerate(self.added.controlnets):
            call, picture = self.call(name), "control picture" if not number else f"control picture {number + 1}"
            self.put(picture, "input")
            self.network(name, "control", "denoise")
            self.flow(picture, name, "pixels", self.call(f"{name}.hint").one("picture"))
            self.flow("sampler", name, "x", call.one("x"))
            if call.one("context") is not None:
                self.flow("conditions", name, "context", call.one("context"))
            residuals = [form for found in call.outputs.values() for form in found]
            self.flow(name, self.main, "residuals", residuals)

    def loop(self) -> None:
        seen, call, parts = self.seen, self.call(self.main), self.pipe.components
        config = parts.network.config
        facts = {"in": config.in_channels, "out": getattr(config, "channels_out", config.out_channels)}
        self.network(self.main, "network", "denoise", channels=facts, trained_at=config.sample_size)
        guided = self.guidance.needs_uncond or bool(self.guidance.rules)
        guided = guided and self.sides == "without and with the prompt"
        goal = "guidance" if guided else "sampler"
        out = call.one("out")
        learned = out is not None and seen.x is not None and out.shape[1] == 2 * seen.x.shape[1]
        self.flow(self.main, goal, parts.target + (", variance" if learned else ""), out)
        if guided:
            plan = self.planned.plan
            way = self.guidance.as_diffusers() if plan.dialect == "diffusers" else self.guidance
            spaces = {rule.name: rule.space for rule in way.rules if hasattr(rule, "space")}
            self.put(
                "guidance",
                "guidance",
                "denoise",
                kind="Guidance",
                calls=plan.nfe,
                facts={"scale": self.guidance.text().split(" + ")[0], "rules": self.guidance.text(), **spaces},
            )
            self.flow("guidance", "sampler", "x0", seen.x0)
        self.put("noise", "input")
        self.flow("noise", "sampler", "noise", seen.x)
        self.put(
            "sampler",
            "sampler",
            "denoise",
            kind=self.planned.plan.name,
            facts=self.sampler_facts(),
            peer=str(parts.scheduler.get("_class_name", "")),
            calls=self.planned.plan.nfe,
        )
        self.flow("sampler", self.main, "x", call.one("x"))
        self.flow("sampler", self.main, "time", call.one("time"))

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
            "x0 filter": filter_words(self.planned.x0_filter),
        }

    def decode(self) -> None:
        vae, seen = self.pipe.components.vae, self.seen
        self.put("images", "output")
        if vae is None:
            self.flow("sampler", "images", "pixels", seen.x)
            return
        facts = {"factor": vae.config.factor, "latent channels": vae.config.latent_channels}
        facts["scaling"] = getattr(vae.config, "scaling_factor", 1.0)
        last = self.nodes.pop()
        self.network("vae", "vae", "decode", **facts)
        self.nodes.append(last)
        self.flow("sampler", "vae", "latents", seen.x)
        self.flow("vae", "images", "pixels", seen.decoded)


def filter_words(found: Filter | None) -> str:
    if found is None:
        return "none"
    kept = {f.name: getattr(found, f.name) for f in fields(found)}  # type: ignore[arg-type]
    name = "clip" if isinstance(found, Clip) else "dynamic threshold"
    return f"{name} {', '.join(f'{value:g}' for value in kept.values() if isinstance(value, float))}"
