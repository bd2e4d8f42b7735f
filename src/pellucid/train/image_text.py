"""Training a pair of encoders, of images and of texts, so that those that belong together point the same way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.core.errors import PellucidError, rule
from pellucid.interop.components import clip_text, clip_vision
from pellucid.interop.folder import CONFIG
from pellucid.interop.save import MAX_SHARD_BYTES, replaced, write_json, write_tensors
from pellucid.interop.tokenizer import Tokenizer
from pellucid.models.clip import CLIP
from pellucid.models.clip_config import CLIPConfig
from pellucid.pipeline.encoders.image_inputs import DEVIATION, MEAN
from pellucid.train.draws import Draws, seeded
from pellucid.train.initial import start_clip
from pellucid.train.objective import BatchLoss
from pellucid.train.source import Batch
from pellucid.train.text import CaptionIds, check_vocabulary, known_of, read_tokenizer

_BICUBIC = 3  # as PIL counts
_PREPROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class ImageTextConfig:
    """`text` and `vision` are the configs of a CLIPModel's halves, less what the tokenizer (a folder) says; `width` is
    that of the space that they share. The logits' scale starts at 1 / `temperature` and stays below `most_scale`
    (Radford et al. 2021)."""

    tokenizer: str
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    width: int = 128
    temperature: float = 0.07
    most_scale: float = 100.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise PellucidError(rule("width", "at least 1", self.width), "config-value")
        if not 0 < 1 / self.most_scale <= self.temperature:
            must = f"at least 1 / most_scale ({1 / self.most_scale:g})"
            raise PellucidError(rule("temperature", must, self.temperature), "config-value")

    def build(self, seed: int, device: torch.device) -> ImageTextTask:
        return ImageTextTask(self, seed, device)


class TrainableCLIP(nn.Module):
    """CLIP as it is trained: directions of images and of texts, and the scale of their cosines."""

    def __init__(self, clip: CLIP, most_scale: float) -> None:
        super().__init__()
        self.clip, self.most = clip, math.log(most_scale)

    def forward(self, ids: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, P) of the images, (B, P) of the texts, and the scale."""
        scale = self.clip.logit_scale.clamp(max=self.most).exp()
        return self.clip.embed_image(pixels).float(), self.clip.embed_text(ids).float(), scale.float()


class ImageTextTask:
    """Each image has to find its caption among those of the batch, and each caption its image.

    With several ranks the batch is that of all of them; with accumulation it is that of one micro-step.
    """

    def __init__(self, config: ImageTextConfig, seed: int, device: torch.device) -> None:
        self.config, self.device = config, device
        self.tokenizer = read_tokenizer(config.tokenizer)
        self.ids = CaptionIds(self.tokenizer)
        settings = _clip_config(config, self.tokenizer)
        check_vocabulary(self.tokenizer, settings.text.vocab_size)
        if self.tokenizer.length > settings.text.max_position_embeddings:
            must = f"at least {self.tokenizer.length}, the tokenizer's window"
            got = settings.text.max_position_embeddings
            raise PellucidError(rule("text.max_position_embeddings", must, got), "components-fit")
        with seeded(seed):
            clip = start_clip(CLIP(settings))
        assert isinstance(clip, CLIP)
        self.side = settings.vision.image_size
        self.network: nn.Module = TrainableCLIP(clip, config.most_scale).to(device)
        self.gathered = {"images": config.width, "texts": config.width}

    def prepare(self, batch: Batch, draws: Draws) -> dict[str, Tensor]:
        if tuple(batch.images.shape[1:]) != (3, self.side, self.side):
            must, got = f"images of shape (3, {self.side}, {self.side})", tuple(batch.images.shape[1:])
            raise PellucidError(rule("data", must, got), "data-shape")
        return {"ids": self.ids.of(batch), "pixels": clip_scaled(batch.images)}

    def loss(self, network: nn.Module, asked: Mapping[str, Tensor]) -> BatchLoss:
        images, texts, scale = network(asked["ids"], asked["pixels"])
        errors = contrastive(_gathered(images), _gathered(texts), scale)  # (B of all ranks,)
        own = errors.detach()[_rank() * len(images) : (_rank() + 1) * len(images)]
        return BatchLoss(errors.mean(), own, torch.zeros_like(own))

    def images(self, network: nn.Module, count: int, seed: int) -> None:
        """It makes none."""

    def save(self, network: nn.Module, folder: Path) -> None:
        """The folder of a CLIPModel with its tokenizer and what its images are scaled by."""
        assert isinstance(network, TrainableCLIP)
        state = dict(network.clip.state_dict())
        state["logit_scale"] = state["logit_scale"].clamp(max=network.most)
        sides = {"height": self.side, "width": self.side}
        with replaced(Path(folder), CONFIG, True) as place:
            write_json(place / CONFIG, _config_json(network.clip.config))
            write_tensors(state, place, "model", None, MAX_SHARD_BYTES)
            self.tokenizer.save(place)
            write_json(
                place / _PREPROCESSOR,
                {
                    "image_processor_type": "CLIPImageProcessor",
                    "do_resize": True,
                    "size": {"shortest_edge": self.side},
                    "resample": _BICUBIC,
                    "do_center_crop": True,
                    "crop_size": sides,
                    "do_rescale": True,
                    "do_normalize": True,
                    "do_convert_rgb": True,
                    "image_mean": list(MEAN),
                    "image_std": list(DEVIATION),
                },
            )


def _clip_config(config: ImageTextConfig, tokenizer: Tokenizer) -> CLIPConfig:
    return CLIPConfig(
        text_config=clip_text({**known_of(tokenizer), **config.text, "projection_dim": config.width}),
        vision_config=clip_vision({**config.vision, "projection_dim": config.width}),
        projection_dim=config.width,
        logit_scale_init_value=-math.log(config.temperature),
    )


def _config_json(config: CLIPConfig) -> dict[str, Any]:
    """As transformers nests it."""
    halves = {"text_config": config.text, "vision_config": config.vision}
    nested: dict[str, Any] = {
        key: {name: value for name, value in asdict(half).items() if name != "architectures"}
        | {"model_type": f"clip_{key.removesuffix('_config')}_model"}
        for key, half in halves.items()
    }
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.projection_dim,
        "logit_scale_init_value": config.logit_scale_init_value,
        **nested,
    }


def clip_scaled(images: Tensor) -> Tensor:
    """Images (B, 3, H, W) in −1 … 1 as CLIP's vision encoder takes them, with its mean and deviation of pixels."""
    mean, deviation = (torch.tensor(v, device=images.device)[:, None, None] for v in (MEAN, DEVIATION))
    return ((images + 1) / 2 - mean) / deviation


def contrastive(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """(N,): for pair n, the mean cross-entropy of finding its text by its image and its image by its text."""
    with torch.autocast(images.device.type, enabled=False):  # in bfloat16 a logit of 70 would be right to 0.25
        logits = scale * images @ texts.T  # (N, N)
    right = torch.arange(len(logits), device=logits.device)
    ways = [F.cross_entropy(way, right, reduction="none") for way in (logits, logits.T)]
    return (ways[0] + ways[1]) / 2


# Several ranks


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class _Gather(torch.autograd.Function):
    """The rows of all ranks, in their order. Every rank computes the same loss of them, so that a rank's own rows get
    the sum of all ranks' gradients; the mean over ranks that DDP and FSDP then take is that of the whole batch."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        held = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(held, own.contiguous())
        ctx.count = len(own)
        return torch.cat(held)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total[dist.get_rank() * ctx.count : (dist.get_rank() + 1) * ctx.count]


def _gathered(own: Tensor) -> Tensor:
    """(B of all ranks, P) of this rank's (B, P)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    return _Gather.apply(own)  # type: ignore[no-any-return]
