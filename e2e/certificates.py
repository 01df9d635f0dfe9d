"""Certificates for tests, made by openssl, and connections with TLS."""

import pathlib
import socket
import ssl
import subprocess

import resp

NEW = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Certificates:
    """An authority (ca.pem), and certificates with keys (NAME.pem, NAME.key) of it, in a directory."""

    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        self.openssl(f"{NEW} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem")
        self.sign("server")
        self.sign("client")

    def openssl(self, arguments):
        done = subprocess.run(["openssl", *arguments.split()], cwd=self.root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def sign(self, name, days=2):
        """Makes a certificate."""
        self.openssl(f"{NEW} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        self.openssl(f"x509 -req -days {days} -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names -out {name}.pem")

    def __getitem__(self, name):
        return self.root / name

    def flags(self, name="server"):
        """The flags of a node."""
        return ["--tls-cert", self[f"{name}.pem"], "--tls-key", self[f"{name}.key"]]

    def context(self, client=None, version=None):
        """The client's side."""
        context = ssl.create_default_context(cafile=str(self["ca.pem"]))
        if client:
            context.load_cert_chain(self[f"{client}.pem"], self[f"{client}.key"])
        if version:
            context.minimum_version = context.maximum_version = version
        return context

    def connect(self, port, timeout=20, **how):
        """A connection with TLS."""
        return TlsConnection(port, self.context(**how), timeout)


class TlsConnection(resp.Connection):
    """A blocking connection with TLS. An end without `close_notify` is an error."""

    def __init__(self, port, context, timeout=20):
        super().__init__(port, timeout)
        plain = self.socket
        try:
            self.socket = context.wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False)
        except (OSError, ssl.SSLError):
            plain.close()
            raise


def raw(port, timeout=20):
    """A connection without TLS, to misbehave on."""
    return socket.create_connection(("127.0.0.1", port), timeout)
