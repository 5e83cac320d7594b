"""`pie simulate`: its arguments, and what a person sees.

Covers the command. Does not cover the work (`pie.simulator.command`, `.calibration`), which is imported
only when it is asked for: it needs the scheduler, and so torch.
"""

from __future__ import annotations

import os
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pie.cluster.config import load_config
from pie.cluster.errors import SimulationError
from pie.cluster.printing import new_table, printer
from pie.policies.errors import PolicyError

if TYPE_CHECKING:
    from pie.simulator.command import SimulateOptions
    from pie.simulator.report import Report


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="What was asked: what a router recorded, Mooncake's format, or a CSV of lengths."
        ),
    ] = None,
    policies: Annotated[
        Path | None, typer.Option(help="Policy file to try; default the built-ins.")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Another policy file; may be given several times.")
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Try the rules of other routers too.")
    ] = False,
    workers: Annotated[int, typer.Option(help="How many workers.")] = 4,
    pages: Annotated[int, typer.Option(help="Pages in a worker's device memory.")] = 4096,
    page_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens in a page; default what the trace was recorded with, else 512."),
    ] = None,
    max_running: Annotated[int, typer.Option(help="Sequences that a worker runs at a time.")] = 256,
    step_tokens: Annotated[int, typer.Option(help="Most tokens of one step.")] = 2048,
    step_target_ms: Annotated[
        float, typer.Option(help="How long a step should take while answers are being written.")
    ] = 50.0,
    host_pages: Annotated[
        int, typer.Option(help="Pages in a worker's host memory; 0 for none.")
    ] = 0,
    pool_pages: Annotated[
        int, typer.Option(help="Pages in the pool, all nodes together; 0 for none.")
    ] = 0,
    pool_nodes: Annotated[int, typer.Option(help="How many nodes the pool has.")] = 1,
    pool_stores: Annotated[
        str, typer.Option(help="When pages go to the pool: `behind` their computing, or `spill`.")
    ] = "behind",
    leave: Annotated[
        list[str] | None,
        typer.Option(help="A place that leaves, as PLACE@SECONDS; may be given several times."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Clients that ask one by one; default the trace's times.")
    ] = None,
    speed: Annotated[float, typer.Option(help="How many times as fast requests arrive.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.")] = None,
    seed: Annotated[int, typer.Option(help="Another one decides otherwise among equals.")] = 0,
    cost: Annotated[
        Path | None, typer.Option(help="Cost model (JSON), as --calibrate writes it.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Where to write all figures.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Where to write a page with plots.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit a cost model from a live cluster instead.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration file; default ./pie.toml.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(help="Router to calibrate by, http://HOST:PORT.")
    ] = None,
) -> None:
    """Try policies on a trace, in simulated time."""
    from pie.simulator.cluster import ClusterSpec  # noqa: PLC0415
    from pie.simulator.command import SimulateOptions, read_cost_model  # noqa: PLC0415
    from pie.simulator.cost_model import CostModel  # noqa: PLC0415
    from pie.simulator.engine import EngineSpec  # noqa: PLC0415
    from pie.simulator.errors import SimulatorError  # noqa: PLC0415
    from pie.simulator.leave import read_leave  # noqa: PLC0415
    from pie.simulator.worker import pool_stores_named  # noqa: PLC0415

    console = printer()
    try:
        if calibrate:
            from pie.cluster.status import router_url  # noqa: PLC0415
            from pie.router.tls import trusted  # noqa: PLC0415

            router = load_config(config, os.environ).config.router
            token = router.api_token.get_secret_value()
            _calibrate(router_url(router, at), token, json_file, console, trusted(router))
            return
        if trace is None:
            raise SimulationError("--trace is missing: the file to simulate")
        options = SimulateOptions(
            trace=trace,
            policies=[policies, *(compare or ())],
            peers=peers,
            cluster=ClusterSpec(
                workers=workers,
                engine=EngineSpec(
                    pages=pages,
                    page_tokens=512 if page_tokens is None else page_tokens,
                    max_running=max_running,
                    step_tokens=step_tokens,
                    step_target_ms=step_target_ms,
                ),
                cost=CostModel() if cost is None else read_cost_model(cost),
                host_pages=host_pages,
                pool_pages=pool_pages,
                pool_nodes=pool_nodes,
                pool_stores=pool_stores_named(pool_stores),
                leaves=tuple(read_leave(one) for one in leave or ()),
                seed=seed,
            ),
            own_page_tokens=page_tokens is None,
            clients=clients,
            speed=speed,
            limit=limit,
            json_file=json_file,
            html_file=html_file,
        )
        _simulate(options, console)
    except (SimulatorError, PolicyError) as error:
        raise SimulationError(str(error)) from error


def _simulate(options: SimulateOptions, console: Console) -> None:
    from pie.simulator.command import simulate as run  # noqa: PLC0415
    from pie.simulator.ordered import orders_told  # noqa: PLC0415
    from pie.simulator.verdict import verdict  # noqa: PLC0415

    began_s = time.perf_counter()

    def told(report: Report) -> None:
        nonlocal began_s
        now_s = time.perf_counter()
        console.print(f"{report.name}: simulated in {now_s - began_s:.1f} s")
        began_s = now_s

    def warned(warning: str) -> None:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)

    reports = run(options, told, warned, console.print)
    console.print(_table(reports))
    for line in verdict(reports):
        console.print(f"{line}.")
    for line in orders_told(reports):
        console.print(line)
    for file in (options.json_file, options.html_file):
        if file is not None:
            console.print(f"written: {file}")


def _calibrate(
    url: str, token: str, file: Path | None, console: Console, trust: ssl.SSLContext | bool
) -> None:
    from pie.cluster.asking import check_key  # noqa: PLC0415
    from pie.simulator.calibration import calibrate  # noqa: PLC0415

    check_key(url, token, trust)
    model = calibrate(url, token, seed=time.time_ns(), trust=trust)
    text = msgspec.json.format(msgspec.json.encode(model)) + b"\n"
    if file is None:
        console.print(text.decode().rstrip())
        return
    console.print(
        f"prefill of {model.prefill_tokens_per_s:,.0f} tokens a second, decode steps of "
        f"{model.decode_step_ms:.1f} ms, {model.decode_sequence_ms:.1f} ms more for each further sequence"
    )
    try:
        file.write_bytes(text)
    except OSError as error:
        raise SimulationError(f"{file}: cannot be written: {error.strerror or error}") from error
    console.print(f"written: {file}")


def _table(reports: list[Report]) -> Table:
    is_pooled = any("pool" in report.evicted_pages for report in reports)
    table = new_table(
        *("policies", "hit rate", *(["from pool"] if is_pooled else ())),
        *("TTFT mean", "p50", "p90", "p99", "busiest worker"),
    )
    for report in reports:
        waits = report.ttft_s
        pool = report.hit_rate_by_source.get("pool", 0.0)
        table.add_row(
            report.name,
            f"{report.hit_rate:.4f}",
            *([f"{pool:.4f}"] if is_pooled else ()),
            *(f"{seconds:.3f} s" for seconds in (waits.mean, waits.p50, waits.p90, waits.p99)),
            f"{report.busiest_over_mean['computed_tokens']:.3f} × mean",
        )
    return table
