"""What goes wrong with an object store is a miss, a counter and a line in the log; nobody waits for long."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typing_extensions import Buffer

from pie.cluster.local_s3 import SECRET_KEY, LocalS3
from pie.page.lookup import LookupStatus
from pie.pool.conformance import put, read, sample_page
from pie.pool.object import ObjectTier
from pie.pool.object_errors import ObjectStoreError, StoreFailure
from pie.pool.object_health import ObjectHealth, ObjectState
from pie.pool.object_s3 import S3Store
from pie.pool.settings import PoolSettings
from pie.pool.tier import id_of
from tests.pool.object_places import (
    LARGE,
    SMALL,
    Wrapped,
    fill,
    objects,
    open_tier,
    pages_of,
    store_of,
    wait_until,
)
from tests.support.s3_server import settings_for

Open = Callable[..., ObjectTier]


@pytest.fixture
def start(s3_settings: PoolSettings) -> Iterator[Open]:
    """Opens tiers; checks and closes them."""
    tiers: list[ObjectTier] = []

    def open_one(settings: PoolSettings | None = None, **options: Any) -> ObjectTier:
        tiers.append(open_tier(settings or s3_settings, **options))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.check()
        tier.close()


class Failing(Wrapped):
    """Fails as it is told to, until it is told otherwise."""

    def __init__(self, inner: S3Store) -> None:
        super().__init__(inner)
        self.failure: StoreFailure | None = None
        self.only: set[str] = set()

    def _fail(self, call: str) -> None:
        if self.failure is not None and (not self.only or call in self.only):
            raise ObjectStoreError(self.failure, "as the test wants it")

    def put(self, name: str, data: Buffer) -> bool:
        self._fail("put")
        return super().put(name, data)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        self._fail("get")
        return super().get(name, start, length)

    def probe(self) -> None:
        self._fail("probe")
        super().probe()


@pytest.mark.live
def test_clocks_that_jump_change_nothing(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = start()
    for number, now_ns in enumerate([10**18, 0, 2 * 10**18, -(10**15)]):
        monkeypatch.setattr("time.time_ns", lambda now_ns=now_ns: now_ns)
        assert put(tier, *sample_page(number, SMALL))
        assert put(tier, *sample_page(number + 10, LARGE))
        tier.flush(60)
    tier.close()
    again = start()
    assert len(pages_of(again)) == 8
    for number in range(4):
        for header, payload in (sample_page(number, SMALL), sample_page(number + 10, LARGE)):
            assert read(again, id_of(header)) == payload


@pytest.mark.live
def test_a_store_that_is_killed_and_comes_back_costs_misses_and_loses_nothing_that_was_in_it(
    own_s3_server: LocalS3, start: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = settings_for(own_s3_server, object_attempts=1)
    changed: list[None] = []
    tier = start(settings, store=S3Store(settings), on_changed=lambda: changed.append(None))
    before = fill(tier, 10, LARGE)
    tier.flush(60)
    wrong: list[object] = []
    stop = threading.Event()

    used = 0

    def use() -> None:
        nonlocal used
        number = 100
        while not stop.is_set():
            header, payload = sample_page(number, LARGE if number % 2 else SMALL)
            put(tier, header, payload)
            for each, known in ((header, payload), sample_page(number % 10, LARGE)):
                got = read(tier, id_of(each))
                if isinstance(got, bytes) and got != known:
                    wrong.append(each)
            number += 1
            used += 1

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: used > 3)
    own_s3_server.kill()
    wait_until(lambda: tier.health.is_off)
    wait_until(lambda: bool(changed))
    assert read(tier, id_of(before[0])) is LookupStatus.MISS
    assert tier.prepare_store(sample_page(5000, LARGE)[0]) is LookupStatus.MISS
    assert "is off" in caplog.text
    own_s3_server.start()
    wait_until(lambda: tier.health.state is ObjectState.OK, 60)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "answers again" in caplog.text
    assert pages_of(tier) >= {id_of(header) for header in before}
    for number, header in enumerate(before):
        assert read(tier, id_of(header)) == sample_page(number, LARGE)[1]


@pytest.mark.live
def test_what_was_stored_while_the_store_was_away_gets_there_when_it_is_back(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = Failing(store_of(s3_settings))
    tier = start(store=store)
    store.failure = StoreFailure.UNREACHABLE
    headers = fill(tier, 8, LARGE)
    wait_until(lambda: tier.health.is_off)
    # Until then they are served from memory, and pages that come now are refused.
    assert read(tier, id_of(headers[0])) == sample_page(0, LARGE)[1]
    assert tier.prepare_store(sample_page(99, LARGE)[0]) is LookupStatus.MISS
    store.failure = None
    wait_until(lambda: not tier.buffered_bytes)
    assert len([name for name in objects(s3_settings) if name.endswith(".full")]) == len(headers)
    assert tier.written.dropped == 0


@pytest.mark.live
def test_a_page_that_the_store_refuses_for_good_is_dropped_and_counted(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = Failing(store_of(s3_settings))
    changed: list[None] = []
    tier = start(store=store, on_changed=lambda: changed.append(None))
    store.failure, store.only = StoreFailure.STRANGE, {"put"}
    (header,) = fill(tier, 1, LARGE)

    def is_dropped() -> bool:
        tier.health.worked("load")  # Others succeed meanwhile.
        return tier.written.dropped == 1

    wait_until(is_dropped)
    assert tier.lookup(id_of(header)) is LookupStatus.MISS
    assert changed
    assert tier.used_bytes == 0


@pytest.mark.live
def test_no_load_waits_longer_than_the_tiers_time_out(
    start: Open, s3_settings: PoolSettings
) -> None:
    class Slow(Wrapped):
        release = threading.Event()

        def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
            self.release.wait(120)
            return super().get(name, start, length)

    store = Slow(store_of(s3_settings))
    tier = start(store=store, timeout_s=0.2, threads=2)
    headers = fill(tier, 8, LARGE)
    tier.flush(60)
    answers = [read(tier, id_of(header)) for header in headers]
    assert set(answers) <= {LookupStatus.RETRY, LookupStatus.MISS}
    assert tier.health.is_off, "a store that answers too late is as good as none"
    assert tier.health.errors["timeout"] == 3
    store.release.set()
    # On a busy machine that time may be too short once more.
    wait_until(lambda: read(tier, id_of(headers[0])) == sample_page(0, LARGE)[1])


@pytest.mark.live
def test_what_could_not_be_read_ahead_is_asked_for_anew(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = Failing(store_of(s3_settings))
    tier = start(store=store)
    headers = fill(tier, 2, LARGE)
    tier.flush(60)
    store.failure, store.only = StoreFailure.BUSY, {"get"}
    tier.expect([id_of(header) for header in headers])
    wait_until(lambda: not tier._reader._ahead)
    store.failure = None
    for number, header in enumerate(headers):
        assert read(tier, id_of(header)) == sample_page(number, LARGE)[1]


@pytest.mark.live
def test_what_was_read_ahead_and_nobody_took_is_let_go(
    start: Open, s3_settings: PoolSettings
) -> None:
    now = [0.0]
    tier = start(clock=lambda: now[0])
    (header,) = fill(tier, 1, LARGE)
    tier.flush(60)
    tier.expect([id_of(header)])
    wait_until(lambda: tier.read_bytes > LARGE)
    assert tier._reader._ahead
    now[0] += 31
    wait_until(lambda: not tier._reader._ahead)


@pytest.mark.live
def test_a_look_that_fails_forgets_nothing_that_lists_say(
    start: Open, s3_settings: PoolSettings
) -> None:
    for first in (0, 10):
        tier = start()
        fill(tier, 2, LARGE, first=first)
        tier.close()

    class FailsOnce(Wrapped):
        def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
            self.gets.append(name)
            if len(self.gets) == 2:
                raise ObjectStoreError(StoreFailure.TIMEOUT, "as the test wants it")
            return self.inner.get(name, start, length)

    store = FailsOnce(store_of(s3_settings))
    again = start(store=store)
    assert not pages_of(again)
    wait_until(lambda: len(pages_of(again)) == 4)
    assert all(name.startswith("lists/") for name in store.gets), "no page was read by itself"


@pytest.mark.live
def test_a_close_counts_what_it_could_not_send(start: Open, s3_settings: PoolSettings) -> None:
    class Hanging(Wrapped):
        release = threading.Event()

        def put(self, name: str, data: Buffer) -> bool:
            assert self.release.wait(120)
            return super().put(name, data)

    store = Hanging(store_of(s3_settings))
    tier = start(store=store, timeout_s=0.2, threads=2)
    fill(tier, 5, LARGE)
    fill(tier, 3, SMALL, first=10)
    tier.close()
    store.release.set()
    assert tier.written.dropped == 8


@pytest.mark.live
def test_a_flipped_bit_is_a_miss_that_is_counted_and_removed(
    start: Open, s3_settings: PoolSettings
) -> None:
    tier = start()
    (header,) = fill(tier, 1, LARGE)
    tier.flush(60)
    (name,) = (each for each in objects(s3_settings) if each.endswith(".full"))
    store = store_of(s3_settings)
    data = store.get(name)
    assert data is not None
    store.remove([name])
    store.put(name, data[:50_000] + bytes([data[50_000] ^ 1]) + data[50_001:])
    assert read(tier, id_of(header)) is LookupStatus.MISS
    assert tier.bad_by_reason == {"checksum": 1}
    tier.flush(60)
    assert name not in objects(s3_settings)
    assert put(tier, *sample_page(0, LARGE))
    tier.flush(60)
    assert read(start(), id_of(header)) == sample_page(0, LARGE)[1]


@pytest.mark.live
def test_an_object_that_was_cut_short_is_a_miss(start: Open, s3_settings: PoolSettings) -> None:
    tier = start()
    (header,) = fill(tier, 1, LARGE)
    tier.flush(60)
    (name,) = (each for each in objects(s3_settings) if each.endswith(".full"))
    store = store_of(s3_settings)
    data = store.get(name)
    assert data is not None
    store.remove([name])
    store.put(name, data[: len(data) // 2])
    assert read(tier, id_of(header)) is LookupStatus.MISS
    assert tier.bad_pages.at_load == 1


@pytest.mark.live
def test_who_may_only_read_gets_pages_and_sends_none(
    start: Open, s3_settings: PoolSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = start()
    headers = fill(tier, 3, LARGE)
    tier.close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "guest")
    guest = start(store=S3Store(s3_settings))
    assert guest.health.state is ObjectState.OK
    fill(guest, 1, LARGE, first=50)
    wait_until(lambda: guest.health.state is ObjectState.READ_ONLY)
    assert guest.prepare_store(sample_page(51, LARGE)[0]) is LookupStatus.MISS
    assert guest.states()["read_only"] == 1
    assert guest.health.errors["denied"] == 1
    for number, header in enumerate(headers):
        assert read(guest, id_of(header)) == sample_page(number, LARGE)[1]


@pytest.mark.live
@pytest.mark.parametrize(
    ("key", "secret", "more", "failure"),
    [
        ("nobody", SECRET_KEY, {}, "denied"),
        ("pie", "wrong", {}, "denied"),
        ("pie", SECRET_KEY, {"object_bucket": "no-such-bucket"}, "no_bucket"),
        ("pie", SECRET_KEY, {"object_endpoint_url": "http://127.0.0.1:9"}, "unreachable"),
        ("pie", SECRET_KEY, {"object_endpoint_url": "http://no.such.host.invalid"}, "unreachable"),
    ],
)
def test_a_store_that_cannot_be_used_is_off_with_the_reason(
    s3_server: LocalS3,
    start: Open,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    secret: str,
    more: dict[str, object],
    failure: str,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    settings = settings_for(s3_server, object_attempts=1, **more)
    tier = start(settings, store=S3Store(settings))
    assert tier.health.is_off
    assert tier.health.errors == {failure: 1}
    header, _ = sample_page(1)
    assert tier.prepare_store(header) is LookupStatus.MISS
    assert read(tier, id_of(header)) is LookupStatus.MISS


def test_an_answer_that_breaks_off_is_a_failure_of_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "pie")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)

    class Broken(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"no more than this")

        def log_message(self, *_arguments: object) -> None:
            """Be silent."""

    with http.server.HTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = S3Store(
            PoolSettings(
                object_bucket="pages",
                object_endpoint_url=f"http://127.0.0.1:{server.server_port}",
                object_attempts=1,
            )
        )
        with pytest.raises(ObjectStoreError) as caught:
            store.get("name")
        assert caught.value.failure is StoreFailure.UNREACHABLE
        store.close()
        server.shutdown()


def takes_stores(health: ObjectHealth) -> bool:
    return health.takes_stores


def state(health: ObjectHealth) -> ObjectState:
    """Return the state as it is now, whatever it was a line before."""
    return health.state


def failing(failure: StoreFailure) -> ObjectStoreError:
    return ObjectStoreError(failure, "")


def test_a_breaker_opens_after_three_failures_in_a_row_and_closes_after_one_good_probe() -> None:
    now = [0.0]
    health = ObjectHealth("bucket", lambda: now[0])
    assert not health.failed(failing(StoreFailure.TIMEOUT), "load")
    assert not health.failed(failing(StoreFailure.BUSY), "load")
    health.worked("load")
    assert not health.failed(failing(StoreFailure.TIMEOUT), "load")
    assert not health.failed(failing(StoreFailure.TIMEOUT), "store")
    assert health.failed(failing(StoreFailure.UNREACHABLE), "load")
    assert health.is_off
    assert not health.begin_probe(), "it waits first"
    now[0] = 1.0
    assert health.begin_probe()
    assert not health.begin_probe(), "one request finds out, not many"
    assert state(health) is ObjectState.PROBING
    assert not takes_stores(health)
    health.end_probe(None)
    assert state(health) is ObjectState.OK
    assert health.opened == 1


def test_probes_come_ever_more_rarely_but_never_end() -> None:
    now = [0.0]
    health = ObjectHealth("bucket", lambda: now[0])
    health.failed(failing(StoreFailure.NO_BUCKET), "load")
    waits = []
    for _ in range(12):
        began = now[0]
        while not health.begin_probe():
            now[0] += 0.25
        waits.append(now[0] - began)
        health.end_probe(failing(StoreFailure.NO_BUCKET))
    assert waits[0] <= 1.25
    assert all(30 <= wait <= 60.25 for wait in waits[7:])


def test_a_refused_store_is_tried_again_after_half_a_minute() -> None:
    now = [0.0]
    health = ObjectHealth("bucket", lambda: now[0])
    assert not health.failed(failing(StoreFailure.DENIED), "store")
    assert state(health) is ObjectState.READ_ONLY
    assert not health.is_off
    assert not takes_stores(health)
    now[0] = 30.0
    assert takes_stores(health)
    health.worked("store")
    assert state(health) is ObjectState.OK
