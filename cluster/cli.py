"""The `pie` command.

Covers arguments, what a person sees, and exit codes: 0 when all went well, 1 when a demonstration
did not show what it should or a node could not be emptied, 2 with one clear sentence for what a person can mend. Does not cover
the work itself (`pie.cluster.launch`, `.pool_process`, `.status`, `.demo`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from pie.cluster import policy_command
from pie.cluster.config import Key, LoadedConfig, load_config
from pie.cluster.key_command import key_app
from pie.cluster.pages import pages_app
from pie.cluster.reference import reference_page, shown
from pie.cluster.sentences import sentences
from pie.cluster.simulating import simulate
from pie.cluster.stopping import Stop, ask_to_stop
from pie.index.address import masked
from pie.router.tls import trusted

if TYPE_CHECKING:
    from pie.cluster.policy_edit import Desk

app = typer.Typer(
    help="Serve large language models and never compute the same prefix twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(pages_app, name="pages")
app.add_typer(key_app, name="key")
policy_app = typer.Typer(help="Look at policy files.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
pool_app = typer.Typer(help="Run one pool node, or empty one.", invoke_without_command=True)
app.add_typer(pool_app, name="pool")

_WATCH_S = 1.0

IndexUrl = Annotated[
    str | None, typer.Option("--index", help="Redis that holds the index, redis://HOST:PORT.")
]
SecretFile = Annotated[
    str | None, typer.Option(help="File with the secret that the cluster shares.")
]
PolicyFile = Annotated[Path, typer.Argument(help="Policy file (YAML).")]
RouterAddress = Annotated[
    str | None, typer.Option("--at", help="Address of a router, http://HOST:PORT.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file; default ./pie.toml.")
]


def main() -> None:
    """Run the `pie` command."""
    try:
        app()
    except SystemExit as ended:
        # What Ray does when the interpreter ends writes into the folder that the guard has removed,
        # waits for parts that are gone, and can crash: there is nothing left for it to do.
        if "ray" in sys.modules:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code if isinstance(ended.code, int) else 1)
        raise


def _version(wanted: bool) -> None:
    if wanted:
        _say(importlib.metadata.version("pie-serve"))
        raise typer.Exit


@app.callback()
def _pie(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    config: ConfigFile = None,
    model: Annotated[
        str | None, typer.Option(help="What to serve: `smollm2`, a folder, a GGUF file, a hub id.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many workers.")] = None,
    routers: Annotated[
        int | None, typer.Option(help="How many routers, which share one port.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    watch_policies: Annotated[
        bool | None,
        typer.Option(help="Put each edit of the policy file, `policies.file`, in force."),
    ] = None,
) -> None:
    """Start a cluster and serve until Ctrl-C or SIGTERM."""
    flags = _flags(
        (("model", "source"), "--model", model),
        (("cluster", "workers"), "--workers", workers),
        (("cluster", "routers"), "--routers", routers),
        (("router", "host"), "--host", host),
        (("router", "port"), "--port", port),
        (("policies", "watch"), "--watch-policies", watch_policies),
    )
    with _signals(), sentences():
        loaded = _load(config, flags)
        # Ray is slow to import; `pie status` does without it.
        from pie.cluster.launch import running  # noqa: PLC0415

        with running(loaded.config, _report) as (cluster, addresses):
            _say("")
            _say(f"Pie serves {cluster.model} at {addresses.router}/v1")
            for name, address in {**addresses.workers, **addresses.pool}.items():
                _say(f"  {name:<10}{address}")
            _say(f"  {'index':<10}{masked(addresses.index)}")
            _say(f"  {'logs':<10}{addresses.logs}")
            _say("Ctrl-C stops it.")
            while True:
                time.sleep(_WATCH_S)
                cluster.poll()


@pool_app.callback()
def pool(
    context: typer.Context,
    config: ConfigFile = None,
    name: Annotated[
        str | None, typer.Option(help="The node's name, the same at each of its starts.")
    ] = None,
    index: IndexUrl = None,
    listen: Annotated[
        str | None, typer.Option(help="Where to listen: curve://HOST:PORT, tcp://127.0.0.1:PORT.")
    ] = None,
    secret_file: SecretFile = None,
) -> None:
    """Run one pool node in this process until Ctrl-C or SIGTERM."""
    if context.invoked_subcommand is not None:
        return
    flags = _flags(
        (("pool", "name"), "--name", name),
        (("index", "url"), "--index", index),
        (("pool", "listen"), "--listen", listen),
        (("cluster", "secret_file"), "--secret-file", secret_file),
    )
    with sentences():
        from pie.cluster.pool_process import run_node  # noqa: PLC0415

        run_node(_load(config, flags).config, _say)


@pool_app.command("drain")
def pool_drain(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    config: ConfigFile = None,
    index: IndexUrl = None,
    secret_file: SecretFile = None,
) -> None:
    """Let a pool node hand its pages to the others; one of `pie pool` ends then."""
    flags = _flags(
        (("index", "url"), "--index", index),
        (("cluster", "secret_file"), "--secret-file", secret_file),
    )
    with sentences():
        from pie.cluster.pool_drain import drain_node  # noqa: PLC0415

        left = drain_node(_load(config, flags).config, name, _say)
    raise typer.Exit(1 if left else 0)


@app.command()
def drain(
    name: Annotated[str, typer.Argument(help="The worker's name.")],
    config: ConfigFile = None,
    at: RouterAddress = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=3600, help="Seconds that it may take.")
    ] = 30.0,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
) -> None:
    """Let a worker take no more requests and hand its pages on, before it is stopped; or undo that."""
    from pie.cluster.worker_drain import drain_worker, take_again  # noqa: PLC0415

    with sentences():
        if undo:
            left = take_again(_desk(config, at), name, _say)
        else:
            left = drain_worker(_desk(config, at), name, timeout_s, _say)
    raise typer.Exit(1 if left else 0)


@app.command()
def status(
    config: ConfigFile = None,
    at: Annotated[str | None, typer.Option(help="Address of a router, http://HOST:PORT.")] = None,
) -> None:
    """Show a running cluster's workers, pool nodes, index mode and hit rate."""
    from pie.cluster.status import router_url, show_status  # noqa: PLC0415

    with sentences():
        router = _load(config).config.router
        token = router.api_token.get_secret_value()
        show_status(router_url(router, at), token, Console(), trusted(router))


@app.command()
def explain(
    request_id: Annotated[
        str, typer.Argument(help="What its answer's `x-pie-request-id` or `id` says.")
    ],
    config: ConfigFile = None,
    at: Annotated[str | None, typer.Option(help="Address of a router, http://HOST:PORT.")] = None,
) -> None:
    """Show which workers a request could have gone to, and why its tokens were computed."""
    from pie.cluster.explain import show_explained  # noqa: PLC0415
    from pie.cluster.status import router_url  # noqa: PLC0415

    with sentences():
        router = _load(config).config.router
        token = router.api_token.get_secret_value()
        console = Console(highlight=False, markup=False, soft_wrap=True)
        show_explained(router_url(router, at), token, request_id, console, trusted(router))


@app.command()
def doctor(config: ConfigFile = None) -> None:
    """Say which limits of users' programs hold on this host; ends with 1 where one does not."""
    from pie.cluster.doctor import examine, show_examined  # noqa: PLC0415

    with sentences():
        found = examine(_load(config).config.programs)
        holds = show_examined(found, Console(highlight=False, markup=False))
    raise typer.Exit(0 if holds else 1)


@app.command()
def demo(config: ConfigFile = None) -> None:
    """Start a cluster, show what is computed and what is not, and stop it."""
    from pie.cluster.demo import run_demo  # noqa: PLC0415

    with _signals(), sentences():
        loaded = _load(config, {("router", "port"): ("pie demo", 0)})
        shown_all = run_demo(loaded.config, Console(), _report)
    raise typer.Exit(0 if shown_all else 1)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    program: Annotated[Path, typer.Argument(help="A Python file; what follows it is its own.")],
    config: ConfigFile = None,
    model: Annotated[
        str | None,
        typer.Option(help="What to run it on: `smollm2`, a folder, a GGUF file, a hub id."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="Run it on a cluster: address of a router, http://HOST:PORT."),
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(
            help="A function that it may call, FILE.py:function or module:function; may be repeated."
        ),
    ] = None,
) -> None:
    """Run an inferlet against a model of its own or on a cluster; `pie run PROGRAM.py --help` tells what it takes."""
    with _signals(), sentences():
        flags: dict[Key, tuple[str, object]] = {}
        if model is not None:
            flags["model", "source"] = ("--model", model)
        if tool:
            flags["programs", "tools"] = ("--tool", tool)
        loaded = _load(config, flags)
        from pie.cluster.run import ProgramError, run_program  # noqa: PLC0415

        if tool and at is not None:
            raise ProgramError(
                "--tool is for a model of its own: a cluster's tools are its workers' [programs] tools"
            )
        tools_by = "--tool" if tool else "programs.tools"
        ended_well = run_program(loaded.config, program, context.args, _report, at, tools_by)
    raise typer.Exit(0 if ended_well else 1)


@app.command("demo-pool")
def demo_pool(config: ConfigFile = None) -> None:
    """Show a conversation that outlives the cluster, its pages in an S3 server of the demo's own."""
    from pie.cluster.demo_pool import run_pool_demo  # noqa: PLC0415

    with _signals(), sentences():
        loaded = _load(config, {("router", "port"): ("pie demo-pool", 0)})
        shown_all = run_pool_demo(loaded.config, Console(), _report)
    raise typer.Exit(0 if shown_all else 1)


@app.command("simulate")
@functools.wraps(simulate)
def _simulate(*arguments: object, **named: object) -> None:
    with sentences():
        simulate(*arguments, **named)  # type: ignore[arg-type]


@config_app.command("show")
def config_show(config: ConfigFile = None) -> None:
    """Print the values in force and where each came from."""
    with sentences():
        loaded = _load(config)
    table = Table(box=None, pad_edge=False)
    for heading in ("key", "value", "from"):
        table.add_column(heading, overflow="fold")
    for (section, key), value, origin in loaded.values():
        table.add_row(f"{section}.{key}", shown(value), origin)
    Console(highlight=False, markup=False).print(table)


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference of every setting, as Markdown."""
    sys.stdout.write(reference_page())


@policy_app.command("check")
def policy_check(file: PolicyFile, config: ConfigFile = None, at: RouterAddress = None) -> None:
    """Say that a policy file is acceptable, or all that is wrong with it, and then end with 2.

    With --at a router is asked too, which knows tenants.
    """
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        good = policy_command.summary(file)
        if at is None:
            warned = policy_command.warnings(file)
        else:
            warned = policy_edit.warnings(_desk(config, at), file)
        for warning in warned:
            print(f"pie: warning: {warning}", file=sys.stderr)
        _say(good)


@policy_app.command("show")
def policy_show(config: ConfigFile = None) -> None:
    """Print the policies that the configuration names."""
    with sentences():
        _say(policy_command.in_force(_load(config).config.policies.file))


@policy_app.command("diff")
def policy_diff(file: PolicyFile, config: ConfigFile = None, at: RouterAddress = None) -> None:
    """Print what a policy file would change of what is in force."""
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        changes = policy_edit.difference(_desk(config, at), file)
        _say(changes or f"{file} changes nothing")


@policy_app.command("apply")
def policy_apply(
    file: PolicyFile,
    config: ConfigFile = None,
    at: RouterAddress = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on, and apply the file whenever it changes.")
    ] = False,
) -> None:
    """Put a policy file in force everywhere at once; one that is bad changes nothing."""
    from pie.cluster import policy_edit  # noqa: PLC0415

    with _signals(), sentences():
        desk = _desk(config, at)
        if watch:
            for _ in policy_edit.watch_file(desk, file, _say):
                pass
        is_everywhere = policy_edit.apply_file(desk, file, _say)
    raise typer.Exit(0 if is_everywhere else 1)


@policy_app.command("rollback")
def policy_rollback(
    to: Annotated[
        int | None,
        typer.Argument(
            help="A version, 0 for what the configuration names; default the one before."
        ),
    ] = None,
    config: ConfigFile = None,
    at: RouterAddress = None,
) -> None:
    """Put an earlier version of the policies in force anew."""
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        is_everywhere = policy_edit.roll_back(_desk(config, at), to, _say)
    raise typer.Exit(0 if is_everywhere else 1)


@policy_app.command("history")
def policy_history(config: ConfigFile = None, at: RouterAddress = None) -> None:
    """Print the versions that were applied, and which one every place runs."""
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        _say(policy_edit.history(_desk(config, at)))


@policy_app.command("events")
def policy_events(config: ConfigFile = None, at: RouterAddress = None) -> None:
    """Print what cluster policies ordered lately, what was refused, and why."""
    from pie.cluster import policy_edit  # noqa: PLC0415

    with sentences():
        _say(policy_edit.events(_desk(config, at)))


@policy_app.command("schema")
def policy_schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    _say(policy_command.schema())


def _desk(config: Path | None, at: str | None) -> Desk:
    """Return the router that policies are changed through."""
    from pie.cluster.policy_edit import Desk  # noqa: PLC0415
    from pie.cluster.status import router_url  # noqa: PLC0415

    router = _load(config).config.router
    token = router.api_token.get_secret_value()
    return Desk(router_url(router, at), token, trusted(router))


def _flags(*given: tuple[Key, str, object]) -> dict[Key, tuple[str, object]]:
    """Return the flags that were given: key, flag and value."""
    return {key: (flag, value) for key, flag, value in given if value is not None}


def _load(config: Path | None, flags: dict[Key, tuple[str, object]] | None = None) -> LoadedConfig:
    return load_config(config, os.environ, flags)


def _say(text: str) -> None:
    print(text, flush=True)


def _report(part: str, what: str) -> None:
    print(f"  {part:<10}{what}", file=sys.stderr, flush=True)


@contextmanager
def _signals() -> Iterator[None]:
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
