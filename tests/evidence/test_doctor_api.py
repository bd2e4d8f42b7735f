"""`pellucid.doctor`: a network of one's own, a loaded model and a folder; the folder as the command has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import believers
import exact_pipelines as exact
import pytest
import tiny_scenes
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import pellucid
from pellucid import PellucidError, schedules
from pellucid.cli import app

ASKED = {"target", "schedule", "scale of training", "drift"}
DATA = believers.probe(("cosine", "v"), count=32).clean


def network(x: Tensor, time: Tensor) -> Tensor:
    """The best denoiser of DATA, trained for v on the cosine schedule, that takes whole times alone."""
    whole = time.round().long()
    return believers.Believer(believers.images_of(), schedules.make("cosine"), "v")(x, whole)


def test_a_network_with_its_right_labels_is_healthy() -> None:
    report = pellucid.doctor(network=network, schedule="cosine", target="v", data=DATA)
    assert set(report.checked) >= ASKED, report.text()
    assert (report.verdict, report.findings, report.subject) == ("healthy", (), "network")


def test_a_network_with_wrong_labels_is_named() -> None:
    """The target is eps where nothing is said."""
    report = pellucid.doctor(network=network, schedule="linear", data=DATA)
    titles = {finding.code: finding.title for finding in report.findings}
    assert set(titles) == {"target-mismatch", "schedule-mismatch"}
    assert "predicts the velocity (v)" in titles["target-mismatch"]
    assert "trained on the schedule cosine" in titles["schedule-mismatch"]
    assert (report.verdict, report.status) == ("not healthy", 1)
    assert {finding.fix for finding in report.findings} == {
        'Pass target="v" with the network.',
        'Pass schedule="cosine" with the network.',
    }


def test_data_of_another_scale_are_found() -> None:
    report = pellucid.doctor(network=network, schedule="cosine", target="v", data=DATA * 2.5)
    assert "data-scale" in [finding.code for finding in report.findings], report.text()


def test_a_run_that_leaves_the_range_of_the_data_is_found_and_clipping_is_named() -> None:
    """A network for eps that is too weak where there is much noise, and exact below."""
    subject = exact.subject("linear", gain=0.3)
    assert subject.pipeline is not None
    assert subject.data is not None
    alone = subject.pipeline.components.network
    report = pellucid.doctor(network=alone, schedule="linear", data=subject.data.pixels * 2 - 1)
    (found,) = report.findings
    assert found.code == "scale-drift", report.text()
    assert "x0_filter=pellucid.Clip(1.0)" in found.fix


def test_few_images_are_no_verdict() -> None:
    report = pellucid.doctor(network=network, schedule="cosine", target="v", data=DATA[:1])
    assert report.verdict == "no fault found; NOT checked: target, schedule"


def test_a_folder_is_answered_as_by_the_command(tmp_path: Path) -> None:
    """And a loaded pipeline is asked the same of its network."""
    bundle, data = str(tiny_scenes.write_model(tmp_path / "tiny")), tmp_path / "images"
    data.mkdir()
    for number in range(2):
        Image.linear_gradient("L").rotate(90 * number).resize((16, 16)).convert("RGB").save(data / f"{number}.png")
    args = ["doctor", bundle, "--data", str(data), "--steps", "20", "--device", "cpu", "--json"]
    found = pellucid.doctor(bundle, data=data, steps=20, device="cpu")
    assert json.loads(json.dumps(found.to_dict())) == json.loads(CliRunner().invoke(app, args).stdout)
    loaded = pellucid.doctor(pellucid.load(bundle, device="cpu"), data=data, steps=20)
    assert [one for one in found.findings if one.code == "denoises-nothing"] == [
        one for one in loaded.findings if one.code == "denoises-nothing"
    ]
    assert "denoises-nothing" in {one.code for one in loaded.findings}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "model or network must be given; got none of them."),
        ({"model": "scenes-128", "network": network}, "model or network must be given; got both."),
        ({"model": "scenes-128", "target": "v"}, "schedule and target must come with network"),
        ({"model": "scenes-128", "data": DATA}, 'data must be a folder or "scenes" with a model'),
        ({"network": network, "data": DATA}, "schedule must be that of the network's training; got nothing."),
        ({"network": network, "schedule": "cosine"}, "data must be clean images (N, C, H, W)"),
        ({"network": network, "schedule": "cosine", "data": torch.zeros(4, 3)}, "got (4, 3)"),
        ({"network": network, "schedule": "cosine", "target": "flow", "data": DATA}, "target must be one that"),
        ({"network": network, "schedule": "cosine", "data": DATA, "steps": 4}, "steps must come with a model"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PellucidError) as refused:
        pellucid.doctor(**asked)
    assert words in str(refused.value)
