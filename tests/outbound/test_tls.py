"""The outbound client: verification of certificates."""

import socket
import ssl
import subprocess
import threading

import pytest

from config.outbound import client, transport
from tests.outbound.helpers import resolve, send


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=hooks.example"
    extra = ["-addext", "subjectAltName=DNS:hooks.example", "-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *extra], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def tls_receiver(certificate):
    """Answers 200 over TLS and records the server names that clients sent."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    names = []
    context.sni_callback = lambda sock, name, _: names.append(name)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                with context.wrap_socket(connection, server_side=True) as secure:
                    while not secure.recv(65536).endswith(b"{}"):
                        continue
                    secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1], names
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_untrusted_certificate_is_refused(tls_receiver):
    port, _ = tls_receiver
    with pytest.raises(client.RequestFailed, match="TLS: self-signed certificate"):
        send(f"https://127.0.0.1:{port}/")


def test_host_name_in_the_certificate_is_verified(tls_receiver, certificate, monkeypatch):
    port, names = tls_receiver
    transport.tls_context.cache_clear()
    try:
        transport.tls_context().load_verify_locations(certificate[0])
        resolve(monkeypatch, "127.0.0.1")
        assert send(f"https://hooks.example:{port}/").status == 200
        assert names == ["hooks.example"]
        with pytest.raises(client.RequestFailed, match="TLS: Hostname mismatch"):
            send(f"https://other.example:{port}/")
    finally:
        transport.tls_context.cache_clear()
