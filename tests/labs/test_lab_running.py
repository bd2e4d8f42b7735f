"""A page that runs beside us, block by block."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pellucid.core.errors import Cancelled
from pellucid.labs import SMOKE, few, process

SIGNATURE = b"\x89PNG"


def page(folder: Path, *blocks: str) -> Path:
    path = folder / "page.py"
    path.write_text('"""\nTitle\n=====\n"""\n\n' + "\n".join(f"# %%\n# Words.\n{code}\n" for code in blocks), "utf-8")
    return path


def test_each_block_has_its_words_code_output_and_figures(tmp_path: Path) -> None:
    drawing = "import matplotlib.pyplot as plt\nplt.plot([x, 2])\nfigure = plt.figure()"
    title, first, second = process.run_page(page(tmp_path, "x = 1\nprint('one', x)", drawing))
    assert (title.text, title.code) == ("Title\n=====", "")
    assert (first.text, first.code, first.printed, first.figures) == ("Words.", "x = 1\nprint('one', x)", "one 1\n", ())
    assert [file[:4] for file in second.figures] == [SIGNATURE] * 2
    assert (second.number, second.count, second.error) == (3, 3, None)


def test_the_small_size_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = page(tmp_path, "from pellucid.labs import few\nprint(few(40, 4))")
    assert [list(process.run_page(path, smoke))[-1].printed for smoke in (False, True)] == ["40\n", "4\n"]
    monkeypatch.setenv(SMOKE, "1")
    assert few(40, 4) == 4


def test_what_a_page_leaves_in_temporary_files_goes(tmp_path: Path) -> None:
    *_, last = process.run_page(page(tmp_path, "import tempfile\nprint(tempfile.mkdtemp(), end='')"))
    assert Path(last.printed).name.startswith("tmp")
    assert not Path(last.printed).exists()


def test_an_error_names_its_line_and_ends_the_run(tmp_path: Path) -> None:
    *_, last = process.run_page(
        page(tmp_path, "def half(x):\n    assert x == 1, 'not one'", "half(2)", "print('never')")
    )
    assert last.error == "AssertionError: not one (page.py, line 9)"
    assert last.number == 3


def test_leaving_does_not_end_the_reader(tmp_path: Path) -> None:
    *_, last = process.run_page(page(tmp_path, "raise SystemExit(3)"))
    assert last.error == "SystemExit: 3 (page.py, line 8)"
    *_, last = process.run_page(
        page(tmp_path, "print(1)", "import os, sys\nprint('gone', file=sys.stderr)\nos._exit(3)")
    )
    assert (last.number, last.error) == (3, "the lab ended its process: gone")
    *_, last = process.run_page(page(tmp_path, "print(1)", "import os\nos._exit(0)"))
    assert (last.number, last.error) == (3, "the lab ended its process")


def test_what_is_written_past_python_does_not_disturb(tmp_path: Path) -> None:
    *_, last = process.run_page(
        page(tmp_path, "import os\nos.system('echo hello')\nos.write(1, b'{}\\n')\nprint('well')")
    )
    assert (last.printed, last.error) == ("well\n", None)


def test_much_output_is_cut(tmp_path: Path) -> None:
    *_, last = process.run_page(page(tmp_path, "print('x' * 10**6)"))
    assert len(last.printed) < process.MOST_PRINTED + 100
    assert last.printed.endswith("900,001 more characters")


def test_annotations_of_the_future_hold_for_all_blocks(tmp_path: Path) -> None:
    blocks = ["from __future__ import annotations", "def f(x: Unknown): ...", "print('fine')"]
    *_, last = process.run_page(page(tmp_path, *blocks))
    assert (last.printed, last.error) == ("fine\n", None)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_cancelling_ends_the_process_amid_a_block(tmp_path: Path) -> None:
    path = page(tmp_path, "import os\nprint(os.getpid())", "import time\ntime.sleep(60)")
    stop: list[bool] = []
    blocks = process.run_page(path, cancelled=lambda: bool(stop))
    next(blocks)
    pid = int(next(blocks).printed)
    stop.append(True)
    begun = time.monotonic()
    with pytest.raises(Cancelled):
        next(blocks)
    assert time.monotonic() - begun < 30
    assert not alive(pid)


def test_not_listening_any_more_ends_the_process(tmp_path: Path) -> None:
    blocks = process.run_page(page(tmp_path, "import os\nprint(os.getpid())", "import time\ntime.sleep(60)"))
    next(blocks)
    pid = int(next(blocks).printed)
    assert alive(pid)
    blocks.close()
    assert not alive(pid)
