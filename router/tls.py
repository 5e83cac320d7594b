"""HTTPS: the certificate that a router shows.

Covers reading it and its key, for the router and for tools that ask it from the same configuration. Does
not cover encryption between the parts of a cluster (`pie.wire.curve`).
"""

from __future__ import annotations

import ssl

from pie.router.errors import CertificateError
from pie.router.settings import RouterSettings


def server_context(settings: RouterSettings) -> ssl.SSLContext | None:
    """Return what a router listens with; None where it serves plain HTTP.

    Raises:
        CertificateError: The files cannot be read, or do not belong together.
    """
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def password() -> str:
        raise CertificateError(f"{settings.tls_key_file}: has a password; write it without one")

    try:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file, password)
    except OSError as error:
        raise CertificateError(
            f"router.tls_cert_file {settings.tls_cert_file} and router.tls_key_file "
            f"{settings.tls_key_file} cannot be used: {error.strerror or error}"
        ) from error
    return context


def trusted(settings: RouterSettings) -> ssl.SSLContext | bool:
    """Return what a tool with a router's own configuration believes: that very certificate.

    Whichever name or address it is reached by. True, for the system's own authorities, where the
    configuration names no certificate or it cannot be read here.
    """
    if settings.tls_cert_file is None:
        return True
    try:
        context = ssl.create_default_context(cafile=str(settings.tls_cert_file))
    except OSError:
        return True
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
