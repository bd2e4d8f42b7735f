"""Every lab: its page runs and keeps its promises, its starter is not written yet, a right answer passes."""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path

import page_run
import pytest

from pellucid.labs import process, script
from pellucid.labs.answers import Outcome, checks_of, judged
from pellucid.labs.catalog import LABS, Lab

ANSWERS = Path(__file__).parent / "answers"
HEADINGS = ["What to notice", "What goes wrong", "Say it in an interview", "Your turn", "Further reading"]
every = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that run beside other tests do not fight for cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def functions(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]


def gaps(path: Path) -> list[str]:
    """The functions of a starter that are to be written."""
    nodes = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in nodes if "raise NotImplementedError" in ast.unparse(node)]


def marked(lab: Lab, path: Path) -> list[Outcome]:
    """All checks in this process: each of them in a process of its own would import torch anew."""
    return [judged(check, path) for check in checks_of(lab)]


# --- the page ----------------------------------------------------------------------------------------------------


@every
def test_a_page_runs_in_its_small_size(lab: Lab, tmp_path: Path) -> None:
    shown = page_run.run(lab.page, tmp_path)
    assert shown[-1].error is None
    assert len(shown) == shown[-1].count
    assert sum(len(block.figures) for block in shown) >= 1
    assert any(block.printed for block in shown)


@pytest.mark.slow
@every
def test_a_page_runs_in_its_full_size(lab: Lab) -> None:
    """A minute is the promise on two free cores; tests beside it take some."""
    begun = time.monotonic()
    shown = list(process.run_page(lab.page))
    assert shown[-1].error is None
    assert time.monotonic() - begun < 180


@every
def test_a_page_has_its_parts(lab: Lab) -> None:
    source = lab.page.read_text("utf-8")
    blocks = script.parse(source)
    first = blocks[0].text
    assert first.splitlines()[0] == f"Lab {lab.code}: {lab.title}"
    for word in ("Question", "Handbook", "Mechanism"):
        assert f"**{word}" in first
    assert f":doc:`/handbook/{lab.section}`" in first
    assert "math" in first
    text = "\n".join(block.text for block in blocks)
    found = [line for line, under in zip(text.splitlines(), text.splitlines()[1:], strict=False) if is_line(under)]
    assert [line for line in found if line in HEADINGS] == HEADINGS
    assert f"pellucid lab {lab.code} --starter" in text
    assert f"pellucid lab {lab.code} --check" in text
    assert source.split("What goes wrong")[1].count("assert ") >= 2
    assert "few(" in source


def is_line(under: str) -> bool:
    return bool(re.fullmatch(r"-{3,}", under))


# --- the starter, and answers ------------------------------------------------------------------------------------


@every
def test_a_starter_is_not_written_yet(lab: Lab) -> None:
    assert 2 <= len(gaps(lab.starter)) <= 5
    found = marked(lab, lab.starter)
    assert len(found) >= 3
    assert {one.verdict for one in found} == {"not written yet"}


@every
def test_a_right_answer_passes(lab: Lab) -> None:
    found = marked(lab, ANSWERS / f"{lab.stem}.py")
    assert [(one.verdict, one.sentence) for one in found] == [("passed", "")] * len(found)


@every
def test_no_function_of_an_answer_can_be_left_out(lab: Lab, tmp_path: Path) -> None:
    """Each gap is looked at by some check: with nothing in its place, not all of them pass."""
    right = (ANSWERS / f"{lab.stem}.py").read_text("utf-8")
    for name in gaps(lab.starter):
        assert name in functions(ANSWERS / f"{lab.stem}.py")
        path = tmp_path / f"{name}.py"
        path.write_text(f"{right}\n\ndef {name}(*given, **named):\n    return None\n", "utf-8")
        assert any(judged(check, path).verdict != "passed" for check in checks_of(lab)), name


WRONG = [
    ("01", "(1 - betas).cumprod(0)", "betas.cumprod(0)", "a step keeps 1 − β"),
    ("01", "(1 - beta) ** 0.5 * x + beta**0.5 * z", "(1 - beta) * x + beta * z", "variances add"),
    ("01", "bar.sqrt() * x0 + (1 - bar).sqrt() * eps", "bar * x0 + (1 - bar) * eps", "without their roots"),
    ("01", "alpha_bar / (1 - alpha_bar)", "(alpha_bar / (1 - alpha_bar)).sqrt()", "the root of it"),
    ("03", "round(num_train - i * num_train / steps) - 1", "i * num_train // steps", "times must begin"),
    (
        "03",
        "((1 - alpha_bar[time]) / alpha_bar[time]) ** 0.5",
        "(1 - alpha_bar[time]) ** 0.5",
        "in Euler's space α is 1",
    ),
    ("03", "x / (1 + sigma**2) ** 0.5", "x", "trained on spread 1"),
    ("03", "x + (after - sigma) *", "x + (sigma - after) *", "σ' is the smaller one"),
    ("11", "uncond, cond = both", "cond, uncond = both", "the halves are swapped"),
    ("11", "both.chunk(2)", "both[::2], both[1::2]", "not interleaved"),
    ("11", "row.level.alpha * x - row.level.sigma * v", "row.level.alpha * x + row.level.sigma * v", "check the sign"),
    ("11", "row), *history)", "row), *history[::-1])", "put the newest first"),
    ("15", "in enumerate(weights)", "in enumerate([weights[0]] * len(weights))", "the weights of the first"),
    ("15", "wait + sum(", "sum(", "the wait is left out"),
    ("15", "max(fit, key=lambda size: size / seconds[size], default=0)", "max(fit, default=0)", "slower by more"),
    ("15", "if not full or", "if True or", "keep one for short requests"),
    ("15", "request.arrived + 4 * request.calls", "request.calls", "Who has waited long must come before"),
    ("15", "sum(request.calls > SHORT for request in running)", "len(running)", "Count the long ones that run"),
    ("15", "if len(running) == capacity:", "if False:", "all are taken"),
]


@pytest.mark.parametrize(("code", "right", "wrong", "hint"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_answer_gets_the_hint_of_its_mistake(
    code: str, right: str, wrong: str, hint: str, tmp_path: Path
) -> None:
    lab = next(lab for lab in LABS if lab.code == code)
    source = (ANSWERS / f"{lab.stem}.py").read_text("utf-8")
    assert right in source
    path = tmp_path / "answer.py"
    path.write_text(source.replace(right, wrong), "utf-8")
    said = [one.sentence for one in marked(lab, path) if one.verdict == "wrong"]
    assert any(hint in sentence for sentence in said), said
