"""`pie policy`: its commands and their arguments.

Covers what a person types, and exit codes: 1 where a place has not taken a version, or that is not known, 2 with all
that is wrong and nothing changed. Does not cover what is said of a file (`pie.cluster.policy_command`) or asking a router
(`pie.cluster.policy_edit`), which each command imports by itself, so that `pie --help` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pie.cluster import policy_command
from pie.cluster.command_parts import ConfigFile, RouterAddress, desk_of, load, say, signals
from pie.cluster.errors import ConfigError
from pie.cluster.sentences import sentences, warn

policy_app = typer.Typer(
    help="Look at policy files, and change what is in force.", no_args_is_help=True
)

PolicyFile = Annotated[Path, typer.Argument(help="Policy file (YAML).")]


def _examples(*lines: str) -> str:
    """Return the end of a command's help; the mark keeps lines as they are."""
    return "\n\n".join(("Examples:", *(f"$ {line}" for line in lines)))


@policy_app.command(
    epilog=_examples(
        "pie policy check policies.yaml",
        "pie policy check policies.yaml --at http://router:8000",
    )
)
def check(file: PolicyFile, config: ConfigFile = None, at: RouterAddress = None) -> None:
    """Say that a policy file is acceptable, or all that is wrong with it, and then end with 2.

    With --at a router is asked too, which knows tenants and tokenizers and has modules of its own.
    """
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        # Once: a pipe can be read no second time.
        policies = policy_command.checked(file)
        if at is None:
            page_tokens = load(config).config.model.page_tokens
            warned = policy_command.warnings(file, policies, page_tokens)
        else:
            warned = policy_edit.warnings(desk_of(config, at), file, policies)
        for warning in warned:
            warn(warning)
        say(policy_command.summary(file, policies))


@policy_app.command(
    epilog=_examples(
        "pie policy show",
        "pie policy show policies.yaml",
        "pie policy show --in-force",
        "pie policy show --version 3 > earlier.yaml",
        "pie policy show --in-force --at http://router:8000",
    )
)
def show(
    file: Annotated[
        Path | None,
        typer.Argument(help="Policy file (YAML); default the one that the configuration names."),
    ] = None,
    config: ConfigFile = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", help="Show what is in force instead: address of a router, http://HOST:PORT."
        ),
    ] = None,
    is_in_force: Annotated[
        bool,
        typer.Option(
            "--in-force",
            help="Show what is in force instead, by the router that the configuration names or --at.",
        ),
    ] = False,
    version: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Print the text of a version instead, as it was applied; 0 for the router's own file.",
        ),
    ] = None,
) -> None:
    """Print each policy and rule of a file, those included that it leaves as they are.

    With --in-force or --at those that are in force now, and their version.
    """
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        asks = at is not None or is_in_force or version is not None
        if file is not None and asks:
            said = "a file and what a router has are two things to show: leave one out, or `pie policy diff` them"
            raise ConfigError([said])
        if is_in_force and version is not None:
            raise ConfigError(["--in-force and --version are two things to show: leave one out"])
        if version is not None:
            say(policy_edit.text_of(desk_of(config, at), version))
        elif asks:
            say(policy_edit.in_force(desk_of(config, at)))
        else:
            say(policy_command.in_force(file or load(config).config.policies.file))


@policy_app.command(
    epilog=_examples(
        "pie policy diff policies.yaml",
        "pie policy diff policies.yaml --at http://router:8000",
    )
)
def diff(file: PolicyFile, config: ConfigFile = None, at: RouterAddress = None) -> None:
    """Print what a policy file would change of what is in force.

    It asks the router that the configuration names, or --at.
    """
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        difference = policy_edit.difference(desk_of(config, at), file)
        for warning in difference.warnings:
            warn(warning)
        say(difference.text or f"{file} changes nothing")


@policy_app.command(
    epilog=_examples(
        "pie policy apply policies.yaml",
        "pie policy apply policies.yaml --at http://router:8000 --watch",
    )
)
def apply(
    file: PolicyFile,
    config: ConfigFile = None,
    at: RouterAddress = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on, and apply the file whenever it changes.")
    ] = False,
) -> None:
    """Put a policy file in force everywhere at once; one that is bad changes nothing.

    It asks the router that the configuration names, or --at. Ends with 1 where a place has not taken it,
    another version has overtaken it or that is not known.
    """
    from pie.cluster import policy_edit  # noqa: PLC0415

    with signals(), sentences():
        desk = desk_of(config, at)
        if watch:
            for _ in policy_edit.watch_file(desk, file, say):
                pass
        is_everywhere = policy_edit.apply_file(desk, file, say)
    raise typer.Exit(0 if is_everywhere else 1)


@policy_app.command(epilog=_examples("pie policy rollback", "pie policy rollback 3"))
def rollback(
    to: Annotated[
        int | None,
        typer.Argument(
            metavar="[VERSION]",
            help="A version, 0 for what the configuration names; default the latest that says something else.",
        ),
    ] = None,
    config: ConfigFile = None,
    at: RouterAddress = None,
) -> None:
    """Put an earlier version of the policies in force anew.

    It asks the router that the configuration names, or --at. Ends with 1 where a place has not taken it,
    another version has overtaken it or that is not known.
    """
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        is_everywhere = policy_edit.roll_back(desk_of(config, at), to, say)
    raise typer.Exit(0 if is_everywhere else 1)


@policy_app.command(
    epilog=_examples("pie policy history", "pie policy history --at http://router:8000")
)
def history(config: ConfigFile = None, at: RouterAddress = None) -> None:
    """Print the versions that were applied, and which one every place runs.

    It asks the router that the configuration names, or --at.
    """
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        say(policy_edit.history(desk_of(config, at)))


@policy_app.command(
    epilog=_examples("pie policy events", "pie policy events --at http://router:8000")
)
def events(config: ConfigFile = None, at: RouterAddress = None) -> None:
    """Print what cluster policies ordered lately, what was refused, and why.

    It asks the router that the configuration names, or --at.
    """
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        say(policy_edit.events(desk_of(config, at)))


@policy_app.command(epilog=_examples("pie policy schema > policies.schema.json"))
def schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    say(policy_command.schema())
