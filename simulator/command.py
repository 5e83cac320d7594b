"""`pie simulate`: policies tried on a trace.

Covers the options, running each set of policies, and what is written. Does not cover the simulation
(`pie.simulator.cluster`) or the command line itself (`pie.cluster.simulating`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from pie.policies.loader import load_policies, load_policy_file
from pie.policies.policy_set import PolicySet
from pie.policies.reading import read_some
from pie.policies.registry import did_you_mean
from pie.policies.saying import said
from pie.simulator import peers
from pie.simulator.cluster import ClusterSpec, SimulatedCluster
from pie.simulator.cost_model import CostModel
from pie.simulator.errors import SetupError
from pie.simulator.meant import MODEL, Meant, meant_in
from pie.simulator.plots import html_page
from pie.simulator.report import Report, report_of
from pie.simulator.trace import Trace, read_trace
from pie.wire.malformed import why_malformed
from pie.worker.load_choice import LoadTier

_MOST_COST_BYTES = 100_000
"""A cost model has some hundred."""
BUILT_IN = "built-in"
"""What a report calls the policies that no file names."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What is tried on what."""

    trace: Path
    policies: Sequence[Path | None] = (None,)
    """Policy files; the built-ins where None."""
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    own_page_tokens: bool = False
    """Whether pages have the size that the trace was recorded with, where it says one."""
    clients: int | None = None
    """Clients that ask one request after the other; None for the trace's own times."""
    speed: float = 1.0
    """How many times as fast requests arrive."""
    limit: int | None = None
    json_file: Path | None = None
    html_file: Path | None = None
    peers: bool = False
    """Whether rules of other routers are tried too (`pie.simulator.peers`)."""


def simulate(
    options: SimulateOptions,
    report: Callable[[Report], None],
    warn: Callable[[str], None] = lambda _: None,
    about: Callable[[str], None] = lambda _: None,
) -> list[Report]:
    """Try each set of policies, and write what is to be written.

    Args:
        options: What is tried on what.
        report: Told of each set when it has been tried.
        warn: Told, before anything runs, of what in the trace or the files is likely not what was meant.
        about: Told what was simulated, when all sets have been tried.

    Raises:
        SimulatorError: The trace cannot be read, or not be simulated so.
        PolicyFileError: A policy file is not acceptable.
    """
    # All files are read before anything runs.
    options.cluster.check()
    sets = [load_policy_file(file) for file in options.policies]
    trace = read_trace(options.trace, limit=options.limit)
    if options.own_page_tokens and trace.page_tokens:
        engine = replace(options.cluster.engine, page_tokens=trace.page_tokens)
        options = replace(options, cluster=replace(options.cluster, engine=engine))
        options.cluster.check()
    for warning in trace.warnings:
        warn(f"{options.trace.name}: {warning}")
    names = _names(options.policies)
    if options.peers:
        names += peers.NAMES
        sets += [
            load_policies(f"cluster: {{routing: {peers.__name__}:{name}}}", name=name)
            for name in peers.NAMES
        ]
    page_tokens = options.cluster.engine.page_tokens
    meant = [meant_in(trace, policies, page_tokens) for policies in sets]
    for name, one in zip(names, meant, strict=True):
        for warning in one.warnings:
            warn(f"{name}: {warning}")
    title = f"{options.trace.name}: {_counted(len(trace.requests), 'request')}"
    setup = _setup(options)
    reports: list[Report] = []
    for name, one in zip(names, meant, strict=True):
        reports.append(run(name, trace, one, options))
        report(reports[-1])
    about(f"{title}; {setup}")
    if options.json_file is not None:
        _write(options.json_file, msgspec.json.format(msgspec.json.encode(reports)) + b"\n")
    if options.html_file is not None:
        _write(options.html_file, html_page(title, reports, setup).encode())
    return reports


def run(name: str, trace: Trace, meant: Meant, options: SimulateOptions) -> Report:
    """Return what one set of policies does with a trace."""
    model = trace.model_root or MODEL
    cluster = SimulatedCluster(options.cluster, meant.policies, model=model, unknown=meant.unknown)
    if options.clients is None:
        cluster.run_open(trace.requests, speed=options.speed)
    else:
        cluster.run_closed(trace.requests, clients=options.clients)
    return report_of(name, cluster, policies=_said(meant.policies), warnings=meant.warnings)


def read_cost_model(file: Path) -> CostModel:
    """Return the cost model in a JSON file, as `pie simulate --calibrate` writes it.

    Raises:
        SetupError: It cannot be read, or is none.
    """
    try:
        text = read_some(file, _MOST_COST_BYTES + 1)
    except OSError as error:
        raise SetupError(f"{file}: cannot be read: {error.strerror or error}") from None
    if len(text) > _MOST_COST_BYTES:
        raise SetupError(
            f"{file}: is not a cost model: it is larger than {_MOST_COST_BYTES:,} bytes"
        )
    try:
        model = msgspec.json.decode(text, type=CostModel)
        model.check()
    except (msgspec.MsgspecError, UnicodeDecodeError, SetupError) as error:
        why = _unknown_in(text) or why_malformed(text, error)
        raise SetupError(f"{file}: is not a cost model: {why}") from None
    return model


def _unknown_in(text: bytes) -> str:
    """Return which names in a cost model are none of it, and what is allowed; empty where all are."""
    try:
        given = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    if not isinstance(given, dict):
        return ""
    rates = given.get("load_tokens_per_s")
    told = []
    for what, names, allowed in (
        ("field", given, CostModel.__struct_fields__),
        ("tier in `load_tokens_per_s`", rates, [tier.value for tier in LoadTier]),
    ):
        unknown = [n for n in names if n not in allowed] if isinstance(names, dict) else []
        if unknown:
            each = ", ".join(f"{name!r}{did_you_mean(name, allowed)}" for name in unknown)
            all_of_them = ", ".join(f"`{name}`" for name in allowed)
            told.append(f"there is no {what} {each}; allowed are {all_of_them}")
    return "; and ".join(told)


def _setup(options: SimulateOptions) -> str:
    """Return what is simulated, in a line."""
    of, cost = options.cluster, options.cluster.cost
    room = f"{_counted(of.engine.pages, 'page')} of {of.engine.page_tokens:,} tokens"
    if of.host_pages:
        room += f" and {of.host_pages:,} in host memory"
    told = [f"{_counted(of.workers, 'worker')}, each with room for {room}"]
    if of.pool_pages:
        told.append(
            f"a pool of {_counted(of.pool_pages, 'page')} on {_counted(of.pool_nodes, 'node')}"
        )
    if options.clients is not None:
        told.append(f"{_counted(options.clients, 'client')}, one request after the other")
    elif options.speed != 1:
        told.append(f"requests {options.speed:g} times as fast")
    told.append(
        f"prefill of {cost.prefill_tokens_per_s:,.0f} tokens a second, "
        f"decode steps of {cost.decode_step_ms:g} ms"
    )
    return "; ".join(told)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _said(policies: PolicySet) -> dict[str, str]:
    """Return what policies are, by kind, and how many rules there are."""
    kinds: dict[str, list[str]] = {}
    for kind, spec in policies.all():
        options = said(spec.factory, spec.options).items()
        told = "".join(f", {name}: {value}" for name, value in options)
        kinds.setdefault(str(kind), []).append(f"{spec.name}{told}")
    told_by_kind = {kind: "; ".join(specs) for kind, specs in kinds.items()}
    return told_by_kind | ({"rules": f"{len(policies.rules)}"} if policies.rules else {})


def _names(files: Sequence[Path | None]) -> list[str]:
    """Return what to call each set of policies: the file's name, with its folder where names repeat."""
    names = [BUILT_IN if file is None else file.stem for file in files]
    return [
        name if names.count(name) == 1 else (str(file) if file is not None else f"{name} {at + 1}")
        for at, (name, file) in enumerate(zip(names, files, strict=True))
    ]


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise SetupError(f"{file}: cannot be written: {error.strerror or error}") from None
