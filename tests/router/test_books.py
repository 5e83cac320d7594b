"""What a router knows of a worker's load between what it sent and what it was told."""

from pie.page.key import PageKey
from pie.router.books import AttemptSink, Running, WorkerBooks
from pie.wire.messages import CachedTokens, FinishReason, Load, Refused, Started, TokenDelta
from tests.router.test_choice import record

KEY = PageKey(bytes(32))


class Sink:
    def on_delta(self, delta: TokenDelta) -> None: ...

    def on_refused(self, refused: Refused) -> None: ...

    def on_gone(self) -> None: ...


class Desk:
    """Books with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.books = WorkerBooks(record("w0"), clock=lambda: self.now_s)
        self.sink: AttemptSink = Sink()

    def send(self, name: str, tokens: int) -> None:
        self.books.sent(name, Running(self.sink, [KEY], tokens, tokens))

    def load(self, waiting_tokens: int, *, waiting: int = 0, running: int = 0) -> None:
        self.books.told_load(Load(running, waiting, waiting_tokens, 5, 10, 1000.0, 20.0))


def first_token(name: str, finish: FinishReason | None = None) -> TokenDelta:
    started = Started(CachedTokens(device=0), 0.0, 0.0, 500.0)
    return TokenDelta(name, (1,), "", finish_reason=finish, started=started)


def test_what_was_sent_waits_until_its_first_token_then_decodes() -> None:
    desk = Desk()
    desk.send("a", 1_000)
    assert (desk.books.waiting, desk.books.queued_tokens, desk.books.decoding) == (1, 1_000, 0)
    desk.books.told(first_token("a"))
    assert (desk.books.waiting, desk.books.queued_tokens, desk.books.decoding) == (0, 0, 1)
    assert desk.books.rates.prefill.tokens == 1_000
    desk.books.told(TokenDelta("a", (2,), "", finish_reason=FinishReason.LENGTH))
    assert (desk.books.running, desk.books.decoding) == (0, 0)
    assert not desk.books.inflight_keys


def test_what_the_worker_says_replaces_what_was_sent_before() -> None:
    desk = Desk()
    desk.send("a", 30_000)
    desk.now_s += 1
    desk.load(4_000)
    assert desk.books.queued_tokens == 4_000
    desk.now_s += 1
    desk.send("b", 500)
    assert desk.books.queued_tokens == 4_500


def test_a_report_that_may_be_older_than_a_request_does_not_hide_it() -> None:
    desk = Desk()
    desk.send("a", 700)
    desk.now_s += 0.001
    desk.load(0)
    assert desk.books.queued_tokens == 700


def test_a_worker_that_says_nothing_for_long_has_all_that_was_sent() -> None:
    desk = Desk()
    desk.send("a", 30_000)
    desk.now_s += 1
    desk.load(4_000, waiting=3, running=7)
    assert (desk.books.waiting, desk.books.decoding) == (3, 7)
    desk.now_s += 10
    assert (desk.books.queued_tokens, desk.books.waiting, desk.books.decoding) == (30_000, 1, 0)


def test_an_attempt_that_ended_leaves_nothing_behind() -> None:
    desk = Desk()
    desk.send("a", 700)
    desk.send("b", 1)
    assert desk.books.ended("a") is not None
    assert desk.books.ended("a") is None
    assert desk.books.told(first_token("a")) is None
    assert (desk.books.queued_tokens, desk.books.inflight_keys[KEY]) == (1, 1)
    assert desk.books.free_share == 1.0


def test_pages_count_as_held_for_a_moment_after_the_answer() -> None:
    desk = Desk()
    for name in ("a", "b"):
        desk.send(name, 16)
        desk.books.told(first_token(name, FinishReason.LENGTH))
        desk.now_s += 0.3
    assert not desk.books.inflight_keys
    assert desk.books.pages_in_making([KEY, PageKey(bytes([1] * 32))]) == 1
    desk.now_s += 0.3
    assert desk.books.pages_in_making([KEY]) == 0
    assert not desk.books._just_held


def test_pages_of_an_attempt_that_never_began_are_not_held_after_it() -> None:
    desk = Desk()
    desk.send("a", 16)
    assert desk.books.pages_in_making([KEY]) == 1
    desk.books.ended("a")
    assert desk.books.pages_in_making([KEY]) == 0
