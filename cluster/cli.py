"""The `pie` command.

Covers arguments, what a person sees, and exit codes: 0 when all went well, 1 when a demonstration
did not show what it should or a node could not be emptied, 2 with one clear sentence for what a person can mend. Does not cover
the work itself (`pie.cluster.launch`, `.pool_process`, `.status`, `.demo`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pie.cluster.command_parts import ConfigFile, RouterAddress, desk_of, load, say, signals
from pie.cluster.config import Key
from pie.cluster.key_command import key_app
from pie.cluster.pages import pages_app
from pie.cluster.policy_app import policy_app
from pie.cluster.printing import new_table, printer
from pie.cluster.reference import reference_page, shown
from pie.cluster.sentences import sentences
from pie.cluster.simulating import simulate
from pie.index.address import masked
from pie.router.tls import trusted

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
        say(importlib.metadata.version("pie-serve"))
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
    with signals(), sentences():
        loaded = load(config, flags)
        # Ray is slow to import; `pie status` does without it.
        from pie.cluster.launch import running  # noqa: PLC0415

        with running(loaded.config, _report) as (cluster, addresses):
            say("")
            say(f"Pie serves {cluster.model} at {addresses.router}/v1")
            for name, address in {**addresses.workers, **addresses.pool}.items():
                say(f"  {name:<10}{address}")
            say(f"  {'index':<10}{masked(addresses.index)}")
            say(f"  {'logs':<10}{addresses.logs}")
            say("Ctrl-C stops it.")
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

        run_node(load(config, flags).config, say)


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

        left = drain_node(load(config, flags).config, name, say)
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
            left = take_again(desk_of(config, at), name, say)
        else:
            left = drain_worker(desk_of(config, at), name, timeout_s, say)
    raise typer.Exit(1 if left else 0)


@app.command()
def status(
    config: ConfigFile = None,
    at: RouterAddress = None,
) -> None:
    """Show a running cluster's workers, pool nodes, index mode and hit rate."""
    from pie.cluster.status import router_url, show_status  # noqa: PLC0415

    with sentences():
        router = load(config).config.router
        token = router.api_token.get_secret_value()
        show_status(router_url(router, at), token, printer(highlight=True), trusted(router))


@app.command()
def explain(
    request_id: Annotated[
        str, typer.Argument(help="What its answer's `x-pie-request-id` or `id` says.")
    ],
    config: ConfigFile = None,
    at: RouterAddress = None,
) -> None:
    """Show which workers a request could have gone to, and why its tokens were computed."""
    from pie.cluster.explain import show_explained  # noqa: PLC0415
    from pie.cluster.status import router_url  # noqa: PLC0415

    with sentences():
        router = load(config).config.router
        token = router.api_token.get_secret_value()
        show_explained(router_url(router, at), token, request_id, printer(), trusted(router))


@app.command()
def doctor(config: ConfigFile = None) -> None:
    """Say which limits of users' programs hold on this host; ends with 1 where one does not."""
    from pie.cluster.doctor import examine, show_examined  # noqa: PLC0415

    with sentences():
        found = examine(load(config).config.programs)
        holds = show_examined(found, printer())
    raise typer.Exit(0 if holds else 1)


@app.command()
def demo(config: ConfigFile = None) -> None:
    """Start a cluster, show what is computed and what is not, and stop it."""
    from pie.cluster.demo import run_demo  # noqa: PLC0415

    with signals(), sentences():
        loaded = load(config, {("router", "port"): ("pie demo", 0)})
        shown_all = run_demo(loaded.config, printer(highlight=True), _report)
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
    with signals(), sentences():
        flags: dict[Key, tuple[str, object]] = {}
        if model is not None:
            flags["model", "source"] = ("--model", model)
        if tool:
            flags["programs", "tools"] = ("--tool", tool)
        loaded = load(config, flags)
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

    with signals(), sentences():
        loaded = load(config, {("router", "port"): ("pie demo-pool", 0)})
        shown_all = run_pool_demo(loaded.config, printer(highlight=True), _report)
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
        loaded = load(config)
    table = new_table("key", "value", "from", left=("value", "from"))
    for (section, key), value, origin in loaded.values():
        table.add_row(f"{section}.{key}", shown(value), origin)
    printer().print(table)


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference of every setting, as Markdown."""
    sys.stdout.write(reference_page())


def _flags(*given: tuple[Key, str, object]) -> dict[Key, tuple[str, object]]:
    """Return the flags that were given: key, flag and value."""
    return {key: (flag, value) for key, flag, value in given if value is not None}


def _report(part: str, what: str) -> None:
    print(f"  {part:<10}{what}", file=sys.stderr, flush=True)
