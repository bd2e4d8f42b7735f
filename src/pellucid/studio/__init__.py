"""The studio: Pellucid as a page in the browser. Here only: gradio, imported without what slows it down.

At every import gradio parses its own sources, to write type stubs beside them; that is more than half of the time that
it takes. A class without a file has no stub: while gradio is imported, its classes have none. The collector rests: an
import makes half a million objects that stay, and looking through them again and again takes 0.7 s.
"""

from __future__ import annotations

import gc
import inspect
import threading
from typing import Any

from pellucid.studio import scratch

scratch.folder()  # gradio asks for its own once, while it is imported
getfile = inspect.getfile


def of_others(thing: Any) -> str:
    if isinstance(thing, type) and thing.__module__.startswith("gradio."):
        raise OSError("no stub is wanted")
    return getfile(thing)


def import_torch() -> None:
    import torch  # noqa: F401


beside = threading.Thread(target=import_torch)
beside.start()
gc.disable()
inspect.getfile = of_others
try:
    import gradio  # noqa: F401
finally:
    inspect.getfile = getfile
    beside.join()
    gc.freeze()
    gc.enable()
