"""The latent cache: what is read is what the VAE would say; killed, it goes on; stale or damaged, it says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import good_folder, plain
from torch import Tensor, nn

from pellucid import PellucidError
from pellucid.interop import weights
from pellucid.models.tiny_vae import TinyAutoencoder, TinyVAEConfig
from pellucid.models.vae import AutoencoderKL, VAEConfig, to_diffusion
from pellucid.train import latent_cache
from pellucid.train.cifar10 import CIFAR10, CIFAR10Source
from pellucid.train.image_folder import ImageFolder
from pellucid.train.latent_cache import cache_latents
from pellucid.train.latent_source import LatentsConfig, LatentSource

COUNT = 10


def small_vae(seed: int = 0, **keys: object) -> AutoencoderKL:
    torch.manual_seed(seed)
    config = VAEConfig(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        **keys,  # type: ignore[arg-type]
    )
    return AutoencoderKL(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images with captions, labels and hints, of which one cannot be read."""
    place = good_folder(tmp_path / "data", COUNT)
    lines = [
        {
            "file_name": f"{n:03d}.png",
            "text": f"größe {n} \ud800",
            "label": n,
            "edges": "000.png",
            "reference": "001.png",
        }
        for n in range(COUNT)
    ]
    (place / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "004.png").write_bytes(b"")
    return place


def opened(folder: Path, **keys: object) -> ImageFolder:
    return ImageFolder(folder, 16, hints=("edges", "reference"), **keys)  # type: ignore[arg-type]


def fresh(source: ImageFolder, vae: nn.Module, indices: Tensor, draws) -> Tensor:
    """The long way: read, encode, sample, scale, image by image in one batch."""
    with torch.no_grad():
        posterior = vae.encode(source.batch(indices, draws).images)
    return to_diffusion(vae.config, posterior.sample(draws.normal("posterior", posterior.mean.shape[1:])))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"shift_factor": 0.3, "scaling_factor": 1.7},
        {"latents_mean": (0.1,) * 4, "latents_std": (0.5, 1.0, 2.0, 3.0)},
    ],
)
def test_cached_latents_are_those_of_the_vae(tmp_path: Path, folder: Path, keys: dict[str, object]) -> None:
    vae = small_vae(**keys)
    cache_latents(opened(folder), vae, tmp_path / "cache", per_shard=4, batch=3)
    found = LatentSource(tmp_path / "cache", source=opened(folder), vae=vae)
    assert len(found) == COUNT
    indices = torch.tensor([9, 0, 4, 4, 7, 3])
    batch, seen = found.batch(indices, plain(6, 2)), opened(folder).batch(indices, plain(6, 2))
    # float32: convolutions of another batch size may add in another order
    assert torch.allclose(batch.images, fresh(opened(folder), vae, indices, plain(6, 2)), rtol=1e-4, atol=1e-5)
    assert batch.images.dtype == torch.float32
    assert batch.captions == seen.captions
    assert torch.equal(batch.labels, seen.labels)
    assert seen.labels.tolist() == [9, 0, 5, 5, 7, 3]  # 4 cannot be read
    for name in ("edges", "reference"):
        assert torch.equal(batch.hints[name], seen.hints[name])
    assert len(found.unreadable) == 1


def test_each_step_draws_its_own_sample_and_parts_make_the_whole(tmp_path: Path, folder: Path) -> None:
    cache_latents(opened(folder), small_vae(), tmp_path / "cache", per_shard=4)
    source = LatentSource(tmp_path / "cache")
    indices = torch.arange(8)
    whole = source.batch(indices, plain(8, 1)).images
    assert torch.equal(whole, source.batch(indices, plain(8, 1)).images)
    assert not torch.equal(whole, source.batch(indices, plain(8, 2)).images)
    parts = [source.batch(indices[4 * p : 4 * p + 4], plain(8, 1, p, 2)).images for p in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_mirrored_latents_are_those_of_mirrored_images(tmp_path: Path, folder: Path) -> None:
    vae = small_vae()
    cache_latents(opened(folder), vae, tmp_path / "cache", mirrored=True, per_shard=4)
    source, flipping = LatentSource(tmp_path / "cache", flip=True), opened(folder, flip=True)
    indices = torch.arange(8)
    batch, seen = source.batch(indices, plain(8, 3)), flipping.batch(indices, plain(8, 3))
    assert torch.allclose(batch.images, fresh(flipping, vae, indices, plain(8, 3)), rtol=1e-4, atol=1e-5)
    for name in ("edges", "reference"):
        assert torch.equal(batch.hints[name], seen.hints[name])
    still = LatentSource(tmp_path / "cache").batch(indices, plain(8, 3)).images
    turned = [not torch.equal(a, b) for a, b in zip(still, batch.images, strict=True)]
    assert turned == (plain(8, 3).uniform("flip") < 0.5).tolist()


def test_half_precision_rounds_and_a_point_has_no_noise(tmp_path: Path, folder: Path) -> None:
    torch.manual_seed(0)
    widths = (8,) * 4
    vae = TinyAutoencoder(TinyVAEConfig(encoder_block_out_channels=widths, decoder_block_out_channels=widths)).eval()
    cache_latents(opened(folder), vae, tmp_path / "cache", dtype="float16")
    source = LatentSource(tmp_path / "cache", vae=vae)
    batch = source.batch(torch.arange(4), plain(4))
    with torch.no_grad():
        mean = vae.encode(opened(folder).batch(torch.arange(4), plain(4)).images).mean
    assert torch.allclose(batch.images, mean, rtol=2**-10, atol=1e-6)
    assert torch.equal(batch.images, source.batch(torch.arange(4), plain(4, 1)).images)


def test_a_source_without_captions_labels_or_fingerprint(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8))
    data, vae = CIFAR10(images, torch.arange(6)), small_vae()
    cache_latents(CIFAR10Source(data, flip=False), vae, tmp_path / "cache")
    found = LatentSource(tmp_path / "cache", source=CIFAR10Source(data, flip=False), vae=vae)
    assert found.batch(torch.tensor([5]), plain(1)).labels.tolist() == [5]
    other = CIFAR10(255 - images, torch.arange(6))
    with pytest.raises(PellucidError) as error:
        LatentSource(tmp_path / "cache", source=CIFAR10Source(other, flip=False))
    assert error.value.code == "latents-stale"


# --- killed, stale, damaged ----------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("moment", range(7))
def test_killed_at_any_moment_it_goes_on_and_ends_the_same(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Killed when a file has been written and not yet named, or just before one is written."""
    vae = small_vae()
    whole = contents(cache_latents(opened(folder), vae, tmp_path / "whole", per_shard=4))
    left = iter(range(moment))

    def killed(path: Path, what) -> None:
        if next(left, None) is None:
            if moment % 2:
                real(path.with_name(f".{path.stem}.0123abcd.part{path.suffix}"), what)
            raise KeyboardInterrupt
        real(path, what)

    real = latent_cache.put
    with monkeypatch.context() as patch:
        patch.setattr(latent_cache, "put", killed)
        if moment < 5:  # a manifest, three shards, a manifest
            with pytest.raises(KeyboardInterrupt):
                cache_latents(opened(folder), vae, tmp_path / "cache", per_shard=4)
            if (tmp_path / "cache" / "latents.json").exists():
                with pytest.raises(PellucidError) as error:
                    LatentSource(tmp_path / "cache")
                assert error.value.code == "latents-incomplete"
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("cache/latents-*")}
    cache_latents(opened(folder), vae, tmp_path / "cache", per_shard=4)
    assert contents(tmp_path / "cache") == whole
    after = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("cache/latents-*")}
    assert before.items() <= after.items()  # what was there was not made again


def test_a_finished_cache_is_not_made_again(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = small_vae()
    cache_latents(opened(folder), vae, tmp_path / "cache")
    monkeypatch.setattr(latent_cache, "made", lambda *_: pytest.fail("encoded again"))
    told: list[tuple[int, int]] = []
    cache_latents(opened(folder), vae, tmp_path / "cache", tell=lambda done, count: told.append((done, count)))
    assert told == [(COUNT, COUNT)]


def test_a_stale_cache_is_one_line_and_is_not_touched(tmp_path: Path, folder: Path) -> None:
    vae, cache = small_vae(), tmp_path / "cache"
    cache_latents(opened(folder), vae, cache, per_shard=4)
    kept = contents(cache)
    (folder / "003.png").write_bytes((folder / "002.png").read_bytes())
    for again in (
        lambda: LatentSource(cache, source=opened(folder)),
        lambda: LatentSource(cache, vae=small_vae(1)),
        lambda: cache_latents(opened(folder), vae, cache, per_shard=4),
    ):
        with pytest.raises(PellucidError, match="cache") as error:
            again()
        assert error.value.code == "latents-stale"
        assert "\n" not in str(error.value)
    assert contents(cache) == kept
    LatentSource(cache)  # of itself it is whole


def test_a_damaged_cache_is_one_line(tmp_path: Path, folder: Path) -> None:
    cache = cache_latents(opened(folder), small_vae(), tmp_path / "cache", per_shard=4)
    shard, manifest = cache / "latents-00001-of-00003.safetensors", cache / "latents.json"
    whole, words = shard.read_bytes(), manifest.read_text()
    other = cache / "latents-00000-of-00003.safetensors"
    for damage in (whole[:-1], whole[:50], b"", other.read_bytes(), None):
        shard.unlink()
        if damage is not None:
            shard.write_bytes(damage)
        with pytest.raises(PellucidError, match="latents-00001") as error:
            LatentSource(cache)
        assert error.value.code in ("latents-damaged", "weights-file")
        if damage is None:
            shard.write_bytes(whole)
    for damage in ("{", "{}", words.replace('"format": 1', '"format": 2'), words.replace('"count"', '"number"')):
        manifest.write_text(damage)
        with pytest.raises(PellucidError, match=r"latents\.json"):
            LatentSource(cache)


def shard_places(shard: Path) -> dict[str, tuple[int, int]]:
    """The bytes of each tensor in a file."""
    data = shard.read_bytes()
    room = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + room])
    return {name: tuple(8 + room + at for at in held["data_offsets"]) for name, held in table.items() if name[0] != "_"}


@pytest.mark.parametrize("on_device", [False, True])
def test_a_flipped_bit_is_found_when_it_is_read(tmp_path: Path, folder: Path, on_device: bool) -> None:
    cache = cache_latents(opened(folder), small_vae(), tmp_path / "cache", per_shard=4, mirrored=True)
    shard = cache / "latents-00001-of-00003.safetensors"
    whole = shard.read_bytes()
    places = shard_places(shard)
    assert {"mean", "std", "labels", "captions", "mirrored/mean", "hints/edges"} <= set(places)
    for name, (first, last) in places.items():
        damaged = bytearray(whole)
        damaged[(first + last) // 2] ^= 1
        shard.write_bytes(damaged)
        with pytest.raises(PellucidError, match=f"{name} in latents-00001") as error:
            LatentSource(cache, flip=True, on_device=on_device).batch(torch.tensor([0, 5]), plain(2))
        assert error.value.code == "latents-damaged"
        assert "\n" not in str(error.value)
    cache_latents(opened(folder), small_vae(), cache, per_shard=4, mirrored=True)  # what is damaged is made again
    assert shard.read_bytes() == whole


def test_a_cache_from_before_digests_is_read_with_a_note(tmp_path: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    cache = cache_latents(opened(folder), small_vae(), tmp_path / "cache", per_shard=4)
    plainly = LatentSource(cache)
    assert plainly.notes == ()
    sizes = []
    for number in range(3):
        path = cache / f"latents-0000{number}-of-00003.safetensors"
        said = json.loads(weights.metadata_of(path)["latents"])
        del said["digests"]
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"latents": json.dumps(said, sort_keys=True)})
        sizes.append(path.stat().st_size)
    manifest = json.loads((cache / "latents.json").read_text())
    (cache / "latents.json").write_text(json.dumps({**manifest, "sizes": sizes}))
    old = LatentSource(cache)
    assert "older version" in old.notes[0]
    asked = torch.arange(COUNT)
    assert torch.equal(old.batch(asked, plain(COUNT)).images, plainly.batch(asked, plain(COUNT)).images)


def test_shards_that_changed_places_are_not_taken(tmp_path: Path, folder: Path) -> None:
    cache = cache_latents(opened(folder), small_vae(), tmp_path / "cache", per_shard=2)
    paths = [cache / f"latents-0000{number}-of-00005.safetensors" for number in (0, 1)]
    first, second = (path.read_bytes() for path in paths)
    assert len(first) == len(second)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(PellucidError, match="latents-00000") as error:
        LatentSource(cache)
    assert error.value.code == "latents-damaged"


def test_bad_requests_are_one_line(tmp_path: Path, folder: Path) -> None:
    vae = small_vae()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    endless = opened(folder)
    endless.endless = True
    cache = cache_latents(opened(folder), vae, tmp_path / "cache")
    for make, code in (
        (lambda: cache_latents(opened(folder), vae, tmp_path / "full"), "latents"),
        (lambda: cache_latents(opened(folder, flip=True), vae, tmp_path / "new"), "latents"),
        (lambda: cache_latents(endless, vae, tmp_path / "new"), "latents"),
        (lambda: cache_latents(opened(folder), vae, tmp_path / "new", per_shard=0), "latents"),
        (lambda: LatentSource(tmp_path / "gone"), "latents-missing"),
        (lambda: LatentSource(cache, flip=True), "latents-mirrored"),
        (lambda: LatentSource(cache).batch(torch.tensor([COUNT]), plain(1)), "data-indices"),
    ):
        with pytest.raises(PellucidError) as error:
            make()
        assert error.value.code == code
        assert ("pellucid data latents CONFIG" in str(error.value)) == (code == "latents-missing")
    assert not (tmp_path / "new").exists()
    assert len(LatentsConfig(str(cache)).open()) == COUNT


def test_latents_that_overflow_are_refused(tmp_path: Path, folder: Path) -> None:
    vae = small_vae()
    with torch.no_grad():
        vae.quant_conv.weight.mul_(1e6)
    with pytest.raises(PellucidError, match="finite in float16") as error:
        cache_latents(opened(folder), vae, tmp_path / "cache", dtype="float16")
    assert error.value.code == "latents-finite"
