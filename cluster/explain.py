"""`pie explain ID`: why a request went where it went, and why its tokens were computed.

Covers asking a router and printing its answer. Does not cover what is kept
(`pie.router.explain`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table

from pie.cluster.asking import Trust, ask_router
from pie.cluster.errors import UnknownRequestError
from pie.cluster.printing import new_table
from pie.cluster.sentences import printable
from pie.router.api.explained import Attempt, Delivered, Explained, ExplainedSequence

_TIMEOUT_S = 5.0


def fetch_explained(url: str, token: str, request_id: str, trust: Trust = True) -> Explained:
    """Ask the router at `url`, such as `http://127.0.0.1:8000`; `trust` as in `fetch_status`.

    Raises:
        UnknownRequestError: It knows nothing of the request.
        NotRunningError: No router answers there, or it does not answer as Pie does.
    """
    path = f"/admin/requests/{quote(request_id, safe='')}"
    answer = ask_router("GET", url, path, token=token, trust=trust, timeout_s=_TIMEOUT_S)
    if answer.status == httpx.codes.NOT_FOUND:
        raise UnknownRequestError(answer.said)
    return answer.read(Explained)


def show_explained(
    url: str,
    token: str,
    request_id: str,
    console: Console,
    trust: Trust = True,
) -> None:
    """Print what became of a request; `trust` as in `fetch_status`.

    Raises:
        UnknownRequestError: As `fetch_explained`.
        NotRunningError: As `fetch_explained`.
    """
    told = fetch_explained(url, token, request_id, trust)
    arrived = datetime.fromtimestamp(told.arrived_unix_s, UTC)
    console.print(
        f"request {told.request_id}    {arrived:%Y-%m-%d %H:%M:%S} UTC    {told.path}    "
        f"model {told.model}    status {told.status}    {told.duration_ms:.0f} ms"
        + (f"    tenant {told.tenant_tag}" if told.tenant_tag else "")
        + (f"    session {told.session_tag}" if told.session_tag else "")
    )
    for sequence in told.sequences:
        console.print()
        _show_sequence(sequence, console)
    if told.sequences_left_out:
        console.print(f"\n{told.sequences_left_out} more sequences are not told.")


def _show_sequence(sequence: ExplainedSequence, console: Console) -> None:
    first = sequence.first_token_ms
    console.print(
        f"choice {sequence.index}    {sequence.prompt_tokens} prompt tokens, "
        f"{sequence.output_tokens} generated    finish {sequence.finish_reason or 'none'}    "
        + ("no token" if first is None else f"first token after {first:.0f} ms")
    )
    for attempt in sequence.attempts:
        resumed = f" after {attempt.after_tokens} tokens" if attempt.after_tokens else ""
        awaited = ""
        if attempt.awaited_tokens:
            awaited = f", and the first {attempt.awaited_tokens} waited for: another computed them"
        forked = ", as a fork of choice 0" if attempt.is_fork else ""
        console.print(
            f"asked {attempt.place}{resumed}{forked}: {attempt.ending}; "
            f"{attempt.predicted_tokens} tokens were predicted to be held{awaited}"
        )
        if attempt.policy:
            console.print(chosen_by(attempt))
        console.print(_candidates(attempt))
        if attempt.workers > len(attempt.candidates) > 0:
            console.print(f"the best {len(attempt.candidates):,} of {attempt.workers:,} workers")
    if sequence.delivered is not None:
        _show_delivered(sequence.delivered, console)


def chosen_by(attempt: Attempt) -> str:
    """Return which policy chose, and in place of which one."""
    if not attempt.policy_failure:
        return printable(f"chosen by `{attempt.policy}`")
    return printable(
        f"chosen by `cost`, in place of `{attempt.policy}`, which failed: {attempt.policy_failure}"
    )


def _candidates(attempt: Attempt) -> Table:
    table = new_table(
        "candidate",
        "device",
        "to load",
        "queued",
        "running",
        "cost ms",
        "wait",
        "load",
        "prefill",
        "decode",
        no_wrap=True,
    )
    for one in attempt.candidates:
        loads = " ".join(f"{tier}={tokens}" for tier, tokens in one.load_tokens.items())
        cost = one.cost
        figures = (
            ("-",) * 5
            if cost is None
            else tuple(
                f"{ms:.1f}"
                for ms in (
                    cost.total_ms,
                    cost.wait_ms,
                    cost.load_ms,
                    cost.prefill_ms,
                    cost.decode_share_ms,
                )
            )
        )
        table.add_row(
            f"{'*' if one.place == attempt.place else ' '} {one.place}",
            str(one.device_tokens),
            loads or "-",
            str(one.queued_tokens),
            str(one.running),
            *figures,
        )
    return table


def _show_delivered(delivered: Delivered, console: Console) -> None:
    cached = ", ".join(f"{tier} {tokens}" for tier, tokens in delivered.cached_tokens.items())
    console.print(
        f"delivered {cached or 'nothing'}    queued {delivered.queued_ms:.1f} ms, "
        f"loads {delivered.load_ms:.1f} ms, prefill {delivered.prefill_ms:.1f} ms"
    )
    for load in delivered.loads:
        came = (
            f"loaded {load.loaded_pages} in {load.took_ms:.1f} ms"
            if load.was_chosen
            else "computed instead"
        )
        console.print(
            f"  {load.tier}: {load.pages} pages, load {load.load_ms:.1f} ms against "
            f"{load.compute_ms:.1f} ms of computing: {came}"
        )
    if delivered.load_overran:
        console.print("  the load took too long and was given up")
    for miss in delivered.misses:
        console.print(f"  computed {miss.tokens} tokens from {miss.at}: {miss.reason}")
