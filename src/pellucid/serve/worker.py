"""The engine's process: it loads the models, makes an image to be warm, and runs what the API process sends.

Run as `python -m pellucid.serve.worker FD`, where FD is one end of a socket pair. When the other end closes, it ends.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

BEAT = 0.25  # seconds between two signs of life
_WARM = {"steps": 2, "sampler": "euler", "seed": 7, "guidance": 2.0}


def main() -> None:
    for one in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a service manager, both processes get them
        signal.signal(one, signal.SIG_IGN)  # the API's says when this one ends
    link, lock = Connection(int(sys.argv[1])), threading.Lock()

    def emit(what: str, id: str = "", **facts: Any) -> None:
        try:
            with lock:
                link.send((what, id, facts))
        except OSError:  # nobody listens any more
            os._exit(0)

    settings = link.recv()
    try:
        run(link, emit, settings)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException as error:
        emit("broken", message=f"{error}" if type(error).__name__ == "PellucidError" else repr(error))
        raise


def run(link: Connection, emit: Any, settings: Any) -> None:
    engine = make_engine(settings, emit)
    emit("ready", **introduction(engine))
    threading.Thread(target=beat, args=(engine, emit), daemon=True).start()
    while True:
        what, id, given = link.recv()
        if what == "submit":
            engine.submit(given)
        elif what == "cancel":
            engine.cancel(id)
        elif what == "trial":
            version, key = given
            threading.Thread(target=trial, args=(engine, emit, id, version, key, settings), daemon=True).start()
        elif what == "promote":
            name, key = given
            engine.pipes[name] = engine.pipes.pop(key)
        elif what == "unload":
            engine.pipes.pop(given, None)
        elif what == "price":
            emit("priced", id, **price(engine, given))
        elif what == "stop":
            engine.close()
            return


def make_engine(settings: Any, emit: Any) -> Any:
    """An engine with the models of the settings."""
    from pellucid.pipeline.load import load
    from pellucid.serve.engine import Engine

    pipes = {}
    for name, path in settings.models.items():
        emit("loading", message=name)
        pipes[name] = load(path, device=settings.device, dtype=settings.dtype)
    memory = None if settings.memory is None else int(settings.memory * 2**30)
    return Engine(pipes, emit, capacity=settings.capacity, memory=memory)


def introduction(engine: Any) -> dict[str, Any]:
    """What an engine says when it is warm."""
    import torch

    return {
        "models": {name: about(pipe) for name, pipe in engine.pipes.items()},
        "warm": {name: engine.device(partial(warm, pipe)) for name, pipe in engine.pipes.items()},
        "torch": torch.__version__,
        "device": str(next(iter(engine.pipes.values())).device),
    }


def trial(engine: Any, emit: Any, id: str, version: Any, key: str, settings: Any) -> None:
    """Loads and examines a version, and says what was found."""
    from pellucid.serve.rollout import Trial

    try:
        found = Trial(engine, version, key, settings.device, settings.dtype).run()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    emit("trial", rollout=id, found=found)


def beat(engine: Any, emit: Any) -> None:
    import time

    while not engine.closing:
        emit("beat", state=engine.state())
        time.sleep(BEAT)


def about(pipe: Any) -> dict[str, Any]:
    """What the API tells of a model, and what it checks requests by."""
    from pellucid.pipeline.encoders.conditions import takes_labels, takes_text
    from pellucid.pipeline.request import Request

    network = pipe.components.network
    width, height = pipe.size_of(Request())
    return {
        "text": takes_text(network),
        "labels": takes_labels(network),
        "size": [width, height],
        "factor": pipe.factor * 2 ** max(len(getattr(network.config, "block_out_channels", ())) - 1, 0),
        "parameters": sum(weight.numel() for weight in network.parameters()),
    }


def warm(pipe: Any) -> str:
    """The hash of an image of a fixed seed: the same after every start on one machine."""
    known = about(pipe)
    asked: dict[str, Any] = dict(_WARM)
    if known["text"]:
        asked["prompt"] = "a red star"
    if known["labels"]:
        asked["label"] = 0
    if not known["text"]:
        asked["guidance"] = 1.0
    return hashlib.sha256(pipe(**asked).images[0].tobytes()).hexdigest()


def price(engine: Any, job: Any) -> dict[str, Any]:
    """The plan of a job and what its calls will take, without running it."""
    from pellucid.pipeline.prepare import settle
    from pellucid.serve.engine import reason_of
    from pellucid.serve.jobs import request_of

    try:
        pipe = engine.pipes[job.model]
        run = settle(pipe, request_of(job))
        state = engine.state()
        steps = [ms for lane in state["lanes"] for ms in lane["step_ms"].values()]
        known = engine.step_seconds.get((job.model, run.size))
        each = 1000 * known if known is not None else max(steps, default=None)
        return {
            "plan": run.plan.to_json(),
            "name": run.plan.name,
            "calls": run.plan.nfe,
            "size": list(run.size),
            "guidance": run.guidance.text(),
            "milliseconds": None if each is None else round(each * run.plan.nfe, 1),
        }
    except Exception as error:
        return {"error": reason_of(error)}


if __name__ == "__main__":
    main()
