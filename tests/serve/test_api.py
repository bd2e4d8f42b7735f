"""OpenAI's images API, with the unmodified client, against a real server."""

from __future__ import annotations

import base64
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from PIL import Image
from servers import RunningServer, pixels, png, wait_for

import pellucid
from pellucid.pipeline.recipe import read_png
from pellucid.serve.settings import ServeSettings

SHORT = {"steps": 3, "sampler": "euler", "seed": 5}


def test_the_openai_client_makes_images(server: RunningServer) -> None:
    made = server.client.images.generate(model="scenes-128", prompt="a red star", n=2, size="128x128", extra_body=SHORT)
    assert len(made.data) == 2
    assert [image.seed for image in made.data] == [5, 6]
    own = pellucid.load("scenes-128")("a red star", width=128, height=128, **SHORT)
    image = Image.open(io.BytesIO(base64.b64decode(made.data[0].b64_json)))
    assert np.abs(np.asarray(image).astype(int) - np.asarray(own.images[0])).max() <= 1
    assert set(made.data[0].timings) == {"wait", "encode", "denoise", "decode"}


def test_a_png_carries_its_recipe(server: RunningServer, tmp_path) -> None:
    made = server.make(**SHORT)
    file = tmp_path / "made.png"
    file.write_bytes(base64.b64decode(made["data"][0]["b64_json"]))
    recipe = read_png(file)
    assert (recipe.prompt, recipe.seed, recipe.steps) == ("a red star", 5, 3)
    assert made["data"][0]["recipe"]["sampler"] == "euler"


def test_models(server: RunningServer) -> None:
    (model,) = server.client.models.list().data
    assert model.id == "scenes-128"
    assert server.client.models.retrieve("scenes-128").owned_by == "pellucid"
    with pytest.raises(openai.NotFoundError) as error:
        server.client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_a_stream_shows_partial_images_and_then_the_whole(server: RunningServer) -> None:
    events = list(
        server.client.images.generate(
            model="scenes-128", prompt="a red star", stream=True, partial_images=2, extra_body={**SHORT, "steps": 12}
        )
    )
    *partial, whole = events
    assert [event.partial_image_index for event in partial] == [0, 1]
    assert {event.type for event in partial} == {"image_generation.partial_image"}
    assert whole.type == "image_generation.completed"
    assert (
        np.abs(pixels({"data": [{"b64_json": whole.b64_json}]}) - pixels(server.make(**{**SHORT, "steps": 12}))).max()
        <= 1
    )


def test_edits_change_what_is_transparent(server: RunningServer) -> None:
    grey = Image.new("RGB", (128, 128), "grey")
    mask = Image.new("RGBA", (128, 128), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 64, 128))
    files = {"image": ("a.png", png(grey)), "mask": ("m.png", png(mask))}
    made = server.client.images.edit(
        model="scenes-128", prompt="a red star", extra_body={**SHORT, "strength": 0.9}, **files
    )
    found = pixels({"data": [{"b64_json": made.data[0].b64_json}]})
    own = pellucid.load("scenes-128")(
        "a red star", image=grey, mask=Image.fromarray((np.asarray(mask)[..., 3] == 0).astype(np.uint8) * 255),
        strength=0.9, **SHORT,
    )  # fmt: skip
    assert np.abs(found - np.asarray(own.images[0])).max() <= 1


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"n": 0}, 400, "n", "invalid_value"),
        ({"n": 11}, 400, "n", "invalid_value"),
        ({"size": "big"}, 400, "size", "invalid_value"),
        ({"size": "99999x99999"}, 400, "size", "limit_exceeded"),
        ({"size": "100x100"}, 400, None, "size-multiple"),
        ({"steps": 100_000}, 400, "steps", "limit_exceeded"),
        ({"sampler": "nope"}, 400, None, "unknown-sampler"),
        ({"guidance": "what + ever"}, 400, None, "guidance"),
        ({"lora": "/etc/passwd"}, 400, "lora", "lora_not_found"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"colour": "red"}, 400, "colour", "unknown_parameter"),
        ({"stream": True, "n": 2}, 400, "n", "invalid_value"),
        ({"background": "transparent"}, 400, "background", "invalid_value"),
        ({"plan": {"rows": []}}, 400, None, "plan-json"),
        ({"prompt": "x" * 40_000}, 400, "prompt", "invalid_value"),
    ],
)
def test_what_is_wrong_is_said_in_openais_shape(
    server: RunningServer, fields: dict, status: int, param: str | None, code: str
) -> None:
    made = server.make(**{**SHORT, **fields})
    assert made["status"] == status
    error = made["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert made["headers"]["x-should-retry"] == "false"


def test_a_plan_and_its_price_without_running_it(server: RunningServer) -> None:
    server.make(**SHORT)
    found = server.http.post("/v1/plans", json={"prompt": "x", "steps": 9, "sampler": "heun"}).json()
    assert (found["name"], found["calls"], len(found["plan"]["rows"])) == ("heun", 17, 17)
    assert found["milliseconds"] > 0
    made = server.make(plan=found["plan"], seed=5)
    assert made["calls"] == 17
    assert np.array_equal(pixels(made), pixels(server.make(steps=9, sampler="heun", seed=5)))


def test_the_numbers_of_each_step(server: RunningServer) -> None:
    made = server.make(trace=True, **SHORT)
    trace = made["data"][0]["trace"]
    plan = server.http.post("/v1/plans", json={"prompt": "x", **SHORT}).json()["plan"]
    assert [step["step"] for step in trace] == [0, 1, 2]
    assert len(plan["rows"]) == 3
    sigmas = [step["sigma"] for step in trace]
    assert sigmas == sorted(sigmas, reverse=True)
    assert all(step["rms_x"] > 0 and step["rms_x0"] > 0 for step in trace)
    assert "trace" not in server.make(**SHORT)["data"][0]


def test_a_job_in_the_background(server: RunningServer) -> None:
    begun = server.make(background=True, **SHORT)
    assert begun["status"] == 202 or begun["status"] == "queued"
    place = f"/v1/jobs/{begun['id']}"
    wait_for(lambda: server.http.get(place).json()["status"] == "completed", 20, "the job is done")
    found = server.http.get(place).json()
    assert np.array_equal(pixels(found["result"]), pixels(server.make(**SHORT)))
    assert server.http.delete(place).json()["status"] == "completed"  # too late: nothing changes
    assert server.http.get("/v1/jobs/job-unknown").status_code == 404


def test_an_address_in_place_of_bytes(server: RunningServer) -> None:
    made = server.make(response_format="url", output_format="jpeg", **SHORT)
    answer = server.http.get(made["data"][0]["url"])
    assert answer.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(answer.content)).size == (128, 128)


def test_an_idempotency_key_runs_once(server: RunningServer) -> None:
    headers, body = {"idempotency-key": "abc"}, {"prompt": "a red star", "steps": 3}  # without a seed: one is drawn

    def ask(**more: object) -> dict:
        answer = server.http.post("/v1/images/generations", json={**body, **more}, headers=headers)
        return answer.json() | {"status": answer.status_code}

    before = server.metric("pellucid_admitted_images_total")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(), range(4)))
    assert len({answer["id"] for answer in answers}) == 1
    assert len({answer["data"][0]["seed"] for answer in answers}) == 1
    assert server.metric("pellucid_admitted_images_total") == before + 1
    assert ask(steps=4)["status"] == 409


def test_a_deadline_that_cannot_be_met_is_refused_at_once(server: RunningServer) -> None:
    server.make(steps=20, seed=1)  # what a call takes is measured
    began = time.monotonic()
    made = server.make(steps=150, deadline_ms=200)
    assert time.monotonic() - began < 1
    assert made["status"] == 429
    assert made["error"]["code"] == "deadline_unreachable"
    assert int(made["headers"]["retry-after"]) >= 1


def test_the_page_and_the_schema(server: RunningServer) -> None:
    assert "Pellucid server" in server.http.get("/").text
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/images/generations", "/v1/images/edits", "/v1/plans", "/v1/jobs/{id}", "/metrics"} <= set(paths)
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.get("/nothing").json()["error"]["code"] == "not_found"


def test_metrics_count_what_happened(server: RunningServer) -> None:
    names = ("pellucid_admitted_images_total", "pellucid_finished_images_total", "pellucid_refused_requests_total")
    before = [server.metric(name) for name in names]
    server.make(n=3, **SHORT)
    server.make(sampler="nope")
    server.make(model="nope")
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 3, 2]
    wait_for(lambda: server.metric("pellucid_unanswered_images") == 0, 5, "nothing is unanswered")


def test_pages_of_other_sites_and_other_names_are_refused(server: RunningServer) -> None:
    assert server.http.get("/v1/models", headers={"origin": "http://evil.example"}).status_code == 403
    assert server.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert server.http.get("/v1/models", headers={"origin": server.address}).status_code == 200


def test_keys(fresh, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who\nann secret-of-ann-123456\nbob secret-of-bob-123456\n")
    served = fresh("--api-keys", str(keys), key="secret-of-ann-123456").wait_ready()
    begun = served.make(background=True, **SHORT)
    for place in ("/health", "/ready", "/"):
        assert served.http.get(place, headers={"authorization": ""}).status_code == 200
    assert served.http.get("/v1/status", headers={"authorization": ""}).status_code == 401
    for given in ("", "Bearer", "Bearer wrong", "Basic secret-of-ann-123456"):
        answer = served.http.get("/v1/models", headers={"authorization": given})
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    of_bob = {"authorization": "Bearer secret-of-bob-123456"}
    assert served.http.get(f"/v1/jobs/{begun['id']}").status_code == 200
    assert served.http.get(f"/v1/jobs/{begun['id']}", headers=of_bob).status_code == 404


def test_beyond_this_machine_only_with_keys() -> None:
    with pytest.raises(RuntimeError, match=r"--host must be 127\.0\.0\.1 without keys"):
        RunningServer("--host", "0.0.0.0")


@pytest.mark.parametrize("wrong", [{"capacity": 2.5}, {"queue": 0}, {"host": 5}, {"models": {}}, {"memory": -1}])
def test_settings_that_are_wrong(wrong: dict) -> None:
    with pytest.raises(pellucid.PellucidError, match=f"{next(iter(wrong))} must be"):
        ServeSettings(**wrong)


def test_the_log_is_lines_of_json(server: RunningServer) -> None:
    server.http.get("/health", headers={"x-request-id": "mine-7"})
    wait_for(lambda: any(line.get("id") == "mine-7" for line in server.lines), 5, "the request is in the log")
    (line,) = [line for line in server.lines if line.get("id") == "mine-7"]
    assert (line["route"], line["status"]) == ("/health", 200)
    assert json.dumps(line)
