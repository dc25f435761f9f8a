"""join.pem: made once, private, good for TLS; and what a person is told where it is missing or wrong."""

from __future__ import annotations

import datetime
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pipeline.cluster import join, joined
from pipeline.errors import BadInput


@pytest.fixture
def made(tmp_path: Path) -> Path:
    join.make(tmp_path, "127.0.0.2", 8786, 5050)
    return tmp_path


def test_the_head_makes_it_once_for_its_owner_only(made: Path) -> None:
    pem = join.pem_path(made)
    assert stat.S_IMODE(pem.stat().st_mode) == 0o600
    before = pem.read_text()
    assert before.startswith("scheduler: tls://127.0.0.2:8786\nmlflow: https://127.0.0.2:5050\n-----BEGIN PRIVATE KEY")
    there = joined(made)
    assert (there.scheduler, there.mlflow) == ("tls://127.0.0.2:8786", "https://127.0.0.2:5050")
    join.make(made, "127.0.0.2", 9000, 9001)
    after = pem.read_text()
    assert after.partition("-----BEGIN")[2] == before.partition("-----BEGIN")[2]
    assert joined(made).scheduler == "tls://127.0.0.2:9000"
    assert list(pem.parent.iterdir()) == [pem]


def test_a_file_left_by_a_crash_is_no_way_to_a_readable_key(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "join.pem.tmp").write_text("")  # mode 644
    join.make(tmp_path, "127.0.0.2", 8786, 5050)
    assert stat.S_IMODE(join.pem_path(tmp_path).stat().st_mode) == 0o600


def test_its_holders_trust_each_other_and_nobody_else(made: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    join.make(other, "127.0.0.2", 8786, 5050)

    def handshake(client: Path, server_name: str) -> None:
        pem = join.pem_path(made)
        serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pem))
        serving.verify_mode = ssl.CERT_REQUIRED
        serving.load_cert_chain(pem)
        asking = ssl.create_default_context(cafile=str(client))
        asking.verify_flags |= ssl.VERIFY_X509_STRICT  # Python 3.13's default
        asking.load_cert_chain(client)
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            asking.wrap_bio(back, there, server_hostname=server_name),
            serving.wrap_bio(there, back, server_side=True),
        ]
        done: set[ssl.SSLObject] = set()
        while len(done) < 2:
            for end in ends:
                try:
                    end.do_handshake()
                    done.add(end)
                except ssl.SSLWantReadError:
                    pass

    handshake(join.pem_path(made), "127.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(join.pem_path(made), "127.0.0.3")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(join.pem_path(other), "127.0.0.2")


def test_dask_gets_tls_and_mlflow_the_certificate(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "10.0.0.1,127.0.0.2")
    monkeypatch.delenv("NO_PROXY", raising=False)
    there = joined(made)
    pem = str(there.pem)
    security = there.security()
    assert security is not None and security.require_encryption
    assert security.tls_ca_file == security.tls_client_key == security.tls_worker_cert == pem
    assert security.get_connection_args("client")["ssl_context"].verify_mode == ssl.CERT_REQUIRED
    assert Path(pem).is_absolute()
    assert there.environment() == {
        "MLFLOW_TRACKING_SERVER_CERT_PATH": pem,
        "no_proxy": "10.0.0.1,127.0.0.2",
        "NO_PROXY": "127.0.0.2",
    }


def test_a_login_is_kept_until_the_certificate_goes(made: Path) -> None:
    join.make(made, "127.0.0.2", 8786, 5050, ("admin", "first"))
    join.make(made, "127.0.0.2", 8786, 5050, ("admin", "second"))
    join.make(made, "127.0.0.2", 8786, 5050)
    environment = joined(made).environment()
    assert environment["MLFLOW_TRACKING_USERNAME"] == "admin"
    assert environment["MLFLOW_TRACKING_PASSWORD"] == "first"


def test_what_a_cluster_looks_like_in_a_log_has_no_password(tmp_path: Path) -> None:
    there = join.make(tmp_path, "127.0.0.1", 8786, 5050, ("admin", "very secret"))
    assert there.password == "very secret"
    assert "very secret" not in f"{there} {there!r}"


def test_secrets_come_from_the_key_and_differ_by_purpose(made: Path) -> None:
    pem = join.pem_path(made)
    assert join.secret(pem, "a") == join.secret(pem, "a") != join.secret(pem, "b")
    assert len(join.secret(pem, "a")) == 64


@pytest.mark.parametrize(
    ("head", "scheduler", "mlflow"),
    [
        ("10.1.2.3", "tls://10.1.2.3:8786", "https://10.1.2.3:5050"),
        ("studio.local:99", "tls://studio.local:99", "https://studio.local:5050"),
        ("tls://10.1.2.3:99", "tls://10.1.2.3:99", "https://10.1.2.3:5050"),
    ],
)
def test_another_address_of_the_head(made: Path, head: str, scheduler: str, mlflow: str) -> None:
    there = joined(made, head)
    assert (there.scheduler, there.mlflow) == (scheduler, mlflow)


def test_an_unencrypted_scheduler_of_this_machine_needs_no_certificate(tmp_path: Path) -> None:
    there = joined(tmp_path, "tcp://127.0.0.1:8786")
    assert (there.scheduler, there.mlflow, there.security(), there.environment()) == (
        "tcp://127.0.0.1:8786",
        None,
        None,
        {},
    )


@pytest.mark.parametrize(
    "head",
    [
        "tcp://10.1.2.3:8786",
        "tcp://127.0.0.1",
        "a b",
        "",
        ":1",
        "h:0",
        "h:70000",
        "http://h",
        "h:x",
        "-h",
        "h/",
        "a..b",
        64 * "a",
    ],
)
def test_addresses_that_cannot_work(made: Path, head: str) -> None:
    with pytest.raises(BadInput, match=r"head: expected .*, got .*; "):
        joined(made, head)


def test_a_machine_without_it_is_told_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"expected this machine's certificate .*join.pem, got none.*make head.*scp "):
        joined(tmp_path)


def test_a_readable_key_is_refused_with_the_command_that_mends_it(made: Path) -> None:
    join.pem_path(made).chmod(0o640)
    with pytest.raises(BadInput, match=r"got mode 640.*chmod 600 "):
        joined(made)


def _cut(text: str) -> str:
    return text[:-100]


def _without_key(text: str) -> str:
    notes, _, blocks = text.partition("-----BEGIN PRIVATE KEY")
    return notes + blocks.partition("-----END PRIVATE KEY-----\n")[2]


def _without_notes(text: str) -> str:
    return "-----BEGIN" + text.partition("-----BEGIN")[2]


@pytest.mark.parametrize("damage", [_cut, _without_key, _without_notes, lambda text: "", lambda text: "ÿ"])
def test_a_damaged_one_is_refused(made: Path, damage: object) -> None:
    assert callable(damage)
    pem = join.pem_path(made)
    pem.write_text(damage(pem.read_text()))
    with pytest.raises(BadInput, match=r"expected .* got .*copy it from the head once: scp "):
        joined(made)


def test_key_and_certificate_of_two_clusters_are_refused(made: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    join.make(other, "127.0.0.2", 8786, 5050)
    mine, theirs = (join.pem_path(o).read_text().partition("-----BEGIN CERTIFICATE") for o in (made, other))
    join.pem_path(made).write_text(mine[0] + theirs[1] + theirs[2])
    with pytest.raises(BadInput, match="do not belong together"):
        joined(made)


def test_a_certificate_without_addresses_is_refused(made: Path) -> None:
    """As one of somebody's own, who thought that any would do."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(1))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    pem += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    notes = join.pem_path(made).read_text().partition("-----BEGIN")[0]
    join.pem_path(made).write_text(notes + pem.decode())
    with pytest.raises(BadInput, match=r"got a damaged one \(the certificate names no address\)"):
        joined(made)


def test_a_certificate_of_another_address_is_not_made_over_silently(made: Path) -> None:
    before = join.pem_path(made).read_bytes()
    with pytest.raises(BadInput, match=r"made for, 127\.0\.0\.2, .*got '10\.9\.9\.9'; choose one of them, or delete"):
        join.make(made, "10.9.9.9", 8786, 5050)
    assert join.pem_path(made).read_bytes() == before
