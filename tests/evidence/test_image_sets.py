"""Sets of images: what folders and files hold, in which order, and what is refused or skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from stand_ins import Small

from pellucid import PellucidError
from pellucid.evidence.metrics import images, score
from pellucid.evidence.metrics.fid import Statistics
from pellucid.evidence.metrics.images import Folder, Pixels, open_images
from pellucid.evidence.metrics.inception import Inception, features
from pellucid.evidence.metrics.score import measure, measure_cached
from pellucid.train.cifar10 import FILES, IN_FILE, RECORD


def pixels(count: int, height: int = 5, width: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def write(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(folder / name, **({"lossless": True} if name.endswith("webp") else {}))


def all_of(found: object) -> tuple[list[torch.Tensor], list[tuple[int, str]]]:
    skipped: list[tuple[int, str]] = []
    chunks = list(found.chunks(lambda number, why: skipped.append((number, why))))
    return chunks, skipped


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    small, large = pixels(3), pixels(2, 6, 7, seed=1)
    names = {"b/2.png": small[2], "a.png": small[0], "b/1.webp": small[1], "c.PNG": large[0], "d.png": large[1]}
    write(tmp_path, names)
    (tmp_path / ".hidden").mkdir()
    write(tmp_path, {".hidden/x.png": small[0], ".y.png": small[0]})
    (tmp_path / "notes.txt").write_text("no image")
    found = open_images(tmp_path)
    assert isinstance(found, Folder)
    assert found.files == ("a.png", "b/1.webp", "b/2.png", "c.PNG", "d.png")
    chunks, skipped = all_of(found)
    assert skipped == []
    assert [tuple(c.shape) for c in chunks] == [(3, 3, 5, 4), (2, 3, 6, 7)]
    assert np.array_equal(chunks[0].permute(0, 2, 3, 1), small)
    assert np.array_equal(chunks[1].permute(0, 2, 3, 1), large)


def test_a_corrupt_image_is_named_and_skipped(tmp_path: Path, small: Inception) -> None:
    write(tmp_path, {f"{i}.png": array for i, array in enumerate(pixels(4))})
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:50])
    (tmp_path / "5.jpg").write_text("no image")
    chunks, skipped = all_of(open_images(tmp_path))
    assert sum(map(len, chunks)) == 3
    assert [number for number, _ in skipped] == [1, 4]
    found = measure(open_images(tmp_path), small)
    assert found.count == 3
    notes = list(found.notes())
    assert "1.png" in notes[0]
    assert "5.jpg" in notes[1]
    assert "2 of 5 images" in notes[-1]


def test_all_corrupt_is_an_error(tmp_path: Path, small: Inception) -> None:
    (tmp_path / "1.png").write_text("no image")
    with pytest.raises(PellucidError, match=r"1\.png") as error:
        measure(open_images(tmp_path), small)
    assert error.value.code == "pictures-empty"


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_arrays_in_either_layout(tmp_path: Path, layout: str, ending: str) -> None:
    array = pixels(6)
    stored = array if layout == "NHWC" else np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    path = tmp_path / f"x{ending}"
    if ending == ".npz":
        np.savez(path, images=stored, labels=np.arange(6), more=np.zeros((1, 1, 1, 1)))
    else:
        save_file({"pictures": torch.from_numpy(stored), "labels": torch.arange(6)}, path)
    found = open_images(path)
    assert isinstance(found, Pixels)
    assert np.array_equal(found.images.permute(0, 2, 3, 1), array)
    assert found.digest() == Pixels(torch.from_numpy(array).permute(0, 3, 1, 2)).digest()


def test_cifar10_by_split(tmp_path: Path) -> None:
    records = np.random.default_rng(0).integers(0, 10, (IN_FILE, RECORD), dtype=np.uint8)
    for name in FILES["test"]:
        records.tofile(tmp_path / name)
    found = open_images(f"{tmp_path}:test")
    assert isinstance(found, Pixels)
    assert found.images.shape == (IN_FILE, 3, 32, 32)
    assert np.array_equal(found.images[7].flatten(), records[7, 1:])
    with pytest.raises(PellucidError, match=r":train or .*:test"):
        open_images(tmp_path)


def test_statistics_are_known_by_their_mark(tmp_path: Path) -> None:
    made = Statistics.of(torch.randn(9, 3, generator=torch.Generator().manual_seed(0)))
    made.save(tmp_path / "s.safetensors")
    found = open_images(tmp_path / "s.safetensors")
    assert isinstance(found, Statistics)
    assert torch.equal(found.covariance, made.covariance)


def test_bad_sets_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: str, **arrays: np.ndarray) -> Path:
        np.savez(tmp_path / name, **arrays)
        return tmp_path / name

    whole = pixels(2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "cut.npz").write_bytes(made("whole.npz", images=whole).read_bytes()[:-30])
    cases = [
        (tmp_path / "none", "not-found"),
        (tmp_path / "empty", "pictures-empty"),
        (tmp_path / "text.txt", "pictures-file"),
        (tmp_path / "cut.npz", "pictures-file"),
        (made("float.npz", images=whole.astype(np.float32)), "picture-dtype"),
        (made("long.npz", images=whole.astype(np.uint64)), "picture-dtype"),
        (made("both.npz", images=np.zeros((2, 3, 5, 3), np.uint8)), "picture-shape"),
        (made("grey.npz", images=np.zeros((2, 5, 5, 1), np.uint8)), "picture-shape"),
        (made("none.npz", images=np.zeros((0, 5, 5, 3), np.uint8)), "picture-shape"),
        (made("two.npz", a=whole, b=whole), "pictures-file"),
        (made("pickled.npz", images=np.array([object()] * 2, dtype=object)), "pictures-file"),
    ]
    for path, code in cases:
        with pytest.raises(PellucidError) as error:
            open_images(path)
        assert (path.name, error.value.code) == (path.name, code)
        assert "\n" not in str(error.value)
    monkeypatch.setattr(images, "MAX_IMAGES", 1)
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    for path in (made("many.npz", images=whole), tmp_path / "folder"):
        write(tmp_path / "folder", {"1.png": whole[0], "2.png": whole[1]})
        with pytest.raises(PellucidError) as error:
            open_images(path)
        assert error.value.code == "pictures-many"


# --- what the network makes of them ------------------------------------------------------------------------------


def test_kept_and_streamed_are_the_same_statistics(small: Inception, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Pixels(torch.from_numpy(pixels(30)).permute(0, 3, 1, 2))
    kept = measure(found, small, batch=7)
    monkeypatch.setattr(score, "MANY", 10)
    streamed = measure(found, small, batch=7)
    assert streamed.features is None
    assert kept.features is not None
    assert torch.allclose(kept.features, features(found.images, small), atol=1e-6)
    assert torch.allclose(streamed.statistics.covariance, kept.statistics.covariance, atol=1e-10)
    assert kept.statistics.network == small.digest()


def test_a_cache_that_changed_is_made_again(small: Inception, tmp_path: Path) -> None:
    told: list[int] = []
    images = torch.from_numpy(pixels(4)).permute(0, 3, 1, 2)
    first = measure_cached(Pixels(images), small, tmp_path / "cache", progress=told.append)
    path = next((tmp_path / "cache").iterdir())
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    again = measure_cached(Pixels(images), small, tmp_path / "cache", progress=told.append)
    assert len(told) == 2
    assert torch.equal(again.statistics.covariance, first.statistics.covariance)
    assert torch.equal(again.features, first.features)  # type: ignore[arg-type]


def test_saved_statistics_that_changed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    Statistics.of(torch.randn(9, 4)).save(path)
    assert Statistics.load(path).count == 9
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    with pytest.raises(PellucidError, match=r"s\.safetensors must be as it was written") as error:
        Statistics.load(path)
    assert error.value.code == "statistics"


def test_the_cache_is_keyed_by_images_and_network(small: Inception, tmp_path: Path) -> None:
    images = torch.from_numpy(pixels(12)).permute(0, 3, 1, 2)
    told: list[int] = []
    first = measure_cached(Pixels(images), small, tmp_path / "cache", progress=told.append)
    second = measure_cached(Pixels(images, "again"), small, tmp_path / "cache", progress=told.append)
    assert told == [12]  # the second did not run
    assert second.name == "again"
    assert torch.equal(first.features, second.features)
    assert torch.equal(first.statistics.covariance, second.statistics.covariance)
    assert second.statistics.network == small.digest()
    measure_cached(Pixels(images.flip(0)), small, tmp_path / "cache", progress=told.append)
    measure_cached(Pixels(images), Small(seed=1), tmp_path / "cache", progress=told.append)
    assert told == [12, 12, 12]
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 3
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    again = measure_cached(Pixels(images), small, tmp_path / "cache", progress=told.append)
    assert told == [12] * 4  # a damaged file is made again
    assert torch.equal(first.features, again.features)


def test_skipped_images_are_told_every_time(small: Inception, tmp_path: Path) -> None:
    write(tmp_path / "in", {f"{i}.png": array for i, array in enumerate(pixels(3))})
    (tmp_path / "in" / "x.png").write_text("no image")
    for _ in range(2):
        found = measure_cached(open_images(tmp_path / "in"), small, tmp_path / "cache")
        assert len(found.skipped) == 1
