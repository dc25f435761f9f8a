"""Whether a cluster's head answers, and on which address this machine talks to it."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from typing import Any

from pipeline.errors import BadInput

from .join import Joined

_TIMEOUT_S = 5.0
_OUT_OF_DATE = (9, 10)  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


def split(address: str) -> tuple[str, int]:
    """Host and port of scheme://host:port."""
    host, _, port = address.partition("//")[2].rpartition(":")
    return host, int(port)


def why_no_scheduler(there: Joined) -> str | None:
    """What is wrong with the scheduler as seen from here, or None when it answers.

    Raises BadInput when it answers with another certificate than ours, or ours is not valid today: waiting mends
    nothing then.
    """
    address = split(there.scheduler)
    try:
        with socket.create_connection(address, _TIMEOUT_S) as connection:
            if there.pem is not None:
                _trusting(there, hostname=False).wrap_socket(connection).close()
        return None
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OUT_OF_DATE:
            raise BadInput(
                f"expected a certificate that is valid today, got {there.pem} ({error.verify_message}); set this "
                "machine's clock, or delete the file on the head, start `make head` again and copy the new one"
            ) from error
        raise BadInput(
            f"expected a head with the certificate {there.pem} at {there.scheduler}, got one with another certificate; "
            f"copy it again: scp {address[0]}:<project folder>/outputs/cluster/join.pem {there.pem}"
        ) from error
    except ssl.SSLError as error:
        return f"something answers at {there.scheduler}, but not a scheduler with TLS ({error.reason})"
    except OSError as error:
        return f"no scheduler answers at {there.scheduler} ({error.strerror or error})"


def why_no_mlflow(there: Joined) -> str | None:
    """What is wrong with the head's MLflow server as seen from here, or None when it answers and lets us in."""
    try:
        ask_mlflow(there, "experiments/get?experiment_id=0")
        return None
    except urllib.error.HTTPError as error:
        if error.code == 404:  # somebody deleted the Default experiment: the server is well
            return None
        hint = {401: ": user or password are not those of join.pem", 403: ": it does not know this address"}
        return f"{there.mlflow} answers {error.code}{hint.get(error.code, '')}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{there.mlflow} does not answer ({getattr(error, 'reason', error)})"


def ask_mlflow(there: Joined, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """An answer of MLflow's REST interface. Raises OSError, ValueError or http.client.HTTPException."""
    request = urllib.request.Request(
        f"{there.mlflow}/api/2.0/mlflow/{what}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    if there.user and there.password:
        login = base64.b64encode(f"{there.user}:{there.password}".encode()).decode()
        request.add_header("Authorization", f"Basic {login}")
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # a proxy has no business between machines of one desk
        urllib.request.HTTPSHandler(context=_trusting(there, hostname=True)),
    )
    with opener.open(request, timeout=_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer


def _trusting(there: Joined, *, hostname: bool) -> ssl.SSLContext:
    """hostname: whether the certificate must name the address, as MLflow's client asks and Dask's does not."""
    context = ssl.create_default_context(cafile=str(there.pem))
    context.load_cert_chain(str(there.pem))
    context.check_hostname = hostname
    return context


def own_address(towards: str) -> str | None:
    """The IPv4 address with which this machine talks to `towards`, or None without a way there. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None
