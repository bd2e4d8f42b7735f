"""`pellucid schedules`."""

from __future__ import annotations

import numpy as np
import pytest

from pellucid import schedules as known

COLUMNS = ["time", "beta", "alpha", "alpha_bar", "snr", "lam", "sigma"]


def test_the_table_has_every_schedule_and_its_facts(tell):
    text = tell("schedules").words
    assert all(name in text for name in known.names())
    assert "scaled_linear vp 1000 0.00085 → 0.012 0.00466 1175 → 0.004682 −2.682 … 3.535 0.02917 … 14.61" in text
    assert "flow flow 1 … 1000" in text
    assert "edm, eps, x0, v, score" in text


@pytest.mark.parametrize("zero_snr", [False, True])
def test_json_has_the_numbers_of_the_api(tell, zero_snr):
    found = tell("schedules", "sd", "cosine", "--json", *(["--zero-snr"] if zero_snr else [])).json
    assert list(found) == ["scaled_linear", "cosine"]
    for name, columns in found.items():
        assert list(columns) == COLUMNS
        for column, values in known.make(name, zero_snr=zero_snr).table().items():
            np.testing.assert_array_equal(np.array(columns[column], dtype=np.float64), values)


def test_infinities_are_words(tell):
    flow = tell("schedules", "flow", "--json").json["flow"]
    assert flow["lam"][-1] == "-inf"
    assert flow["snr"][-1] == 0.0
    assert tell("schedules", "linear", "--zero-snr", "--json").json["linear"]["sigma"][-1] == "inf"


def test_zero_snr_of_all_is_of_all_that_can(tell):
    answer = tell("schedules", "--zero-snr")
    assert "scaled_linear" in answer.out
    assert "edm" not in answer.out
    assert "left out" in answer.out


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["flow", "--zero-snr"], "error[zero-snr]: schedule must be a discrete one for zero terminal SNR; got 'flow'"),
        (["cosin"], "error[unknown-schedule]: schedule must be a known name; got 'cosin'. Nearest: cosine"),
        (["trained"], "error[option]: "),
        (["--plot", "curves.txt"], "error[file-type]: --plot must be a file that ends in .png, .svg, .pdf"),
        (["--plot", "missing/curves.png"], "error[file]: --plot must be in a folder that exists"),
    ],
)
def test_bad_input(refuse, args, start):
    assert refuse("schedules", *args).startswith(start)


def test_the_image(tell, see, tmp_path):
    tell("schedules", "--plot", "curves.png")
    see(tmp_path / "curves.png", 1500, 200)


def test_plot_and_json_go_together(ask, see, tmp_path):
    answer = ask("schedules", "linear", "--zero-snr", "--plot", "one.png", "--json")
    assert ("linear" in answer.json, answer.err) == (True, "wrote one.png\n")
    see(tmp_path / "one.png", 1500, 50)
