"""Bodies of requests and answers: OpenAI's images API, with fields of our own beside theirs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_IMAGES = 10  # of one request, as OpenAI's
_Text = Annotated[str, Field(max_length=32_000)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class LoraChoice(BaseModel):
    """One of the LoRAs that the server was started with, and its scale."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=200)
    scale: _Finite = 1.0


class ImageRequest(BaseModel):
    """What to make. The first fields are OpenAI's, those from `negative_prompt` on are Pellucid's."""

    model_config = ConfigDict(extra="forbid")

    prompt: _Text | None = None
    model: Annotated[str, Field(max_length=200)] | None = None
    n: int = Field(1, ge=1, le=MAX_IMAGES)
    size: str | None = Field(None, pattern=r"^(auto|[1-9]\d{0,4}x[1-9]\d{0,4})$")
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(None, ge=0, le=100)
    stream: bool = False
    partial_images: int = Field(0, ge=0, le=3)
    user: str | None = Field(None, max_length=1000)
    quality: str | None = Field(None, max_length=20)  # of OpenAI's own models: accepted, without an effect
    style: str | None = Field(None, max_length=20)
    moderation: str | None = Field(None, max_length=20)
    background: bool | Literal["auto", "opaque"] = False  # true: answer with a job at once

    negative_prompt: _Text | None = None
    label: int | str | None = None
    sampler: str | None = Field(None, max_length=100)
    grid: str | dict[str, Any] | None = None
    steps: int | None = Field(None, ge=1)
    guidance: str | _Finite | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    plan: dict[str, Any] | None = None
    lora: str | list[str | LoraChoice] | None = None
    strength: _Finite | None = Field(None, gt=0, le=1)
    trace: bool = False
    deadline_ms: int | None = Field(None, ge=1, le=86_400_000)

    @property
    def in_background(self) -> bool:
        return self.background is True


class PlanRequest(ImageRequest):
    """A request whose plan and price are wanted; nothing is made."""


class RolloutRequest(BaseModel):
    """A new version of a model, and how it is tried."""

    model_config = ConfigDict(extra="forbid")
    path: str = Field(max_length=4096)
    model: str | None = Field(None, max_length=200)
    canary: _Finite = Field(0.05, ge=0, le=1)
    shadow: bool = True
    requests: int = Field(20, ge=1, le=100_000)
    error_rate: _Finite = Field(0.02, ge=0, le=1)
    slowdown: _Finite = Field(1.5, ge=0.1, le=1000)
    distance: _Finite | None = Field(None, ge=0, le=255)
    adherence: _Finite | None = Field(None, ge=0, le=1)
    seeds: int = Field(4, ge=1, le=1000)
