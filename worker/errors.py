"""Errors of a worker.

    WorkerError
    ├── ModelError              the model cannot be served
    │   ├── ModelNotFound       no such folder, file or hub id, or it is not a model
    │   ├── UnsupportedModel    Pie would compute it wrongly, or cannot compute it
    │   └── NotEnoughMemory     weights or pages do not fit
    ├── ToolError               a function cannot be a tool of programs
    └── BatchError              a batch breaks its contract: a bug of the caller

Each says in one sentence what is wrong and, where it can, what to do. Errors of transformers,
safetensors and the hub are translated in `pie.worker.sources` and `pie.worker.model`.
"""

from __future__ import annotations


class WorkerError(Exception):
    """Any error of `pie.worker`."""


class ModelError(WorkerError):
    """The model cannot be served."""


class ModelNotFound(ModelError):  # noqa: N818
    """There is no such model."""


class UnsupportedModel(ModelError):  # noqa: N818
    """Pie would compute this model wrongly, or cannot compute it."""


class NotEnoughMemory(ModelError):  # noqa: N818
    """The weights or the pages do not fit into memory."""


class ToolError(WorkerError):
    """A function cannot be a tool of programs."""


class BatchError(WorkerError):
    """A batch breaks its contract."""
