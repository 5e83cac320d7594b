"""How much of orders there may be at a time, for those who give them, take them there and carry them out.

Covers the numbers. Does not cover which orders are given within them (`pie.policies.cluster_manager`) or keeping to
them (`pie.policies.remembered`, `pie.router.ordering`, `pie.worker.orders`).
"""

from __future__ import annotations

BYTES_PER_S = 256 << 20
"""Pages that are ordered to move, in the whole cluster; and those that one worker moves for orders. Where no setting says otherwise."""
MOST_ORDERS = 8
"""Orders about pages that are given in one round."""
MOST_MOVES = 1_024
"""Conversations that are moved in one round: no byte moves for it."""
MOST_PAGES = 2_048
"""Pages of one order as it is given: a proposal about more is carried out a part in each round."""
MOST_SEQUENCE_PAGES = 16_384
"""Pages of a sequence that a proposal may be about, as those of one conversation: 262,144 tokens at 16 a page."""
DEADLINE_S = 1.0
"""What a policy has to answer."""
AGAIN_S = 20.0
"""So long an order that was given is not given again."""
ORDER_S = 20.0
"""Longest that a worker is about one order; what is left then is left."""
MOST_WAITING = 8
"""Orders that one worker has at a time, the one that it is about included."""
ANSWER_S = (MOST_WAITING + 1) * ORDER_S
"""How long the answer to an order is waited for: one that is last of all may be carried out that late."""
