"""join.pem: what a machine needs to join a cluster, in one file: addresses, certificate, private key.

The certificate is its own authority and all machines share it, so whoever shows it belongs to the cluster. The lines
before the PEM blocks, `name: value`, say where the head is; readers of PEM files skip them.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pipeline.errors import BadInput

if TYPE_CHECKING:
    from distributed import Security

SCHEDULER_PORT = 8786
MLFLOW_PORT = 5050
_VALID_DAYS = 3650
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"  # longer or empty ones make the resolver raise UnicodeError
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"  # a name or an IPv4 address


@dataclass(frozen=True)
class Joined:
    """A cluster as seen from a machine that may join it."""

    scheduler: str  # tls://host:port, or tcp://127.0.0.1:port
    mlflow: str | None  # https://host:port; None for a scheduler without a head (tcp)
    pem: Path | None  # join.pem, absolute; None for tcp
    user: str | None = None  # MLflow's, where the head asks for one
    password: str | None = field(default=None, repr=False)  # a traceback or a log may show the rest

    def security(self) -> Security | None:
        """For distributed.Client(scheduler, security=...): TLS with the shared certificate, nothing unencrypted."""
        if self.pem is None:
            return None
        from distributed import Security

        pem = str(self.pem)
        ends = {f"tls_{role}_{what}": pem for role in ("client", "worker", "scheduler") for what in ("cert", "key")}
        return Security(require_encryption=True, tls_ca_file=pem, **ends)

    def environment(self) -> dict[str, str]:
        """The variables with which MLflow's client reaches the head; set them before mlflow is used."""
        if self.pem is None:
            return {}
        variables = {"MLFLOW_TRACKING_SERVER_CERT_PATH": str(self.pem)}
        host = self.scheduler.removeprefix("tls://").partition(":")[0]
        for name in ("no_proxy", "NO_PROXY"):  # a company proxy must not be asked for a machine of this desk
            others = [each for each in os.environ.get(name, "").split(",") if each and each != host]
            variables[name] = ",".join([*others, host])
        if self.user and self.password:
            variables |= {"MLFLOW_TRACKING_USERNAME": self.user, "MLFLOW_TRACKING_PASSWORD": self.password}
        return variables


def pem_path(outputs: Path) -> Path:
    return outputs / "cluster" / "join.pem"


def joined(outputs: Path, head: str | None = None) -> Joined:
    """The cluster of this machine, from `outputs`/cluster/join.pem; nothing is contacted.

    head: the head's address where it is not the one in join.pem: host, host:port or tls://host:port. A scheduler on
    this machine only, tcp://127.0.0.1:port, needs no join.pem. Raises BadInput for a missing, damaged or readable-by-
    others join.pem and for an address that cannot work.
    """
    if head is not None and head.startswith("tcp://"):
        host, port = _split(head.removeprefix("tcp://"), head)
        if not port or not (host == "localhost" or host.startswith("127.")):
            raise BadInput(
                f"head: expected an unencrypted scheduler only on this machine, tcp://127.0.0.1:port, got {head!r}; "
                "use the address of a cluster's head (`make head` prints it)"
            )
        return Joined(f"tcp://{host}:{port}", None, None)
    pem = pem_path(outputs)
    notes = _read(pem)
    scheduler, mlflow = notes["scheduler"], notes["mlflow"]
    if head is not None:
        host, port = _split(head.removeprefix("tls://"), head)
        scheduler = f"tls://{host}:{port or scheduler.rpartition(':')[2]}"
        mlflow = f"https://{host}:{mlflow.rpartition(':')[2]}"
    return Joined(scheduler, mlflow, pem.absolute(), notes.get("mlflow-user"), notes.get("mlflow-password"))


def _split(address: str, given: str) -> tuple[str, int | None]:
    form = re.fullmatch(rf"({_HOST})(?::(\d{{1,5}}))?", address, re.ASCII)
    if form and 1 <= int(form[2] or 1) <= 65535:
        return form[1], int(form[2]) if form[2] else None
    raise BadInput(
        f"head: expected a host name or an IPv4 address, with :port or without, got {given!r}; "
        "`make head` prints the right one on the head"
    )


def _read(pem: Path) -> dict[str, str]:
    """The notes of a join.pem that is whole and private. Raises BadInput."""
    copy = f"copy it from the head once: scp <head>:<its project folder>/outputs/cluster/join.pem {pem}"
    try:
        text = pem.read_text(encoding="ascii")
        mode = pem.stat().st_mode & 0o777
    except FileNotFoundError as error:
        raise BadInput(
            f"expected this machine's certificate {pem}, got none; on the head itself run `make head`, elsewhere {copy}"
        ) from error
    except (OSError, ValueError) as error:
        raise BadInput(f"expected this machine's certificate {pem}, got {error}; {copy}") from error
    if mode & 0o077:
        raise BadInput(
            f"expected {pem} to be readable by its owner only, got mode {mode:o}: it holds the cluster's private key; "
            f"run: chmod 600 {pem}"
        )
    notes = _notes(text)
    try:
        key = serialization.load_pem_private_key(text.encode(), None)
        certificate = x509.load_pem_x509_certificate(text.encode())
        if key.public_key() != certificate.public_key():
            raise ValueError("key and certificate do not belong together")
        if not _names(certificate):
            raise ValueError("the certificate names no address")
        for name, form in (("scheduler", rf"tls://{_HOST}:\d+"), ("mlflow", rf"https://{_HOST}:\d+")):
            if not re.fullmatch(form, notes.get(name, "")):
                raise ValueError(f"no line `{name}: {form.partition(':')[0]}://host:port`")
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInput(f"expected a whole join.pem at {pem}, got a damaged one ({error}); {copy}") from error
    return notes


def _notes(text: str) -> dict[str, str]:
    lines = (line.partition(": ") for line in text.partition("-----BEGIN")[0].splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


# -- the head makes it ------------------------------------------------------------------------------------------------


def make(outputs: Path, host: str, port: int, mlflow_port: int, login: tuple[str, str] | None = None) -> Joined:
    """Write join.pem for a head at `host`, or bring the notes of the one that is there up to date.

    The certificate is made once; it is valid for `host` and every other address and name of this machine at that time.
    login: MLflow's user and password; a login that join.pem has already stays. Raises BadInput for a damaged join.pem
    and for one that was not made for `host`, OSError where it cannot be written.
    """
    pem = pem_path(outputs)
    if pem.exists():
        notes = _read(pem)
        blocks = "-----BEGIN" + pem.read_text(encoding="ascii").partition("-----BEGIN")[2]
        if host not in names(pem):
            raise BadInput(
                f"expected one of the addresses that {pem} was made for, {', '.join(names(pem))}, got {host!r}; choose "
                f"one of them, or delete {pem}: a new one is made then, and every machine needs a copy of it"
            )
    else:
        notes, blocks = {}, _certificate(host)
    notes |= {"scheduler": f"tls://{host}:{port}", "mlflow": f"https://{host}:{mlflow_port}"}
    if login and "mlflow-user" not in notes:
        notes["mlflow-user"], notes["mlflow-password"] = login
    text = "".join(f"{name}: {value}\n" for name, value in notes.items()) + blocks
    pem.parent.mkdir(parents=True, exist_ok=True)
    temporary = pem.with_name("join.pem.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, pem)
    return joined(outputs)


def names(pem: Path) -> list[str]:
    """The addresses and names that the certificate is valid for."""
    return _names(x509.load_pem_x509_certificate(pem.read_bytes()))


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in alternatives]


def fingerprint(pem: Path) -> str:
    """Ten hex digits that tell one cluster's certificate from another's."""
    return x509.load_pem_x509_certificate(pem.read_bytes()).fingerprint(hashes.SHA256()).hex()[:10]


def secret(pem: Path, purpose: str) -> str:
    """64 hex digits that only holders of the private key know, the same each time; another one for each purpose."""
    key = serialization.load_pem_private_key(pem.read_bytes(), None)
    raw = key.private_bytes(serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return hashlib.sha256(purpose.encode() + b"\0" + raw).hexdigest()


def _certificate(host: str) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "keyformer cluster")])
    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys(
        ("content_commitment", "data_encipherment", "key_agreement", "crl_sign", "encipher_only", "decipher_only"),
        False,
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    extensions: list[tuple[Any, bool]] = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.KeyUsage(digital_signature=True, key_encipherment=True, key_cert_sign=True, **usage), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        (x509.SubjectAlternativeName([_alternative(name) for name in _own_names(host)]), False),
        (identifier, False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False),
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=30))  # the clock of another machine may be behind
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    certificate = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode()


def _own_names(host: str) -> Iterable[str]:
    """`host`, and every IPv4 address and name under which this machine may be known."""
    addresses = [a.address for at in psutil.net_if_addrs().values() for a in at if a.family == socket.AF_INET]
    name = socket.gethostname().removesuffix(".local")
    named = [name, f"{name}.local"] if re.fullmatch(_HOST, name) else []
    return dict.fromkeys([host, *addresses, *named])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
