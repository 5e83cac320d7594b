"""`pie status`: what a running cluster says of itself.

Covers asking a router and printing its answer. Does not cover what is counted
(`pie.router.status`).
"""

from __future__ import annotations

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from pie.cluster.errors import NotRunningError
from pie.router.status import ClusterStatus

_TIMEOUT_S = 5.0


def fetch_status(url: str, token: str) -> ClusterStatus:
    """Ask the router at `url`, such as `http://127.0.0.1:8000`.

    Raises:
        NotRunningError: No router answers there, or it does not answer as Pie does.
    """
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{url}/status", headers=headers, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=ClusterStatus)
    except httpx.HTTPStatusError as error:
        raise NotRunningError(f"{url} answered {error.response.status_code} to /status") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotRunningError(
            f"no router answers at {url} ({error}): start one with `pie serve`, or name it with --at"
        ) from error
    except msgspec.DecodeError as error:
        raise NotRunningError(f"what answers at {url} is not a Pie router") from error


def show_status(url: str, token: str, console: Console) -> None:
    """Print the status of the router at `url`.

    Raises:
        NotRunningError: As `fetch_status`.
    """
    status = fetch_status(url, token)
    console.print(f"router  {url}    model {status.model or 'none'}    index {status.index}")
    workers = Table(box=None, pad_edge=False)
    for heading in (
        "worker",
        "state",
        "running",
        "waiting",
        "pages free",
        "pages",
        "prefill tok/s",
    ):
        workers.add_column(heading, justify="left" if heading in {"worker", "state"} else "right")
    for one in status.workers:
        workers.add_row(
            one.place,
            one.state,
            str(one.running),
            str(one.waiting),
            f"{one.free_pages}/{one.total_pages}",
            _tiers(one.pages),
            f"{one.prefill_tokens_per_s:.0f}",
        )
    console.print(workers)
    for node in status.pool:
        console.print(f"{node.place}  {_tiers(node.pages)}")
    share = status.cached_tokens_total / status.prompt_tokens if status.prompt_tokens else 0.0
    sources = ", ".join(f"{name} {count}" for name, count in status.cached_tokens.items() if count)
    console.print(
        f"hit rate {share:.1%} of {status.prompt_tokens} prompt tokens"
        + (f" ({sources})" if sources else "")
        + f"    requests {status.requests}"
    )


def _tiers(pages: dict[str, int]) -> str:
    return ", ".join(f"{tier} {count}" for tier, count in pages.items()) or "none"
