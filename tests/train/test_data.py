"""CIFAR-10's binary form, and the order of the data: each example once an epoch, at any step, on any ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid import PellucidError
from pellucid.train.cifar10 import CIFAR10, FILES, IN_FILE, RECORD, CIFAR10Source
from pellucid.train.draws import Draws, Order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official layout with made-up pixels."""
    base = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin"
    base.mkdir()
    random = np.random.default_rng(0)
    for name in (*FILES["train"], *FILES["test"]):
        records = random.integers(0, 256, (IN_FILE, RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(base / name)
    return base.parent


def test_records_are_read_as_they_are_written(folder: Path) -> None:
    train, test = CIFAR10.read(folder), CIFAR10.read(folder, "test")
    assert (len(train), len(test)) == (50_000, 10_000)
    raw = np.fromfile(folder / "cifar-10-batches-bin" / "data_batch_3.bin", np.uint8).reshape(-1, RECORD)
    number = 2 * IN_FILE + 17
    assert int(train.labels[number]) == raw[17, 0]
    assert train.images[number, 0, 0, 5] == raw[17, 1 + 5]  # red, first row
    assert train.images[number, 2, 31, 31] == raw[17, -1]  # blue, last pixel
    found = CIFAR10Source(train, flip=False).batch(torch.tensor([number, 3]), Draws(0, 0, 2), torch.device("cpu"))
    images, labels = found.images, found.labels
    assert images.shape == (2, 3, 32, 32)
    assert float(images[0, 2, 31, 31]) == pytest.approx(raw[17, -1] / 127.5 - 1, abs=1e-6)
    assert labels.tolist() == [raw[17, 0], int(train.labels[3])]
    assert float(images.min()) >= -1.0
    assert float(images.max()) <= 1.0


def test_flips_are_by_chance_and_by_address() -> None:
    """About half of the images are mirrored, and the same ones in whatever parts they come."""
    data = CIFAR10(torch.randint(0, 256, (64, 3, 4, 4), dtype=torch.uint8), torch.arange(64) % 10)
    plain, flipped = CIFAR10Source(data, flip=False), CIFAR10Source(data)
    indices, device = torch.arange(64).flip(0), torch.device("cpu")
    straight = plain.batch(indices, Draws(3, 5, 64), device).images
    whole = flipped.batch(indices, Draws(3, 5, 64), device)
    parts = [flipped.batch(part, Draws(3, 5, 64, i, 4), device).images for i, part in enumerate(indices.split(16))]
    assert torch.equal(torch.cat(parts), whole.images)
    assert torch.equal(whole.labels, indices % 10)
    mirrored = (whole.images == straight.flip(3)).flatten(1).all(1)
    assert torch.equal(whole.images[~mirrored], straight[~mirrored])
    assert 16 <= int(mirrored.sum()) <= 48  # 4 deviations of 64 fair coins


def test_a_missing_or_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    for code, make in (
        ("data-missing", lambda: CIFAR10.read(tmp_path)),
        ("data-split", lambda: CIFAR10.read(folder, "x")),
    ):
        with pytest.raises(PellucidError) as error:
            make()
        assert error.value.code == code
    whole = (folder / "cifar-10-batches-bin" / "test_batch.bin").read_bytes()
    for damage in (whole[:-1], b"\xff" + whole[1:]):
        (tmp_path / "test_batch.bin").write_bytes(damage)
        with pytest.raises(PellucidError, match=r"test_batch\.bin") as error:
            CIFAR10.read(tmp_path, "test")
        assert error.value.code == "data-damaged"


@given(count=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 2**63 - 1))
def test_every_example_comes_once_an_epoch(count: int, batch: int, seed: int) -> None:
    order = Order(count, batch, seed)
    stream = torch.cat([order.step(step) for step in range(3 * count // batch + 2)]).tolist()
    for epoch in range(3):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(ranks=st.sampled_from([1, 2, 3, 6]), step=st.integers(0, 200))
def test_ranks_share_what_one_would_see(ranks: int, step: int) -> None:
    order = Order(25, 12, 4)
    parts = torch.cat([order.step(step, rank, ranks) for rank in range(ranks)])
    assert torch.equal(parts, order.step(step))


def test_epochs_and_seeds_differ() -> None:
    first, second = Order(100, 100, 0).step(0), Order(100, 100, 0).step(1)
    other = Order(100, 100, 1).step(0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: Order(0, 4), "data-empty"),
        (lambda: Order(4, 0), "batch"),
        (lambda: Order(10, 5).step(0, 0, 2), "batch-parts"),
    ],
)
def test_bad_input_is_one_line(make, code: str) -> None:
    with pytest.raises(PellucidError) as error:
        make()
    assert error.value.code == code
