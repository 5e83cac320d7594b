"""`pie pages`: looking at pages at rest, checking them, and carrying them elsewhere.

Covers arguments, what a person sees, and exit codes: 0 when all went well, 1 when pages were bad, could not
be read or were left out, 2 with one clear sentence for what a person can mend. Does not cover the work
(`pie.cluster.page_tools`), which is imported when it is needed: other commands do without.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pie.cluster.config import PieConfig, load_config
from pie.cluster.sentences import sentences

if TYPE_CHECKING:
    from pie.cluster.page_tools import Found

pages_app = typer.Typer(help="Look at pages at rest, check them, copy them.", no_args_is_help=True)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file; default ./pie.toml.")
]
At = Annotated[
    str | None,
    typer.Option(
        help="Where: a place such as `pool-0`, a folder, a tar file, `s3://BUCKET/PREFIX`; default all folders."
    ),
]
Keys = Annotated[
    list[str] | None, typer.Argument(help="Keys, or their first digits; default all pages.")
]
SecretFile = Annotated[
    Path | None,
    typer.Option("--secret", help="The pages' cluster.secret, where it does not lie beside them."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@pages_app.command("ls")
def ls(
    keys: Keys = None,
    at: At = None,
    config: ConfigFile = None,
    secret: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """List pages by their headers: where they lie, tokens, sizes, ages."""
    with sentences():
        from pie.cluster import page_lines  # noqa: PLC0415

        sums = page_lines.Sums()
        with _finding(keys, at, _load(config), secret) as found:
            if not as_json:
                print(page_lines.HEADING)
            for one in found:
                line = page_lines.line_of(one)
                sums.add(line)
                print(page_lines.as_json(line) if as_json else page_lines.row(line))
        if not as_json:
            print(sums)


@pages_app.command()
def show(
    key: Annotated[str, typer.Argument(help="A page's key, or its first digits.")],
    at: At = None,
    config: ConfigFile = None,
    secret: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Show all copies of a page, checked, and who holds it in a running cluster."""
    with sentences():
        from pie.cluster import page_lines, page_tools  # noqa: PLC0415

        settings = _load(config)
        with _finding([key], at, settings, secret) as found:
            checked = page_tools.checked(found)
            lines = [page_lines.looked_at(one, problem) for one, problem in checked]
        holders = page_tools.holders(lines[0].key, settings)
        if as_json:
            print(msgspec.json.encode({"copies": lines, "holders": holders}).decode())
        else:
            print("\n\n".join(map(page_lines.card, lines)), end="\n\n")
            print(page_lines.held(holders))
    raise typer.Exit(int(any(line.problem for line in lines)))


@pages_app.command()
def verify(
    at: At = None,
    config: ConfigFile = None,
    secret: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Read every page, tell each bad one and why; the exit code is 1 if there is one."""
    bad: Counter[str] = Counter()
    with sentences():
        from pie.cluster import page_lines, page_tools  # noqa: PLC0415
        from pie.pool.at_rest import may_be_of_another_secret  # noqa: PLC0415

        good = unread = 0
        with _finding(None, at, _load(config), secret) as found:
            for one, problem in page_tools.checked(found):
                if not problem:
                    good += 1
                    continue
                bad[problem.partition(":")[0]] += 1
                unread += may_be_of_another_secret(problem)
                line = page_lines.line_of(one, problem)
                where = f"{line.source}/{line.where}: {problem}"
                print(page_lines.as_json(line) if as_json else where)
        if as_json:
            print(msgspec.json.encode({"good": good, "bad": bad}).decode())
        else:
            told = ", ".join(f"{count} {reason}" for reason, count in sorted(bad.items()))
            print(f"{good} pages are good" + (f", {bad.total()} are not: {told}" if bad else ""))
            if unread:
                print(page_lines.FOREIGN_HINT)
    raise typer.Exit(int(bool(bad)))


@pages_app.command("export")
def export_command(
    target: Annotated[str, typer.Argument(help="A folder, or a file that ends with .tar.")],
    keys: Keys = None,
    at: At = None,
    config: ConfigFile = None,
    secret: SecretFile = None,
) -> None:
    """Copy page files, checked and as they are, to a folder or a tar file."""
    with sentences():
        from pie.cluster import page_places, page_tools  # noqa: PLC0415

        if not target:
            raise page_places.PagesError("an empty name is neither a folder nor a tar file")
        if page_places.is_bucket(target):
            raise page_places.PagesError(
                "export writes a folder or a tar file; to put pages into a bucket use `pie pages import "
                f"SOURCE --into {target}`"
            )
        with _finding(keys, at, _load(config), secret) as found:
            copied, bad = page_tools.export(found, Path(target))
    _tell_left_out(bad)
    print(f"{copied} pages were copied to {target}")
    raise typer.Exit(int(bool(bad)))


@pages_app.command("import")
def import_command(
    source: Annotated[str, typer.Argument(help="A folder, a tar file or `s3://BUCKET/PREFIX`.")],
    into: Annotated[
        str,
        typer.Option(help="Where to: a place such as `pool-0`, a folder, `s3://BUCKET/PREFIX`."),
    ],
    config: ConfigFile = None,
    secret: SecretFile = None,
) -> None:
    """Check page files and store them in a stopped node's folder or a bucket, as if it had stored them."""
    with sentences():
        from pie.cluster import page_places, page_tools  # noqa: PLC0415

        settings = _load(config)
        target = page_places.one(into, settings)
        with _finding(None, source, settings, secret) as found:
            done = page_tools.import_pages(found, target, settings)
    _tell_left_out(done.bad)
    print(f"{done.stored} pages were stored in {target.name}, {done.held} were there already")
    raise typer.Exit(int(bool(done.bad)))


@pages_app.command()
def rm(
    keys: Keys = None,
    locked: Annotated[
        bool, typer.Option("--locked", help="All pages whose encryption key is not given.")
    ] = False,
    running: Annotated[
        bool, typer.Option("--running", help="Tell the pool nodes of the running cluster.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    at: At = None,
    config: ConfigFile = None,
    secret: SecretFile = None,
) -> None:
    """Remove pages, all copies and parts, from a bucket or from folders that no running node owns."""
    with sentences():
        from pie.cluster import page_lines, page_places, page_tools  # noqa: PLC0415

        if bool(keys) == locked:
            raise page_places.PagesError("name keys to remove, or --locked")
        if running:
            if locked or at is not None:
                raise page_places.PagesError("running nodes are told keys alone, and all of them")
            _rm_running(keys or [], yes=yes, config=_load(config), secret=secret)
            return
        with _finding(keys, at, _load(config), secret) as found:
            chosen = [one for one in found if not locked or page_tools.is_locked(one)]
            for one in chosen[:_SHOWN]:
                print(page_lines.row(page_lines.line_of(one)))
            size = sum(one.page.file_bytes for one in chosen)
            what = f"{len(chosen)} page{'s' * (len(chosen) != 1)} ({size} bytes)"
            if chosen and not yes and not typer.confirm(f"Remove {what}?"):
                raise typer.Exit(1)
            print(f"{page_tools.remove(chosen)} removed")


def _rm_running(keys: list[str], *, yes: bool, config: PieConfig, secret: Path | None) -> None:
    from pie.cluster.page_running import remove_running  # noqa: PLC0415
    from pie.wire.orders import PageChange  # noqa: PLC0415

    if not yes and not typer.confirm(f"Remove {len(keys)} pages from all nodes?"):
        raise typer.Exit(1)
    became = remove_running(keys, config, secret)
    told = {
        PageChange.DONE: "removed",
        PageChange.NOT_HELD: "held by no node",
        PageChange.IN_USE: "in use: try again",
        PageChange.FAILED: "maybe still there: a node did not answer",
    }
    print(
        ", ".join(f"{became[change]} {words}" for change, words in told.items() if became[change])
    )
    raise typer.Exit(int(became[PageChange.DONE] + became[PageChange.NOT_HELD] < len(keys)))


_SHOWN = 20


@contextmanager
def _finding(
    keys: list[str] | None, at: str | None, config: PieConfig, secret: Path | None
) -> Iterator[Iterable[Found]]:
    """Find the pages that a person means, for a block."""
    from pie.cluster import page_places, page_tools  # noqa: PLC0415

    with page_places.sources(at, config, secret) as opened:
        found = page_tools.everything(opened)
        yield page_tools.selected(found, keys) if keys else found


def _load(config: Path | None) -> PieConfig:
    return load_config(config, os.environ).config


def _tell_left_out(bad: Iterable[tuple[str, str]]) -> None:
    """Tell each reason once, and how many it is true of."""
    from pie.cluster import page_lines  # noqa: PLC0415
    from pie.pool.at_rest import may_be_of_another_secret  # noqa: PLC0415

    names: dict[str, list[str]] = {}
    for name, problem in bad:
        names.setdefault(problem, []).append(name)
    for problem, (first, *others) in names.items():
        who = f"{first} was" if not others else f"{len(others) + 1}, such as {first}, were"
        print(f"pie: {who} left out: {problem}", file=sys.stderr)
    if any(map(may_be_of_another_secret, names)):
        print(f"pie: {page_lines.FOREIGN_HINT}", file=sys.stderr)
