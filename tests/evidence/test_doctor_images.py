"""What the doctor reads in images: true scenes are left alone, and each way of spoiling them is told by its cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from spoilt_images import COUNT, as_bytes, blurred, clipped, drawn, noisy, swapped, tiled, true, write
from torch import Tensor
from typer.testing import CliRunner

from pellucid.cli import app
from pellucid.evidence.doctor.checks import Report, examine
from pellucid.evidence.doctor.subject import KnownImages, Subject
from pellucid.evidence.metrics.images import Pixels, folder_of
from pellucid.pipeline.images import to_images
from pellucid.train.cifar10 import CIFAR10

CHECKS = ("sharpness", "noise", "saturation", "seams", "bleeding")


def look(pixels: Tensor, *, reference: bool = False) -> Report:
    data = KnownImages(true(COUNT, 500)) if reference else None
    return examine(Subject("images", images=Pixels(as_bytes(pixels)), data=data))


@pytest.mark.parametrize("reference", [False, True])
def test_true_images_are_left_alone(reference: bool) -> None:
    report = look(true(), reference=reference)
    assert report.findings == (), report.text()
    assert set(CHECKS) - {"bleeding"} <= set(report.checked)


def test_photographs_are_left_alone(cifar: Path) -> None:
    report = examine(Subject("photographs", images=Pixels(CIFAR10.read(cifar, "test").images[:256])))
    assert report.findings == (), report.text()


SPOILT: list[tuple[str, Callable[[Tensor], Tensor], bool]] = [
    ("low-sharpness", lambda x: blurred(x, 2.0), False),
    ("low-sharpness", lambda x: blurred(x, 1.0), True),
    ("residual-noise", lambda x: noisy(x, 0.05), False),
    ("residual-noise", lambda x: noisy(x, 0.015), True),
    ("oversaturated-images", clipped, False),
    ("tile-seams", tiled, False),
]


@pytest.mark.parametrize(("code", "spoil", "reference"), SPOILT)
def test_a_spoilt_image_is_told(code: str, spoil: Callable[[Tensor], Tensor], reference: bool) -> None:
    """Each alone, and nothing else; a small fault needs images to compare with."""
    report = look(spoil(true()), reference=reference)
    assert [finding.code for finding in report.findings] == [code], report.text()
    assert report.status == 1


def test_the_period_of_the_tiles_is_measured() -> None:
    (found,) = look(tiled(true())).findings
    assert dict(found.evidence)["period in pixels"] == 64


def test_colours_on_the_wrong_object_are_told(tmp_path: Path) -> None:
    """Where the files say what was asked for, and of scenes alone."""
    told = drawn(objects=(2,))
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    right = examine(Subject("right", images=folder_of(write(tmp_path / "right", told, told, 4.0))))
    assert right.findings == (), right.text()
    assert {"bleeding", "as asked"} <= set(right.checked)
    wrong = examine(Subject("wrong", images=folder_of(write(tmp_path / "wrong", swapped(told), told, 15.0))))
    (found,) = wrong.findings
    assert found.code == "colour-bleeding"
    assert "guidance 15" in found.cause
    assert dict(found.evidence)["share"] > 0.5  # type: ignore[operator]


def test_images_that_do_not_show_what_was_asked_for_are_told(tmp_path: Path) -> None:
    """Pictures of other prompts, whose colours are right by chance at most."""
    told = drawn(objects=(1,))
    shown = told[[*range(1, len(told)), 0]]
    report = examine(Subject("other", images=folder_of(write(tmp_path, shown, told, 4.0))))
    (found,) = report.findings
    assert found.code == "not-as-asked"
    facts = dict(found.evidence)
    assert facts["share"] < 0.2  # type: ignore[operator]
    assert facts["guidance scale"] == 4.0


def test_where_the_truth_is_not_known_bleeding_is_not_judged() -> None:
    skipped = dict(look(true()).skipped)
    assert "truth" in skipped["bleeding"]
    assert "truth" in skipped["as asked"]


def test_small_images_are_not_judged() -> None:
    skipped = dict(examine(Subject("small", images=Pixels(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)))).skipped)
    assert all("16 pixels" in skipped[name] for name in ("sharpness", "noise", "saturation", "seams"))


def test_images_are_compared_with_data_on_the_command_line(tmp_path: Path) -> None:
    """Scenes that are a little soft are told only where there are sharp ones to compare with."""
    for i, image in enumerate(to_images(2 * blurred(true(8), 1.0) - 1)):
        image.save(tmp_path / f"{i}.png")
    for args, code in (([], 0), (["--data", "scenes"], 1)):
        answer = CliRunner().invoke(app, ["doctor", "--images", str(tmp_path), "--only", "sharpness", *args])
        assert answer.exit_code == code, answer.output
        assert ("low-sharpness" in answer.stdout) == bool(code)
