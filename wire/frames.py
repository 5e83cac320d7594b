"""Payload frames.

Covers the type of what may be sent, and memory that is lent to zmq until it is done with it.
"""

from __future__ import annotations

from typing_extensions import Buffer

__all__ = ["Buffer"]
