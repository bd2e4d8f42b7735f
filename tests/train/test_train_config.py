"""The config file: read strictly, refused in one line, and a fingerprint of what shapes the weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid import PellucidError
from pellucid.train.config import (
    MAX_BYTES,
    EngineConfig,
    LogConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
    chosen,
    read,
    to_plain,
)
from pellucid.train.denoiser import DenoiserConfig
from pellucid.train.kinds import DATA, TASKS

WHOLE = """
steps = 10
batch = 8
ema = [100, 2_000.5]
[task]
kind = "denoiser"
[task.network]
_class_name = "UNet2DModel"
[task.objective]
schedule = { name = "cosine", num_train = 100 }
times = { stratified = true }
[data]
kind = "cifar10"
folder = "here"
[optimizer]
rate = 1
decay = "cosine"
[engine]
dtype = "bf16"
[log]
every = 5
checkpoint_every = 10
"""
LEAST: dict[str, Any] = {"task": {}, "data": {}, "steps": 10, "batch": 4}


def load(text: str | bytes, folder: Path) -> TrainConfig:
    path = folder / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return TrainConfig.load(path)


def load_all(text: str, folder: Path) -> tuple[Any, Any]:
    config = load(text, folder)
    return chosen(config.task, TASKS, "task"), chosen(config.data, DATA, "data")


def refused(error: pytest.ExceptionInfo[PellucidError]) -> tuple[str, str]:
    line = str(error.value)
    assert "\n" not in line.strip()
    return error.value.code, line


# --- what is read ------------------------------------------------------------------------------------------------


def test_a_file_is_read_into_its_types(tmp_path: Path) -> None:
    config = load(WHOLE, tmp_path)
    assert (config.steps, config.batch, config.seed) == (10, 8, 0)
    assert config.ema == (100.0, 2000.5)
    assert (config.optimizer.rate, type(config.optimizer.rate)) == (1.0, float)  # a whole number is a number too
    assert config.optimizer == OptimizerConfig(rate=1.0, decay="cosine")
    assert config.engine == EngineConfig(dtype="bf16")
    assert config.log == LogConfig(every=5, checkpoint_every=10)
    task = chosen(config.task, TASKS, "task")
    assert isinstance(task, DenoiserConfig)
    assert task.objective.times.stratified is True
    assert task.objective.build().schedule.num_train == 100
    assert chosen(config.data, DATA, "data").folder == "here"


def test_nothing_but_what_is_needed_is_needed() -> None:
    config = read(TrainConfig, LEAST, "config")
    assert config == TrainConfig({}, {}, 10, 4)
    assert (config.optimizer, config.engine, config.log) == (OptimizerConfig(), EngineConfig(), LogConfig())


def test_plain_values_are_json_and_read_back(tmp_path: Path) -> None:
    config = load(WHOLE, tmp_path)
    again = json.loads(json.dumps(to_plain(config), allow_nan=False))
    assert read(TrainConfig, again, "config") == config


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "where", "nearest"),
    [
        ("steps = 10", "steps = 10\nsead = 3", "config.sead", "seed"),
        ("rate = 1", "rat = 1", "config.optimizer.rat", "rate"),
        ('dtype = "bf16"', 'precision = "bf16"\n', "config.engine.precision", ""),
        ("every = 5", "evry = 5", "config.log.evry", "every"),
        ("folder =", "foldr =", "data.foldr", "folder"),
        ("[task.objective]", '[task.objective]\ntargt = "v"', "task.objective.targt", "target"),
        ("{ stratified", "{ stratifid", "task.objective.times.stratifid", "stratified"),
    ],
)
def test_an_unknown_key_is_named_at_every_depth(tmp_path: Path, old: str, new: str, where: str, nearest: str) -> None:
    assert old in WHOLE
    with pytest.raises(PellucidError) as error:
        load_all(WHOLE.replace(old, new, 1), tmp_path)
    code, line = refused(error)
    assert code == "config-key"
    assert f"{where} must be a known key. Nearest: " in line
    assert nearest in line


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"steps": "ten"}, "config-type", "config.steps must be a whole number; got 'ten'."),
        ({"steps": 1.5}, "config-type", "config.steps must be a whole number; got 1.5."),
        ({"steps": True}, "config-type", "config.steps must be a whole number; got True."),
        ({"steps": 0}, "config-value", "steps must be at least 1; got 0."),
        ({"steps": 10**13}, "config-value", "steps must be at most"),
        ({"batch": 10**7}, "config-value", "batch must be at most"),
        ({"seed": -1}, "config-value", "seed must be at least 0; got -1."),
        ({"seed": 2**63}, "config-value", "seed must be at most"),
        ({"ema": 3.0}, "config-type", "config.ema must be a list of numbers; got 3.0."),
        ({"ema": [1.0, "x"]}, "config-type", "config.ema[1] must be a number; got 'x'."),
        ({"task": "denoiser"}, "config-type", "config.task must be a table; got 'denoiser'."),
        ({"log": 3}, "config-type", "config.log must be a table; got 3."),
        ({"optimizer": {"rate": float("nan")}}, "config-value", "config.optimizer.rate must be finite; got nan."),
        ({"optimizer": {"rate": float("inf")}}, "config-value", "config.optimizer.rate must be finite; got inf."),
        ({"optimizer": {"rate": 10**400}}, "config-value", "config.optimizer.rate must be finite"),
        ({"optimizer": {"rate": False}}, "config-type", "config.optimizer.rate must be a number; got False."),
        ({"optimizer": {"rate": 0.0}}, "config-value", "rate must be above 0; got 0.0."),
        ({"optimizer": {"betas": [0.9]}}, "config-value", "betas must be two numbers"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "config-value", "betas must be two numbers"),
        ({"optimizer": {"clip": -1.0}}, "config-value", "weight_decay, clip must be 0 or more"),
        ({"optimizer": {"decay": "linear"}}, "config-value", "decay must be one of constant, cosine; got 'linear'."),
        ({"optimizer": {"decay": ["cosine"]}}, "config-value", "decay must be one of constant, cosine"),
        ({"engine": {"accumulate": 0}}, "config-value", "accumulate must be at least 1; got 0."),
        ({"engine": {"compile": 1}}, "config-type", "config.engine.compile must be"),
        ({"log": {"every": 0}}, "config-value", "every must be at least 1; got 0."),
        ({"log": {"every": 3, "checkpoint_every": 10}}, "config-value", "must be a multiple of log.every (3)"),
        ({"task": {"network": {"eps": float("nan")}}}, "config-value", "config.task.network.eps must be a finite"),
        ({"data": {"since": [1, object()]}}, "config-value", "config.data.since[1] must be a finite"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_one_line(changed: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(PellucidError) as error:
        read(TrainConfig, LEAST | changed, "config")
    found, line = refused(error)
    assert found == code
    assert words in line


@pytest.mark.parametrize("key", sorted(LEAST))
def test_what_is_missing_is_named(key: str) -> None:
    with pytest.raises(PellucidError, match=f"config must have {key}; got ") as error:
        read(TrainConfig, {k: v for k, v in LEAST.items() if k != key}, "config")
    assert error.value.code == "config-missing"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps = ", "must be valid TOML"),
        ("steps = 1\nsteps = 2", "must be valid TOML"),
        (b"\xff\xfe\x00", "must be text in UTF-8"),
        ("steps = " + "9" * 5000, "must be valid TOML"),
        ("a = " + "[" * 20_000, "must be valid TOML"),
        ("# " + "x" * MAX_BYTES, f"at most {MAX_BYTES} bytes"),
        ("", "config must have task, data, steps, batch; got none."),
    ],
    ids=["cut", "twice", "binary", "digits", "depth", "huge", "empty"],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(PellucidError) as error:
        load(text, tmp_path)
    code, line = refused(error)
    assert words in line
    assert code in ("config-file", "config-missing")
    assert len(line) < 300


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(PellucidError, match=r"a file that exists|a plain file"):
            TrainConfig.load(path)


@pytest.mark.parametrize("kind", ["denoser", None, 3, ["denoiser"], {}])
def test_an_unknown_kind_lists_the_known(kind: Any) -> None:
    with pytest.raises(PellucidError, match=r"^task\.kind must be one of .*denoiser.*Nearest: ") as error:
        chosen({"kind": kind} if kind is not None else {}, TASKS, "task")
    assert error.value.code == "config-value"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ({"schedule": {"num_train": 10}}, "config-missing"),
        ({"schedule": {"name": "liner"}}, "unknown-schedule"),
        ({"schedule": {"name": "linear", "betas": 3}}, "option"),
        ({"schedule": {"name": "linear"}, "target": "noise level"}, "unknown-target"),
        ({"schedule": {"name": "linear"}, "target": "flow"}, "target-schedule"),
        ({"schedule": {"name": "linear"}, "dropout": 1.5}, "objective"),
        ({"schedule": {"name": "linear"}, "noise_offset": -0.1}, "objective"),
        ({"schedule": {"name": "linear"}, "times": {"kind": "normal"}}, "config-value"),
        ({"schedule": {"name": "linear"}, "weighting": {"kind": "min_snr", "gamma": 0.0}}, "weighting"),
    ],
    ids=str,
)
def test_an_objective_that_cannot_be_is_one_line(raw: dict[str, Any], code: str) -> None:
    with pytest.raises(PellucidError) as error:
        read(ObjectiveConfig, raw, "objective").build()
    assert refused(error)[0] == code


# --- the fingerprint ---------------------------------------------------------------------------------------------


def fingerprint(changed: dict[str, Any]) -> str:
    return read(TrainConfig, LEAST | changed, "config").fingerprint()


@pytest.mark.parametrize(
    "changed",
    [
        {"log": {"every": 5, "checkpoint_every": 20, "keep": 9, "tensorboard": False, "pictures_every": 3}},
        {"steps": 20},
        {"seed": 0, "optimizer": {}, "ema": []},
    ],
    ids=str,
)
def test_what_shapes_no_weights_is_not_in_the_fingerprint(changed: dict[str, Any]) -> None:
    """The log, a longer run at a constant rate, and a default that is written out."""
    assert fingerprint(changed) == fingerprint({})


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"batch": 8},
        {"ema": [5.0]},
        {"optimizer": {"rate": 2e-4}},
        {"optimizer": {"weight_decay": 0.01}},
        {"engine": {"dtype": "bf16"}},
        {"task": {"kind": "denoiser"}},
        {"task": {"network": {"layers": [1, 2]}}},
        {"data": {"folder": "there"}},
    ],
    ids=str,
)
def test_what_shapes_the_weights_is_in_it(changed: dict[str, Any]) -> None:
    assert fingerprint(changed) != fingerprint({})


def test_a_longer_run_is_another_run_only_when_its_rate_falls() -> None:
    decay = {"optimizer": {"decay": "cosine"}}
    assert fingerprint({"steps": 20} | decay) != fingerprint(decay)


@given(order=st.permutations(sorted(LEAST | {"seed": 3, "ema": [1.0]})))
def test_the_order_of_keys_does_not_matter(order: list[str]) -> None:
    values = LEAST | {"seed": 3, "ema": [1.0], "task": {"a": 1, "b": 2}}
    turned = {key: values[key] for key in order} | {"task": {"b": 2, "a": 1}}
    assert read(TrainConfig, turned, "config").fingerprint() == read(TrainConfig, values, "config").fingerprint()


def test_every_field_is_in_the_fingerprint_or_known_not_to_be() -> None:
    """A field that is added later is decided on, not forgotten."""
    assert {f.name for f in dataclasses.fields(TrainConfig)} == {
        "task", "data", "steps", "batch", "seed", "ema", "optimizer", "engine", "log",
    }  # fmt: skip
