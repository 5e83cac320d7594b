"""The configuration's reference page, made from the settings classes.

`docs/configuration.md` holds what `reference_page` returns; a test keeps them equal, and
`pie config reference` prints it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import annotated_types
from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo

from pie.cluster.config import ENV_PREFIX, sections
from pie.index.address import masked

_HEAD = """\
# Configuration

Everything that can be set, with its default. This page is made from the code by
`pie config reference`; `pie config show` prints the values in force and where each came from.

`pie serve` reads `pie.toml` in the working directory, or the file that `--config` names. A
variable such as `PIE_MODEL__DTYPE` wins over the file, a flag such as `--port` over both. Sizes
take units (`512MiB`, `8GiB`). A key or section that is not listed here is refused, and every
problem is reported at once.

```toml
[cluster]
workers = 2

[model]
source = "smollm2"
dtype = "bfloat16"
```
"""


def reference_page() -> str:
    """Return the reference as Markdown."""
    pages = [_HEAD]
    pages += (_section(name, settings) for name, settings in sections().items())
    return "\n".join(pages)


def shown(value: object) -> str:
    """Return a value as it would stand in the file; a secret is never shown."""
    match value:
        case None:
            text = "unset"
        case SecretStr():
            text = '"***"' if value.get_secret_value() else '""'
        case bool():
            text = str(value).lower()
        case ByteSize():
            text = f'"{_size(value)}"'
        case Enum():
            text = f'"{value.value}"'
        case str() | Path():
            text = f'"{masked(str(value))}"'
        case list() | tuple():
            text = "[" + ", ".join(shown(one) for one in value) + "]"
        case BaseModel():
            text = shown({name: getattr(value, name) for name in type(value).model_fields})
        case Mapping():
            text = "{" + ", ".join(f"{k} = {shown(v)}" for k, v in value.items()) + "}"
        case _:
            text = str(value)
    return text


def _section(name: str, settings: type[BaseModel]) -> str:
    about = inspect.cleandoc(settings.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    lines = [
        f"## `[{name}]`",
        "",
        about,
        "",
        "| key | type | default | what it sets |",
        "|---|---|---|---|",
    ]
    for key, field in settings.model_fields.items():
        default = shown(field.get_default(call_default_factory=True, validated_data={}))
        text = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{key}` | {_type(field)} | `{default}` | {text} |")
    lines += ["", f"Environment: `{ENV_PREFIX}{name.upper()}__KEY`.", ""]
    return "\n".join(lines)


def _type(field: FieldInfo) -> str:
    def bound(value: object) -> str:
        sized = field.annotation is ByteSize and isinstance(value, int) and value
        return _size(value) if sized and isinstance(value, int) else str(value)

    bounds = []
    for item in field.metadata:
        match item:
            case annotated_types.Ge(ge=low):
                bounds.append(f"≥ {bound(low)}")
            case annotated_types.Gt(gt=low):
                bounds.append(f"> {bound(low)}")
            case annotated_types.Le(le=high):
                bounds.append(f"≤ {bound(high)}")
            case annotated_types.Lt(lt=high):
                bounds.append(f"< {bound(high)}")
    return ", ".join([_type_name(field.annotation), *bounds])


_NAMES: dict[object, str] = {
    ByteSize: "size",
    SecretStr: "secret",
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    type(None): "unset",
}


def _type_name(annotation: object) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(_type_name(one) for one in arguments)
    if origin in {list, tuple}:
        return "list of " + _type_name(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{one.value}`" for one in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


_UNITS = {"PiB": 1 << 50, "TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def _size(value: int) -> str:
    for unit, scale in _UNITS.items():
        if value and value % scale == 0:
            return f"{value // scale}{unit}"
    return f"{value}B"
