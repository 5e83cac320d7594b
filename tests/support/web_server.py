"""A real HTTP server on this host, for tests."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIG_BYTES = 4 << 20


class WebServer(ThreadingHTTPServer):
    """Serves `/echo`, `/redirect`, `/big` and `/slow`; notes what it was asked."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.most_at_once = 0
        self.at_once = 0
        self.go_on = threading.Event()
        self.lock = threading.Lock()
        self.scheme = "http" if tls is None else "https"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def origin(self, host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that refuse a certificate or an answer hang up."""


class _Handler(BaseHTTPRequestHandler):
    server: WebServer

    def _answer(self) -> None:
        server = self.server
        with server.lock:
            server.asked.append(f"{self.command} {self.path}")
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size)
        status, headers, data = 200, {"content-type": "application/json"}, b""
        if self.path == "/redirect":
            status, headers = 302, {"location": "http://127.0.0.1:1/secret"}
        elif self.path == "/big":
            data = b"x" * BIG_BYTES
        else:
            if self.path == "/slow":
                server.go_on.wait(60)
            told = {name.lower(): value for name, value in self.headers.items()}
            data = json.dumps({"headers": told, "body": body.decode()}).encode()
        with server.lock:
            server.at_once -= 1
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@contextmanager
def web_server(tls: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    """Run a server meanwhile."""
    server = WebServer(tls)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def certificate_for(name: str, folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Return a server's TLS with a certificate of its own for a name, and the file that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    try:
        known: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        known = x509.DNSName(name)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([known]), critical=False)
        .sign(key, hashes.SHA256())
    )
    trusted, secret = folder / "certificate.pem", folder / "key.pem"
    trusted.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(trusted, secret)
    return server, trusted
