"""Latents of scenes: cached with several phrasings and their tokens, and gathered on the device that trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_files import plain
from scene_cases import CPU, SCENES, WINDOW, built, text_table, tokenizer, write_parts
from tiny_networks import VAE
from typer.testing import CliRunner

from pellucid.cli import data
from pellucid.core.errors import PellucidError
from pellucid.models.vae import AutoencoderKL
from pellucid.scenes import captions
from pellucid.train.autoencoder import read_vae
from pellucid.train.config import TrainConfig, chosen, read
from pellucid.train.draws import Draws
from pellucid.train.kinds import DATA
from pellucid.train.latent_cache import cache_latents
from pellucid.train.latent_recipe import make_latents
from pellucid.train.latent_source import LatentsConfig, LatentSource
from pellucid.train.ranks import Ranks
from pellucid.train.scenes_source import ScenesConfig
from pellucid.train.text import tokens
from pellucid.train.text_denoiser import TextDenoiserConfig
from pellucid.train.trainer import Trainer

COUNT, PHRASINGS = 21, 3
HINTED = replace(SCENES, count=COUNT, hints=("edges", "reference"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def vae(parts: Path) -> AutoencoderKL:
    return read_vae(str(parts / "vae"))


@pytest.fixture(scope="module")
def cache(vae: AutoencoderKL, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "scenes"
    keys: dict[str, Any] = {"phrasings": PHRASINGS, "tokenizer": tokenizer(), "hints": "bytes", "mirrored": True}
    return cache_latents(HINTED.open(), vae, folder, dtype="float16", batch=4, per_shard=8, **keys)


def test_the_cache_holds_the_scenes(cache: Path, vae: AutoencoderKL) -> None:
    source, asked = LatentSource(cache, source=HINTED.open(), vae=vae), torch.tensor([20, 0, 8, 7, 8])
    got, seen = source.batch(asked, plain(5, 1)), HINTED.open().batch(asked, plain(5, 1))
    with torch.no_grad():
        posterior = vae.encode(seen.images)
    wanted = posterior.sample(plain(5, 1).normal("posterior", posterior.mean.shape[1:])) * vae.config.scaling_factor
    assert torch.allclose(got.images, wanted, rtol=2**-8, atol=2**-8)  # float16
    for name in ("edges", "reference"):
        span = 1 if name == "edges" else 2
        assert (got.hints[name] - seen.hints[name]).abs().max() <= span / 510 + 1e-6  # half a step of a byte
        assert got.hints[name].dtype == torch.float32


def test_each_step_draws_one_of_the_phrasings_and_its_tokens(cache: Path) -> None:
    source, asked = LatentSource(cache), torch.arange(COUNT)
    scenes = SCENES.sample(asked)
    ways = [captions(scenes, SCENES.seed + k) for k in range(PHRASINGS)]
    seen: set[int] = set()
    for step in range(6):
        got = source.batch(asked, plain(COUNT, step))
        which = [[way[i] for way in ways].index(got.captions[i]) for i in range(COUNT)]
        seen |= set(which)
        drawn = (plain(COUNT, step).uniform("phrasing") * PHRASINGS).long()
        assert [ways[k][i] for i, k in enumerate(drawn.tolist())] == list(got.captions)
        assert torch.equal(got.tokens, tokens(tokenizer(), got.captions))
        assert got.tokens.dtype == torch.int64
    assert seen == {0, 1, 2}
    halves = [source.batch(asked[10 * p : 10 * p + 10], plain(20, 3, p, 2)) for p in range(2)]
    assert halves[0].captions + halves[1].captions == source.batch(asked[:20], plain(20, 3)).captions


@pytest.mark.parametrize("flip", [False, True])
def test_on_the_device_a_batch_is_the_same(cache: Path, flip: bool) -> None:
    far, near = LatentSource(cache, flip=flip), LatentSource(cache, flip=flip, on_device=True)
    for step, asked in enumerate((torch.tensor([3, 20, 0, 3]), torch.tensor([8, 7, 15, 16]))):
        a, b = far.batch(asked, plain(4, step)), near.batch(asked, plain(4, step))
        assert torch.equal(a.images, b.images)
        assert a.captions == b.captions
        assert torch.equal(a.tokens, b.tokens)
        assert a.hints.keys() == b.hints.keys()
        assert all(torch.equal(a.hints[name], b.hints[name]) for name in a.hints)
    assert {name.startswith("mirrored/") for name in near.near} == ({False, True} if flip else {False})
    near.shards = near.shards[:1]  # nothing is read any more
    assert torch.equal(near.batch(asked, plain(4, 1)).images, b.images)
    with pytest.raises(PellucidError) as error:
        near.batch(asked, plain(4), "meta")
    assert error.value.code == "latents-device"


def test_the_task_takes_tokens_and_latents_as_they_are(
    cache: Path, parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = built(TextDenoiserConfig, text_table(parts))
    asked, draws = torch.arange(8), Draws(3, 5, 8)
    batch = LatentSource(cache, on_device=True).batch(asked, draws)
    slow = task.prepare(replace(batch, tokens=None), draws)
    first = task.prepare(batch, draws)
    monkeypatch.setattr("pellucid.train.text.tokens", lambda *_: pytest.fail("tokenized"))
    monkeypatch.setattr(task.vae, "encode", lambda *_: pytest.fail("encoded"))
    for got in (first, task.prepare(batch, draws)):
        assert got.keys() == slow.keys()
        assert all(torch.equal(got[name], slow[name]) for name in slow)
    dropped = draws.uniform("dropout") < 0.25
    assert dropped.any()
    assert torch.equal(got["ids"][dropped], tokens(tokenizer(), [""]).expand(int(dropped.sum()), WINDOW))


def test_a_task_with_another_tokenizer_refuses_the_tokens(cache: Path, parts: Path, tmp_path: Path) -> None:
    other = tokenizer().add("red")
    other.save(tmp_path / "tokenizer")
    (tmp_path / "vae").symlink_to(parts / "vae")
    task = built(TextDenoiserConfig, text_table(tmp_path))
    with pytest.raises(PellucidError) as error:
        task.prepare(LatentSource(cache).batch(torch.arange(COUNT), plain(COUNT)), plain(COUNT))
    assert error.value.code == "data-tokens"


# --- by a config --------------------------------------------------------------------------------------------------


def recipe(parts: Path, folder: Path, **of: Any) -> dict[str, Any]:
    scenes = {"kind": "scenes", "size": 16, "seed": 5, "objects": [1], "count": 104, **of}
    latents = {"kind": "latents", "folder": str(folder), "on_device": True, "phrasings": 2, "of": scenes}
    task = {"kind": "text_denoiser", **text_table(parts)}
    log = {"every": 2, "checkpoint_every": 0, "tensorboard": False}
    return {"task": task, "data": latents, "steps": 3, "batch": 8, "log": log}


def test_one_config_makes_the_cache_and_trains_on_it(parts: Path, tmp_path: Path) -> None:
    config = read(TrainConfig, recipe(parts, tmp_path / "cache"), "config")
    told: list[tuple[int, int]] = []
    made = make_latents(config, tell=lambda *at: told.append(at))
    assert (made, told) == (tmp_path / "cache", [(104, 104)])
    run = Trainer(config, tmp_path / "run", Ranks(), quiet=True)
    assert isinstance(run.source, LatentSource)
    assert run.run().steps == 3
    assert run.source.near["tokens"].dtype == torch.int16


@pytest.mark.parametrize("change", [{"of": {"seed": 6}}, {"phrasings": 3}, {"of": {"count": 25}}])
def test_a_config_refuses_the_cache_of_another(parts: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    make_latents(read(TrainConfig, recipe(parts, tmp_path / "cache"), "config"))
    other = recipe(parts, tmp_path / "cache", **change.pop("of", {}))["data"] | change
    with pytest.raises(PellucidError) as error:
        chosen(other, DATA, "data").open()
    assert error.value.code == "latents-stale"
    assert "\n" not in str(error.value)


def test_the_command_makes_it_of_any_config(parts: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "run.toml", tmp_path / "cache"
    file.write_text(
        f"""
steps = 1
batch = 8
[task]
kind = "lora"
base = "{base_pipeline(parts, tmp_path)}"
[data]
kind = "scenes"
size = 16
objects = [1]
"""
    )
    args = ["latents", str(file), "--out", str(folder), "--count", "9", "--phrasings", "2", "--device", "cpu"]
    result = CliRunner().invoke(data.app, args)
    assert result.exit_code == 0, result.output
    assert "9 images" in result.output
    source = LatentSource(folder)
    assert (len(source), source.cache.phrasings, source.batch(torch.arange(3), plain(3)).tokens.shape[0]) == (9, 2, 3)
    assert CliRunner().invoke(data.app, args[:4] + args[6:]).exception.code == "latents"  # without --count


def base_pipeline(parts: Path, folder: Path) -> Path:
    """A pipeline of random weights, as training leaves it."""
    task = built(TextDenoiserConfig, text_table(parts))
    task.save(task.network, folder / "base")
    return folder / "base"


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda vae, folder: cache_latents(SCENES.open(), vae, folder), "latents"),
        (lambda vae, folder: cache_latents(HINTED.open(), vae, folder, phrasings=0), "latents"),
        (lambda vae, folder: ScenesConfig(count=-1), "scenes-count"),
        (lambda vae, folder: make_latents(with_data({"kind": "latents", "folder": str(folder)})), "latents"),
        (lambda vae, folder: make_latents(with_data({"kind": "scenes"})), "latents"),
        (lambda vae, folder: make_latents(with_data({"kind": "scenes", "count": 3}), folder), "latents"),
    ],
)
def test_bad_requests_are_one_line(vae: AutoencoderKL, tmp_path: Path, make: Any, code: str) -> None:
    with pytest.raises(PellucidError) as error:
        make(vae, tmp_path / "new")
    assert error.value.code == code
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def with_data(table: dict[str, Any]) -> TrainConfig:
    task = {"kind": "autoencoder", "network": VAE}
    return read(TrainConfig, {"task": task, "data": table, "steps": 1, "batch": 1}, "config")


def test_latents_that_do_not_fit_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = LatentSource(cache, on_device=True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    with pytest.raises(PellucidError) as error:
        source.settle(torch.device("cuda"))
    assert error.value.code == "latents-memory"
    assert source.near == {}


def test_scenes_with_a_count_have_an_end() -> None:
    source = replace(SCENES, count=7).open()
    assert (len(source), source.endless, SCENES.open().endless) == (7, False, True)
    whole = SCENES.open().batch(torch.arange(7), plain(7), CPU)
    assert torch.equal(source.batch(torch.arange(7), plain(7), CPU).images, whole.images)


def test_fingerprints_tell_configs_apart_and_know_no_compiler() -> None:
    kinds = [SCENES, replace(SCENES, seed=6), replace(SCENES, count=5), replace(SCENES, name_style=False)]
    kinds += [replace(SCENES, hints=("edges",)), replace(SCENES, size=32)]
    found = [one.open().fingerprint() for one in kinds]
    assert len(set(found)) == len(kinds)
    assert replace(SCENES, compile_render=True).open().fingerprint() == found[0]
    assert isinstance(chosen({"kind": "latents", "folder": "x"}, DATA, "data"), LatentsConfig)
