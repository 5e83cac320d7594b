"""What Ray, and the libraries in its processes, read from the environment when they are imported.

Covers how processes of a Ray know each other, what Ray is kept from doing, and how threads of a worker
wait. Does not cover
starting it (`pie.cluster.ray_runtime`), and does not import it.
"""

from __future__ import annotations

import os
import secrets

SPIN_COUNT = "2000"
"""How long a thread of a worker's model spins at a barrier before it sleeps. By default that is so long
that, where anything else wants the cores, its threads wait for each other to be given one: with one
busy process beside two threads decode fell from 30 to under 1 token/s. See
`docs/design/0013-spinning-threads.md`."""


def prepare(address: str) -> None:
    """Set what Ray reads; has no effect on a Ray that was imported before.

    A private Ray (no `address`) asks its processes for a token that nobody else has. A running one
    is joined as RAY_AUTH_MODE says, without a token where it says nothing. An unset mode would
    write a token file into the home folder and refuse whoever does not find it.
    """
    if address:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    else:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # A private Ray without its control service is of no use; by default it waits a minute for it.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    # Without this Ray's core takes SIGTERM for a crash: it prints a stack and ends the process.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
