"""The pipeline: a loaded model and a request → images, with the plan, the recipe and what each stage took."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pellucid.core.batch import Observer
from pellucid.core.errors import PellucidError, rule
from pellucid.interop.components import text_parts
from pellucid.interop.save import save_components
from pellucid.models import lora
from pellucid.models.lora import MergeSet
from pellucid.models.quantize import dtype_name
from pellucid.pipeline import memory
from pellucid.pipeline.decode import decode
from pellucid.pipeline.encoders.conditions import takes_text
from pellucid.pipeline.model import Model, lay_out, networks_of
from pellucid.pipeline.peer_words import RefusesPeerWords, attribute_error
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.prepare import STEPS, Prepared, RunPlan, denoise, make_plan, prepare, settle
from pellucid.pipeline.request import Lora, Request, takes
from pellucid.pipeline.result import Result, show_result
from pellucid.pipeline.stages import faster_threads


@dataclass(repr=False)
class Pipeline(Model, RefusesPeerWords):
    """A model ready to run. Calls share nothing but its weights: several threads may use one pipeline at once."""

    _fitted: int = field(default=0, init=False)  # the most pixels of a request that were found to fit

    @takes(Request)
    def __call__(self, *prompt: Any, **options: Any) -> Result:
        """pipe("a red star", steps=20, seed=1): the options are the fields of `Request`."""
        return self.run(Request.of(*prompt, **options))

    def __repr__(self) -> str:
        return _description(self)

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Pipeline:
        """Not here: `pellucid.load` opens folders, single files, hub ids and bundles."""
        raise attribute_error("from_pretrained")

    def run(self, request: Request, plan: RunPlan | None = None, observers: Sequence[Observer] = ()) -> Result:
        """Encodes, denoises and decodes one request, without gradients; `plan` and `observers` as for `prepare`."""
        weak = [request.weak.components.network] if isinstance(request.weak, Model) else []
        with (
            lora.running([*self.networks().values(), *weak]),
            faster_threads(self.components.network, self.device) as notes,
        ):
            result = decode(denoise(self.prepare(request, plan, observers, notes)))
        return show_result((*request.observers, *observers), result)

    def prepare(
        self,
        request: Request,
        plan: RunPlan | None = None,
        observers: Sequence[Observer] = (),
        notes: Sequence[str] = (),
    ) -> Prepared:
        """A request as a value that can wait and be run: `decode(denoise(pipe.prepare(request)))` is a whole run.

        `plan` is what `make_plan` made of the request, where somebody wanted to see it first; `observers` watch
        besides those of the request; `notes` go into the result.
        """
        run = settle(self, request, plan)
        self._fitted = memory.check_fits(run, self._fitted)
        return prepare(run, observers=observers, explain=partial(memory.explain, self, request), notes=notes)

    def merge(self, *loras: Lora) -> MergeSet:
        """LoRAs written into the model's own weights, for all requests, until `.unmerge()` puts the old ones back.

        No second copy of the changed weights is used in a run; the originals wait in memory for the way back. Both are
        refused while a run is in progress, in this or another thread: it would go on with other weights.
        """
        for adapter in map(self.lora_of, loras):
            if adapter.tokens:
                got, advice = ", ".join(adapter.tokens), "Give it in the loras of each call."
                raise PellucidError(rule(f"LoRA {adapter.name}", "one without tokens", got, advice), "lora-tokens")
        return lora.merge_all(self.networks(), [(self.lora_of(one), one.scale) for one in loras])

    def explain(self, request: Request, stage: str) -> str:
        """Who owns the peak of a stage's memory, and what would lower it."""
        return memory.explain(self, request, stage)

    def save(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Writes the model as a folder that diffusers opens too; the options are those of `save_components`."""
        save_components(self.components, folder, **options)

    def to(self, device: torch.device | str) -> Pipeline:
        """The same pipeline with its networks on a device."""
        self.device = torch.device(device)
        if self.policy.offload == "none":
            for network in networks_of(self.components):
                network.to(self.device)
            lay_out(self.components, self.policy, self.device)
            self.graphs.clear()  # they are of the other device's weights, as the views are
            self._views.clear()
        return self


def _description(pipe: Pipeline) -> str:
    """The model in some ten lines: its networks with their sizes, its defaults, and how to call it."""
    parts = pipe.components
    encoders = dict(zip(text_parts(parts), parts.text_encoders, strict=True))
    networks = {"network": parts.network, "vae": parts.vae, **encoders, "image_encoder": parts.image_encoder}
    lines = [f"Pipeline {parts.name}"]
    for name, network in networks.items():
        if network is not None:
            count = sum(p.numel() for p in network.parameters()) / 1e6
            lines.append(f"  {name:16}{type(network).__name__}, {count:.1f} M parameters, {dtype_name(network)}")
    request = Request(prompt="" if takes_text(parts.network) else None)
    own = make_plan(parts, request).plan
    (width, height), guidance = pipe.size_of(request), pipe.guidance_of(request).text()
    return "\n".join(
        [
            *lines,
            f"  {'schedule':16}{parts.schedule.name}, predicts {parts.target}",
            f"  {'defaults':16}{own.name}, {STEPS} steps, guidance {guidance}, {width}×{height} pixels",
            f"  {'device':16}{pipe.device}" + (f", policy {pipe.policy.to_dict()}" if pipe.policy != Policy() else ""),
            *([f"  {'notes':16}{'; '.join(parts.notes)}"] if parts.notes else []),
            f"  {'call':16}" + ('pipe("a red star", steps=20, seed=7)' if request.prompt == "" else "pipe(seed=7)"),
        ]
    )
