"""Answers that are checked beside us: right, wrong, broken, endless, and files that are none."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pellucid.core.errors import Cancelled, PellucidError
from pellucid.labs import answers
from pellucid.labs.catalog import find

LAB = find("01")
RIGHT = Path(__file__).parent / "answers" / f"{LAB.stem}.py"
LIGHT = Path(__file__).parent / "light"
LIGHT_RIGHT = """
def alpha_bar(betas): return 1 - betas
def stepped(x): return x / 2
def noised(x): return x + 1
def snr(x): return x * x
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lab 01 the processes check numbers alone, and do not import torch."""
    paths = [str(LIGHT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def written(folder: Path, source: str) -> Path:
    path = folder / "answer.py"
    path.write_text(source, "utf-8")
    return path


def test_a_right_answer_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = answers.check(LAB, written(tmp_path, RIGHT.read_text("utf-8")))
    assert [one.verdict for one in found] == ["passed"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["answer.py"]


def test_each_check_has_its_own_verdict(tmp_path: Path) -> None:
    source = RIGHT.read_text("utf-8")
    source = source.replace("(1 - betas).cumprod(0)", "1 - betas")  # wrong
    source = source.replace("return (1 - beta) ** 0.5 * x", "print('look', beta)\n    raise NotImplementedError\n    x")
    source = source.replace("def snr", "def ratio")  # missing
    source = source.replace("alpha_bar[times]", "alpha_bar[times.missing]")  # an error, on a line
    first, second, third, fourth = answers.check(LAB, written(tmp_path, source))
    assert first.verdict == "wrong"
    assert "take the product of all up to it" in first.sentence
    assert (second.verdict, second.printed) == ("not written yet", "look 0.02\n")
    assert third.verdict == "error"
    line = source.splitlines().index("    bar = alpha_bar[times.missing].view(-1, 1, 1, 1)") + 1
    assert third.sentence == f"AttributeError: 'Tensor' object has no attribute 'missing' (answer.py, line {line})"
    assert fourth.verdict == "error"
    assert fourth.sentence == "the answer must have snr, as the starter has; it has none"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nonsense", "NameError: name 'nonsense' is not defined (answer.py, line 1)"),
        ("import sys\nsys.exit(0)", "SystemExit: 0 (answer.py, line 2)"),
        ("import os\nos._exit(0)", "the answer ended its process"),
        ("def alpha_bar(betas):\n    return alpha_bar(betas)", "RecursionError"),
    ],
)
@pytest.mark.usefixtures("light")
def test_an_answer_that_breaks_is_an_error_and_no_more(tmp_path: Path, source: str, sentence: str) -> None:
    found = answers.check(LAB, written(tmp_path, source))
    assert len(found) == 4
    assert {one.verdict for one in found} == {"error"}
    assert sentence in found[0].sentence
    assert "\n" not in found[0].sentence


def test_an_answer_has_limits_on_memory_and_files(tmp_path: Path) -> None:
    greedy = """
import torch
def alpha_bar(*given): return torch.ones(2**36)
def stepped(*given): return bytearray(2**33)
def noised(*given): open("large", "wb").write(bytes(2**27))
def snr(*given): return [open("/dev/null") for _ in range(999)]
"""
    found = answers.check(LAB, written(tmp_path, greedy))
    memory = "the answer must take at most 4 GiB of memory; it asked for more"
    file = "the answer must write at most 64 MiB to a file; it wrote more"
    assert [one.sentence for one in found[:3]] == [memory, memory, file]
    assert "Too many open files" in found[3].sentence


@pytest.mark.usefixtures("light")
def test_shared_memory_counts_too(tmp_path: Path) -> None:
    found = answers.check(LAB, written(tmp_path, "import mmap\nheld = mmap.mmap(-1, 12 * 2**30)"))
    assert {one.sentence for one in found} == {"the answer must take at most 4 GiB of memory; it asked for more"}


@pytest.mark.usefixtures("light")
def test_an_answer_runs_in_an_empty_folder_of_its_own_which_goes(tmp_path: Path) -> None:
    looks = (
        "import os, stat, tempfile\nhere = os.getcwd()\nassert tempfile.gettempdir() == here\n"
        "raise ValueError(here + ' ' + oct(stat.S_IMODE(os.stat(here).st_mode)) + ' ' + str(os.listdir()))"
    )
    where, mode, held = answers.check(LAB, written(tmp_path, looks))[0].sentence.split()[1:4]
    assert (mode, held) == ("0o700", "[]")
    assert not Path(where).exists()


@pytest.mark.usefixtures("light")
def test_what_an_answer_prints_is_kept_apart_and_cut(tmp_path: Path) -> None:
    noisy = "import os\nprint('x' * 10**6)\nos.write(1, b'not json')\n" + LIGHT_RIGHT
    found = answers.check(LAB, written(tmp_path, noisy))
    assert [one.verdict for one in found] == ["passed"] * 4
    assert len(found[0].printed) < 5000


@pytest.mark.usefixtures("light")
def test_an_endless_answer_ends(tmp_path: Path) -> None:
    endless = LIGHT_RIGHT.replace("return x / 2", "\n    while True: pass")
    begun = time.monotonic()
    first, *rest = answers.check(LAB, written(tmp_path, endless), timeout=4)
    assert time.monotonic() - begun < 20
    assert first.verdict == "passed"
    assert [one.sentence for one in rest] == ["the answer did not end within 4 s"] * 3


LEAVES = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(20)\n    os._exit(0)\n"


@pytest.mark.parametrize(
    "source",
    [
        LEAVES + "time.sleep(60)",  # the process that is left holds the channel
        "import os, time\nos.closerange(3, 99)\ntime.sleep(60)",  # nothing more is told
    ],
)
@pytest.mark.usefixtures("light")
def test_the_timeout_is_kept_whatever_holds_or_closes_the_channel(tmp_path: Path, source: str) -> None:
    begun = time.monotonic()
    found = answers.check(LAB, written(tmp_path, source), timeout=3)
    assert time.monotonic() - begun < 6
    assert {one.sentence for one in found} == {"the answer did not end within 3 s"}


@pytest.mark.usefixtures("light")
def test_what_an_answer_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    begun = time.monotonic()
    found = answers.check(LAB, written(tmp_path, LEAVES + LIGHT_RIGHT))
    assert [one.verdict for one in found] == ["passed"] * 4
    assert time.monotonic() - begun < 15


FORGED = """
import json, os
from pellucid.labs.checks.lab_01 import CHECKS
made = [{"name": one.name, "verdict": "passed", "sentence": "", "printed": ""} for one in CHECKS]
"""


@pytest.mark.parametrize(
    "lines",
    [
        "['no JSON']",
        "['[' * 100_000]",
        "[json.dumps({'names': ['mine'] * 12})]",
        "[json.dumps(made[0] | {'verdict': 'splendid'})]",
        "[json.dumps(made[0] | {'sentence': 7})]",
        "map(json.dumps, made)",  # the real outcomes come after
    ],
)
@pytest.mark.usefixtures("light")
def test_what_an_answer_writes_among_the_outcomes_is_an_error_and_never_a_pass(tmp_path: Path, lines: str) -> None:
    writes = FORGED + f"for line in {lines}:\n    [os.write(n, line.encode() + b'\\n') for n in CHANNEL]\n"
    own = "CHANNEL = [n for n in range(3, 99) if 'pipe:' in os.path.realpath(f'/proc/self/fd/{n}')]\n"
    found = answers.check(LAB, written(tmp_path, "import os\n" + own + writes))
    assert [one.verdict for one in found] == ["error"] * 4
    assert [one.sentence for one in found] == ["the answer wrote where the checks report their outcomes"] * 4


@pytest.mark.usefixtures("light")
def test_a_check_can_be_cancelled(tmp_path: Path) -> None:
    with pytest.raises(Cancelled):
        answers.check(LAB, written(tmp_path, "while True: pass"), cancelled=lambda: True)


@pytest.mark.parametrize(
    ("held", "code", "words"),
    [
        (None, "answer-file", "answer must be a file that exists"),
        (b"def f(:\n", "answer-python", "answer must be Python; got answer.py: invalid syntax, line 1"),
        (b"\x89PNG\r\n\x00\xff", "answer-python", "answer must be Python"),
        (b"(" * 10_000, "answer-python", "answer must be Python"),
        (b"#" * (2**20 + 1), "answer-size", "answer must be at most 1 MiB; got '1,048,577 bytes'"),
    ],
)
def test_what_is_no_answer_is_one_line(tmp_path: Path, held: bytes | None, code: str, words: str) -> None:
    path = tmp_path / "answer.py"
    if held is not None:
        path.write_bytes(held)
    with pytest.raises(PellucidError) as found:
        answers.check(LAB, path)
    assert found.value.code == code
    assert words in str(found.value)
    assert "\n" not in str(found.value)
