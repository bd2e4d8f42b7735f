"""WebDataset shards: the index against Python's tarfile, examples against the folder they came from, and damage."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import damaged, good_folder, painted, plain, stored

from pellucid import PellucidError
from pellucid.train.image_folder import ImageFolder
from pellucid.train.web_shards import TarDamagedError, WebShards, WebShardsConfig, braces, members


def write_tar(path: Path, files: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def examples(first: int, count: int) -> dict[str, bytes]:
    """Files of examples: an image, a caption and a class each."""
    files = {}
    for n in range(first, first + count):
        files |= {f"{n:03d}.png": stored(painted(n)), f"{n:03d}.txt": f"number {n}\n".encode()}
        files[f"{n:03d}.cls"] = str(n % 3).encode()
    return files


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Twelve examples in three shards."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        write_tar(folder / f"train-{number:06d}.tar", examples(4 * number, 4))
    return folder


# --- the index -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_index_is_that_of_tarfile(tmp_path: Path, form: int) -> None:
    choose = random.Random(form)
    names = [f"dir.{n}/{n:05d}.jpg" for n in range(20)]
    if form != tarfile.USTAR_FORMAT:
        names += ["a" * 60 + "/" + "b" * 180 + ".png", "ünïcödé/äöü.txt", "d/" * 120 + "x.json"]
    files = {name: choose.randbytes(choose.choice((0, 1, 511, 512, 513, 4000))) for name in names}
    path = write_tar(tmp_path / "a.tar", files, form)
    with tarfile.open(path, "a", format=form) as archive:  # what is no file is passed over
        folder = tarfile.TarInfo("inner")
        folder.type, folder.size = tarfile.DIRTYPE, 700  # some writers give a size, and no bytes follow
        archive.addfile(folder)
        link = tarfile.TarInfo("l" * 150 if form != tarfile.USTAR_FORMAT else "link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("last.txt"))
    with tarfile.open(path) as archive:
        wanted = [(m.name, m.offset_data, m.size) for m in archive if m.isreg()]
    assert [(m.name, m.offset, m.size) for m in members(path)] == wanted
    whole = path.read_bytes()
    for member in members(path):
        if member.name in files:
            assert whole[member.offset : member.offset + member.size] == files[member.name]


@given(cut=st.integers(0, 1))
def test_an_archive_without_its_end_is_still_read(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = write_tar(tmp_path_factory.mktemp("cut") / "a.tar", {"a.txt": b"1", "b.txt": b"2"})
    path.write_bytes(path.read_bytes()[: 2048 + 512 * cut])  # two files, and no or one block of zeros
    assert [m.name for m in members(path)] == ["a.txt", "b.txt"]


@given(data=st.data())
def test_damage_anywhere_never_gives_what_lies_outside(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    """Whatever bytes are changed or cut, members lie inside the file, and nothing but TarDamagedError is raised."""
    path = write_tar(tmp_path_factory.mktemp("fuzz") / "a.tar", examples(0, 2), tarfile.PAX_FORMAT)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    path.write_bytes(raw)
    found = []
    try:
        for member in members(path):
            found.append(member)
    except TarDamagedError:
        pass
    assert all(0 <= m.offset <= m.offset + m.size <= len(raw) for m in found)


def test_a_sum_of_signed_bytes_is_also_one(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"ü.txt": b"1"})
    raw = bytearray(path.read_bytes())
    high = sum(byte > 127 for byte in raw[:512])
    assert high
    raw[148:156] = b"%06o\0 " % (int(raw[148:154], 8) - 256 * high)
    path.write_bytes(raw)
    assert [m.name for m in members(path)] == ["ü.txt"]


@pytest.mark.parametrize("size", [b"\x80" + bytes(3) + b"\xff" * 8, b"\xff" * 12, b"77777777777\0", b"-0000000001\0"])
def test_false_sizes_end_the_archive(tmp_path: Path, size: bytes) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.txt": b"1", "b.txt": b"2"})
    raw = bytearray(path.read_bytes())
    raw[1024 + 124 : 1024 + 136] = size
    raw[1024 + 148 : 1024 + 156] = b" " * 8
    raw[1024 + 148 : 1024 + 156] = b"%06o\0 " % sum(raw[1024:1536])
    path.write_bytes(raw)
    found = []
    with pytest.raises(TarDamagedError):
        found.extend(member.name for member in members(path))
    assert found == ["a.txt"]


# --- examples ------------------------------------------------------------------------------------------------------


def test_shards_read_as_the_folder_they_were_made_from(tmp_path: Path, shards: Path) -> None:
    folder = good_folder(tmp_path / "folder", 12)
    lines = ({"file_name": f"{n:03d}.png", "text": f"number {n}", "label": n % 3} for n in range(12))
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    indices = torch.tensor([11, 0, 5, 5, 7, 2])
    for options in ({}, {"crop": "random", "flip": True}):
        a = ImageFolder(folder, 16, **options).batch(indices, plain(6, 3))
        b = WebShards(shards, 16, **options).batch(indices, plain(6, 3))
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert a.captions == b.captions == tuple(f"number {n}" for n in indices.tolist())


def test_any_order_reads_what_the_order_of_files_reads(shards: Path) -> None:
    source = WebShards(shards, 24)
    whole = source.batch(torch.arange(12), plain(12))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    mixed = WebShards(shards, 24, workers=1).batch(order, plain(12))
    assert torch.equal(mixed.images, whole.images[order])
    assert [source.name(i) for i in (0, 4, 11)] == [
        "train-000000.tar/000",
        "train-000001.tar/004",
        "train-000002.tar/011",
    ]


def test_a_pattern_a_folder_and_a_list_mean_the_same(shards: Path) -> None:
    names = sorted(shards.iterdir())
    (shards / "notes.txt").write_text("x")
    pattern = str(shards / "train-{000000..000002}.tar")
    prints = {WebShards(form, 24).fingerprint() for form in (shards, str(shards), pattern, names)}
    assert len(prints) == 1
    assert len(WebShards(names[1], 24)) == 4
    assert WebShards(names[1], 24).fingerprint() not in prints


def test_braces() -> None:
    assert list(braces("a-{08..11}.tar")) == [f"a-{n:02d}.tar" for n in range(8, 12)]
    assert list(braces("{a,b}-{0..1}")) == ["a-0", "a-1", "b-0", "b-1"]
    assert list(braces("plain.tar")) == ["plain.tar"]


def test_json_says_captions_and_labels(tmp_path: Path) -> None:
    files = {}
    for n in range(3):
        said = json.dumps({"caption": f"c{n}", "label": n})
        files |= {f"{n}.jpg": stored(painted(n), "JPEG"), f"{n}.json": said.encode()}
    batch = WebShards(write_tar(tmp_path / "a.tar", files), 24).batch(torch.tensor([2, 1]), plain(2))
    assert batch.captions == ("c2", "c1")
    assert batch.labels.tolist() == [2, 1]


def test_names_group_up_to_the_first_dot_and_hints_have_names(tmp_path: Path) -> None:
    files = {
        "__index__": b"",
        "v1.0/a.JPG": stored(painted(0), "JPEG"),
        "v1.0/a.edges.png": stored(painted(7)),
        "v1.0/b.png": stored(painted(1)),
        "v1.0/b.edges.png": stored(painted(8)),
        "v1.0/c.txt": b"no image",
        "v1.0/d.png": stored(painted(2)),
    }
    path = write_tar(tmp_path / "a.tar", files)
    source = WebShards(path, 24, hints=("edges",))
    assert [source.name(i) for i in range(len(source))] == ["a.tar/v1.0/a", "a.tar/v1.0/b"]
    assert source.incomplete == 2
    hint = source.batch(torch.tensor([1]), plain(1)).hints["edges"]
    assert (hint[0, 0] * 255).round().byte().numpy().tobytes() == painted(8).convert("L").tobytes()
    assert len(WebShards(path, 24)) == 3


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_images_are_skipped_as_in_a_folder(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for n, (name, data) in enumerate(sorted(damaged().items())):
        files |= {f"{n:03d}x.{name.split('.')[1]}": data, f"{n:03d}y.png": stored(painted(n))}
    files |= {f"9{n:02d}.png": stored(painted(n)) for n in range(6)}
    source = WebShards(write_tar(tmp_path / "a.tar", files), 24)
    batch = source.batch(torch.arange(len(source)), plain(len(source)))
    for index in range(0, 2 * len(damaged()), 2):
        assert torch.equal(batch.images[index], batch.images[index + 1])
    assert len(source.unreadable) == len(damaged())
    assert set(source.unreadable) == {f"a.tar/{n:03d}x" for n in range(len(damaged()))}


def test_examples_that_lack_a_caption_or_have_a_bad_class_are_skipped(tmp_path: Path) -> None:
    files = examples(0, 6)
    del files["001.txt"]
    files["003.cls"] = b"minus one"
    files["004.txt"] = b"\xff\xfe"
    source = WebShards(write_tar(tmp_path / "a.tar", files), 24)
    batch = source.batch(torch.arange(6), plain(6))
    assert batch.captions == tuple(f"number {n}" for n in (0, 2, 2, 5, 5, 5))
    assert sorted(source.unreadable) == ["a.tar/001", "a.tar/003", "a.tar/004"]


def test_of_a_truncated_shard_the_rest_is_used_and_named(shards: Path, caplog) -> None:
    path = shards / "train-000001.tar"
    with tarfile.open(path) as archive:
        end = archive.getmember("006.png").offset_data + 100
    path.write_bytes(path.read_bytes()[:end])
    source = WebShards(shards, 24)
    assert len(source) == 10  # 006 and 007 are lost
    assert list(source.damaged) == ["train-000001.tar"]
    assert "train-000001.tar" in caplog.text
    batch = source.batch(torch.arange(10), plain(10))
    assert batch.captions == tuple(f"number {n}" for n in (0, 1, 2, 3, 4, 5, 8, 9, 10, 11))
    assert len(source.unreadable) == 0


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda d: d / "gone.tar", "data-missing"),
        (lambda d: str(d / "train-{000000..000003}.tar"), "data-missing"),
        (lambda d: str(d / "train-{3..0}.tar"), "data-shards"),
        (lambda d: str(d / "{0..99999}{0..99999}.tar"), "data-shards"),
        (lambda d: d / "empty", "data-empty"),
        (lambda d: [], "data-empty"),
        (lambda d: d / "none.tar", "data-empty"),
        (lambda d: d / "text.tar", "data-empty"),
        (lambda d: d / "a.tar.gz", "data-shards"),
        (lambda d: [d / "none.tar"] * 2, "data-shards"),
        (lambda d: d / "twice.tar", "data-damaged"),
    ],
)
def test_bad_shards_are_one_line(shards: Path, make, code: str) -> None:
    (shards / "empty").mkdir()
    (shards / "a.tar.gz").write_bytes(b"\x1f\x8b")
    (shards / "text.tar").write_text("not an archive")
    write_tar(shards / "none.tar", {"a.txt": b"only words"})
    write_tar(shards / "twice.tar", {"a.png": b"1", "a.PNG": b"2"})
    with pytest.raises(PellucidError) as error:
        WebShards(make(shards), 24)
    assert error.value.code == code
    assert "\n" not in str(error.value)


def test_a_config_opens_the_shards(shards: Path) -> None:
    assert len(WebShardsConfig(str(shards / "train-{000000..000001}.tar"), 16).open()) == 8
