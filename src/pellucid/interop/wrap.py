"""A live diffusers pipeline, asked one step at a time.

The pipeline's own call runs on a copy of the object, in a thread that moves only while it is asked. Two proxies
stand in for its parts (wrap_proxies.py): one for the scheduler, which hands every step to us, and one for the network,
which notes its inputs and its answers. So the pipeline encodes, shapes, passes the time and decodes as it always does,
whatever its family; the loop, the plan and the guidance are ours. The pipeline itself is never written to.
"""

from __future__ import annotations

import copy
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.wrap_proxies import Branch, Call, NetworkProxy, Reply, SchedulerProxy, Times

_NETWORKS = ("transformer", "unet")
_FALLBACK = "Our samplers still run inside of it: pipe.scheduler = pellucid.Scheduler.from_config(pipe.scheduler)."
# What a pipeline that starts from an image takes, and what it is called.
_IMAGE = (
    "strength",
    "mask_image",
    "control_image",
    "image_guidance_scale",
    "controlnet_conditioning_scale",
    "adapter_conditioning_scale",
    "noise_level",
    "source_prompt",
)
_IMAGE_WORDS = "Img2Img|ImageToImage|I2I|Inpaint|Edit|Upscale|Refiner|ControlNet|Adapter|Layered|Pix2Pix"
_LEAVE = object()


@dataclass(frozen=True)
class Peer:
    """A pipeline that can be asked: the object, the name of its network, and what its call takes, with defaults."""

    pipeline: Any
    network_name: str
    takes: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return type(self.pipeline).__name__

    @property
    def network(self) -> Any:
        return getattr(self.pipeline, self.network_name)


def look(pipeline: Any) -> Peer:
    """What a pipeline is, or why it cannot be wrapped."""
    kind = type(pipeline).__name__
    if isinstance(pipeline, type) or not callable(pipeline) or not hasattr(pipeline, "scheduler"):
        got = pipeline.__name__ if isinstance(pipeline, type) else kind
        raise PellucidError(rule("pipeline", "a live diffusers text-to-image pipeline", got), "wrap")
    parameters = inspect.signature(type(pipeline).__call__).parameters
    takes = {name: p.default for name, p in parameters.items() if name != "self"}
    refuse_other_work(kind, takes)
    found = [name for name in _NETWORKS if getattr(pipeline, name, None) is not None]
    if len(found) != 1 or not hasattr(pipeline, "prepare_latents"):
        must = (
            "one with a single transformer or unet and with prepare_latents: Stable Diffusion 1, 2, XL and 3, FLUX, "
            "PixArt, Sana, AuraFlow, Lumina, HunyuanDiT, Qwen-Image, Z-Image and others of that build"
        )
        raise PellucidError(rule("pipeline", must, kind, _FALLBACK), "wrap-family")
    return Peer(pipeline, found[0], takes)


def refuse_other_work(kind: str, takes: Mapping[str, Any]) -> None:
    """Video, sound, and images from images: refused by name."""
    work = None
    if "Video" in kind or any("video" in name or "frames" in name for name in takes):
        work = "makes video"
    elif "Audio" in kind or any("audio" in name for name in takes):
        work = "makes sound"
    elif re.search(_IMAGE_WORDS, kind) or any(name in takes for name in _IMAGE):
        work = "starts from an image"
    elif "prompt" not in takes:
        work = "takes no prompt"
    if work is not None:
        advice = "pellucid.load reads folders of image-to-image, inpainting and class-conditional models."
        raise PellucidError(f"pipeline must make images from text alone; {kind} {work}. {advice}", "wrap-kind")


class _HangUp(BaseException):
    """Unwinds the pipeline's own call when no further step will come."""


class Conversation:
    """One call of a pipeline: `start`, then `ask` for each step, then `finish`; `close` in any case.

    `lay` turns what the pipeline asks of its scheduler into the times for its network, one per step.
    """

    def __init__(self, peer: Peer, call: dict[str, Any], lay: Callable[[Times], Tensor]) -> None:
        self.peer, self.call, self.lay = peer, call, lay
        self.network = peer.network
        self.first: Tensor | None = None  # the pipeline's own latents: the x of its first step is written into them
        self.laid = False
        self.given: Tensor | None = None
        self.only: Branch | None = None
        self.calls: list[Call] = []
        self.answer: Any = None  # the network's last one
        self.stage = "prepare"
        self.attention = dict(getattr(self.network, "attn_processors", {}))
        self.to_peer: SimpleQueue[Any] = SimpleQueue()
        self.to_us: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.thread = threading.Thread(target=self.work, args=(_as_here(),), daemon=True, name="pellucid-wrap")

    # --- our side -------------------------------------------------------------------------------------------------

    def start(self) -> Tensor:
        """Runs the pipeline up to its loop; its first latents, as it drew them, at unit scale."""
        self.thread.start()
        self.wait_for("ready")
        assert self.first is not None
        return self.first.detach().clone()

    def ask(self, x: Tensor, only: Branch | None = None) -> Reply:
        """One step of the pipeline's loop on x, as the network is to see it; `only` one of two predictions."""
        assert self.first is not None
        self.only, self.calls = only, []
        self.given = x.to(self.first)
        if self.stage == "prepare":
            self.first.copy_(self.given)
            self.stage = "denoise"
        self.to_peer.put(self.given)
        reply: Reply = self.wait_for("step")
        if not reply.calls:
            raise self.another("call its network in each step")
        return reply

    def finish(self, x: Tensor) -> Any:
        """Gives the last x, and takes what the pipeline makes of it."""
        assert self.first is not None
        if self.stage == "prepare":  # no step was asked for
            self.first.copy_(x)
        self.stage = "decode"
        self.to_peer.put(x.to(self.first))
        return self.wait_for("done")

    def close(self) -> None:
        """Lets the pipeline go, wherever it stands."""
        if self.thread.ident is not None:
            self.to_peer.put(_LEAVE)
            self.thread.join()

    def wait_for(self, wanted: str) -> Any:
        what, value = self.to_us.get()
        if what == "failed":
            explained = self.explained(value)
            raise explained from (None if explained is value else value)
        if what != wanted:
            raise self.another("run one step for each time of its scheduler")
        return value

    def another(self, must: str) -> PellucidError:
        return PellucidError(f"{self.peer.kind} must {must}; its loop is of another kind. {_FALLBACK}", "wrap-loop")

    def explained(self, error: BaseException) -> BaseException:
        """A pipeline's complaint as one line; what is ours, or not about the request, as it is."""
        plain = isinstance(error, ValueError | TypeError | NotImplementedError | AttributeError | LookupError)
        plain = plain or (isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError))
        if isinstance(error, PellucidError) or not plain:
            return error
        line = " ".join(str(error).split())[:400].rstrip(".")
        return PellucidError(f"{self.peer.kind} could not {self.stage}: {line or type(error).__name__}.", "wrap-peer")

    # --- the pipeline's side --------------------------------------------------------------------------------------

    def work(self, settings: AbstractContextManager[None]) -> None:
        try:
            with settings:
                self.to_us.put(("done", self.twin()(**self.call)))
        except _HangUp:
            self.tidy()
        except BaseException as error:
            self.to_us.put(("failed", error))

    def tidy(self) -> None:
        """What the end of the pipeline's call would have put right: offloaded parts, exchanged attention."""
        getattr(self.peer.pipeline, "maybe_free_model_hooks", lambda: None)()
        if self.attention and self.network.attn_processors != self.attention:
            self.network.set_attn_processor(self.attention)

    def twin(self) -> Any:
        """The pipeline with our stand-ins: a copy that shares every part; the object itself stays as it is."""
        real = self.peer.pipeline
        made = copy.copy(real)
        own = {
            "scheduler": SchedulerProxy(self, real.scheduler),
            self.peer.network_name: NetworkProxy(self, self.network),
            "prepare_latents": partial(self.prepare_latents, made.prepare_latents),
            "_progress_bar_config": {"disable": True},
        }
        if hasattr(real, "maybe_free_model_hooks"):  # offloading belongs to the object that set it up
            own["maybe_free_model_hooks"] = real.maybe_free_model_hooks
        vars(made).update(own)
        return made

    def hand_over(self, what: str, value: Any = None) -> Any:
        self.to_us.put((what, value))
        answer = self.to_peer.get()
        if answer is _LEAVE:
            raise _HangUp
        return answer

    def prepare_latents(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the pipeline does it, in memory of its own, so that the first x can be written there."""
        made = prepare(*args, **kwargs)
        parts = list(made) if isinstance(made, tuple | list) else [made]
        self.first = parts[0] = parts[0].clone(memory_format=torch.contiguous_format)
        if self.laid:
            self.hand_over("ready")
        return tuple(parts) if isinstance(made, tuple | list) else parts[0]

    def times_are_laid(self) -> None:
        self.laid = True
        if self.first is not None:
            self.hand_over("ready")

    def step(self, output: Tensor, sample: Tensor) -> Tensor:
        """The pipeline's prediction goes to us; what comes back is its next x."""
        given = self.given
        if given is None or sample.shape != given.shape or not _same(sample, given):
            raise self.another("step from the latents that it was given")
        if output.shape != sample.shape and output.ndim > 1 and output.shape[1] == 2 * sample.shape[1]:
            output = output[:, : sample.shape[1]]  # a learned variance: split off
        return self.hand_over("step", Reply(output, self.calls))


def _same(sample: Tensor, given: Tensor) -> bool:
    """Whether they hold the same numbers; a run that broke has NaN in both."""
    return sample is given or bool(((sample.to(given) == given) | given.isnan()).all())


def _as_here() -> AbstractContextManager[None]:
    """What torch keeps for each thread, as it is in this one: kernels, autocast, device and stream."""
    threads = torch.get_num_threads()
    cast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @contextmanager
    def settings() -> Iterator[None]:
        with ExitStack() as stack:
            torch.set_num_threads(threads)
            stack.enter_context(torch.no_grad())
            for kind, dtype, on in cast:
                stack.enter_context(torch.autocast(kind, dtype, on))
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return settings()
