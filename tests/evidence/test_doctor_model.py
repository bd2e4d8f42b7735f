"""Checks that run the model: overflow and the first module that breaks, the scale of training, drift, adapters."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import believers
import exact_pipelines as exact
import numpy as np
import pytest
import small_denoisers as small
import tiny_scenes
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import pellucid
from pellucid.cli import app
from pellucid.core import schedule as schedules
from pellucid.core.schedule import Level
from pellucid.evidence.doctor.checks import Finding, examine, named
from pellucid.evidence.doctor.detectors import SpreadObserver, drift_findings, training_scale
from pellucid.evidence.doctor.probe import probe_of
from pellucid.evidence.doctor.ranges import HALF, watch_modules
from pellucid.evidence.doctor.subject import KnownImages, Subject, UnsupportedCheck, of_pipeline
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.request import Lora


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_scenes.write_model(tmp_path_factory.mktemp("bundle") / "tiny")


def opened(bundle: Path, dtype: str | None = None) -> Pipeline:
    return pellucid.load(bundle, dtype=dtype, device="cpu")


def only(found: Any) -> Finding:
    (one,) = found
    return one  # type: ignore[no-any-return]


def findings(name: str, subject: Subject) -> list[Finding]:
    """Those of one check."""
    (check,) = named([name])
    return check.run(subject)


# --- overflow -----------------------------------------------------------------------------------------------------


def test_a_sound_model_is_left_alone(bundle: Path) -> None:
    for dtype in (None, "float16", "bfloat16"):
        assert findings("overflow", of_pipeline(opened(bundle, dtype))) == []


def test_the_first_module_that_overflows_float16_is_named(bundle: Path) -> None:
    """The module, what it would have made in float32, and the way out."""
    pipe = opened(bundle, "float16")
    pipe.components.network.mid_block.resnets[0].conv1.weight.data.fill_(3e4)
    found = only(findings("overflow", of_pipeline(pipe)))
    assert found.code == "float16-overflow"
    facts = dict(found.evidence)
    assert facts["module"] == "unet.mid_block.resnets.0.conv1"
    assert facts["dtype"] == "float16"
    assert facts["largest number in float32"] > HALF  # type: ignore[operator]
    assert "bfloat16" in found.fix
    # the same weights in a wider dtype are well, so that the cure is one
    wide = opened(bundle)
    wide.components.network.mid_block.resnets[0].conv1.weight.data.fill_(3e4)
    assert {one.severity for one in findings("overflow", of_pipeline(wide))} <= {"note"}


def test_weights_that_are_not_finite_are_named_by_their_module(bundle: Path) -> None:
    pipe = opened(bundle)
    pipe.components.network.down_blocks[0].resnets[0].conv2.weight.data[0, 0, 0, 0] = torch.nan
    found = only(findings("overflow", of_pipeline(pipe)))
    assert found.code == "module-not-finite"
    assert dict(found.evidence)["module"] == "unet.down_blocks.0.resnets.0.conv2"
    assert "1 numbers of its own weights" in found.cause


def test_a_text_encoder_that_breaks_is_named_before_the_denoiser(bundle: Path) -> None:
    pipe = opened(bundle)
    pipe.components.text_encoders[0].get_submodule(last_linear(pipe.components.text_encoders[0])).bias.data[0] = (
        math.inf
    )
    found = only(findings("overflow", of_pipeline(pipe)))
    assert str(dict(found.evidence)["module"]).startswith("text_encoder.")


def last_linear(network: nn.Module) -> str:
    return [
        name for name, module in network.named_modules() if isinstance(module, nn.Linear) and module.bias is not None
    ][-1]


def test_numbers_that_grew_too_large_are_followed_back(bundle: Path) -> None:
    pipe = opened(bundle)
    pipe.components.network.mid_block.attentions[0].proj_in.weight.data.mul_(1e30)
    found = only(findings("overflow", of_pipeline(pipe)))
    assert found.code == "module-not-finite"
    assert "unet.mid_block.attentions.0.proj_in makes numbers beyond" in found.cause


def test_code_between_modules_is_blamed_on_its_owner() -> None:
    """A division in a forward is no module: the one that holds it is named."""

    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = self.first(x)
            return self.second(made / (made - made))

    network = Divides()
    with torch.no_grad(), watch_modules({"net": network}) as watch:
        network(torch.ones(1, 4))
    assert watch.first is not None
    assert watch.first.path == "net"
    assert watch.first.between
    assert not network._forward_hooks  # and nothing is left behind


# --- scale --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0.3, 0.7, 1.0, 2.0])
def test_the_scale_of_training_is_measured(times: float) -> None:
    """Data that are `times` too large must be multiplied by 1 / `times`, to a tenth."""
    seen = training_scale(believers.probe(("scaled_linear", "v"), scale=times, count=16))
    assert seen.factor == pytest.approx(1 / times, rel=0.1)
    assert seen.interval.low <= 1.05 / times
    assert seen.interval.high >= 0.95 / times


# --- drift --------------------------------------------------------------------------------------------------------


def spread(*ratios: float) -> SpreadObserver:
    """A run whose x has so many times the spread of its levels, for data of spread 0.5."""
    levels = [Level(math.cos(u), math.sin(u)) for u in torch.linspace(1.4, 0, len(ratios)).tolist()]
    chance = 1 + 0.03 * torch.randn(len(ratios), 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = [math.hypot(0.5 * level.alpha, level.sigma) * times for level, times in zip(levels, ratios, strict=True)]
    return SpreadObserver(levels, [size * row for size, row in zip(sizes, chance, strict=True)])


def test_a_run_that_keeps_its_spread_is_left_alone() -> None:
    assert list(drift_findings(spread(1, 1.05, 1.1, 1.2), 0.5)) == []


def test_a_run_that_grows_or_shrinks_is_told_with_the_step_where_it_begins() -> None:
    grown = only(drift_findings(spread(1, 1.1, 1.4, 2), 0.5))
    assert "strong" in grown.cause
    assert dict(grown.evidence)["first step that is off"] == 3
    shrunk = only(drift_findings(spread(1, 1, 0.7, 0.4), 0.5))
    assert "weak" in shrunk.cause


# --- adapters -----------------------------------------------------------------------------------------------------


def worn(bundle: Path, *given: Any, folder: bool = False) -> list[Finding]:
    subject = of_pipeline(opened(bundle))
    subject = replace(subject, adapters=given) if given else subject
    return findings("adapters", replace(subject, folder=bundle, index={}) if folder else subject)


def test_a_lora_that_acts_is_left_alone(bundle: Path) -> None:
    assert worn(bundle, Lora(bundle / "lora")) == []


def test_a_lora_at_scale_0_is_told(bundle: Path) -> None:
    found = only(worn(bundle, Lora(bundle / "lora", 0.0)))
    assert found.code == "adapter-no-effect"
    assert "scale" in found.cause


def renamed(bundle: Path, folder: Path, change: Any) -> Path:
    (file,) = (bundle / "lora").glob("*.safetensors")
    save_file(dict(change(*pair) for pair in load_file(file).items()), folder / "other.safetensors")
    return folder / "other.safetensors"


def test_a_lora_whose_keys_fit_nothing_is_told(bundle: Path, tmp_path: Path) -> None:
    other = renamed(bundle, tmp_path, lambda key, value: (key.replace("blocks", "blobs"), value))
    found = only(worn(bundle, Lora(other)))
    assert found.code == "adapter-no-effect"
    assert "keys for layers" in found.cause


def test_a_lora_of_zeros_is_told(bundle: Path, tmp_path: Path) -> None:
    zeros = renamed(bundle, tmp_path, lambda key, value: (key, torch.zeros_like(value)))
    found = only(worn(bundle, Lora(zeros)))
    assert found.code == "adapter-no-effect"
    assert "zero" in found.cause


def with_keys(bundle: Path, file: Path, **more: torch.Tensor) -> Path:
    (lora,) = (bundle / "lora").glob("*.safetensors")
    save_file({**load_file(lora), **more}, file)
    return file


def test_tokens_of_a_lora_are_not_another_base(bundle: Path, tmp_path: Path) -> None:
    width = opened(bundle).components.text_encoders[0].config.hidden_size
    rows = torch.randn(2, width)
    kinds: dict[str, dict[str, torch.Tensor]] = {
        "words": {"<s1>": rows[0].clone(), "<s2>": rows[1].clone()},
        "rows": {"clip_l": rows},
        "bundle": {"bundle_emb.mine.string_to_param.*": rows},
    }
    for name, more in kinds.items():
        assert worn(bundle, Lora(with_keys(bundle, tmp_path / f"{name}.safetensors", **more))) == []
    found = only(worn(bundle, Lora(with_keys(bundle, tmp_path / "wide.safetensors", clip_l=torch.randn(2, width + 1)))))
    assert found.code == "adapter-misfit"
    assert "textual inversion '<s0>'" in found.cause
    assert f"{width} wide" in found.cause


def test_a_lora_that_fits_in_part_is_told(bundle: Path, tmp_path: Path) -> None:
    half = renamed(bundle, tmp_path, lambda key, value: (key.replace("up_blocks", "up_blobs"), value))
    found = only(worn(bundle, Lora(half)))
    assert found.code == "adapter-keys-unused"
    assert found.severity == "warning"
    assert dict(found.evidence)["share"] > 0.05  # type: ignore[operator]


def test_adapters_of_a_bundle_that_were_never_trained_are_told(bundle: Path) -> None:
    """A new ControlNet adds nothing; the LoRA beside it was moved, and acts."""
    found = worn(bundle, folder=True)
    assert ["ControlNet controlnet" in one.title for one in found if "ControlNet" in one.title] == [True]
    assert not [one for one in found if "LoRA" in one.title]
    assert "never trained" in next(one.cause for one in found if "ControlNet" in one.title)


def test_no_adapter_is_no_verdict(bundle: Path) -> None:
    with pytest.raises(UnsupportedCheck, match="no adapter"):
        worn(bundle)


# --- trained models -----------------------------------------------------------------------------------------------

CHECKS = ("overflow", "target", "schedule", "scale of training", "drift")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted([*small.PIXELS, *small.LATENTS]))
def test_a_trained_model_is_healthy(name: str, small_denoisers: small.Small) -> None:
    """But for drift: the images of so small a network may end washed out, and of x0 they do."""
    report = examine(small_denoisers.subject(name), named([one for one in CHECKS if one != "drift"]))
    assert report.findings == (), report.text()
    assert report.skipped == (), report.text()


@pytest.mark.slow
def test_a_wrong_scaling_factor_is_measured(small_denoisers: small.Small) -> None:
    for times in (0.4, 2.5):
        subject = small_denoisers.subject("latent-eps")
        assert subject.pipeline is not None
        vae = subject.pipeline.components.vae
        assert vae is not None
        right = vae.config.scaling_factor
        vae.config = replace(vae.config, scaling_factor=right * times)
        found = only(findings("scale of training", subject))
        assert found.code == "latent-scale"
        assert dict(found.evidence)["factor at which the network denoises best"] == pytest.approx(1 / times, rel=0.25)
        assert f'"scaling_factor": {right * times * training_scale(probe_of(subject, 16)).factor:.3g}' in found.fix


@pytest.mark.slow
def test_predictions_that_are_too_weak_are_not_healthy(small_denoisers: small.Small) -> None:
    subject = small_denoisers.subject("v-cosine")
    assert subject.pipeline is not None
    assert findings("drift", subject) == []
    with torch.no_grad():
        for parameter in subject.pipeline.components.network.conv_out.parameters():
            parameter.mul_(0.5)
    assert examine(replace(subject), named(CHECKS)).status == 1  # a new subject: nothing is kept of before


@pytest.mark.slow
def test_real_networks_of_cifar_are_healthy(cifar_runs: list[Path], cifar: Path) -> None:
    for folder in cifar_runs:
        report = examine(small.cifar_subject(folder, cifar), named(CHECKS))
        assert report.findings == (), report.text()
        assert report.skipped == (), report.text()


def test_data_of_one_image_is_no_verdict(bundle: Path) -> None:
    subject: Subject = of_pipeline(opened(bundle), data=KnownImages(torch.rand(1, 3, 16, 16)))
    report = examine(subject)
    skipped = dict(report.skipped)
    assert "too few" in skipped["target"]
    assert "too few" in skipped["scale of training"]


# --- the command ---------------------------------------------------------------------------------------------------


def ask(*args: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *args], prog_name="pellucid", env={"COLUMNS": "200"})


def test_a_check_that_is_asked_for_must_be_possible(bundle: Path) -> None:
    """Of an untrained network the target is not told without data; asked for by name that is bad input, in one line."""
    answer = ask(str(bundle), "--device", "cpu", "--only", "target")
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert "target" in answer.stderr
    assert "denoises no built-in image; give --data of its kind" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert dict(examine(of_pipeline(opened(bundle))).skipped)["drift"].startswith("no data")


def test_one_check_alone(bundle: Path) -> None:
    answer = ask(str(bundle), "--device", "cpu", "--only", "overflow", "--json")
    assert answer.exit_code == 0
    told = json.loads(answer.stdout)
    assert told["checked"] == ["overflow"]
    assert told["skipped"] == []


def test_an_unknown_check_is_refused_with_the_nearest(bundle: Path) -> None:
    answer = ask(str(bundle), "--only", "targets")
    assert answer.exit_code == 2
    assert "target" in answer.stderr


def test_an_untrained_model_is_told_from_data(bundle: Path) -> None:
    answer = ask(str(bundle), "--device", "cpu", "--data", "scenes", "--only", "target", "--json")
    assert answer.exit_code == 1
    assert [one["code"] for one in json.loads(answer.stdout)["findings"]] == ["denoises-nothing"]


LINEAR = np.linspace(1e-4, 0.02, 1000)
OWN = {
    "steeper": schedules.make("linear", beta_end=0.05),
    "reversed": schedules.trained(LINEAR[::-1].copy()),
    "constant": schedules.trained(np.full(1000, 0.01)),
}


@pytest.mark.parametrize("said", ["linear", "cosine"])
@pytest.mark.parametrize("name", OWN)
def test_betas_of_its_own_are_not_taken_for_another_scale_or_schedule(name: str, said: str) -> None:
    """They look like another scale at some levels, and like the nearest schedule at others."""
    subject = exact.subject(said)
    assert subject.pipeline is not None
    network: Any = subject.pipeline.components.network
    network.believer = replace(network.believer, schedule=OWN[name])
    report = examine(subject, named(("schedule", "scale of training")))
    assert [finding.code for finding in report.findings] == ["schedule-unknown"], report.text()
