"""The doctor's framework, and what its checks claim of schedulers, held against diffusers itself."""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from published import CONFIGS, SD15, SD21_V, SDXL

from pellucid import PellucidError, compile_plan
from pellucid.core.plan import Plan, deviation, landings
from pellucid.evidence.doctor import checks, scheduler_configs
from pellucid.evidence.doctor.checks import REPORT_FORMAT, Check, Finding, Report, check, every, examine
from pellucid.evidence.doctor.probe import open_data
from pellucid.evidence.doctor.ranges import spread_of
from pellucid.evidence.doctor.subject import (
    NEEDS,
    RunSpec,
    Subject,
    SubjectSpec,
    UnsupportedCheck,
    of_config,
    of_name,
    open_subject,
)
from pellucid.interop.diffusers_classes import CLASSES, KNOWN


def finding(severity: Any = "note", code: str = "a-code", **changes: Any) -> Finding:
    made = Finding(code, severity, "a title", (("size", 0.123456), ("name", "x")), "a cause", "a fix")
    return replace(made, **changes)


def found(config: dict[str, Any], code: str, **asked: Any) -> Finding:
    """The one finding of that code."""
    report = examine(of_config(config, RunSpec(**asked)))
    (hit,) = [one for one in report.findings if one.code == code]
    return hit


def facts(hit: Finding) -> dict[str, Any]:
    return dict(hit.evidence)


# --- findings and reports --------------------------------------------------------------------------------------


def test_a_report_says_the_gravest_first_and_ends_with_its_status() -> None:
    subject = Subject("thing")
    grave = [Check("a", lambda _: [finding("note", "one"), finding("error", "two"), finding("warning", "three")])]
    report = examine(subject, grave)
    assert [one.code for one in report.findings] == ["two", "three", "one"]
    assert report.status == 1
    assert examine(subject, [Check("a", lambda _: [finding()])]).status == 0
    assert examine(subject, []).status == 0


def test_a_report_as_text_and_as_json() -> None:
    report = Report((finding("error"),), ("a", "b"), (("c", "no data"), ("d", "no data")), "thing")
    lines = report.text().splitlines()
    assert lines[0] == "error[a-code] a title"
    assert lines[1].split(maxsplit=1) == ["evidence", "size = 0.1235; name = x"]
    assert "thing: not healthy; 1 error; 2 checks." in lines
    assert lines[-1].strip() == "not checked: c, d (no data)"
    held = json.loads(json.dumps(report.to_dict()))
    assert held["format"] == REPORT_FORMAT
    assert held["status"] == 1
    assert held["findings"][0]["evidence"] == {"size": 0.123456, "name": "x"}
    assert held["skipped"] == [{"check": "c", "why": "no data"}, {"check": "d", "why": "no data"}]


@pytest.mark.parametrize("changes", [{"code": "Not A Code"}, {"severity": "fatal"}])
def test_a_finding_has_a_code_and_a_severity(changes: dict[str, str]) -> None:
    with pytest.raises(PellucidError) as error:
        finding(**changes)  # type: ignore[arg-type]
    assert error.value.code == "finding"


def test_checks_are_registered_once_and_need_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS", {})
    check("mine")(lambda subject, plan: [])
    assert checks.CHECKS["mine"].needs == ("plan",)
    with pytest.raises(PellucidError, match="a name of its own"):
        check("mine")(lambda _: [])
    with pytest.raises(PellucidError, match="needs of other must be among"):
        check("other")(lambda subject, luck: [])


def test_what_cannot_run_is_skipped_with_the_reason() -> None:
    def unable(subject: Subject) -> list[Finding]:
        raise UnsupportedCheck("it is too dark")

    def refused(subject: Subject) -> list[Finding]:
        raise PellucidError("the network takes no such input", "shape")

    seen: list[int] = []
    report = examine(
        Subject("thing", absent={"plan": "the schedule is broken"}),
        [
            Check("a", lambda subject, plan, data: []),
            Check("b", unable),
            Check("c", lambda _: []),
            Check("d", refused),
        ],
        lambda: seen.append(1),
    )
    assert report.checked == ("c",)
    assert report.skipped == (
        ("a", f"the schedule is broken; {NEEDS['data']}"),
        ("b", "it is too dark"),
        ("d", "the network takes no such input"),
    )
    assert len(seen) == 4


def test_every_need_is_a_field_of_a_subject() -> None:
    assert all(hasattr(Subject("thing"), need) for need in NEEDS)
    assert {need for one in every() for need in one.needs} <= set(NEEDS)


def codes_in_the_source() -> set[str]:
    """The first argument of every Finding that a check makes, where it is written out."""
    found = set()
    for path in Path(checks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding" and node.args:
                code = node.args[0]
                sides = [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]
                found |= {side.value for side in sides if isinstance(side, ast.Constant)}
    return {str(code) for code in found}


def test_every_finding_is_in_the_table_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([a-z0-9-]+)`", "\n".join(re.findall(r"^\| `.*$", page, re.MULTILINE))))
    assert len(codes_in_the_source()) > 40
    assert codes_in_the_source() <= listed


# --- what the checks claim, by diffusers -----------------------------------------------------------------------


def run_in_diffusers(config: dict[str, Any], steps: int) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """(scheduler, x before each step, x after each step), every prediction being that of one known point."""
    scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
    scheduler.set_timesteps(steps)
    point = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    x = torch.ones((1, 1, 1, 1), dtype=torch.float64)
    before, after = [], []
    for time in scheduler.timesteps:
        level = scheduler.alphas_cumprod[time.long()].double()
        eps = (x - level.sqrt() * point) / (1 - level).sqrt()
        before.append(x)
        x = scheduler.step(eps, time, x).prev_sample
        after.append(x)
    return scheduler, before, after


def test_the_last_step_that_goes_nowhere_goes_nowhere_in_diffusers() -> None:
    config = {**SD15, "_class_name": "DEISMultistepScheduler", "use_karras_sigmas": True}
    hit = found(config, "repeated-last-sigma", steps=10)
    scheduler, before, after = run_in_diffusers(config, 10)
    assert torch.allclose(before[-1], after[-1], atol=1e-6)
    assert not torch.allclose(before[-2], after[-2], atol=1e-3)
    sigmas = scheduler.sigmas.tolist()
    assert sigmas[-1] == sigmas[-2]
    assert facts(hit)["sigma / alpha after"] == pytest.approx(sigmas[-1], rel=1e-4)  # float32 betas
    assert not any(one.code == "repeated-last-sigma" for one in examine(of_config(SDXL, RunSpec())).findings)


@pytest.mark.parametrize(("spacing", "steps", "severity"), [("linspace", 8, "warning"), ("trailing", 30, "note")])
def test_rows_that_miss_their_level_miss_it_in_diffusers(spacing: str, steps: int, severity: str) -> None:
    """x of one point at the level before each call, against the level of the time that the network is told."""
    config = {**SD21_V, "prediction_type": "epsilon", "timestep_spacing": spacing}
    hit = found(config, "previous-step", steps=steps)
    scheduler = diffusers.DDIMScheduler.from_config(config)
    scheduler.set_timesteps(steps)
    levels = scheduler.alphas_cumprod.double()
    signal, noise = levels[scheduler.timesteps[0]].sqrt(), (1 - levels[scheduler.timesteps[0]]).sqrt()
    gaps = []
    for time in scheduler.timesteps.tolist():
        gaps.append(float(max(abs(signal - levels[time].sqrt()), abs(noise - (1 - levels[time]).sqrt()))))
        zero, one = torch.zeros(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, 1, dtype=torch.float64)
        root, rest = levels[time].sqrt(), (1 - levels[time]).sqrt()
        # the step is linear: of the point alone (x = signal·1), and of the noise alone (x = noise·1)
        signal = scheduler.step((signal * one - root) / rest, time, signal * one).prev_sample.squeeze()
        noise = scheduler.step(noise * one / rest + zero, time, noise * one).prev_sample.squeeze()
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    assert hit.severity == severity
    assert facts(hit)["off by, of x"] == pytest.approx(gaps[worst], rel=1e-3)
    assert facts(hit)["worst row"] == worst


def test_landings_are_the_deviation_row_by_row() -> None:
    plan = compile_plan("ddim", grid="linspace", steps=8, dialect="diffusers")
    assert max(gap for gap, _ in landings(plan)) == deviation(plan)[0] > 0.01
    assert len(landings(plan)) == plan.nfe + 1


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("DDIMScheduler", "use_karras_sigmas", True),
        ("PNDMScheduler", "rescale_betas_zero_snr", True),
        ("EulerAncestralDiscreteScheduler", "use_karras_sigmas", True),
        ("LMSDiscreteScheduler", "rescale_betas_zero_snr", True),
    ],
)
def test_a_key_that_is_not_heard_changes_nothing_in_diffusers(name: str, key: str, value: Any) -> None:
    config = {**SD15, "_class_name": name}
    hit = found({**config, key: value}, "unheard-key")
    assert key in hit.title
    with_it, without = (getattr(diffusers, name).from_config(c) for c in ({**config, key: value}, config))
    for scheduler in (with_it, without):
        scheduler.set_timesteps(10)
    assert with_it.timesteps.tolist() == without.timesteps.tolist()
    assert torch.equal(with_it.alphas_cumprod, without.alphas_cumprod)
    able = hit.fix.split('"')[3]
    assert key in CLASSES[able][1]


def test_schedulers_that_are_not_read_are_those_of_diffusers() -> None:
    theirs = {name for name in dir(diffusers.schedulers) if name.endswith("Scheduler") and name[0] != "_"}
    assert set(scheduler_configs.ELSEWHERE) == theirs - set(CLASSES)


CLASSES_OF_BETAS = [
    name for name in CLASSES if "Parallel" not in name and {"beta_schedule", "prediction_type"} <= set(CLASSES[name][1])
]


@pytest.mark.parametrize("name", [name for name in CLASSES_OF_BETAS if name != "DDIMInverseScheduler"])
@pytest.mark.parametrize("base", [SD15, SDXL, SD21_V], ids=["sd15", "sdxl", "sd21-v"])
def test_a_scheduler_made_from_a_published_config_is_healthy(name: str, base: dict[str, Any]) -> None:
    """The swap that everybody makes; also with the sigmas of Karras, but for the class whose last step is then null."""
    for more in ({}, {"use_karras_sigmas": True}):
        if more and ("use_karras_sigmas" not in CLASSES[name][1] or name == "DEISMultistepScheduler"):
            continue
        config = json.loads(getattr(diffusers, name).from_config(base, **more).to_json_string())
        for steps in (20, 30):
            report = examine(of_config(config, RunSpec(steps=steps)))
            assert report.status == 0, report.text()


@pytest.mark.parametrize("steps", [4, 8, 20, 25, 28, 50])
def test_published_configs_are_healthy_at_any_usual_number_of_steps(steps: int) -> None:
    for name, config in CONFIGS.items():
        report = examine(of_config(config, RunSpec(steps=steps)))
        assert report.status == 0, f"{name}\n{report.text()}"


def test_severity_follows_what_was_measured() -> None:
    """One key, two numbers of steps: 50 divide the times, 8 do not by far."""
    config = {**SD21_V, "timestep_spacing": "trailing"}
    codes = {one.code for one in examine(of_config(config, RunSpec(steps=50))).findings}
    assert "previous-step" not in codes
    small, large = (
        facts(found({**SD21_V, "timestep_spacing": "linspace"}, "previous-step", steps=n)) for n in (100, 8)
    )
    assert small["off by, of x"] < 0.01 < large["off by, of x"]


def test_numbers_of_the_zero_snr_finding() -> None:
    hit = found({**SDXL, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}, "eps-zero-snr")
    assert facts(hit) == {"alpha at the last time": 0.0, "beta at the last time": 1.0}
    assert hit.severity == "error"
    faint = found({"_class_name": "EulerDiscreteScheduler", "beta_schedule": "squaredcos_cap_v2"}, "eps-faint-signal")
    alpha = diffusers.EulerDiscreteScheduler(beta_schedule="squaredcos_cap_v2").alphas_cumprod[-1].double().sqrt()
    assert facts(faint)["error of x0 for one of eps"] == pytest.approx(1 / float(alpha), rel=1e-3)


def test_a_named_sampler_is_judged_and_not_the_config() -> None:
    config = {**SD21_V, "timestep_spacing": "linspace"}
    assert examine(of_config(config, RunSpec(steps=10))).status == 1
    assert examine(of_config(config, RunSpec(steps=10, sampler="ddim", grid="linspace"))).status == 0


# --- subjects --------------------------------------------------------------------------------------------------


def test_a_config_from_a_file_a_folder_and_a_dict(tmp_path: Path) -> None:
    (tmp_path / "scheduler_config.json").write_text(json.dumps(SD15), encoding="utf-8")
    reports = [examine(of_config(where, RunSpec())) for where in (SD15, tmp_path, tmp_path / "scheduler_config.json")]
    reports.append(examine(of_name(str(tmp_path / "scheduler_config.json"), RunSpec(), SubjectSpec())))
    assert len({one.findings for one in reports}) == 1


def test_an_a1111_image_is_judged_by_its_own_words(tmp_path: Path) -> None:
    text = "a star\nSteps: 20, Sampler: Euler a, CFG scale: 18, Seed: 1, Size: 512x512, Model: gone, Mystery: 7"
    info = PngInfo()
    info.add_text("parameters", text)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    subject = open_subject(SubjectSpec(model=str(tmp_path / "a.png")))
    assert (subject.run.steps, subject.run.sampler, subject.run.dialect) == (20, "euler_a", "k-diffusion")
    report = examine(subject)
    assert {one.code: one.severity for one in report.findings} == {"guidance-high": "warning", "recipe-unread": "note"}
    assert facts(report.findings[1]) == {"Mystery": "7"}


def test_a_plan_file_is_judged_by_its_rows(tmp_path: Path) -> None:
    plan = compile_plan("euler", grid="karras", steps=6)
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    subject = open_subject(SubjectSpec(model=str(tmp_path / "plan.json")))
    assert isinstance(subject.plan, Plan)
    assert examine(subject).status == 0


@pytest.mark.parametrize(
    ("given_", "code"),
    [
        (SubjectSpec(), "usage"),
        (SubjectSpec(model="x", config="y"), "usage"),
        (SubjectSpec(model="no/such/folder/at/all"), "not-found"),
        (SubjectSpec(config="missing.json"), "config-file"),
        (SubjectSpec(images="missing"), "not-found"),
    ],
)
def test_what_is_no_subject_is_refused(given_: SubjectSpec, code: str) -> None:
    with pytest.raises(PellucidError) as error:
        open_subject(given_)
    assert error.value.code == code


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1, 2", encoding="utf-8")
    (tmp_path / "b.json").write_text("[1, 2]", encoding="utf-8")
    (tmp_path / "c.json").write_text('{"some": "thing"}', encoding="utf-8")
    Image.new("RGB", (8, 8)).save(tmp_path / "d.png")
    for name in ("a.json", "b.json", "c.json", "d.png", "."):
        with pytest.raises(PellucidError):
            open_subject(SubjectSpec(model=str(tmp_path / name)))


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2000), st.floats(-1e3, 1e3), st.sampled_from(["zero", "linear", "x", ""]),
    st.lists(st.floats(0, 1), max_size=4),
)  # fmt: skip


@given(
    name=st.sampled_from(sorted(CLASSES)),
    more=st.dictionaries(st.sampled_from([*sorted(KNOWN), "mystery"]), VALUES, max_size=4),
    steps=st.integers(1, 60),
)
def test_no_config_makes_the_doctor_fail(name: str, more: dict[str, Any], steps: int) -> None:
    report = examine(of_config({**SD15, **more, "_class_name": name}, RunSpec(steps=steps)))
    assert all(one.evidence and one.cause and one.fix for one in report.findings)
    json.dumps(report.to_dict())


# --- data ------------------------------------------------------------------------------------------------------


def test_known_images_are_cut_to_the_size_that_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(5):
        Image.new("RGB", (40, 20 + number), (255, 0, 0)).save(tmp_path / "a" / f"{number}.png")
    for where, count in ((str(tmp_path / "a"), 3), ("scenes", 4)):
        data = open_data(where, 16, count)
        assert data.pixels.shape == (count, 3, 16, 16)
        assert 0 <= float(data.pixels.min()) <= float(data.pixels.max()) <= 1
    assert open_data(str(tmp_path / "a"), 16).pixels[:, 0].allclose(torch.ones(5, 16, 16))
    assert data.captions is not None
    assert len(data.captions) == 4


def test_the_interval_of_the_spread_holds_the_truth() -> None:
    """Of 40 sets of 16 normal images of spread 1.1, nearly all intervals hold it, and each holds its own."""
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for _ in range(40):
        found = spread_of(1.1 * torch.randn(16, 4, 8, 8, generator=generator))
        spread, low, high = found.value, found.low, found.high
        assert low <= spread <= high
        assert high - low < 0.1
        hits += low <= 1.1 <= high
    assert hits >= 36
    assert math.isclose(spread_of(torch.ones(4, 1, 2, 2)).value, 0.0)
