"""The HTTP interface: OpenAI's images API, jobs, plans, health, metrics and a status page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from PIL import Image
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid._version import __version__
from pellucid.core.errors import PellucidError
from pellucid.interop.source import pipelines
from pellucid.serve.admission import Admission
from pellucid.serve.errors import ApiError
from pellucid.serve.jobs import Job, opened
from pellucid.serve.metrics import STAGES, Metrics, percentile
from pellucid.serve.rollout import Rollout, RolloutSettings, check_inside
from pellucid.serve.schemas import ImageRequest, PlanRequest, RolloutRequest
from pellucid.serve.settings import ServeSettings, owner_of
from pellucid.serve.supervisor import Supervisor, Work, unavailable

MOST_BYTES = 64 * 2**20  # of a request's body
_FIELDS = ("prompt", "negative_prompt", "label", "sampler", "grid", "steps", "guidance", "strength")
_KEPT = 256  # finished requests that can be asked for again,
_KEPT_BYTES = 256 * 2**20  # and their images; in base64 they take as much again and a third
_OPEN = ("/", "/health", "/ready")  # the page asks for a key itself, a load balancer has none
_PAGE = Path(__file__).with_name("status.html")
_LOG = logging.getLogger("pellucid.serve")


@dataclass(eq=False)
class Group:
    """A request with its images: what a job is to a client."""

    id: str
    body: ImageRequest
    works: list[Work]
    owner: str
    created: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    answer: asyncio.Future[dict[str, Any]] | None = None
    files: list[bytes] = field(default_factory=list)

    @property
    def state(self) -> str:
        if self.answer is not None and self.answer.done():
            error = self.answer.exception() if not self.answer.cancelled() else None
            if error is None:
                return "completed"
            return "cancelled" if isinstance(error, ApiError) and error.code == "cancelled" else "failed"
        return "in_progress" if any(work.started for work in self.works) else "queued"


class Server:
    """What the routes share: the engine, what was accepted, and what is remembered of it."""

    def __init__(self, settings: ServeSettings, engines: Callable[..., Any] = Supervisor) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.admission = Admission(settings.queue)
        self.supervisor: Any = engines(settings, self.told)
        self.groups: OrderedDict[str, Group] = OrderedDict()
        self.repeats: OrderedDict[tuple[str, str], tuple[str, Group]] = OrderedDict()  # by owner and idempotency key
        self.tasks: set[asyncio.Task[Any]] = set()
        self.draining = False
        self.rollouts: OrderedDict[str, Rollout] = OrderedDict()
        self.seconds: dict[str, list[float]] = {name: [] for name in (*STAGES, "total")}  # of the last images

    # --- what the engine did ----------------------------------------------------------------------------------------

    def told(self, what: str, **facts: Any) -> None:
        metrics = self.metrics
        if what == "step":
            metrics.step.labels(str(facts["images"])).observe(facts["seconds"])
            metrics.occupancy.set(min(facts["images"] / facts["limit"], 1.0))
        elif what == "done":
            work: Work = facts["work"]
            metrics.finished.labels(work.job.model).inc()
            for stage in STAGES:
                self.saw(stage, facts["times"].get(stage, 0.0))
            self.saw("total", time.monotonic() - work.job.arrived)
            self.admission.done(sum(facts["times"].get(stage, 0.0) for stage in STAGES[1:]))
        elif what == "failed":
            kind = facts["code"]
            if kind in ("cancelled", "deadline", "disconnected"):
                metrics.cancelled.labels(kind).inc()
            else:
                metrics.failed.labels(kind).inc()
        elif what == "trial":
            if facts["rollout"] in self.rollouts:
                self.rollouts[facts["rollout"]].loaded(facts["found"])
        elif what == "restart":
            metrics.restarts.inc()
            if self.rollout is not None:
                self.rollout.end("rolled back", "the engine ended while the version was tried")
            _LOG.error("the engine ended", extra={"facts": {"code": facts["code"]}})
        elif what in ("hung", "broken", "fault"):
            _LOG.error("engine: %s", what, extra={"facts": {k: str(v) for k, v in facts.items()}})
        elif what == "ready":
            _LOG.info("the engine is ready", extra={"facts": {"device": facts["device"]}})

    def saw(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = [*self.seconds[stage][-511:], seconds]
        if stage == "total":
            self.metrics.total.observe(seconds)
        else:
            self.metrics.stage.labels(stage).observe(seconds)

    def refresh(self) -> None:
        """Gauges, as they are now."""
        state = self.supervisor.engine
        for stage in STAGES[1:]:
            self.metrics.queue.labels(stage).set(state.get("queues", {}).get(stage, 0))
            self.metrics.age.labels(stage).set(state.get("ages", {}).get(stage, 0.0))
        self.metrics.running.set(sum(lane["images"] for lane in state.get("lanes", ())))
        self.metrics.accepted.set(self.admission.taken)
        self.metrics.ready.set(self.supervisor.ready)

    # --- requests ---------------------------------------------------------------------------------------------------

    def model_of(self, name: str | None) -> str:
        known = list(self.settings.models)
        found = known[0] if name is None or name == "default" else name
        if found not in known:
            message = f"model must be one of {', '.join(known)}; got {found!r}."
            raise ApiError(404, "model_not_found", message, param="model")
        return found

    def jobs_of(self, body: ImageRequest, uploads: Mapping[str, bytes], arrived: float) -> list[Job]:
        """One job for each image, with a seed of its own, so that each can be run again as it was."""
        model, fields = self.model_of(body.model), self.fields_of(body)
        first = secrets.randbelow(2**32) if body.seed is None else body.seed
        deadline = None if body.deadline_ms is None else arrived + body.deadline_ms / 1000
        return [
            Job(
                id=f"img-{secrets.token_hex(12)}",
                model=model,
                fields={**fields, "seed": first + k},
                uploads=dict(uploads),
                loras=self.loras_of(body),
                arrived=arrived,
                deadline=deadline,
                previews=body.partial_images if body.stream else 0,
                progress=body.in_background or body.stream,
                trace=body.trace,
            )
            for k in range(body.n)
        ]

    def fields_of(self, body: ImageRequest) -> dict[str, Any]:
        """The fields of a pipeline's request, within the limits of this server."""
        fields = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
        if isinstance(body.guidance, float | int):
            fields["guidance"] = f"{body.guidance:g}"
        if body.plan is not None:
            fields["plan"] = json.dumps(body.plan)
        if body.size not in (None, "auto"):
            width, height = (int(side) for side in str(body.size).split("x"))
            self.check_limit("size", width * height, self.settings.max_pixels, "pixels")
            fields |= {"width": width, "height": height}
        self.check_limit("steps", body.steps or 0, self.settings.max_steps, "steps")
        self.check_limit("plan", len((body.plan or {}).get("rows", ())), 4 * self.settings.max_steps, "rows")
        return fields

    @staticmethod
    def check_limit(name: str, value: int, most: int, what: str) -> None:
        if value > most:
            message = f"{name} must be at most {most} {what}; got {value}."
            raise ApiError(400, "limit_exceeded", message, param=name)

    def loras_of(self, body: ImageRequest) -> tuple[tuple[str, float], ...]:
        """The files of the LoRAs that are named; only those that the server was started with."""
        given = [body.lora] if isinstance(body.lora, str) else body.lora or []
        found = []
        for one in given:
            name, scale = (one, 1.0) if isinstance(one, str) else (one.name, one.scale)
            if name not in self.settings.loras:
                known = ", ".join(self.settings.loras) or "none"
                message = f"lora must be one of this server's ({known}); got {name!r}."
                raise ApiError(400, "lora_not_found", message, param="lora")
            found.append((self.settings.loras[name], scale))
        return tuple(found)

    # --- versions ---------------------------------------------------------------------------------------------------

    @property
    def rollout(self) -> Rollout | None:
        """The one that is on its way."""
        return next((one for one in self.rollouts.values() if not one.over), None)

    def roll_out(self, asked: RolloutSettings) -> Rollout:
        if self.rollout is not None:
            raise ApiError(409, "rollout_running", f"{self.rollout.id} must end before the next begins.")
        if not self.supervisor.ready:
            raise unavailable(self.supervisor.why)
        made = Rollout(f"rollout-{secrets.token_hex(6)}", asked, self.rolled_out)
        self.supervisor.examine(made.id, asked, made.key)  # Ray's replicas refuse here
        self.rollouts[made.id] = made
        return made

    def rolled_out(self, rollout: Rollout) -> None:
        """Makes a decision so."""
        if rollout.stage == "promoted":
            self.supervisor.promote(rollout.settings.model, rollout.key, rollout.settings.path)
        else:
            self.supervisor.unload(rollout.key)
        self.metrics.rollouts.labels(rollout.stage).inc()
        _LOG.warning("rollout", extra={"facts": {"id": rollout.id, "stage": rollout.stage, "why": rollout.why}})
        if self.settings.records is not None:
            rollout.write(self.settings.records)

    def versions_of(self, jobs: list[Job]) -> tuple[list[Job], list[Job]]:
        """The jobs, perhaps for the new version in place of the old; and copies for it, whose images nobody sees."""
        rollout = self.rollout
        if rollout is None or jobs[0].model != rollout.settings.model:
            return jobs, []
        wants = rollout.wants()
        if wants == "canary":
            return [replace(job, model=rollout.key) for job in jobs], []
        if wants == "shadow" and 2 * self.admission.taken <= self.admission.limit:
            return jobs, [replace(job, id=f"shadow-{job.id}", model=rollout.key, previews=0) for job in jobs]
        return jobs, []

    def submit(self, job: Job) -> Work:
        """Hands a job to the engine; a roll-out that is on its way sees how it ends."""
        work, rollout = self.supervisor.submit(job), self.rollout
        if rollout is not None and job.model in (rollout.key, rollout.settings.model):
            stage, arm = rollout.stage, "new" if job.model == rollout.key else "old"

            def ended(done: asyncio.Future[dict[str, Any]]) -> None:
                error = None if done.cancelled() else done.exception()
                if done.cancelled() or (isinstance(error, ApiError) and error.status < 500):
                    return  # what was asked was wrong, or nobody wants it any more
                times = None if error else done.result()["times"]
                rollout.saw(stage, arm, None if times is None else sum(times.get(s, 0.0) for s in STAGES[1:]))

            work.result.add_done_callback(ended)
        return work

    async def result_of(self, work: Work, group: Group) -> dict[str, Any]:
        """The result of a job; one that failed on a version that is tried is made by the old one."""
        try:
            return await work.result
        except ApiError as error:
            name = next((one.settings.model for one in self.rollouts.values() if one.key == work.job.model), None)
            if name is None or error.status < 500:
                raise
            again = self.submit(replace(work.job, id=f"img-{secrets.token_hex(12)}", model=name))
            group.works[group.works.index(work)] = again
            return await again.result

    async def accept(self, body: ImageRequest, uploads: Mapping[str, bytes], owner: str) -> Group:
        """Takes a request in, or refuses it: by its form, by capacity, by its deadline."""
        arrived = time.monotonic()
        if self.draining:
            raise ApiError(503, "shutdown", "the server is shutting down.", retry_after=5)
        jobs = self.jobs_of(body, uploads, arrived)
        if body.stream and body.n > 1:
            raise ApiError(400, "invalid_value", "n must be 1 with stream; got more.", param="n")
        self.admission.take(len(jobs))
        try:
            if jobs[0].deadline is not None:
                known = await self.supervisor.price(jobs[0]) if self.supervisor.ready else {}
                work = known.get("milliseconds")
                self.admission.check_deadline(
                    jobs[0].deadline - time.monotonic(), None if work is None else work / 1000
                )
        except BaseException:
            self.admission.give_back(len(jobs))
            raise
        self.metrics.admitted.labels(jobs[0].model).inc(len(jobs))
        jobs, copies = self.versions_of(jobs)
        works = [self.submit(job) for job in jobs]
        for copy in copies:
            self.submit(copy)
        for work in works:
            work.result.add_done_callback(lambda _: self.admission.give_back())
        group = Group(f"job-{secrets.token_hex(12)}", body, works, owner)
        group.answer = asyncio.ensure_future(self.answer(group))
        group.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.groups[group.id] = group
        self.forget_old()
        return group

    def forget_old(self) -> None:
        """Drops what finished long ago, and the oldest of what takes too much; what runs stays."""
        now, kept = time.time(), 0
        done = [group for group in self.groups.values() if group.state not in ("queued", "in_progress")]
        for count, group in enumerate(reversed(done), 1):
            kept += sum(map(len, group.files))
            if now - group.created > self.settings.kept_seconds or count > _KEPT or kept > _KEPT_BYTES:
                self.forget(group)

    def forget(self, group: Group) -> None:
        self.groups.pop(group.id, None)
        for key in [key for key, (_, held) in self.repeats.items() if held is group]:
            del self.repeats[key]

    async def answer(self, group: Group) -> dict[str, Any]:
        """The body of the response, once all images are there; the first that fails ends the others."""
        try:
            found = await asyncio.gather(*(self.result_of(work, group) for work in group.works))
        except BaseException:
            self.cancel(group)
            raise
        body, data = group.body, []
        for k, facts in enumerate(found):
            recipe = json.loads(facts["recipes"][0])
            image = await asyncio.to_thread(in_format, facts["images"][0], body)
            group.files.append(image)
            shown: dict[str, Any] = {"seed": facts["seeds"][0], "recipe": recipe, "timings": facts["times"]}
            if body.trace:
                shown["trace"] = facts["trace"]
            if body.response_format == "url":
                shown["url"] = f"/v1/jobs/{group.id}/images/{k}"
            else:
                shown["b64_json"] = base64.b64encode(image).decode()
            data.append(shown)
        width, height = recipe["size"]
        return {
            "id": group.id,
            "created": int(group.created),
            "model": group.works[0].job.model.partition("@")[0],
            "data": data,
            "size": f"{width}x{height}",
            "output_format": body.output_format,
            "calls": sum(facts["calls"] for facts in found),
            "notes": list(dict.fromkeys(note for facts in found for note in facts["notes"])),
            "seconds": round(time.monotonic() - group.began, 4),
        }

    def cancel(self, group: Group) -> None:
        for work in group.works:
            self.supervisor.cancel(work.job.id)

    async def once(self, key: str | None, owner: str, said: bytes, make: Callable[[], Awaitable[Group]]) -> Group:
        """The group of an idempotency key: the same one for the same request, however often it comes."""
        if key is None:
            return await make()
        digest = hashlib.sha256(said).hexdigest()
        held = self.repeats.get((owner, key))
        if held is not None:
            if held[0] != digest:
                message = "Idempotency-Key must come with the same request each time; this one differs."
                raise ApiError(409, "idempotency_mismatch", message, param="Idempotency-Key")
            if held[1].state not in ("failed", "cancelled"):
                return held[1]
        group = await make()
        self.repeats[owner, key] = digest, group
        return group


def in_format(png: bytes, body: ImageRequest) -> bytes:
    """The image as it was asked for; a PNG carries its recipe."""
    if body.output_format == "png":
        return png
    whole, quality = BytesIO(), 90 if body.output_compression is None else body.output_compression
    Image.open(BytesIO(png)).convert("RGB").save(whole, format=body.output_format.upper(), quality=max(quality, 1))
    return whole.getvalue()


# --- The app ----------------------------------------------------------------------------------------------------------


def make_app(settings: ServeSettings, engines: Callable[..., Any] = Supervisor) -> FastAPI:
    """The app; `engines` is what runs the jobs: one process of this machine, or Ray's replicas."""
    server = Server(settings, engines)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.supervisor.start()
        try:
            yield
        finally:
            server.draining = True
            await server.supervisor.stop(grace=30.0)

    app = FastAPI(title="Pellucid", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    add_errors(app, server)
    add_images(app, server)
    add_jobs(app, server)
    add_rollouts(app, server)
    add_watching(app, server)
    app.add_middleware(Gate, server=server)
    return app


def add_errors(app: FastAPI, server: Server) -> None:
    def refused(error: ApiError) -> Response:
        server.metrics.refused.labels(error.reason).inc()
        return JSONResponse(error.body, error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def own(_: Request, error: ApiError) -> Response:
        return refused(error)

    @app.exception_handler(PellucidError)
    async def of_pellucid(_: Request, error: PellucidError) -> Response:
        return refused(ApiError(400, error.code, str(error)))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return refused(validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        names = {404: "not_found", 405: "method_not_allowed", 400: "invalid_request"}
        message = {404: "there is nothing at this address.", 405: "this address takes another method."}
        code = names.get(error.status_code, "http_error")
        made = refused(ApiError(error.status_code, code, message.get(error.status_code, f"{error.detail}.")))
        made.headers.update(error.headers or {})
        return made

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> Response:
        _LOG.error("a request failed", exc_info=error)
        return refused(ApiError(500, "internal_error", "the server failed; its log says why."))


def validation_error(errors: Any) -> ApiError:
    """The first thing that is wrong with a body, in one line."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("body",)]
    name = place[0] if place else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, "unknown_parameter", f"unknown parameter: {name!r}.", param=name)
    message = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return ApiError(400, "invalid_value", f"{'.'.join(place) or 'body'}: {message}.", param=name)


def add_images(app: FastAPI, server: Server) -> None:
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": "An error in OpenAI's shape.", "content": {"application/json": {}}}
        for status in (400, 401, 404, 409, 413, 429, 499, 500, 503, 504)
    }

    @app.post("/v1/images/generations", tags=["images"], responses=answers)
    async def generations(body: ImageRequest, request: Request) -> Response:
        """Makes images of a prompt."""
        return await serve(body, {}, request, body.model_dump_json().encode())

    @app.post("/v1/images/edits", tags=["images"], responses=answers, openapi_extra=edit_schema())
    async def edits(request: Request) -> Response:
        """Changes an image, where `mask` says so or as a whole: multipart, with `image` and the other fields."""
        body, uploads = await read_form(request)
        digest = hashlib.sha256(b"".join(uploads[name] for name in sorted(uploads)))
        return await serve(body, uploads, request, body.model_dump_json().encode() + digest.digest())

    @app.post("/v1/plans", tags=["plans"], responses=answers)
    async def plans(body: PlanRequest) -> Response:
        """Compiles and checks a plan without running it: its calls and what they will take."""
        if not server.supervisor.ready:
            raise ApiError(503, "engine_unavailable", server.supervisor.why, retry_after=2)
        found = await server.supervisor.price(server.jobs_of(body, {}, time.monotonic())[0])
        found["plan"] = json.loads(found["plan"])
        return JSONResponse(found)

    async def serve(body: ImageRequest, uploads: Mapping[str, bytes], request: Request, said: bytes) -> Response:
        owner = request.scope.get("pellucid.owner", "")
        key = request.headers.get("idempotency-key")
        group = await server.once(key, owner, said, lambda: server.accept(body, uploads, owner))
        assert group.answer is not None
        if body.in_background:
            return JSONResponse(shown(group), 202)
        if body.stream:
            return StreamingResponse(
                events(group), media_type="text/event-stream", headers={"cache-control": "no-store"}
            )
        found = await until_gone(group, request, shared=key is not None)
        if key is None and body.response_format == "b64_json":
            server.forget(group)  # nobody can ask for it again
        headers = {"x-job-id": group.id, "openai-processing-ms": str(round(1000 * found["seconds"]))}
        return JSONResponse(found, headers=headers)

    async def until_gone(group: Group, request: Request, shared: bool) -> dict[str, Any]:
        """The answer; a client that hangs up cancels its request, unless others may ask for it by its key."""
        assert group.answer is not None
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({group.answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not group.answer.done():
                if not shared:
                    server.cancel(group)
                raise ApiError(499, "disconnected", "the client has gone.")
            return await asyncio.shield(group.answer)
        finally:
            gone.cancel()

    async def events(group: Group) -> AsyncIterator[bytes]:
        """Server-sent events: partial images, then the whole one, or an error."""
        work, body = group.works[0], group.body
        try:
            while (item := await work.previews.get()) is not None:
                index, image = item
                shown = {"b64_json": base64.b64encode(await asyncio.to_thread(in_format, image, body)).decode()}
                yield event("partial_image", group, **shown, partial_image_index=index)
            assert group.answer is not None
            found = await asyncio.shield(group.answer)
            more = {name: found[name] for name in ("size", "output_format", "calls", "notes", "seconds")}
            yield event("completed", group, **found["data"][0], **more)
        except ApiError as error:
            yield b"event: error\ndata: " + json.dumps({"type": "error", **error.body}).encode() + b"\n\n"
        finally:
            server.cancel(group)  # of a client that has gone; after the end this does nothing
            server.forget(group)

    def event(name: str, group: Group, **facts: Any) -> bytes:
        kind = f"image_generation.{name}" if "image" not in group.works[0].job.uploads else f"image_edit.{name}"
        whole = {"type": kind, "created_at": int(group.created), "output_format": group.body.output_format, **facts}
        return f"event: {kind}\ndata: {json.dumps(whole)}\n\n".encode()


def edit_schema() -> dict[str, Any]:
    """What `edits` takes, for the OpenAPI page: a form with files beside the fields of a generation."""
    schema = ImageRequest.model_json_schema()
    file = {"type": "string", "format": "binary"}
    plain = {name: {"type": "string"} for name in schema["properties"]}
    whole = {"type": "object", "properties": {"image": file, "mask": file, **plain}, "required": ["image"]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": whole}}}}


async def disconnected(request: Request) -> None:
    """Waits until the client hangs up; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_form(request: Request) -> tuple[ImageRequest, dict[str, bytes]]:
    """The fields and files of a multipart request."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(415, "unsupported_media_type", "edits must come as multipart/form-data.")
    fields: dict[str, Any] = {}
    uploads: dict[str, bytes] = {}
    async with request.form(max_files=4, max_fields=64, max_part_size=1 << 20) as form:
        for name, value in form.multi_items():
            name = name.removesuffix("[]")
            if isinstance(value, UploadFile) or hasattr(value, "read"):
                if name not in ("image", "mask"):
                    raise ApiError(400, "unknown_parameter", f"unknown file: {name!r}.", param=name)
                if name in uploads:
                    raise ApiError(400, "invalid_value", f"{name} must be given once; got several.", param=name)
                uploads[name] = await value.read()
            else:
                fields[name] = plain_value(name, str(value))
    if "image" not in uploads:
        raise ApiError(400, "missing_parameter", "image must be given.", param="image")
    for name, data in uploads.items():
        await asyncio.to_thread(check_upload, name, data)
    try:
        return ImageRequest(**fields), uploads
    except ValidationError as error:
        raise validation_error(error.errors()) from None


_NUMBERS = {"n", "output_compression", "partial_images", "steps", "seed", "deadline_ms", "strength", "guidance"}
_JSON = {"grid", "plan", "lora", "stream", "background"}


def plain_value(name: str, text: str) -> Any:
    """A form's field as JSON would have it."""
    if name in _JSON | _NUMBERS:
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
            if not isinstance(value, float) or math.isfinite(value):
                return value
    return text


def check_upload(name: str, data: bytes) -> None:
    try:
        opened(name, data)
    except PellucidError as error:
        raise ApiError(400, "invalid_image", str(error), param=name) from None


def add_jobs(app: FastAPI, server: Server) -> None:
    def group_of(id: str, request: Request) -> Group:
        group = server.groups.get(id)
        if group is None or group.owner != request.scope.get("pellucid.owner", ""):
            raise ApiError(404, "job_not_found", f"job {id!r} is not known, or was forgotten.", param="id")
        return group

    @app.get("/v1/jobs/{id}", tags=["jobs"])
    async def job(id: str, request: Request) -> Response:
        """How far a request is; its images once they are there."""
        return JSONResponse(shown(group_of(id, request)))

    @app.delete("/v1/jobs/{id}", tags=["jobs"])
    async def end(id: str, request: Request) -> Response:
        """Cancels a request from any stage; once it has ended, nothing changes."""
        group = group_of(id, request)
        server.cancel(group)
        assert group.answer is not None
        await asyncio.wait({group.answer}, timeout=1.0)
        return JSONResponse(shown(group))

    @app.get("/v1/jobs/{id}/images/{index}", tags=["jobs"])
    async def image(id: str, index: int, request: Request) -> Response:
        group = group_of(id, request)
        if not 0 <= index < len(group.files):
            raise ApiError(404, "image_not_found", f"image {index} of job {id!r} is not there.", param="index")
        return Response(group.files[index], media_type=f"image/{group.body.output_format}")

    @app.get("/v1/models", tags=["models"])
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card(server, name) for name in server.settings.models]})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> Response:
        return JSONResponse(model_card(server, server.model_of(name)))


def model_card(server: Server, name: str) -> dict[str, Any]:
    began = int(time.time() - (time.monotonic() - server.supervisor.started_at))
    return {
        "id": name,
        "object": "model",
        "created": began,
        "owned_by": "pellucid",
        **server.supervisor.models.get(name, {}),
    }


def shown(group: Group) -> dict[str, Any]:
    """A job as its client sees it."""
    state = group.state
    found: dict[str, Any] = {
        "id": group.id,
        "object": "image.job",
        "status": state,
        "created": int(group.created),
        "images": [
            {"id": work.job.id, "stage": work.state, "step": work.step, "steps": work.steps, "runs": work.runs + 1}
            for work in group.works
        ],
    }
    if group.answer is not None and group.answer.done() and not group.answer.cancelled():
        error = group.answer.exception()
        if error is None:
            found["result"] = group.answer.result()
        elif isinstance(error, ApiError):
            found |= error.body
    return found


def add_rollouts(app: FastAPI, server: Server) -> None:
    def rollout_of(id: str) -> Rollout:
        if id not in server.rollouts:
            raise ApiError(404, "rollout_not_found", f"roll-out {id!r} is not known.", param="id")
        return server.rollouts[id]

    @app.post("/v1/rollouts", tags=["rollouts"])
    async def begin(body: RolloutRequest) -> Response:
        """Loads a new version of a model beside the old one, tries it, and promotes it or rolls it back."""
        model = server.model_of(body.model)
        path = check_inside(body.path, list(server.settings.candidates), pipelines())
        asked = RolloutSettings(**{**body.model_dump(), "model": model, "path": path})
        return JSONResponse(server.roll_out(asked).to_dict(), 202)

    @app.get("/v1/rollouts/{id}", tags=["rollouts"])
    async def rollout(id: str) -> Response:
        return JSONResponse(rollout_of(id).to_dict())

    @app.delete("/v1/rollouts/{id}", tags=["rollouts"])
    async def back(id: str) -> Response:
        """Rolls back; what was promoted stays."""
        found = rollout_of(id)
        found.end("rolled back", "somebody asked for it")
        return JSONResponse(found.to_dict())


def add_watching(app: FastAPI, server: Server) -> None:
    @app.get("/health", tags=["watching"])
    async def health() -> Response:
        """The API is alive, whatever the engine does."""
        return JSONResponse({"status": "ok", "version": __version__})

    @app.get("/ready", tags=["watching"])
    async def ready() -> Response:
        """Whether the engine is warm: an image of a fixed seed was made, and is the one of the first start."""
        good = server.supervisor.ready and not server.draining
        why = "the server is shutting down." if server.draining else server.supervisor.why
        body = {"status": "ready", "warm": server.supervisor.warm} if good else {"status": "not ready", "why": why}
        return JSONResponse(body, 200 if good else 503, headers={} if good else {"retry-after": "2"})

    @app.get("/metrics", tags=["watching"])
    async def metrics() -> Response:
        server.refresh()
        return PlainTextResponse(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/status", tags=["watching"])
    async def status() -> Response:
        """Queues, lanes and percentiles, as the status page and `pellucid top` show them."""
        return JSONResponse(status_of(server))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"cache-control": "no-store"})


def status_of(server: Server) -> dict[str, Any]:
    supervisor = server.supervisor
    return {
        "version": __version__,
        "ready": supervisor.ready,
        "why": supervisor.why,
        "draining": server.draining,
        "restarts": supervisor.restarts,
        "unanswered": server.admission.taken,
        "queue": server.admission.limit,
        "images_per_second": round(server.admission.recent_rate, 3),
        "models": supervisor.models,
        "engine": supervisor.engine,
        "seconds": {name: percentiles(values) for name, values in server.seconds.items()},
    }


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(percentile(ordered, p), 4) for p in (50, 95, 99)} if ordered else {}


# --- The gate ---------------------------------------------------------------------------------------------------------


class Gate:
    """Stands around the whole app: keys, hosts and origins, the size of a body, ids of requests, and the log."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        id = (
            given
            if given.isascii() and given.isprintable() and 0 < len(given) <= 128
            else f"req-{secrets.token_hex(8)}"
        )
        began, status = time.monotonic(), 0
        size, answered = 0, False

        async def sending(message: Message) -> None:
            nonlocal status
            if answered:
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode())]
            await send(message)

        async def receiving() -> Message:
            nonlocal size, answered
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BYTES and not answered:
                await refuse(too_large())
                answered = True
            return {"type": "http.disconnect"} if answered else message

        async def refuse(error: ApiError) -> None:
            self.server.metrics.refused.labels(error.reason).inc()
            await JSONResponse(error.body, error.status, headers=error.headers)(scope, receive, sending)

        error = self.refusal(scope, headers)
        try:
            if error is not None:
                await refuse(error)
            else:
                await self.app(scope, receiving, sending)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.server.metrics.responses.labels(route, str(status)).inc()
            facts = {"id": id, "method": scope["method"], "route": route, "status": status}
            _LOG.info("request", extra={"facts": {**facts, "seconds": round(time.monotonic() - began, 4)}})

    def refusal(self, scope: Scope, headers: Mapping[str, str]) -> ApiError | None:
        """Why a request goes no further."""
        settings = self.server.settings
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return too_large()
        if settings.keys:
            if scope["path"] in _OPEN:
                return None
            kind, _, key = headers.get("authorization", "").partition(" ")
            owner = owner_of(settings.keys, key.strip()) if kind.lower() == "bearer" else None
            if owner is None:
                message = "a key of this server must be given as `Authorization: Bearer KEY`."
                return ApiError(401, "invalid_api_key", message)
            scope["pellucid.owner"] = owner
            return None
        if settings.open:
            return None
        host = headers.get("host", "").rpartition(":")[0] or headers.get("host", "")
        if host not in ("127.0.0.1", "localhost", "[::1]", settings.host):
            return ApiError(403, "host_not_allowed", "the server must be addressed as 127.0.0.1 or localhost.")
        origin = headers.get("origin")
        if origin is not None and origin.split("://")[-1] != headers.get("host"):
            return ApiError(403, "origin_not_allowed", "a page of another site must not use this server.")
        return None


def too_large() -> ApiError:
    return ApiError(413, "body_too_large", f"the body must be at most {MOST_BYTES} bytes; got more.")
