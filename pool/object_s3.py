"""A bucket of any store that speaks S3, through boto3.

Covers requests, and boto3's errors, which become this package's here and nowhere else. Does not
cover what the objects hold (`pie.pool.object`).

All calls block, within their time-outs: never on an event loop. Thread-safe.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)
from typing_extensions import Buffer

from pie.pool.object_errors import ObjectStoreError, StoreFailure
from pie.pool.object_store import FoundObject, ObjectStart
from pie.pool.settings import PoolSettings

log = logging.getLogger("pie.pool.object")

_MOST_REMOVED = 1000
"""Names in one DeleteObjects, as S3 allows."""
_DEFAULT_REGION = "us-east-1"
"""What servers other than AWS's take where none is set: signatures need some region."""

_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "403"}
_BUSY = {"SlowDown", "RequestTimeout", "RequestTimeoutException", "ThrottlingException"}
_NO_OBJECT = {"NoSuchKey", "404"}


class _Got(NamedTuple):
    """What a request for an object brought."""

    data: bytes
    is_range: bool
    object_bytes: int
    """Size of the whole object, as far as the store says it."""


class S3Store:
    """An `ObjectStore` in a bucket, below a prefix."""

    def __init__(self, settings: PoolSettings, *, attempts: int | None = None) -> None:
        """Prepare; nothing is sent yet.

        Args:
            settings: Of which those that begin with `object_` count.
            attempts: How often one request is tried; `object_attempts` where None.

        Raises:
            ObjectStoreError: The endpoint, the region or the profile makes no sense.
        """
        self._bucket = settings.object_bucket
        self._prefix = f"{settings.object_prefix}/" if settings.object_prefix else ""
        self._is_conditional = True
        ca_file = settings.object_ca_file
        try:
            session = boto3.session.Session()
            self._client = session.client(
                "s3",
                endpoint_url=settings.object_endpoint_url or None,
                region_name=settings.object_region or session.region_name or _DEFAULT_REGION,
                verify=None if ca_file is None else str(ca_file),
                config=Config(
                    connect_timeout=settings.object_connect_timeout_s,
                    read_timeout=settings.object_read_timeout_s,
                    # Standard: exponential backoff with full jitter, and a budget of retries that
                    # a store in trouble does not refill.
                    retries={
                        "mode": "standard",
                        "total_max_attempts": attempts or settings.object_attempts,
                    },
                    max_pool_connections=2 * settings.object_threads,
                    request_checksum_calculation=settings.object_checksums.value,
                    response_checksum_validation=settings.object_checksums.value,
                    s3={"addressing_style": _addressing(settings)},
                    tcp_keepalive=True,
                ),
            )
        except (BotoCoreError, ValueError, OSError) as error:
            raise ObjectStoreError(StoreFailure.STRANGE, str(error)) from error

    def put(self, name: str, data: Buffer) -> bool:
        """Make an object with `If-None-Match: *`; a store that does not know it overwrites.

        Overwriting does no harm: a name stands for its content.
        """
        condition = {"IfNoneMatch": "*"} if self._is_conditional else {}
        body = data if isinstance(data, bytes | bytearray) else bytes(data)
        try:
            self._client.put_object(
                Bucket=self._bucket, Key=self._prefix + name, Body=body, **condition
            )
        except ClientError as error:
            code, status = _answer(error)
            if condition and (status == 412 or code == "PreconditionFailed"):
                return False
            if condition and (status == 501 or code == "NotImplemented"):
                self._is_conditional = False
                log.info("%s takes no conditions: objects are overwritten", self._bucket)
                return self.put(name, data)
            _raise(error)
        except (BotoCoreError, HTTPClientError) as error:
            _raise(error)
        return True

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return an object or a range of it, as far as it goes; None where it is not there."""
        if not start and length is None:
            whole = self._get(name)
            return None if whole is None else whole.data
        wanted = f"bytes={start}-{'' if length is None else start + length - 1}"
        answer = self._get(name, Range=wanted)
        if answer is None or answer.is_range:
            return None if answer is None else answer.data
        data = answer.data  # A store that knows no ranges.
        return data[start:] if length is None else data[start : start + length]

    def get_start(self, name: str, length: int) -> ObjectStart | None:
        """Return an object's first bytes, so many at most, and its size; None where it is not there."""
        answer = self._get(name, Range=f"bytes=0-{length - 1}")
        return None if answer is None else ObjectStart(answer.data[:length], answer.object_bytes)

    def _get(self, name: str, **wanted: str) -> _Got | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name, **wanted)
            # Not as a context itself: that is urllib3's stream, with errors of its own.
            with contextlib.closing(answer["Body"]) as body:
                data: bytes = body.read()
        except ClientError as error:
            code, status = _answer(error)
            if code in _NO_OBJECT or status == 416:
                return None
            _raise(error)
        except (BotoCoreError, HTTPClientError) as error:
            _raise(error)
        is_range = answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        total = str(answer.get("ContentRange", "")).rpartition("/")[2]
        return _Got(data, is_range, int(total) if total.isdigit() else len(data))

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, a thousand to a request."""
        for at in range(0, len(names), _MOST_REMOVED):
            some = names[at : at + _MOST_REMOVED]
            wanted = [{"Key": self._prefix + name} for name in some]
            try:
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": wanted, "Quiet": True}
                )
            except (BotoCoreError, ClientError, HTTPClientError) as error:
                _raise(error)
            for refused in answer.get("Errors", ()):
                code = str(refused.get("Code", ""))
                if code not in _NO_OBJECT:
                    raise ObjectStoreError(_failure(code, 0), f"DeleteObjects: {refused}")

    def found(self) -> Iterator[FoundObject]:
        """List all objects below the prefix, a thousand to a request."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        try:
            for page in pages:
                for one in page.get("Contents", ()):
                    name = one["Key"].removeprefix(self._prefix)
                    stored_ns = int(one["LastModified"].timestamp() * 1e9)
                    yield FoundObject(name, one["Size"], stored_ns)
        except (BotoCoreError, ClientError, HTTPClientError) as error:
            _raise(error)

    def probe(self) -> None:
        """List one name."""
        try:
            self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
        except (BotoCoreError, ClientError, HTTPClientError) as error:
            _raise(error)

    def make_bucket(self) -> None:
        """Make the bucket, where there is none yet, and see that it takes objects."""
        try:
            self._client.create_bucket(Bucket=self._bucket)
        except ClientError as error:
            if _answer(error)[0] not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                _raise(error)
        except (BotoCoreError, HTTPClientError) as error:
            _raise(error)
        self.put("ready", b"pie")
        self.remove(["ready"])

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()


def _addressing(settings: PoolSettings) -> str:
    style = settings.object_addressing.value
    if style == "auto" and settings.object_endpoint_url:
        return "path"  # Names of hosts are made up of a bucket's by those who have a wildcard.
    return style


def _answer(error: ClientError) -> tuple[str, int]:
    """Return S3's code and HTTP's status."""
    answer: dict[str, Any] = error.response
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(answer.get("Error", {}).get("Code", "")), int(status)


def _failure(code: str, status: int) -> StoreFailure:
    if code == "NoSuchBucket":
        return StoreFailure.NO_BUCKET
    if code in _DENIED or status in {401, 403}:
        return StoreFailure.DENIED
    if code in _BUSY or status in {409, 429} or status >= 500:
        return StoreFailure.BUSY
    return StoreFailure.STRANGE


_FAILURES: tuple[tuple[tuple[type[Exception], ...], StoreFailure], ...] = (
    # The first that fits: some of these are kinds of others.
    ((SSLError,), StoreFailure.TLS),
    ((ConnectTimeoutError, ReadTimeoutError), StoreFailure.TIMEOUT),
    (
        (
            EndpointConnectionError,
            ConnectionClosedError,
            IncompleteReadError,
            ResponseStreamingError,
            HTTPClientError,
        ),
        StoreFailure.UNREACHABLE,
    ),
    (
        (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError),
        StoreFailure.DENIED,
    ),
)


def _raise(error: BotoCoreError | ClientError | HTTPClientError) -> NoReturn:
    """Say in this package's words what boto3 says in its own."""
    if isinstance(error, ClientError):
        failure = _failure(*_answer(error))
    else:
        failure = next(
            (failure for kinds, failure in _FAILURES if isinstance(error, kinds)),
            StoreFailure.STRANGE,
        )
    raise ObjectStoreError(failure, str(error)) from error


def make_bucket(settings: PoolSettings) -> None:
    """Make the bucket, where there is none yet, and see that it takes objects.

    Raises:
        ObjectStoreError: The store did not do it.
    """
    store = S3Store(settings)
    try:
        store.make_bucket()
    finally:
        store.close()


def probe_bucket(settings: PoolSettings) -> None:
    """Ask a bucket for next to nothing, once.

    Raises:
        ObjectStoreError: It did not answer as it should.
    """
    store = S3Store(settings, attempts=1)
    try:
        store.probe()
    finally:
        store.close()
