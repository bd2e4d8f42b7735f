"""The sampler study with real pipelines, ours and diffusers'; as a command; over processes and over Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from oracle_pipe import OraclePipe, subject
from tiny_scenes import write_model
from typer.testing import CliRunner

import pellucid
from pellucid.core.errors import PellucidError
from pellucid.evidence.study import kernel
from pellucid.evidence.study.kernel import WorkShare, make_share, run_study, shard_of
from pellucid.evidence.study.samplers import SamplerStudy, SamplerStudyConfig

QUICK = ["--converged-steps", "6", "--path-steps", "6", "--rounds", "1", "--device", "cpu", "--batch", "2"]


@pytest.fixture(autouse=True)
def no_weights(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine may have in its cache does not count."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path_factory.getbasetemp() / "no-cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sampled") / "model")


def ask(*args: str) -> Any:
    from pellucid.cli import app

    result = CliRunner().invoke(app, ["study", "samplers", *args], prog_name="pellucid", env={"COLUMNS": "250"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts that are no scenes: the reader takes its time over images of nothing."""
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text("star red a\nblue\nsquare square\n")
    return str(path)


def words(model: Path, out: Path, **changes: str) -> list[str]:
    given = {"samplers": "ddim,euler_a:karras", "steps": "2,3", "prompts": "scenes:3", "guidance": "3"} | changes
    flags = [word for name, value in given.items() for word in (f"--{name}", value)]
    return ["--model", str(model), *flags, "--out", str(out), *QUICK]


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A study by the command: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("done") / "out"
    found = ask(*words(model, out), "--json")
    assert found.exit_code == 0
    return out, json.loads(found.stdout)


def test_the_command_measures_all_that_the_bundle_allows(done: tuple[Path, dict[str, Any]]) -> None:
    """A bundle with an image-text encoder and prompts of scenes: KID on its embeddings, fit, and attributes."""
    out, held = done
    assert [(row["sampler"], row["steps"], row["nfe"], row["stochastic"]) for row in held["cells"]] == [
        ("ddim", 2, 2, False), ("ddim", 3, 3, False), ("euler_a:karras", 2, 2, True), ("euler_a:karras", 3, 3, True),
    ]  # fmt: skip
    measures = {"distance", "latent", "image_text", "kid", "right"}
    assert all(measures <= set(row) for row in held["cells"])
    assert held["pictures"] == 3
    assert any("KID is on CLIP embeddings" in note for note in held["notes"])
    assert any(note.startswith("fid is left out") for note in held["notes"])
    assert '--guidance "3"' in held["recommendation"]["command"]
    for name in ("report.html", "table.md", "results.json", "config.json", "records.jsonl", "latency.jsonl"):
        assert (out / name).is_file()


def test_a_second_call_makes_nothing_again(model: Path, done: tuple[Path, dict[str, Any]]) -> None:
    out, held = done
    before = {name: (out / name).read_bytes() for name in ("records.jsonl", "latency.jsonl")}
    found = ask(*words(model, out))
    assert found.exit_code == 0
    assert "Use " in found.stdout
    assert "report.html" in found.stdout
    assert {name: (out / name).read_bytes() for name in before} == before
    assert held["recommendation"]["sentence"] in " ".join(found.stdout.split())


def batches_in(folder: Path) -> int:
    """Batches whose images are there, of all processes."""
    return sum(path.read_bytes().count(b'"what": "pictures"') for path in folder.glob("records*.jsonl"))


def test_shards_by_hand_then_the_report(model: Path, plain: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for index in (0, 1):
        found = ask(*words(model, out, prompts=plain), "--shard", f"{index}/2", "--json")
        assert json.loads(found.stdout)["batches"] == 1
    assert not (out / "latency.jsonl").exists()  # never beside other work
    assert not (out / "report.html").exists()
    before = batches_in(out)
    whole = ask(*words(model, out, prompts=plain), "--json")
    assert batches_in(out) == before == 2 * (2 + 4) + 2
    assert json.loads(whole.stdout)["pictures"] == 3


BAD: list[tuple[dict[str, str], str]] = [
    ({"samplers": "no_such"}, "error[unknown-sampler]"),
    ({"samplers": ","}, "error[study-list]"),
    ({"steps": "5,x"}, "error[usage]"),
    ({"steps": "0"}, "error[steps]"),
    ({"steps": "50"}, "error[converged]"),
    ({"prompts": "no-such-file"}, "error[file]"),
    ({"guidance": "no such rule"}, "error[guidance"),
    ({"clip": "no-such-folder"}, "error[not-found]"),
    ({"by": "kid"}, ""),  # which this bundle's CLIP allows: the right way round
    ({"by": "taste"}, "error[by]"),
    ({"inception": "no-such-file"}, "error[file]"),
    ({"reference": "no-such-folder"}, "error[reference]"),
    ({"shard": "2/2"}, "error[shard]"),
    ({"ray": "2", "processes": "2"}, "error[shard]"),
    ({"processes": "3"}, "error[shard]: --processes must be at most 2"),
    ({"ray": "3"}, "error[shard]: --ray must be at most 2"),
    ({"size": "0"}, "error[size]"),
]


@pytest.mark.parametrize(("changes", "line"), BAD)
def test_bad_input_is_one_line(
    model: Path, done: tuple[Path, dict[str, Any]], changes: dict[str, str], line: str
) -> None:
    """In the folder of a study that is whole, so that nothing but the mistake can take time."""
    out, _ = done
    before = (out / "records.jsonl").read_bytes()
    found = ask(*words(model, out, **changes))
    assert found.exit_code == (2 if line else 0)
    if line:
        assert found.stderr.startswith(line)
        assert found.stderr.count("\n") == 1
    assert (out / "records.jsonl").read_bytes() == before


def test_folders_that_cannot_be_used(model: Path, done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = ask(*words(model, tmp_path / "file" / "out"))
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1)
    assert ask(*words(tmp_path / "no-model", tmp_path / "out")).stderr.startswith("error[not-found]")
    assert not (tmp_path / "out").exists()
    other = ask(*words(model, done[0], guidance="4"))
    assert other.stderr.startswith("error[resume-config]")
    assert "another guidance" in other.stderr


def test_an_empty_prompts_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n\n")
    found = ask(*words(model, tmp_path / "out", prompts=str(tmp_path / "p.txt")))
    assert found.stderr == f"error[prompts]: prompts must be at least one line; got '{tmp_path / 'p.txt'}'.\n"


# --- other models ------------------------------------------------------------------------------------------------


def config(**changes: Any) -> SamplerStudyConfig:
    given = {"model": "m", "samplers": ("ddim", "euler_a"), "steps": (2, 3), "prompts": ("a cab", "deaf"), "batch": 2}
    return SamplerStudyConfig(**given | {"converged_steps": 6, "path_steps": 6, "rounds": 1} | changes)


def test_a_wrapped_diffusers_pipeline(tmp_path: Path) -> None:
    """Its network, its guidance and its decoder; our samplers, on one Brownian path a seed."""
    from tiny_peers import peer

    asked, pipe = config(guidance=3.0, size=(16, 24)), pellucid.wrap(peer("sd"))
    found = run_study(SamplerStudy, asked, tmp_path / "study", pipe=pipe)
    assert found.study.files.images(found.cells[0], 0, 2)[0].size == (16, 24)
    assert [cell.nfe for cell in found.cells] == [2, 3, 2, 3]
    assert all(value > 0 for value in found.columns["latent"].values)
    assert found.verdict.words == ""  # a live object has no name to load it by
    assert found.verdict.call["guidance"] == 3.0
    assert "pipe(…, sampler=" in (tmp_path / "study" / "report.html").read_text("utf-8")


@pytest.mark.parametrize(("asks", "prompts"), [("label", ("3", "cat")), ("nothing", ())])
def test_models_without_text(tmp_path: Path, asks: Any, prompts: tuple[str, ...]) -> None:
    pipe = OraclePipe()
    asked = config(prompts=prompts, seeds=2, batch=4)
    SamplerStudy(asked, tmp_path / "study", subject(pipe, asks=asks)).run()
    for call in pipe.calls:
        if asks == "label":
            assert call["label"] == [3, 3, "cat", "cat"]
        else:
            assert call["n"] == 2
            assert "label" not in call
        assert call["prompt"] == []


# --- processes and Ray -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_make_the_same_study(model: Path, plain: str, tmp_path: Path) -> None:
    found = ask(*words(model, tmp_path / "out", prompts=plain), "--processes", "2", "--json")
    assert found.exit_code == 0
    alone = json.loads(ask(*words(model, tmp_path / "alone", prompts=plain), "--json").stdout)
    for mine, other in zip(json.loads(found.stdout)["cells"], alone["cells"], strict=True):
        assert mine["latent"]["value"] == pytest.approx(other["latent"]["value"], rel=1e-4)
    assert {path.name for path in (tmp_path / "out").glob("records*")} == {"records-0of2.jsonl", "records-1of2.jsonl"}


@pytest.mark.slow
def test_a_bad_model_in_a_process_is_one_line(model: Path, tmp_path: Path) -> None:
    share = WorkShare(SamplerStudy, config(model=str(tmp_path / "none")), str(tmp_path / "out"), 0, 1)
    with pytest.raises(PellucidError, match="model must be"):
        make_share(share)


@pytest.mark.slow
def test_a_process_that_was_killed_loses_nothing(model: Path, tmp_path: Path) -> None:
    """A real process, killed in the middle without warning; the next call goes on."""
    asked = words(model, tmp_path / "out", prompts="scenes:8")
    args = [sys.executable, "-m", "pellucid.cli", "study", "samplers", *asked]
    running = subprocess.Popen(args, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    records = tmp_path / "out" / "records.jsonl"
    while running.poll() is None and not (records.exists() and records.read_bytes().count(b"\n") > 5):
        pass
    running.kill()
    running.wait()
    kept = records.read_bytes().count(b'"what": "pictures"')
    assert kept > 0
    found = ask(*asked, "--json")
    assert json.loads(found.stdout)["pictures"] == 8
    keys = [(row["cell"], row["first"], row["what"]) for row in map(json.loads, records.read_text().splitlines())]
    assert len(set(keys)) == len(keys)


class FakeRay(ModuleType):
    """As much of Ray as is used: tasks run when they are asked for."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.started = False
        self.tasks: list[Any] = []

    def is_initialized(self) -> bool:
        return self.started

    def init(self, **options: Any) -> None:
        self.started = True

    def remote(self, *functions: Any, **options: Any) -> Any:
        def task(function: Any) -> Any:
            return SimpleNamespace(remote=lambda share: self.tasks.append((function, share, options)))

        return task(functions[0]) if functions else task

    def get(self, waiting: list[Any]) -> list[Any]:
        return [function(share) for function, share, _ in self.tasks]


@pytest.mark.slow
def test_over_ray(model: Path, plain: str, tmp_path: Path) -> None:
    """The real Ray, on this machine: its workers write the same records as one process."""
    pytest.importorskip("ray")
    command = [
        sys.executable,
        "-m",
        "pellucid.cli",
        "study",
        "samplers",
        *words(model, tmp_path / "out", prompts=plain),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""}
    done = subprocess.run(
        [*command, "--ray", "2", "--json"], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout[done.stdout.index("{") :])["pictures"] == 3
    assert {path.name for path in (tmp_path / "out").glob("records*")} == {"records-0of2.jsonl", "records-1of2.jsonl"}


def test_a_task_on_a_gpu_asks_ray_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(kernel, "make_share", lambda share: None)
    kernel.over_ray([WorkShare(SamplerStudy, config(), str(tmp_path), i, 3, {"device": "cuda"}) for i in range(3)])
    assert [options for _, _, options in ray.tasks] == [{"num_gpus": 1}] * 3


def test_without_ray_it_is_one_line(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    found = ask(*words(model, tmp_path / "out"), "--ray", "2")
    assert found.exit_code == 2
    assert found.stderr.startswith("error[missing-extra]: ray must be installed")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["4", "1/1", "-1/2", "0/0", "a/b", "0/1000"])
def test_bad_shards(text: str) -> None:
    with pytest.raises(PellucidError, match="--shard must be as 0/4"):
        shard_of(text)
    assert shard_of("3/4") == (3, 4)


def test_a_killed_worker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures.process import BrokenProcessPool

    def broken(*args: Any) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(kernel, "wait_for", broken)
    monkeypatch.setattr(kernel, "ProcessPoolExecutor", lambda *a, **k: InHere())
    with pytest.raises(PellucidError, match=r"a process of the study was killed\. Run the same command again"):
        kernel.over_processes([WorkShare(SamplerStudy, config(), str(tmp_path), i, 2) for i in range(2)])


class InHere:
    """A pool whose work nobody does."""

    def __enter__(self) -> InHere:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def submit(self, function: Any, share: Any) -> torch.futures.Future:
        return torch.futures.Future()
