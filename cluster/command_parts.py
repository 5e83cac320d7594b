"""What several `pie` commands share: options, the configuration, the router that they ask, signals.

Covers what commands begin and end with. Does not cover the commands (`pie.cluster.cli`, `.policy_app`)
or how a mistake is told (`pie.cluster.sentences`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pie.cluster.config import Key, LoadedConfig, load_config
from pie.cluster.errors import UncertainError
from pie.cluster.sentences import drop_output
from pie.cluster.stopping import Stop, ask_to_stop
from pie.router.tls import trusted

if TYPE_CHECKING:
    from pie.cluster.policy_edit import Desk

RouterAddress = Annotated[
    str | None, typer.Option("--at", help="Address of a router, http://HOST:PORT.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file; default ./pie.toml.")
]


def load(config: Path | None, flags: dict[Key, tuple[str, object]] | None = None) -> LoadedConfig:
    """Return the configuration of a file, the environment and flags.

    Raises:
        ConfigError: It is not acceptable.
    """
    return load_config(config, os.environ, flags)


def desk_of(config: Path | None, at: str | None) -> Desk:
    """Return the router that policies are changed through: the one at an address, else the configuration's.

    Raises:
        ConfigError: The configuration is not acceptable.
    """
    from pie.cluster.policy_edit import Desk  # noqa: PLC0415
    from pie.cluster.status import router_url  # noqa: PLC0415

    found = load(config).config
    file = found.policies.file
    return Desk(
        router_url(found.router, at),
        found.router.api_token.get_secret_value(),
        trusted(found.router),
        folder=None if file is None else file.absolute().parent,
    )


def say(text: str) -> None:
    """Print a line at once, also where nobody looks on.

    Raises:
        UncertainError: It cannot be written, such as to a file on a full disk.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        why = error.strerror or str(error)
        raise UncertainError(f"what this command says cannot be written: {why}") from error


@contextmanager
def signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into an orderly end; a second one ends it at once."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(_number: int, _frame: FrameType | None) -> None:
        for one in numbers:
            signal.signal(one, at_once)
        print("pie: stopping; once more ends it at once", file=sys.stderr, flush=True)
        ask_to_stop()

    def at_once(number: int, _frame: FrameType | None) -> NoReturn:
        os._exit(128 + number)  # The guard cleans up.

    before = {one: signal.signal(one, stop) for one in numbers}
    try:
        yield
    except Stop:
        raise typer.Exit(0) from None
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
