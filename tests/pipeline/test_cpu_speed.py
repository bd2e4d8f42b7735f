"""What is chosen on a CPU by measuring: the dtype and the order of channels, only where "auto" asks for that."""

from __future__ import annotations

import time

import pytest
import torch

import pellucid
from pellucid.pipeline import cpu_speed
from pellucid.pipeline import load as loading
from pellucid.pipeline.cpu_speed import CPUSpeed

MODEL = "scenes-128"


def pretend(monkeypatch: pytest.MonkeyPatch, bfloat16: float, channels_last: float) -> None:
    monkeypatch.setattr(loading, "measure", lambda: CPUSpeed(bfloat16, channels_last))


def innermost(pipe: pellucid.Pipeline) -> bool:
    weight = pipe.components.network.conv_in.weight
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_the_measurement_is_short_and_made_once() -> None:
    cpu_speed.measure.cache_clear()
    began = time.process_time()
    first = cpu_speed.measure()
    assert time.process_time() - began < 10  # 0.2 s alone; of threads, on a busy machine
    assert first.bfloat16 > 0
    assert first.channels_last > 0
    assert cpu_speed.measure() is first


def test_little_gain_changes_nothing() -> None:
    assert CPUSpeed(1.1, 1.1).dtype == torch.float32
    assert CPUSpeed(2.0, 1.1).dtype == torch.bfloat16
    assert not CPUSpeed(2.0, 1.1).prefers_channels_last
    assert CPUSpeed(2.0, 2.0).prefers_channels_last


@pytest.mark.parametrize(
    ("speed", "dtype", "last"),
    [
        ((0.2, 1.0), torch.float32, False),
        ((1.0, 9.0), torch.float32, False),  # float32 keeps its order, and so its last bits
        ((2.0, 1.0), torch.bfloat16, False),
        ((2.0, 2.0), torch.bfloat16, True),
    ],
)
def test_auto_is_what_is_faster(
    monkeypatch: pytest.MonkeyPatch, speed: tuple[float, float], dtype: torch.dtype, last: bool
) -> None:
    pretend(monkeypatch, *speed)
    pipe = pellucid.load(MODEL, device="cpu", dtype="auto")
    assert next(pipe.components.network.parameters()).dtype == dtype
    assert (innermost(pipe), pipe.policy.channels_last) == (last, last)
    without = pellucid.load(MODEL, device="cpu", dtype="auto", policy=pellucid.Policy(without=("channels_last",)))
    assert not innermost(without)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_what_is_asked_for_depends_on_no_measurement(monkeypatch: pytest.MonkeyPatch, dtype: str | None) -> None:
    monkeypatch.setattr(loading, "measure", lambda: pytest.fail("measured"))
    pipe = pellucid.load(MODEL, device="cpu", dtype=dtype)
    assert not innermost(pipe)
    assert next(pipe.components.network.parameters()).dtype == getattr(torch, dtype or "float32")


def test_a_recipe_repeats_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2.0, 2.0)
    made = pellucid.load(MODEL, device="cpu", dtype="auto")("a red star", steps=1, seed=3)
    assert (made.recipe.dtype, made.recipe.policy) == ("bfloat16", {"channels_last": True})


def test_float16_on_a_cpu_is_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2.0, 1.0)
    for dtype in ("float16", "stored"):
        [note] = [text for text in pellucid.load(MODEL, device="cpu", dtype=dtype).components.notes if "slow" in text]
        assert note.startswith("float16 is slow on a CPU")
        assert "--dtype bfloat16" in note
    for kind in (None, "float32", "auto"):
        assert not any("slow" in text for text in pellucid.load(MODEL, device="cpu", dtype=kind).components.notes)
