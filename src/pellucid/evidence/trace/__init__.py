"""Traces: a run recorded step by step, in one file that can be inspected, compared, repeated and drawn.

`recorder` writes one, `reading` and `header` read it; `diff`, `replay`, `filmstrip`, `timeline` and `previews` use
it. The layout of the file and its measures are this room's own.
"""

from pellucid.evidence.trace.reading import Step, Trace, read
from pellucid.evidence.trace.recorder import Recorder

__all__ = ["Recorder", "Step", "Trace", "read"]
