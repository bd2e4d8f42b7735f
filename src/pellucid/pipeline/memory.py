"""Memory before and after: the peak of each stage and its owner, predicted by a rehearsal and measured by a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from pellucid.core.errors import PellucidError
from pellucid.interop.components import Components
from pellucid.models import graph_memory, lora
from pellucid.models.captured import DeviceStepper, bucket, called_through
from pellucid.models.guided import GuidedDenoiser
from pellucid.pipeline.decode import decode
from pellucid.pipeline.encoders.conditions import takes_labels, takes_text
from pellucid.pipeline.encoders.image_inputs import is_inpainting
from pellucid.pipeline.ghost import META, Kernels, Rehearsal, Shadows
from pellucid.pipeline.model import Model, RunSettings, networks_by_name, set_memory_format, with_views
from pellucid.pipeline.policy import Policy
from pellucid.pipeline.prepare import ControlledDenoiser, Prepared, denoise, prepare, settle
from pellucid.pipeline.request import Control, Request
from pellucid.pipeline.tracker import GRAIN, METER, Peak, borrowed_bytes, metered, standing_bytes

_STEPS = 2  # rows of a rehearsal: the second has a history
_PROMPT = "a"


@dataclass(frozen=True)
class Forecast:
    """The predicted peak of each stage."""

    stages: dict[str, Peak]
    policy: Policy

    @property
    def stage(self) -> str:
        """Where the peak of the whole run is."""
        return max(self.stages, key=lambda name: self.stages[name].total)

    @property
    def peak(self) -> Peak:
        return self.stages[self.stage]

    @property
    def graphs(self) -> int:
        """Bytes that captured graphs keep between runs."""
        return max(peak.graphs for peak in self.stages.values())


# --- what to run ---------------------------------------------------------------------------------------------------


def request_for(
    model: Model,
    *,
    size: tuple[int, int] | None = None,
    batch: int = 1,
    steps: int = _STEPS,
    controlnets: Sequence[Any] = (),
    loras: Sequence[Any] = (),
) -> Request:
    """A request of a size and a batch, for any kind of model; what it shows does not matter for memory."""
    width, height = size if size is not None else model.size_of(Request())
    fields: dict[str, Any] = {
        "n": batch,
        "steps": steps,
        "sampler": "euler",
        "seed": 0,
        "width": width,
        "height": height,
    }
    network = model.components.network
    grey = Image.new("RGB", (width, height), "grey")
    if takes_text(network):
        fields["prompt"] = _PROMPT
    if takes_labels(network):
        fields["label"] = 0
    if is_inpainting(model.components):
        fields |= {"image": grey, "mask": Image.new("L", (width, height), 255)}
    controls = tuple(Control(network, grey) for network in controlnets)
    return Request(**fields, controls=controls, loras=tuple(loras))


def guests_by_name(model: Model, request: Request) -> dict[str, nn.Module]:
    """The networks that a request brings with it."""
    controls = [model.controlnet_of(control) for control in request.controls]
    adapters = [model.ip_adapter_of(prompt) for prompt in request.image_prompts]
    kinds: dict[str, list[Any]] = {"controlnet": controls, "ip_adapter": adapters}
    named = {f"{kind}_{i}" if i else kind: one for kind, held in kinds.items() for i, one in enumerate(held)}
    return named if request.weak is None else {**named, "weak": request.weak.components.network}


# --- prediction ----------------------------------------------------------------------------------------------------


def predict(
    model: Model,
    request: Request,
    *,
    policy: Policy | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    beside: Sequence[Tensor] = (),
    steps: int | None = None,
) -> Forecast:
    """The peak of each stage of a request, without running it: its own code on networks without data.

    `policy`, `device` ("cuda" or "cpu") and `dtype` are the pipeline's where they are left out; `beside` are tensors
    that lie on the device besides the networks.
    """
    policy = model.policy if policy is None else policy
    where = torch.device(model.device if device is None else device)
    policy.check(where)
    cuda = where.type != "cpu"
    shadows = Shadows("cuda" if cuda else "cpu", waits=policy.offload != "none", dtype=dtype)
    few = min(request.steps or _STEPS, _STEPS) if steps is None else steps
    ghosts = _Ghosts.of(model, replace(request, plan=None, steps=few), shadows)
    last = policy.does("channels_last", where)
    if last and policy.offload == "none":
        set_memory_format(ghosts.components, torch.channels_last)
    tracker = Rehearsal(
        ["meta"] if cuda else ["meta", "cpu"],
        grain=GRAIN if cuda else 1,
        scratch=borrowed_bytes(last) if cuda else None,
    )
    tracker.hold(ghosts.resident, [shadows.shadow(tensor) for tensor in beside])
    eager = replace(policy, compile=False)  # compiled code holds no more than this
    ghost = _GhostModel(ghosts.components, eager, META, captures=policy.does("graphs", where))
    with metered(tracker), Kernels(shadows.device, policy.attention), tracker.following(ghosts.named):
        prepared = prepare(settle(ghost, ghosts.request))
        text = _hoisted(prepared, ghost)
        latents = denoise(prepared)
        text, after = text[1:], tracker.others
        decode(latents)
    kept = graph_memory.held(ghost.graphs).registers + sum(graph_memory.bytes_of(one) for one in text)
    peaks = tracker.stages if not kept else _with_graphs(tracker.stages, kept, after)
    standing = standing_bytes(where)
    return Forecast({n: replace(peak, workspace=peak.workspace + standing) for n, peak in peaks.items()}, policy)


@dataclass(repr=False)
class _GhostModel(Model):
    """A model whose steps are rehearsed, where it `captures`, as the programs that a GPU captures, at their sizes."""

    captures: bool = False

    def stepper(self, networks: Sequence[nn.Module]) -> DeviceStepper | None:
        return self.graphs.stepper((), capture=False) if self.captures else None  # the hooks on networks are ours


def _hoisted(prepared: Prepared, ghost: _GhostModel) -> list[Any]:
    """The text's keys and values that a run makes once, and the copies that a program keeps."""
    denoiser = prepared.denoiser
    denoiser = denoiser.guided if isinstance(denoiser, ControlledDenoiser) else denoiser
    if ghost.policy.offload != "none" or not isinstance(denoiser, GuidedDenoiser):
        return []
    network: Any = called_through(denoiser.network)[-1]
    given = [one["context"] for one in (denoiser.uncond, denoiser.cond) if one and "context" in one]
    if not given or not hasattr(network, "text_tokens"):
        return []
    context = torch.cat(given)
    copies = context[:1].expand(bucket(len(context)) if ghost.captures else 0, *context.shape[1:])
    return [network.text_tokens(rows) for rows in (context, copies) if len(rows)]


def _with_graphs(stages: Mapping[str, Peak], kept: int, after: int) -> dict[str, Peak]:
    """The peaks with what captured graphs keep: registers and inputs, and a pool with the activations of one call.

    While steps run, the activations are those in the pool; all other stages find it full, from the second run on.
    """
    busy = stages["denoise"]
    pool = max(busy.activations + busy.workspace - after, 0)
    found = {name: replace(peak, graphs=kept + pool) for name, peak in stages.items()}
    for name in ("denoise", "decode"):
        if name in found:
            found[name] = replace(found[name], activations=stages[name].activations - kept)
    found["denoise"] = replace(found["denoise"], graphs=kept)
    return found


@dataclass(frozen=True)
class _Ghosts:
    """The ghosts of a rehearsal: those that act, those that only take room, and their request."""

    components: Components
    named: dict[str, nn.Module]
    resident: list[nn.Module]
    request: Request

    @classmethod
    def of(cls, model: Model, request: Request, shadows: Shadows) -> _Ghosts:
        guests = {name: shadows.ghost(network) for name, network in guests_by_name(model, request).items()}
        encoders = (model.image_encoder_of(prompt) for prompt in request.image_prompts)
        encoder = next((one for one in encoders if one is not None), model.components.image_encoder)
        base = shadows.of(replace(model.components, image_encoder=encoder, controlnets=()))
        acting = _with_ghost_loras(base, model, request)
        named = {**networks_by_name(acting), **guests}
        resident = [*networks_by_name(base).values(), *named.values()]
        return cls(acting, named, resident, _ghost_request(request, guests, shadows))


def _with_ghost_loras(base: Components, model: Model, request: Request) -> Components:
    """Views of ghosts with the LoRAs of a request: a new tensor for each weight that one of them changes."""
    views = networks_by_name(base)
    for one in request.named_loras:
        for part, adapter in model.lora_of(one).adapters.items():
            layers = {layer: views[part].get_submodule(layer) for layer in adapter.layers}
            swaps = {
                layer: {name: _empty_twin(tensor) for name, tensor in module.state_dict().items() if name != "bias"}
                for layer, module in layers.items()
            }
            views[part] = lora.view(views[part], swaps)
    return with_views(base, views)


def _empty_twin(weight: Tensor) -> Tensor:
    """Another tensor without data, of the same form."""
    if weight.is_meta:
        return torch.empty_like(weight)
    return weight.new_zeros(()).expand(weight.shape)


def _ghost_request(request: Request, guests: dict[str, Any], shadows: Shadows) -> Request:
    """The same request, of few steps, with ghosts for its networks and nobody watching."""
    controlnets = [guest for name, guest in guests.items() if name.startswith("controlnet")]
    adapters = [guest for name, guest in guests.items() if name.startswith("ip_adapter")]
    weak = request.weak
    if weak is not None:
        weak = replace(weak, components=shadows.of(replace(weak.components, controlnets=())))
    return replace(
        request,
        controls=[replace(c, network=ghost) for c, ghost in zip(request.controls, controlnets, strict=True)],
        image_prompts=[replace(p, adapter=ghost) for p, ghost in zip(request.image_prompts, adapters, strict=True)],
        weak=weak,
        loras=(),
        plan=None,
        sampler="euler",
        grid=None,
        options={},
        dialect=None,
        observers=(),
        constraints=(),
        cancelled=None,
        noise=None,
        seed=0,
    )


def size_text(size: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.3g} {unit}" if size < 1000 * 2**power else f"{size / 2**power:.0f} {unit}"
    return f"{size:.0f} B"


# --- Out of memory --------------------------------------------------------------------------------------------------

_HELPS = 0.95  # advice must bring the peak below this share of what it was
_TILE = 64
_CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "text": ({"offload": "component"},),
    "encode": ({"offload": "component"}, {"vae_tile": _TILE}),
    "denoise": ({"offload": "component"}, {"offload": "block"}, {"attention": "auto"}),
    "decode": ({"offload": "component"}, {"vae_slicing": True}, {"vae_tile": _TILE}, {"attention": "auto"}),
}


_ROUGH = 8 * 2**10  # bytes per pixel that a run with a VAE stays below: measured are 0.6 (scenes-128) to 5 kB (SDXL)
_OF_PIXELS = 8  # times that, of a network of pixels
_LITTLE = 2**31  # bytes, by the rough count, below which nothing is checked
GROUPS = Path("/sys/fs/cgroup")


def check_fits(run: RunSettings, fitted: int = 0) -> int:
    """Refuses a request whose predicted peak is beyond the memory that is free; else the most pixels known to fit.

    A rehearsal takes half a second, so it is made only of what does not fit by a rough count, and of more pixels than
    `fitted`.
    """
    model, request = run.model, run.request
    pixels = run.size[0] * run.size[1] * run.count
    rough = _ROUGH * pixels * (_OF_PIXELS if model.components.vae is None else 1)
    if rough < _LITTLE or pixels <= fitted or METER.get() is not None:
        return fitted
    room = available(model.device)
    if room is None:
        return fitted
    held = model.graph_memory()
    room -= held.idle
    if rough > room:
        try:
            forecast = predict(model, request, steps=1)
        except Exception:  # what is wrong with the request is said when it runs
            return fitted
        need = forecast.peak.total - _resident(model) - min(held.total, forecast.graphs)
        if need > room:
            words = f"{size_text(need)} more are predicted to be needed, {size_text(room)} are free"
            advice = explain(model, request, forecast.stage)
            raise PellucidError(f"memory must suffice for stage {forecast.stage}; {words}. {advice}", "out-of-memory")
    return pixels


def _resident(model: Model) -> int:
    """Bytes of the model's networks that are on the device already."""
    networks = networks_by_name(model.components).values()
    held = {id(t): t for network in networks for t in (*network.parameters(), *network.buffers())}
    return sum(t.nbytes for t in held.values() if t.device.type == model.device.type)


def available(device: torch.device) -> int | None:
    """Bytes that a run may still take on a device; None where that is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    found = list(limits(_file_text(Path("/proc/self/cgroup"))))
    free = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _file_text(Path("/proc/meminfo")).splitlines()}
    if "MemAvailable" in free:
        found.append(free["MemAvailable"] + free.get("SwapFree", 0))
    if (taken := _file_text(Path("/proc/self/statm"))) and (most := _address_space()) is not None:
        found.append(most - int(taken.split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(min(found), 0) if found else None


def _address_space() -> int | None:
    """The limit of this process (`ulimit -v`), where it has one."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if most == resource.RLIM_INFINITY else most


def limits(groups: str) -> Iterator[int]:
    """What the control groups of this process, as /proc/self/cgroup names them, leave: cached files can be let go."""
    for line in groups.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = GROUPS / "memory" if kinds else GROUPS
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents) if inner.is_relative_to(root) else ():
            most, used = (_file_text(folder / name).strip() for name in names)
            if most.isdecimal() and used.isdecimal():
                stat = dict(row.split() for row in _file_text(folder / "memory.stat").splitlines())
                cached = sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
                yield int(most) - int(used) + cached
            if folder == root:
                break


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""


def explain(model: Model, request: Request, stage: str) -> str:
    """Which module owns the peak of a stage, and what would lower it by how much: predicted, nothing is run."""
    many = len(request.seeds()) > 1
    changes = {
        ", ".join(f"{name}={value!r}" for name, value in change.items()): policy
        for change, policy in _policy_changes(model, stage, many)
    }
    try:
        now = predict(model, request, steps=1).stages[stage]
        found = _peaks_after(model, request, stage, changes)
    except Exception:  # advice must not hide what it is about
        fewer = ["fewer images at once"] if many else []
        return f"Use {', '.join(['a smaller size', *fewer, *changes])}."
    better = sorted((total, name) for name, total in found.items() if total < _HELPS * now.total)
    advice = "; ".join(f"{name} brings it to {size_text(total)}" for total, name in better)
    owner, whole, held = now.owner or "The stage itself", size_text(now.total), size_text(now.weights)
    other = "Use a smaller size, or a device with more memory"
    return f"{owner} owns its peak: {whole} predicted, {held} of it weights. {advice or other}."


def _policy_changes(model: Model, stage: str, many: bool) -> Iterator[tuple[dict[str, Any], Policy]]:
    """The changes of policy that act on a stage, on this device, with the rest of the policy."""
    for change in _CHANGES.get(stage, ()):
        with suppress(PellucidError):
            policy = replace(model.policy, **change)
            policy.check(model.device)
            if policy != model.policy and (many or "vae_slicing" not in change):
                yield change, policy


def _peaks_after(model: Model, request: Request, stage: str, changes: Mapping[str, Policy]) -> dict[str, int]:
    """What might help, and the stage's peak with it: changes of the policy, half precision, one image at a time."""

    def peak(of: Request = request, **goal: Any) -> int:
        return predict(model, of, steps=1, **goal).stages[stage].total

    found = {name: peak(policy=policy) for name, policy in changes.items()}
    if next(model.components.network.parameters()).dtype == torch.float32:
        found["dtype='bfloat16'"] = peak(dtype=torch.bfloat16)
    if len(request.seeds()) > 1:
        found["one image at a time"] = peak(_first_image_of(request))
    return found


def _first_image_of(request: Request) -> Request:
    """The same request for its first image."""
    label = request.label
    many = isinstance(label, list | tuple)
    return replace(
        request,
        n=1,
        seed=0,
        latents=None,
        prompt=request.prompts[0] if request.prompt is not None else None,
        negative_prompt=request.negatives[0] if request.negative_prompt is not None else None,
        **{name: texts[0] for name, texts in request.seconds.items()},  # type: ignore[arg-type]
        label=label[0] if many else label,  # type: ignore[index]
    )
