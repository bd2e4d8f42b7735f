"""From a model to its graph: read without its weights, rehearsed without data, then told as nodes and flows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.interop import source, weights
from pellucid.interop.family import family_of
from pellucid.models import ip_adapter
from pellucid.models.controlnet import ControlNet
from pellucid.models.ip_adapter import IPAdapter
from pellucid.pipeline.ghost import META, Shadows
from pellucid.pipeline.image_inputs import adapter_file, read_controlnet
from pellucid.pipeline.inspection import Asked, Graph, Stored
from pellucid.pipeline.inspection_draft import Draft
from pellucid.pipeline.inspection_files import stored_component, stored_in
from pellucid.pipeline.inspection_run import Added, make_request, rehearse
from pellucid.pipeline.inspection_time import measure, rows_of
from pellucid.pipeline.load import STORED, PathLike, load
from pellucid.pipeline.pipeline import Pipeline, networks_of
from pellucid.pipeline.planning import Planned, make_plan
from pellucid.pipeline.request import Request

Watch = Callable[[int], Callable[[], None]]
SPARE_SAMPLER = "dpmpp_2m"  # where the model's own does not run here


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


def with_times(graph: Graph, where: PathLike, asked: Asked, watch: Watch | None = None, **loading: Any) -> Graph:
    """The graph with milliseconds, for which the weights are loaded and run. `watch(rows)` gives a tick a row."""
    pipe = load(where, **loading)
    added = add(pipe, asked, {})
    request, _, _ = plan_for(pipe, make_request(pipe, added, asked))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `graph_of`, whose notes the graph has
        tick = (lambda: None) if watch is None else watch(rows_of(pipe, request))
        return graph.timed(*measure(pipe, request, added, tick))


def sketch(where: PathLike, **loading: Any) -> Pipeline:
    """The pipeline on the meta device: all files are found and checked, names and shapes too, and no weight is read."""
    try:
        return load(where, device=META, **loading)
    except NotImplementedError:  # a DiT compares the values of its embedders, which meta has not: it is mapped instead
        return hollow(load(where, device="cpu", **{**loading, "dtype": loading.get("dtype") or STORED}))


def hollow(pipe: Pipeline) -> Pipeline:
    """The same pipeline without data; itself where it has none."""
    parts = pipe.components
    if all(next(network.parameters()).is_meta for network in networks_of(parts)):
        return pipe
    emptied = Shadows("cuda").ghost  # the shapes are those of any device
    made = replace(
        parts,
        network=emptied(parts.network),
        vae=None if parts.vae is None else emptied(parts.vae),
        text_encoders=tuple(emptied(encoder) for encoder in parts.text_encoders),
        image_encoder=None if parts.image_encoder is None else emptied(parts.image_encoder),
        controlnets=tuple(emptied(network) for network in parts.controlnets),
    )
    return Pipeline(made, device=META)


def graph_of(pipe: Pipeline, asked: Asked | None = None, stored: Mapping[str, Stored] | None = None) -> Graph:
    """The graph of a pipeline, loaded or only sketched."""
    asked, held = asked or Asked(), dict(stored or {})
    pipe = hollow(pipe)
    parts = pipe.components
    added = add(pipe, asked, held)
    request, planned, notes = plan_for(pipe, make_request(pipe, added, asked))
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
        notes=(*parts.notes, *draft.guidance.notes, *notes, *draft.notes),
    )


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
        controls.append((read_controlnet(pipe, os.fspath(path)), stored_component(source.locate(path))))
    adapters = [(read_adapter(path, weight), stored_component(adapter_file(path))) for path in asked.ip_adapters]
    found: list[dict[str, Any]] = []
    for kind, listed in (("controlnet", controls), ("ip_adapter", adapters)):
        named = {kind if not number else f"{kind}_{number}": pair for number, pair in enumerate(listed)}
        held |= {name: store for name, (_, store) in named.items() if store is not None}
        found.append({name: network for name, (network, _) in named.items()})
    return Added(*found)


def read_adapter(path: PathLike, like: Tensor) -> IPAdapter:
    with like.device:
        held = {key: tensor.to(like.device) for key, tensor in weights.read(adapter_file(path)).items()}
        return ip_adapter.from_state(held).to(like.dtype).eval().requires_grad_(False)
