"""What a client is given of what sequences made, and when."""

import pytest

from pie.router.errors import ApiError, server_error
from pie.router.mailbox import Mailbox
from pie.wire.messages import FinishReason, TokenDelta


def delta(text: str, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("r", (1,), text, finish)


async def test_a_stream_is_given_what_was_made_before_an_error() -> None:
    mailbox = Mailbox(2, streaming=True)
    mailbox.add(0, delta("all of it", FinishReason.STOP))
    mailbox.add(1, delta("half"))
    mailbox.fail(server_error("no"))
    assert [piece.text for piece in await mailbox.take()] == ["all of it", "half"]
    with pytest.raises(ApiError, match="no"):
        await mailbox.take()


async def test_one_answer_is_whole_or_an_error() -> None:
    mailbox = Mailbox(2, streaming=False)
    mailbox.add(0, delta("all of it", FinishReason.STOP))
    mailbox.fail(server_error("no"))
    with pytest.raises(ApiError, match="no"):
        await mailbox.take()


async def test_a_client_that_is_gone_is_given_nothing() -> None:
    mailbox = Mailbox(1, streaming=True)
    mailbox.add(0, delta("half"))
    mailbox.hang_up()
    assert await mailbox.take() == []
