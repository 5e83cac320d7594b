"""What a user's program imports: `from pie.inferlet import Context, ForwardPass, …`; and `run` for its client."""

from pie.inferlet.client import run
from pie.inferlet.context import Context
from pie.inferlet.errors import (
    BadCallError,
    ContextLengthError,
    DroppedSlotError,
    EndedError,
    FrozenPageError,
    HostGoneError,
    HttpFailedError,
    InferletError,
    NeverWrittenError,
    NotAllowedError,
    NothingAttendedError,
    NotRunError,
    OutOfPagesError,
    PassFailedError,
    RecurrentError,
    ToolFailedError,
)
from pie.inferlet.forward import ForwardPass, PassResult, StateGeometry
from pie.inferlet.generation import Generation
from pie.inferlet.pipeline import Pipeline
from pie.inferlet.samplers import Sampler, greedy
from pie.inferlet.tools import Tool
from pie.inferlet.web import HttpResponse
from pie.inferlet.working_set import WorkingSet

__all__ = [
    "BadCallError",
    "Context",
    "ContextLengthError",
    "DroppedSlotError",
    "EndedError",
    "ForwardPass",
    "FrozenPageError",
    "Generation",
    "HostGoneError",
    "HttpFailedError",
    "HttpResponse",
    "InferletError",
    "NeverWrittenError",
    "NotAllowedError",
    "NotRunError",
    "NothingAttendedError",
    "OutOfPagesError",
    "PassFailedError",
    "PassResult",
    "Pipeline",
    "RecurrentError",
    "Sampler",
    "StateGeometry",
    "Tool",
    "ToolFailedError",
    "WorkingSet",
    "greedy",
    "run",
]
