"""diffusers' own scheduler tests, run on `pellucid.Scheduler`: at least 95 % of what we do not refuse must pass.

The tests are not ours and not in this repository. DIFFUSERS_TESTS names a checkout (or its `tests` folder); an editable
install is found by itself. Their tests run twice, on their classes and on ours: only what passes on theirs is counted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import diffusers
import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "refused.md"
ENOUGH = 0.95
# The beginning of a test id → the heading of docs/refused.md that says why we do not run it.
REFUSED = {
    r"(DDIM|DDIMInverse|DDIMParallel|DDPM|DDPMParallel|LCM|TCD)SchedulerTest::test_betas": "Betas beyond 1",
    r"DDIM(Inverse|Parallel)?SchedulerTest::test_rescale_betas_zero_snr": "Epsilon at zero terminal SNR",
    r"PNDMSchedulerTest::test_(betas|prediction_type|schedules|step_shape|steps_offset)": "PNDM out of its order",
    r"PNDMSchedulerTest::test_(inference_steps|time_indices|timesteps)": "PNDM out of its order",
    r"DPMSolver(Multistep|Singlestep)SchedulerTest::test_lambda_min_clipped": "A clipped λ",
    r"DPMSolverSDESchedulerTest::test_full_loop": "Noise from a Brownian tree",
    r"IPNDMSchedulerTest::test_full_loop_no_noise": "A step after the last",
    r"IPNDMSchedulerTest::test_trained_betas": "Betas for iPNDM",
    r"EDMEulerSchedulerTest::test_prediction_type": "EDM's v with another sigma_data",
    r"EDMDPMSolverMultistepSchedulerTest::test_(prediction_type|thresholding|full_loop_with_v_prediction)": (
        "EDM's v with another sigma_data"
    ),
}


def folder() -> Path | None:
    """Where diffusers' scheduler tests are, if anywhere."""
    asked = os.environ.get("DIFFUSERS_TESTS")
    roots = [Path(asked)] if asked else [Path(diffusers.__file__).parents[2]]
    places = [root / part for root in roots for part in ("tests/schedulers", "schedulers", ".")]
    return next((p for p in places if (p / "test_schedulers.py").is_file()), None)


def outcomes(tests: Path, of: str, report: Path) -> dict[str, bool]:
    """Test id → whether it passed; skipped tests are left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "diffusers_suite", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["--tb=no", "--junitxml", str(report), "--rootdir", str(tests), "-c", os.devnull, str(tests)]
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "SUITE_OF": of, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tests.parents[1], env=env, capture_output=True, text=True, timeout=900)
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
        if case.find("skipped") is None:
            found[name] = case.find("failure") is None and case.find("error") is None
    return found


def is_refused(name: str) -> bool:
    return any(re.match(pattern, name) for pattern in REFUSED)


@pytest.mark.slow
@pytest.mark.skipif(folder() is None, reason="no copy of diffusers' tests: set DIFFUSERS_TESTS to a checkout")
def test_their_tests_pass_on_our_scheduler(tmp_path: Path) -> None:
    tests = folder()
    assert tests is not None
    theirs, ours = (outcomes(tests, of, tmp_path / f"{of}.xml") for of in ("theirs", "ours"))
    counted = sorted(name for name, passed in theirs.items() if passed)
    assert len(counted) > 300, "most of their tests must run here, else the part says little"
    refused = [name for name in counted if is_refused(name)]
    wanted = [name for name in counted if not is_refused(name)]
    failed = [name for name in wanted if not ours.get(name, False)]
    part = 1 - len(failed) / len(wanted)
    print(f"\n{len(counted)} tests pass on diffusers' classes; {len(refused)} of them are refused by design;")
    print(
        f"{len(wanted) - len(failed)} of the other {len(wanted)} pass on ours ({part:.1%}). Failed:",
        *failed,
        sep="\n  ",
    )
    assert part >= ENOUGH
    stale = [name for name in refused if ours.get(name, False)]
    assert not stale, f"refused by the list, but they pass: {stale}"


def test_every_refusal_is_explained_on_its_page() -> None:
    headings = set(re.findall(r"^#+ (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(REFUSED.values()) <= headings
