"""Folders of images: metadata and classes, deterministic batches, and damage that is named and skipped."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import damaged, good_folder, painted, plain

from pellucid import PellucidError
from pellucid.train import image_source
from pellucid.train.image_folder import ImageFolder, ImageFolderConfig
from pellucid.train.source import Batch


def asked(*indices: int) -> torch.Tensor:
    return torch.tensor(indices)


def rows(folder: Path, *values: object, name: str = "metadata.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")


def same(a: Batch, b: Batch) -> bool:
    labels = (a.labels is None and b.labels is None) or torch.equal(a.labels, b.labels)
    return torch.equal(a.images, b.images) and a.captions == b.captions and labels


def pixels(number: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(painted(number)).copy()).permute(2, 0, 1).float() / 127.5 - 1.0


def test_images_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    good_folder(tmp_path, 4)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._000.png").write_bytes(b"left by macOS")
    source = ImageFolder(tmp_path, 24)
    assert [source.name(i) for i in range(len(source))] == ["000.png", "001.png", "002.png", "003.png"]
    batch = source.batch(asked(3, 0), plain(2))
    assert torch.equal(batch.images, torch.stack([pixels(3), pixels(0)]))
    assert (batch.labels, batch.captions, dict(batch.hints)) == (None, None, {})
    assert len(source.unreadable) == 0


def test_folders_are_classes_if_all_lie_equally_deep(tmp_path: Path) -> None:
    for name in ("dog", "cat"):
        good_folder(tmp_path / name, 2)
    source = ImageFolder(tmp_path, 24)
    assert source.classes == ("cat", "dog")
    assert source.batch(asked(0, 1, 2, 3), plain(4)).labels.tolist() == [0, 0, 1, 1]
    painted(1).save(tmp_path / "stray.png")
    assert ImageFolder(tmp_path, 24).batch(asked(0), plain(1)).labels is None


def test_rows_say_caption_label_and_hints(tmp_path: Path) -> None:
    good_folder(tmp_path / "sub", 3)
    rows(
        tmp_path,
        {"file_name": "sub/002.png", "text": "two", "label": "b", "edges": "sub/000.png", "score": 3},
        {"file_name": "sub/001.png", "caption": "ünë", "label": "a", "edges_file_name": "sub/001.png"},
    )
    source = ImageFolder(tmp_path, 24, hints=("edges",))
    batch = source.batch(asked(0, 1), plain(2))
    assert batch.captions == ("ünë", "two")
    assert batch.labels.tolist() == [0, 1]
    assert torch.equal(batch.images, torch.stack([pixels(1), pixels(2)]))
    grey = torch.from_numpy(np.asarray(painted(1).convert("L")).copy()).float() / 255
    assert torch.equal(batch.hints["edges"][0, 0], grey)


def test_metadata_in_a_folder_speaks_of_that_folder_and_csv_says_the_same(tmp_path: Path) -> None:
    good_folder(tmp_path / "train", 2)
    rows(tmp_path / "train", {"file_name": "000.png", "text": "a, b"}, {"file_name": "001.png", "text": "c"})
    jsonl = ImageFolder(tmp_path, 24).batch(asked(0, 1), plain(2))
    (tmp_path / "train" / "metadata.jsonl").unlink()
    (tmp_path / "train" / "metadata.csv").write_text('\ufefffile_name,text\r\n000.png,"a, b"\r\n001.png,c\r\n', "utf-8")
    assert same(jsonl, ImageFolder(tmp_path, 24).batch(asked(0, 1), plain(2)))
    assert jsonl.captions == ("a, b", "c")


def test_images_without_a_row_are_said_to_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good_folder(tmp_path, 4)
    rows(tmp_path, {"file_name": "001.png", "text": "x", "edges": "002.png"})
    assert len(ImageFolder(tmp_path, 24)) == 1
    assert "2 images without a row" in caplog.text


@pytest.mark.parametrize(
    ("row", "code", "words"),
    [
        ({"file_name": "../secret.png"}, "data-path", "inside the folder"),
        ({"file_name": "/etc/passwd"}, "data-path", "inside the folder"),
        ({"file_name": "sub/../../secret.png"}, "data-path", "inside the folder"),
        ({"file_name": "C:\\secret.png"}, "data-metadata", "slashes"),
        ({"file_name": "C:secret.png"}, "data-path", "inside the folder"),
        ({"file_name": "a\0.png"}, "data-metadata", "slashes"),
        ({"file_name": 3}, "data-metadata", "slashes"),
        ({"file_name": "gone.png"}, "data-missing", "are there"),
        ({"file_name": "000.png"}, "data-metadata", "another image"),
        ({"file_name": "sub/../000.png"}, "data-metadata", "another image"),
        ({"text": "x"}, "data-metadata", "file_name"),
        ({"file_name": "001.png", "text": ["x"]}, "data-metadata", "string"),
        ({"file_name": "001.png"}, "data-metadata", "no text"),
        ({"file_name": "001.png", "text": "x", "label": -1}, "data-metadata", "label"),
        ({"file_name": "001.png", "text": "x", "label": 1.5}, "data-metadata", "label"),
        ({"file_name": "001.png", "text": "x", "label": "cat"}, "data-metadata", "label in words"),
        ([1], "data-metadata", "JSON object"),
    ],
)
def test_a_bad_row_is_one_line_with_its_number(tmp_path: Path, row: object, code: str, words: str) -> None:
    good_folder(tmp_path / "data", 2)
    painted(0).save(tmp_path / "secret.png")
    rows(tmp_path / "data", {"file_name": "000.png", "text": "x"}, row)
    with pytest.raises(PellucidError, match=r"metadata\.jsonl, line 2 must be") as error:
        ImageFolder(tmp_path / "data", 24)
    assert error.value.code == code
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.jsonl", b'{"file_name": "000.png"}\n{broken\n'),
        ("metadata.jsonl", b'{"file_name": "000.png"}\n\xff\xfe\n'),
        ("metadata.jsonl", b"[" * 100_000),
        ("metadata.csv", b"file_name,text\n000.png,a,b\n"),
        ("metadata.csv", b'file_name,text\n000.png,"a\n'),
    ],
)
def test_broken_metadata_is_one_line(tmp_path: Path, name: str, text: bytes) -> None:
    good_folder(tmp_path, 1)
    (tmp_path / name).write_bytes(text)
    with pytest.raises(PellucidError, match=name) as error:
        ImageFolder(tmp_path, 24)
    assert error.value.code == "data-metadata"


def test_a_missing_hint_is_said_when_opened(tmp_path: Path) -> None:
    good_folder(tmp_path, 1)
    with pytest.raises(PellucidError) as error:
        ImageFolder(tmp_path, 24, hints=("edges",))
    assert error.value.code == "data-hints"
    for row, words in (({"file_name": "000.png"}, "edges"), ({"file_name": "000.png", "edges": "e.png"}, "e.png")):
        rows(tmp_path, row)
        with pytest.raises(PellucidError, match=words):
            ImageFolder(tmp_path, 24, hints=("edges",))


@pytest.mark.parametrize("code", ["data-missing", "data-empty", "data-unreadable"])
def test_an_empty_or_unreadable_folder_is_one_line(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    if code != "data-missing":
        folder.mkdir()
    if code == "data-unreadable":  # tests may run as root, who may read everything

        def refuse(top: object, onerror) -> Sequence[object]:
            onerror(PermissionError(13, "Permission denied", "data/inner"))
            return []

        monkeypatch.setattr(os, "walk", refuse)
    with pytest.raises(PellucidError, match="folder of images must be") as error:
        ImageFolder(folder, 24)
    assert error.value.code == code


# --- batches -------------------------------------------------------------------------------------------------------


def test_the_same_step_gives_the_same_batch_and_parts_make_the_whole(tmp_path: Path) -> None:
    for number in range(12):
        painted(number, (40 + number, 30)).save(tmp_path / f"{number:02d}.png")
    source = ImageFolder(tmp_path, 16, crop="random", flip=True)
    indices = torch.arange(12)
    whole = source.batch(indices, plain(12, step=7))
    assert same(whole, ImageFolder(tmp_path, 16, crop="random", flip=True, workers=1).batch(indices, plain(12, step=7)))
    parts = [source.batch(indices[p * 4 : p * 4 + 4], plain(12, 7, p, 3)).images for p in range(3)]
    assert torch.equal(torch.cat(parts), whole.images)
    other = source.batch(indices, plain(12, step=8))
    assert not torch.equal(other.images, whole.images)


def test_flips_mirror_about_half(tmp_path: Path) -> None:
    good_folder(tmp_path, 1)
    indices = torch.zeros(64, dtype=torch.long)
    still = ImageFolder(tmp_path, 24).batch(indices, plain(64)).images
    turned = ImageFolder(tmp_path, 24, flip=True).batch(indices, plain(64)).images
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(turned, still, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(turned, still, strict=True)]
    assert [m != k for m, k in zip(mirrored, kept, strict=True)] == [True] * 64
    assert 16 <= sum(mirrored) <= 48  # four standard deviations of a fair coin


# --- damage --------------------------------------------------------------------------------------------------------


def spoiled(folder: Path, good: int = 17) -> Path:
    """Good images, and after every other of the first ones a damaged one."""
    good_folder(folder, good)
    for number, (name, data) in enumerate(sorted(damaged().items())):
        (folder / f"{number:03d}x-{name}").write_bytes(data)
    return folder


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_every_damaged_image_is_named_once_and_replaced_by_the_next(tmp_path: Path, caplog) -> None:
    source = ImageFolder(spoiled(tmp_path), 24)
    names = [source.name(i) for i in range(len(source))]
    bad = [i for i, name in enumerate(names) if "x-" in name]
    assert len(bad) == len(damaged())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            batch = source.batch(torch.arange(len(source)), plain(len(source)))
    for index in bad:  # the next in the order of files is a good one: they alternate
        assert torch.equal(batch.images[index], batch.images[(index + 1) % len(source)])
    assert len(source.unreadable) == len(bad)
    assert sorted(source.unreadable) == [names[i] for i in bad]
    told = [record.getMessage() for record in caplog.records]
    assert sorted(line.split(": ")[0] for line in told) == [f"skipped {names[i]}" for i in bad]
    assert all("\n" not in line for line in told)


def test_replacement_depends_on_files_alone(tmp_path: Path) -> None:
    """A fresh source, one that knows the damage already, and parts of a batch all see the same."""
    spoiled(tmp_path)
    one, two = ImageFolder(tmp_path, 24, workers=1), ImageFolder(tmp_path, 24, workers=4)
    indices = torch.arange(len(one))
    first = one.batch(indices, plain(len(one)))
    assert same(first, one.batch(indices, plain(len(one))))
    parts = [two.batch(part, plain(len(one), 0, p, 2)).images for p, part in enumerate(indices.chunk(2))]
    assert torch.equal(torch.cat(parts), first.images)


def test_what_is_said_of_a_image_goes_with_it(tmp_path: Path) -> None:
    good_folder(tmp_path, 3)
    (tmp_path / "001.png").write_bytes(b"")
    rows(tmp_path, *({"file_name": f"{n:03d}.png", "text": str(n), "label": n} for n in range(3)))
    batch = ImageFolder(tmp_path, 24).batch(asked(0, 1, 2), plain(3))
    assert batch.captions == ("0", "2", "2")
    assert batch.labels.tolist() == [0, 2, 2]


def test_a_damaged_hint_skips_its_example(tmp_path: Path) -> None:
    good_folder(tmp_path, 2)
    (tmp_path / "e.png").write_bytes(b"x")
    rows(tmp_path, {"file_name": "000.png", "edges": "e.png"}, {"file_name": "001.png", "edges": "001.png"})
    source = ImageFolder(tmp_path, 24, hints=("edges",))
    assert torch.equal(source.batch(asked(0), plain(1)).images[0], pixels(1))
    assert "of its edges" in source.unreadable["000.png"]


def test_a_image_that_goes_away_is_skipped(tmp_path: Path) -> None:
    source = ImageFolder(good_folder(tmp_path, 3), 24)
    (tmp_path / "001.png").unlink()
    assert torch.equal(source.batch(asked(1), plain(1)).images[0], pixels(2))
    assert len(source.unreadable) == 1


def test_a_file_beyond_bounds_is_skipped_and_no_room_is_made_for_it(tmp_path: Path) -> None:
    source = ImageFolder(good_folder(tmp_path, 2), 24)
    with (tmp_path / "000.png").open("wb") as file:
        file.truncate(2**33)  # a hole: it takes no place on the disk
    assert torch.equal(source.batch(asked(0), plain(1)).images[0], pixels(1))
    assert f"it has {2**33} bytes" in source.unreadable["000.png"]


def test_a_disk_that_fails_for_a_moment_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_source, "PAUSE", 0.0)
    failures = [OSError(5, "Input/output error")] * 2

    def read() -> bytes:
        if failures:
            raise failures.pop()
        return b"data"

    assert image_source.steadily(read) == b"data"
    failures += [OSError(5, "Input/output error")] * 3
    with pytest.raises(PellucidError, match="Input/output error"):
        image_source.steadily(read)


def test_mostly_damaged_data_stops_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(16):
        (tmp_path / f"{number:03d}.png").write_bytes(b"")
    with pytest.raises(PellucidError, match=r"16 in a row cannot: .*000\.png: it is empty") as error:
        ImageFolder(tmp_path, 24).batch(asked(0), plain(1))
    for number in (4, 9, 14):
        painted(number).save(tmp_path / f"{number:03d}.png")
    source = ImageFolder(tmp_path, 24)
    source.batch(asked(0), plain(1))  # one place says nothing
    with pytest.raises(PellucidError, match=r"6 of a batch of 8 could not be read") as error:
        source.batch(torch.arange(8, 16), plain(8))
    assert error.value.code == "data-damaged"
    assert "\n" not in str(error.value)
    monkeypatch.setattr(image_source, "MAX_SKIPPED", 5)
    patient = ImageFolder(tmp_path, 24)
    patient.batch(asked(4, 3), plain(2))
    patient.batch(asked(5), plain(1))
    with pytest.raises(PellucidError, match=r"examples could not be read"):
        patient.batch(asked(12), plain(1))


def test_bad_requests_are_one_line(tmp_path: Path) -> None:
    source = ImageFolder(good_folder(tmp_path, 3), 24)
    for indices, draws in ((asked(3), plain(1)), (asked(-1), plain(1)), (asked(0, 1), plain(1))):
        with pytest.raises(PellucidError, match="indices must be") as error:
            source.batch(indices, draws)
        assert error.value.code == "data-indices"
    for make in (lambda: ImageFolder(tmp_path, 24, workers=0), lambda: ImageFolder(tmp_path, 24, hints=("a", "a"))):
        with pytest.raises(PellucidError, match="must be"):
            make()


def test_the_fingerprint_follows_files_rows_and_framing(tmp_path: Path) -> None:
    good_folder(tmp_path, 3)
    first = ImageFolder(tmp_path, 24).fingerprint()
    assert first == ImageFolder(tmp_path, 24, workers=1).fingerprint()
    seen = {first, ImageFolder(tmp_path, 16).fingerprint(), ImageFolder(tmp_path, 24, crop="random").fingerprint()}
    os.utime(tmp_path / "001.png", ns=(1, 1))
    seen.add(ImageFolder(tmp_path, 24).fingerprint())
    rows(tmp_path, *({"file_name": f"{n:03d}.png", "text": "x"} for n in range(3)))
    seen.add(ImageFolder(tmp_path, 24).fingerprint())
    assert len(seen) == 5


def test_a_config_opens_the_source(tmp_path: Path) -> None:
    source = ImageFolderConfig(str(good_folder(tmp_path, 2)), 16, crop="random", flip=True).open()
    assert (len(source), source.framing.size, source.framing.crop, source.flip) == (2, 16, "random", True)
