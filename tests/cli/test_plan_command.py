"""`pellucid plan`: the table that a person reads says what the plan is."""

from __future__ import annotations

import inspect
import json
import math
import re

import pytest

import pellucid
from pellucid.cli import plan
from pellucid.core.plan import REGISTERS

READ = [
    ("dpmpp_2m", ["--grid", "karras"], {"grid": "karras"}),
    ("heun", [], {}),
    ("pndm", [], {}),
    ("unipc", ["--as", "diffusers"], {"dialect": "diffusers"}),
    ("euler_a", ["--option", "eta=0.5"], {"eta": 0.5}),
    ("edm_stochastic", ["--schedule", "edm", "--target", "edm"], {"schedule": "edm", "target": "edm"}),
    ("sa_solver", ["--option", "tau_range=0.1,0.9"], {"tau_range": (0.1, 0.9)}),
    ("flow_euler", ["--schedule", "flow", "--target", "flow"], {"schedule": "flow", "target": "flow"}),
]
TERM = re.compile(r"([+−]?) ?(?:([0-9.e−+]+)·)?(" + "|".join(REGISTERS) + r")\b")


def weights_in(formula: str) -> dict[str, float]:
    """`0.93·x − p0` → {x: 0.93, p0: −1}."""
    found = {}
    for sign, size, register in TERM.findall(formula.replace("e−", "e-")):
        found[register] = (-1.0 if sign == "−" else 1.0) * (float(size) if size else 1.0)
    return found


@pytest.mark.parametrize(("sampler", "words", "options"), READ)
def test_the_table_says_what_the_plan_is(tell, sampler, words, options):
    plan = pellucid.compile_plan(sampler, steps=5, **options)
    lines = tell("plan", sampler, "--steps", "5", *words).out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.endswith("   update"))
    rows = lines[header + 1 : header + 1 + plan.nfe]
    for index, (line, row) in enumerate(zip(rows, plan.rows, strict=True)):
        number, time, alpha, sigma, lam = line.replace("−", "-").replace("∞", "inf").split()[:5]
        assert int(number) == index
        assert math.isclose(float(time), row.time, rel_tol=1e-6, abs_tol=1e-12)
        shown = (float(alpha), float(sigma), float(lam))
        assert shown == pytest.approx((row.level.alpha, row.level.sigma, row.level.lam), rel=1e-3)
        update = line.split("x ← ")[1].split("   held:")[0].split("   churn:")[0]
        into_x, _, into_anchor = update.partition("anchor ←")
        assert weights_in(into_x) == pytest.approx({REGISTERS[r]: w for r, w in row.x}, rel=1e-3)
        assert weights_in(into_anchor) == pytest.approx({REGISTERS[r]: w for r, w in row.anchor or ()}, rel=1e-3)
        assert ("held:" in line) == row.held
        assert ("churn:" in line) == (row.pre_noise > 0)


def test_the_header_says_what_was_asked(tell):
    text = tell("plan", "edm_stochastic", "--schedule", "edm", "--steps", "5").words
    plan = pellucid.compile_plan("edm_stochastic", schedule="edm", steps=5)
    assert text.startswith(f"EDM stochastic (edm_stochastic): {plan.nfe} model calls (NFE)")
    for fact in ("schedule edm, sigma_min 0.002", "grid karras, steps 5", "dialect exact", "frame ve", "basis eps"):
        assert fact in text
    assert "initial scale 80" in text
    assert f"deviation {plan.deviation:.3g}, declared: {plan.declared}" in text


def test_the_header_says_what_a_plan_keeps(tell):
    """More than there was of large things, half of small ones: told before anything runs."""
    text = tell("plan", "heun", "--schedule", "cosine", "--target", "v", "--grid", "trailing", "--steps", "20").words
    assert (
        "keeps 581 % at 1, 139 % at 0.3, 80.1 % at 0.1, 32.1 % at 0.03, 11.1 % at 0.01: the contrast of Gaussian"
        in text
    )
    assert "keeps" not in tell("plan", "ddim", "--final", "sigma_min").words  # there is noise in what comes out


def test_a_plan_is_shown_without_torch(burden):
    """A second of waiting for what a table of numbers does not need."""
    shown, imported = burden("plan", "ddim", "--steps", "5")
    assert "keeps" in shown
    assert imported == "['numpy']\n"


def test_formulas_are_short_and_exact():
    assert plan.formula(((0, 0.93), (2, 0.07), (3, -0.01), (7, 0.2))) == "0.9300·x + 0.07000·p0 − 0.01000·p1 + 0.2000·z"
    assert plan.formula(((1, 1.0), (2, -1.0))) == "anchor − p0"
    assert plan.formula(((0, -0.5),)) == "− 0.5000·x"
    assert plan.formula(()) == "0"


def test_defaults_in_the_help_are_those_of_the_engine(tell):
    text = tell("plan", "--help").words
    defaults = inspect.signature(pellucid.compile_plan).parameters
    assert f"(default: {defaults['schedule'].default})" in text
    assert defaults["target"].default is None
    assert "(default: the schedule's usual one)" in text
    assert f"(default: {pellucid.compile_plan('euler').grid['steps']})" in text


@pytest.mark.parametrize(("sampler", "words", "options"), READ)
def test_json_is_the_plan(tell, sampler, words, options):
    answer = tell("plan", sampler, "--steps", "5", "--json", *words)
    plan = pellucid.compile_plan(sampler, steps=5, **options)
    assert answer.json == json.loads(plan.to_json())
    assert pellucid.Plan.from_json(answer.out).rows == plan.rows


def test_an_unbounded_option_survives_json(tell):
    answer = tell("plan", "euler", "--steps", "3", "--json", "--option", "s_tmax=inf")
    assert answer.json["options"]["s_tmax"] == "inf"
    assert pellucid.Plan.from_json(answer.out).options["s_tmax"] == float("inf")


def test_final_is_where_the_last_step_ends(tell):
    end = tell("plan", "euler", "--steps", "4", "--final", "sigma_min", "--json").json["end"]
    schedule = pellucid.schedules.make("scaled_linear")
    assert end[1] / end[0] == pytest.approx(schedule.sigma_range[0], rel=1e-12)
    assert tell("plan", "euler", "--steps", "4", "--final", "zero", "--json").json["end"] == [1.0, 0.0]


def test_a_saved_plan_reads_back(tell, tmp_path):
    shown = tell("plan", "unipc", "--steps", "6", "--save", "plan.json").out
    saved = pellucid.Plan.from_json((tmp_path / "plan.json").read_bytes())
    assert saved == pellucid.compile_plan("unipc", steps=6)
    assert tell("plan", "plan.json").out + "wrote plan.json\n" == shown
    assert tell("plan", "./plan.json", "--json").out == tell("plan", "unipc", "--steps", "6", "--json").out


@pytest.mark.parametrize(
    ("words", "width"),
    [
        (["dpmpp_2m", "--grid", "karras"], 900),
        (["pndm", "--steps", "8"], 1300),
        (["edm_stochastic", "--schedule", "edm", "--steps", "40"], 1000),
        (["euler", "--steps", "1"], 600),
        (["ddim", "--schedule", "flow", "--steps", "3"], 600),
    ],
)
def test_the_image(tell, see, tmp_path, words, width):
    assert tell("plan", *words, "--plot", "plan.png").out == "wrote plan.png\n"
    see(tmp_path / "plan.png", width, 60)


BAD = [
    (["eulr"], "unknown-sampler", "Nearest: euler"),
    (["euler", "--schedule", "linnear"], "unknown-schedule", "linear"),
    (["euler", "--grid", "karas"], "unknown-grid", "karras"),
    (["euler", "--target", "epsilonn"], "unknown-target", "epsilon"),
    (["euler", "--as", "diffuser"], "unknown-dialect", "diffusers"),
    (["euler", "--steps", "0"], "steps", "1 to 10000"),
    (["euler", "--final", "one"], "final", "zero or sigma_min"),
    (["ddpm", "--as", "diffusers", "--final", "sigma_min"], "final", "changes nothing"),
    (["euler", "--target", "flow"], "target-schedule", "schedule `flow`"),
    (["DPM++ 2M Karras", "--grid", "beta"], "grid-twice", "karras"),
    (["euler", "--option", "eta"], "option", "key=value"),
    (["euler", "--option", "eta=0.5"], "option", "Known: s_churn"),
    (["euler_a", "--option", "eta=half"], "option", "a number"),
    (["euler_a", "--option", "eta=nan"], "option", "a number"),
    (["euler_a", "--option", "eta=2"], "eta", "between 0 and 1"),
    (["euler_a", "--option", "eta=1", "--option", "eta=0"], "option", "given once"),
    (["unipc", "--option", "order=2.5"], "option", "a whole number"),
    (["unipc", "--option", "predict_x0=perhaps"], "option", "true or false"),
    (["unipc", "--option", "disable_corrector=first"], "option", "numbers"),
    (["plms", "--option", "bases=1"], "option", "set by a dialect"),
    (["dpm_singlestep", "--option", "orders=1,2"], "order", "orders"),
    (["euler", "--plot", "a.gif"], "file-type", ".png"),
    (["euler", "--plot", "a.png", "--json"], "usage", "without --json"),
    (["euler", "--plot", "a.png", "--diff", "ddim"], "usage", "without --diff"),
    (["euler", "--save", "plan.txt"], "file-type", ".json"),
    (["euler", "--save", "missing/plan.json"], "file", "folder that exists"),
    (["missing.json"], "file", "a file that exists; got 'missing.json'"),
    (["."], "unknown-sampler", "'.'"),
    (["./"], "file", "a folder"),
]


@pytest.mark.parametrize(
    ("args", "code", "hint"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input(refuse, tmp_path, args, code, hint):
    line = refuse("plan", *args)
    assert line.startswith(f"error[{code}]: ")
    assert hint in line
    assert list(tmp_path.iterdir()) == []


def changed(**fields: object) -> bytes:
    return json.dumps({**pellucid.compile_plan("euler", steps=2).to_dict(), **fields}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"kind": "pellucid-plan", "schema": 1}',
        b"[" * 100_000,
        changed(schema=2),
        changed(rows=[]),
        changed(end=[0, 0]),
        changed(start=[1, 2]),
        changed(frame="sideways"),
        changed(basis=7),
    ],
)
def test_a_file_that_is_no_plan(refuse, tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    assert refuse("plan", "plan.json")


def test_a_file_is_complete_and_bounded(refuse, tell, tmp_path, monkeypatch):
    tell("plan", "euler", "--steps", "2", "--save", "plan.json")
    assert "--steps must be left out with a plan file" in refuse("plan", "plan.json", "--steps", "3")
    assert "--as must be left out with a plan file" in refuse("plan", "plan.json", "--as", "exact")
    monkeypatch.setattr("pellucid.cli.plan_words.MAX_PLAN_BYTES", 100)
    assert refuse("plan", "plan.json").startswith("error[file-size]")
