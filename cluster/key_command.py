"""`pie key`: tenants and their API keys.

Covers arguments and what a person sees. Does not cover the file (`pie.router.key_file`) or what a
router makes of it, which it reads anew when it changes (`pie.router.access`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pie.cluster.config import load_config
from pie.cluster.errors import ConfigError, UnknownKeyError
from pie.cluster.sentences import sentences
from pie.router.errors import KeyFileError
from pie.router.key_file import KeyFile, Tenant, editing, read_key_file

_HEADING = (
    "key",
    "tenant",
    "scope",
    "created",
    "req/min",
    "tok/min",
    "at once",
    "priority",
    "note",
)

key_app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file; default ./pie.toml.")
]
TenantName = Annotated[str, typer.Argument(help="Letters, digits, `.`, `_` and `-`.")]
Requests = Annotated[
    int | None, typer.Option("--requests-per-minute", min=0, help="0 for no limit.")
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-minute", min=0, help="Of prompts and answers together; 0 for no limit."
    ),
]
Concurrent = Annotated[
    int | None, typer.Option("--concurrent", min=0, help="Sequences in flight; 0 for no limit.")
]
Priority = Annotated[
    int | None, typer.Option("--priority", help="Workers take a smaller one first; 0 at first.")
]


@key_app.command()
def create(
    tenant: TenantName,
    admin: Annotated[
        bool, typer.Option("--admin", help="Let it ask for /admin, /status and /metrics too.")
    ] = False,
    note: Annotated[str, typer.Option(help="For you, such as who has it.")] = "",
    requests: Requests = None,
    tokens: Tokens = None,
    concurrent: Concurrent = None,
    priority: Priority = None,
    config: ConfigFile = None,
) -> None:
    """Make a key of a tenant, who is new where nobody has the name. It is shown this once."""
    with sentences(), _file(config) as file, editing(file) as edited:
        changed = _limited(edited.content, tenant, requests, tokens, concurrent, priority)
        edited.content, id_, key = changed.with_key(tenant, is_admin=admin, note=note)
        _check(edited.content)
    print(f"key {id_} of tenant {tenant}, which is nowhere to be seen again:", flush=True)
    print(key, flush=True)


@key_app.command()
def limit(
    tenant: TenantName,
    requests: Requests = None,
    tokens: Tokens = None,
    concurrent: Concurrent = None,
    priority: Priority = None,
    config: ConfigFile = None,
) -> None:
    """Change what a tenant may take."""
    with sentences(), _file(config) as file, editing(file) as edited:
        if tenant not in edited.content.tenants:
            raise UnknownKeyError(f"{file} has no tenant {tenant!r}; `pie key create` makes one")
        edited.content = _limited(edited.content, tenant, requests, tokens, concurrent, priority)
        _check(edited.content)


@key_app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `pie key ls` lists it.")],
    config: ConfigFile = None,
) -> None:
    """Refuse a key from now on. Its tenant stays, and so do the tenant's pages."""
    with sentences(), _file(config) as file, editing(file) as edited:
        if key_id not in edited.content.keys:
            raise UnknownKeyError(f"{file} has no key {key_id!r}; `pie key ls` lists those it has")
        edited.content = edited.content.without_key(key_id)


@key_app.command("ls")
def list_keys(config: ConfigFile = None) -> None:
    """List tenants with what they may take, and their keys."""
    with sentences(), _file(config) as file:
        content = read_key_file(file)
        unused = content.tenants.keys() - {key.tenant for key in content.keys.values()}
        rows = [
            *(
                (
                    id_,
                    key.tenant,
                    "admin" if key.is_admin else "generate",
                    key.created,
                    *_shown(content.tenants[key.tenant]),
                    key.note,
                )
                for id_, key in content.keys.items()
            ),
            *(("-", name, "-", "-", *_shown(content.tenants[name]), "") for name in unused),
        ]
        rows.sort(key=lambda row: row[1])
        widths = [max(map(len, column)) for column in zip(_HEADING, *rows, strict=True)]
        for row in (_HEADING, *rows):
            padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            print("  ".join(padded).rstrip())


def _shown(tenant: Tenant) -> tuple[str, ...]:
    limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.concurrent)
    return (*("-" if one is None else str(one) for one in limits), str(tenant.priority))


def _limited(
    content: KeyFile,
    tenant: str,
    requests: int | None,
    tokens: int | None,
    concurrent: int | None,
    priority: int | None,
) -> KeyFile:
    """Return the file with those limits that were given; 0 is none, but for a priority."""
    given = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "concurrent": concurrent,
    }
    limits = {name: value or None for name, value in given.items() if value is not None}
    return content.with_tenant(
        tenant, **limits, **({} if priority is None else {"priority": priority})
    )


def _check(content: KeyFile) -> None:
    """Hold what a person gave to the file's format."""
    try:
        msgspec.convert(msgspec.to_builtins(content), KeyFile)
    except msgspec.ValidationError as error:
        raise ConfigError([f"that cannot be: {error}"]) from error


@contextmanager
def _file(config: Path | None) -> Iterator[Path]:
    """Give the file of keys, and say what is wrong with it in one sentence."""
    file = load_config(config, os.environ).config.router.keys_file
    if file is None:
        raise ConfigError(["router.keys_file is not set: it says where keys are kept"])
    try:
        yield file
    except KeyFileError as error:
        raise ConfigError([f"router.keys_file: {error}"]) from error
