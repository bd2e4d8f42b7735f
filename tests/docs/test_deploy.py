"""What docs/serve.md and the files of deploy/ name exists: options, settings, fields, codes, metrics, addresses."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import typer

from pellucid.cli import app
from pellucid.serve.api import MOST_BYTES
from pellucid.serve.bench import read_mix
from pellucid.serve.metrics import Metrics
from pellucid.serve.rollout import RolloutSettings
from pellucid.serve.schemas import ImageRequest, RolloutRequest
from pellucid.serve.settings import ServeSettings, read_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
HANDBOOK = (ROOT / "docs" / "handbook" / "serving.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page, re.S | re.M)


# --- metrics ----------------------------------------------------------------------------------------------------------


@cache
def series() -> dict[str, set[str]]:
    """The names that Prometheus sees, with their labels."""
    found: dict[str, set[str]] = {}
    for metric in vars(Metrics()).values():
        if hasattr(metric, "describe"):
            (family,) = metric.describe()
            for suffix in SUFFIXES[family.type]:
                labels = {*metric._labelnames, *(("le",) if suffix == "_bucket" else ())}
                found[family.name + suffix] = labels
    return found


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def of_whole_histograms() -> set[str]:
    return {name.removesuffix("_bucket") for name in series() if name.endswith("_bucket")}


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    asked = set()
    for expression in expressions():
        names = set(re.findall(r"pellucid_\w+", expression))
        assert names, expression
        assert names <= set(series()), expression
        labels = set(re.findall(r"(\w+)=~?\"", expression))
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            labels |= {label.strip() for label in group.split(",")}
        for name in names:
            assert labels <= series()[name] | {"instance"}, expression
        asked |= names
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    every = {name for name in series() if not name.endswith(("_bucket", "_sum", "_count"))} | of_whole_histograms()
    assert bare == every  # nothing that the server counts is left out


def test_legends_name_labels_of_their_query() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]


def test_the_data_source_is_a_variable() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    (name,) = re.findall(r"label_values\((\w+), instance\)", variables["instance"]["query"]["query"])
    assert name in series()


@pytest.mark.parametrize("page", [PAGE, HANDBOOK], ids=["serve.md", "serving.md"])
def test_pages_name_metrics_that_exist(page: str) -> None:
    assert set(re.findall(r"\bpellucid_[a-z_]+\b", page)) <= set(series()) | of_whole_histograms()


def test_the_page_lists_every_metric_with_its_labels() -> None:
    listed = dict(re.findall(r"^\| `(pellucid_\w+)` \|([^|]*)\|", PAGE, re.M))
    for name, labels in series().items():
        whole = re.sub(r"_(bucket|sum|count)$", "", name)
        shown = set(re.findall(r"`(\w+)`", listed[name if whole not in of_whole_histograms() else whole]))
        assert shown == labels - {"le"}, name


# --- commands ---------------------------------------------------------------------------------------------------------


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command line makes of words after `pellucid`; an unknown command or option is an error."""
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    with command.make_context(words[0], list(words[1:])) as context:
        return dict(context.params)


def commands(page: str) -> list[list[str]]:
    """The lines of a page's shell blocks that run pellucid, as the words after it."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.match(r"pellucid( |$)", line)]
    inline = re.findall(r"`(pellucid [^`]+)`", page)
    return [words[1:] for words in (shlex.split(line, comments=True) for line in (*lines, *inline)) if words[1:]]


@pytest.mark.parametrize("page", [PAGE, HANDBOOK], ids=["serve.md", "serving.md"])
def test_commands_and_options_exist(page: str) -> None:
    seen = {words[0] for words in commands(page) if len(words) > 1 and parsed(words) is not None}
    assert {"serve", "rollout", "bench-serve", "memory"} <= seen


def test_the_unit_starts_the_server_as_it_can_be_started() -> None:
    unit = (DEPLOY / "pellucid.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.+)$", unit, re.M)
    program, *words = shlex.split(line.replace("%d", "/run/credentials/pellucid.service"))
    assert Path(program).name == "pellucid"
    given = parsed(words)
    (credential,) = re.findall(r"^LoadCredential=(\w+):", unit, re.M)
    assert given["api_keys"].name == credential
    assert re.search(r"^KillMode=mixed$", unit, re.M)  # the engine must not get the server's signal
    assert f":{ServeSettings().port}/ready" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "pellucid.service").read_text(encoding="utf-8")
    here = tmp_path / "pellucid.service"
    here.write_text(unit.replace("/opt/pellucid/bin/pellucid", "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(here)], capture_output=True, text=True, timeout=60)
    if "Failed to" in done.stderr and str(here) not in done.stderr:
        pytest.skip(f"systemd does not run here: {done.stderr.strip()[:200]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_starts_the_server_as_it_can_be_started() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    (entry,), (command,) = (re.findall(rf"^{name} (\[.+\])$", text, re.M) for name in ("ENTRYPOINT", "CMD"))
    program, *words = [*json.loads(entry), *json.loads(command)]
    assert program == "pellucid"
    given = parsed(words)
    assert given["host"] == "0.0.0.0"
    assert str(given["api_keys"]).startswith("/run/secrets/")
    assert f"EXPOSE {given['port']}" in text
    for name in re.findall(r"^COPY (.+) \S+$", text, re.M):
        assert all((ROOT / path).exists() for path in name.split())


def test_the_proxy_and_prometheus_know_the_address() -> None:
    yaml = pytest.importorskip("yaml")
    address = f"{ServeSettings().host}:{ServeSettings().port}"
    caddy = (DEPLOY / "Caddyfile").read_text(encoding="utf-8")
    assert f"reverse_proxy {address}" in caddy
    assert f"max_size {MOST_BYTES // 2**20}MiB" in caddy
    assert not re.search(r"^\s*flush_interval", caddy, re.M)
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert (job["metrics_path"], job["static_configs"]) == ("/metrics", [{"targets": [address]}])
    assert job["authorization"]["type"] == "Bearer"


# --- settings, fields, errors -----------------------------------------------------------------------------------------


def named_in(section: str) -> set[str]:
    """The words that a section of the page has in backticks."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return {word for found in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"[\w-]+", found)}


def test_every_setting_and_option_is_on_the_page() -> None:
    assert {one.name for one in fields(ServeSettings)} <= named_in("Settings")
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {option for one in command.params for option in one.opts if option.startswith("--")} - {"--help"}
    assert options - {"--config"} <= set(re.findall(r"--[a-z-]+", PAGE))
    assert "`--config`" in PAGE


def test_the_defaults_on_the_page_are_the_defaults() -> None:
    own = ServeSettings()
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|", PAGE, re.M))
    numbers = ("port", "queue", "capacity", "max_steps", "step_timeout", "start_timeout", "kept_seconds", "replicas")
    assert {name: float(rows[name]) for name in numbers} == {name: getattr(own, name) for name in numbers}
    assert rows["host"] == own.host
    assert eval(rows["max_pixels"].replace("²", "**2")) == own.max_pixels


def test_the_example_settings_are_read(tmp_path: Path) -> None:
    settings, mix = (tmp_path / name for name in ("serve.toml", "mix.toml"))
    first, second = blocks(PAGE, "toml")
    settings.write_text(first, encoding="utf-8")
    mix.write_text(second, encoding="utf-8")
    assert read_settings(settings, {}).models == tomllib.loads(first)["models"]
    assert [kind.name for kind in read_mix(mix)] == ["draft", "careful"]


def test_every_field_is_on_the_page() -> None:
    assert set(ImageRequest.model_fields) <= named_in("Requests")
    assert set(RolloutRequest.model_fields) <= named_in("Roll out a new version")
    assert {one.name for one in fields(RolloutSettings)} <= set(RolloutRequest.model_fields)


def test_every_error_code_is_on_the_page() -> None:
    room = ROOT / "src" / "pellucid" / "serve"
    files = [path for path in room.glob("*.py") if not path.name.startswith(("bench", "client"))]  # the other side
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    codes = set(re.findall(r"(?:ApiError|unavailable)\(\s*\d{3},\s*\"(\w+)\"", source))
    codes |= set(re.findall(r"\"?\bcode\"?\s*[=:]\s*\"(\w+)\"", source))
    assert len(codes) > 20
    assert codes - named_in("Errors") == set()


# --- a real server ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_quick_start_runs(tmp_path: Path) -> None:
    """The commands before the settings, in their order, then the snippets."""
    pytest.importorskip("openai")
    first = PAGE.partition("\n## Settings")[0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "pellucid.cli", "serve", "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as served:
        assert served.stdout is not None
        address = json.loads(served.stdout.readline())["address"]

        def run(script: str) -> str:
            here = script.replace("http://127.0.0.1:8000", address)
            done = subprocess.run(
                ["bash", "-ec", here], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        try:
            said = [run(script) for script in blocks(first, "sh") if not script.startswith("pellucid")]
            assert '"status":' in said[0]
            assert (tmp_path / "star.png").read_bytes().startswith(b"\x89PNG")
            assert "error" not in json.loads((tmp_path / "edited.json").read_text())
            assert json.loads(said[2].splitlines()[0].partition("}]}")[0] + "}]}")["status"] == "queued"
            assert json.loads(said[-1])["calls"] > 10
            code = "\n".join(blocks(first, "py")).replace("http://127.0.0.1:8000", address)
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            kinds = ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
            assert done.stdout.split() == kinds
            assert {path.name for path in tmp_path.glob("star-*.png")} == {"star-7.png", "star-8.png"}
        finally:
            served.send_signal(signal.SIGTERM)
            served.wait(40)
