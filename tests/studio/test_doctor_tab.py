"""The tab Doctor: what is brought, what is refused, and findings as cards, the gravest first."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from PIL import Image
from tiny_models import saved

from pellucid.core.errors import Cancelled, PellucidError
from pellucid.evidence.doctor.checks import Finding, Report
from pellucid.evidence.doctor.subject import of_pipeline
from pellucid.evidence.trace.recorder import Recorder
from pellucid.pipeline.load import load
from pellucid.studio import doctor_tab as tab
from pellucid.studio import form
from pellucid.studio.doctor_tab import CONFIG, IMAGES, MODEL, TRACE, DoctorForm, DoctorTab
from pellucid.studio.form import Shelf
from pellucid.studio.visitors import Job, Sessions

ME: Any = SimpleNamespace(session_hash="me")
SICK = {
    "_class_name": "DDIMScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": True,
    "no_such_key": 3,
}


def folder(name: str = "ddpm") -> str:
    return str(saved(name)[1])


def image(path: Path, size: tuple[int, int] = (32, 32)) -> str:
    Image.linear_gradient("L").resize(size).convert("RGB").save(path)
    return str(path)


# --- what is computed --------------------------------------------------------------------------------------------


def test_a_model_is_read_without_its_weights(tmp_path: Path) -> None:
    job = Job()
    report = tab.examined(DoctorForm(MODEL, folder()), tmp_path, job)
    assert report.subject == folder()
    assert report.checked
    assert any("weights were not asked for" in why for _, why in report.skipped)
    assert report.verdict == "no fault found; NOT checked: target, schedule"
    assert job.reports.get() == ("opening …", 0.0)
    assert job.reports.get()[0].startswith("1 of ")


def test_the_weights_are_run_where_they_are_asked_for(tmp_path: Path) -> None:
    quick = tab.examined(DoctorForm(MODEL, folder()), tmp_path, Job())
    report = tab.examined(DoctorForm(MODEL, folder(), weights=True, steps=3), tmp_path, Job())
    assert len(report.checked) > len(quick.checked)


def test_a_sick_config_pasted_or_sent(tmp_path: Path) -> None:
    pasted = tab.examined(DoctorForm(CONFIG, pasted=json.dumps(SICK)), tmp_path, Job())
    assert [finding.code for finding in pasted.findings][:2] == ["eps-zero-snr", "unknown-key"]
    assert pasted.subject == "the pasted config"
    file = tmp_path / "scheduler_config.json"
    file.write_text(json.dumps(SICK))
    sent = tab.examined(DoctorForm(CONFIG, config=str(file)), tmp_path, Job())
    assert sent.findings == pasted.findings
    assert sent.subject == "scheduler_config.json"


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.trace.safetensors"
    with Recorder(path) as recorder:
        load(folder(), device="cpu")(n=1, seed=1, steps=2, observers=(recorder,))
    report = tab.examined(DoctorForm(TRACE, trace=str(path)), tmp_path, Job())
    assert report.checked
    assert report.subject == path.name


def test_images(tmp_path: Path) -> None:
    sent = [image(tmp_path / f"{number}.png") for number in range(3)]
    report = tab.examined(DoctorForm(IMAGES, images=sent), tmp_path, Job())
    assert report.subject == "3 images"
    assert report.checked
    again = tab.examined(DoctorForm(IMAGES, images=sent[:1]), tmp_path, Job())  # nothing of before is left
    assert again.subject == "1 image"
    assert len(list((tmp_path / "doctor" / "pictures").iterdir())) == 1


@pytest.mark.parametrize(
    ("patient", "start"),
    [
        (DoctorForm(MODEL, None), "model must be a folder"),
        (DoctorForm(MODEL, "missing"), "model must be a folder"),
        (DoctorForm(CONFIG), "config must be pasted, or uploaded"),
        (DoctorForm(CONFIG, pasted='{"_class_name": '), "config must be JSON"),
        (DoctorForm(CONFIG, pasted="[" * 100_000), "config must be nested at most 64 deep"),
        (DoctorForm(CONFIG, pasted="[1]"), "config must be a JSON object"),
        (DoctorForm(CONFIG, pasted=" " * 9 + "1" * (tab.MOST_WORDS + 1)), "config must be at most"),
        (DoctorForm(TRACE), "trace must be a file"),
        (DoctorForm(IMAGES), "images must be from 1 to 64"),
        (DoctorForm(IMAGES, images=["a.png"] * 65), "images must be from 1 to 64"),
        (DoctorForm(IMAGES, images=["a.exe"]), "image must be a file that ends in"),
        (DoctorForm("a ghost"), "what to look at must be one of"),
        (DoctorForm(MODEL, "MODEL", steps=0), "steps must be a whole number"),
        (DoctorForm(MODEL, "MODEL", sampler="oiler"), "sampler"),
    ],
)
def test_what_is_refused(patient: DoctorForm, start: str, tmp_path: Path) -> None:
    if patient.model == "MODEL":
        patient = DoctorForm(MODEL, folder(), steps=patient.steps, sampler=patient.sampler)
    if start == "sampler":  # the doctor says so among what was not checked, and goes on
        assert "oiler" in tab.cards(tab.examined(patient, tmp_path, Job()))
        return
    with pytest.raises(PellucidError, match=f"^{start}"):
        tab.examined(patient, tmp_path, Job())


def test_of_what_is_no_folder_of_images_the_data_box_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("secret")
    (tmp_path / "made.npz").write_bytes(b"PK")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "metadata.jsonl").write_text("secret")
    said = set()
    for name in ("missing", "empty", "notes.txt", "made.npz", "bad", "x" * 5000, "\0"):
        with pytest.raises(PellucidError) as found:
            tab.examined(DoctorForm(MODEL, folder(), data=str(tmp_path / name)), tmp_path, Job())
        said.add(re.sub("'.*'", "THAT", str(found.value)))
    assert said == {"data must be scenes or a folder of images; got THAT."}


def test_a_folder_of_images_is_data(tmp_path: Path) -> None:
    image(tmp_path / "one.png")
    given = DoctorForm(MODEL, folder(), data=str(tmp_path)).given(tmp_path)
    assert (given.data, given.quick) == (str(tmp_path), False)
    assert DoctorForm(MODEL, folder(), data="scenes").given(tmp_path).data == "scenes"


def test_a_image_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MOST_PIXELS", 32 * 32)
    with pytest.raises(PellucidError, match=r"large.png must be at most"):
        tab.examined(DoctorForm(IMAGES, images=[image(tmp_path / "large.png", (64, 64))]), tmp_path, Job())


def test_a_cancelled_examination_ends(tmp_path: Path) -> None:
    job = Job()
    job.cancel()
    with pytest.raises(Cancelled):
        tab.examined(DoctorForm(MODEL, folder()), tmp_path, job)


def test_a_long_check_ends_amid_its_work() -> None:
    job, pipe = Job(), load(folder(), device="cpu")
    tab.stoppable(of_pipeline(pipe), job)
    pipe(n=1, seed=1, steps=1)
    job.cancel()
    with pytest.raises(Cancelled):
        pipe(n=1, seed=1, steps=1)


# --- what is shown -----------------------------------------------------------------------------------------------


def finding(severity: Any) -> Finding:
    return Finding("some-code", severity, f"a {severity} <b>", (("share", 0.123456),), "because", "do this")


def test_the_gravest_come_first_with_numbers_cause_and_fix() -> None:
    shown = tab.cards(Report((finding("note"), finding("error"), finding("warning")), ("one",)))
    places = [shown.find(f"finding-{severity}") for severity in ("error", "warning", "note")]
    assert -1 not in places
    assert places == sorted(places)
    assert "a error &lt;b&gt;" in shown
    for words in ("share = 0.1235", "because", "do this"):
        assert words in shown
    assert "Healthy" not in shown


def test_what_was_not_checked_is_not_green() -> None:
    """The verdict is the command's; a model that was not asked is shown as a warning is."""
    quick = tab.cards(Report((), ("one",), unchecked=("target", "schedule")))
    assert "<b>No fault found; NOT checked: target, schedule.</b>" in quick
    assert "#188a3b" not in quick
    assert tab.COLOURS["warning"] in quick
    assert "Healthy" not in quick


def test_healthy_is_said_plainly() -> None:
    skipped = (("trace", "no trace: give --trace FILE"), ("config", "the subject is not a scheduler"))
    shown = tab.cards(Report((), ("one", "two"), skipped))
    assert "<b>Healthy.</b> 2 checks found nothing wrong." in shown
    assert "#188a3b" in shown  # green
    assert "not checked: trace" in shown
    assert "1 more checks are for other subjects" in shown
    assert "Healthy" in tab.cards(Report((finding("note"),), ("one",)))


# --- the page ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> Iterator[DoctorTab]:
    sessions = Sessions()

    async def built() -> DoctorTab:  # outside of a loop Gradio makes one, and never closes it
        with gr.Blocks(analytics_enabled=False):
            return DoctorTab(Shelf(device="cpu"), sessions, gr.Dropdown(), gr.State(""))

    yield asyncio.run(built())
    sessions.end_all()


def controls(pasted: str = "") -> list[Any]:
    return [False, pasted, None, None, None, "none", 30, form.OWN, form.OWN]


def test_the_page_ends_with_the_verdict(page: DoctorTab) -> None:
    *_, (said, shown) = page.examine(ME, CONFIG, "", *controls(json.dumps(SICK)))
    assert "not healthy; 1 error, 1 warning" in said
    assert "finding-error" in shown
    assert page.cancel(ME) == gr.skip()


def test_bad_input_keeps_what_is_shown(page: DoctorTab) -> None:
    seen: list[Any] = []
    with pytest.raises(gr.Error, match="config must be JSON"):
        seen.extend(shown for _, shown in page.examine(ME, CONFIG, "", *controls("{")))
    assert all(shown == gr.skip() for shown in seen)
