"""The head or a worker as a service of the machine: a launchd LaunchDaemon on macOS, a systemd unit on Linux.

A LaunchDaemon rather than a LaunchAgent: since macOS 15 agents need a person's leave to use the local network, and get
"no route to host" without it; daemons do not. Either starts with the machine, without anybody logged in.
"""

from __future__ import annotations

import os
import plistlib
import pwd
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import BadInput

from .join import joined
from .supervise import PROJECT

LAUNCH_DAEMONS = Path("/Library/LaunchDaemons")
SYSTEMD_UNITS = Path("/etc/systemd/system")
_RESTART_S = 10  # what launchd and systemd wait at least; the commands restart their own processes sooner


def install(service: str, arguments: Sequence[str], outputs: Path, *, only_print: bool) -> None:
    """Write the file that makes `python -m pipeline.cluster <arguments>` start with the machine, and say how to enable
    it; only_print: print the file.

    It runs as the owner of the project folder, there. Raises BadInput without root, and for a worker without join.pem.
    """
    if service == "worker":
        joined(outputs)  # a service without it would start in vain, again and again, where nobody looks
    macos = sys.platform == "darwin"
    path, content = (_launch_daemon if macos else _systemd_unit)(service, arguments, outputs)
    if only_print:
        print(content, end="")
        return
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"expected to write {path}, got {error.strerror}: services belong to the system. Use sudo: sudo "
            f"{sys.executable} -m pipeline.cluster install-service {shlex.join(arguments)}; or --print it, and put the "
            "file there yourself"
        ) from error
    path.chmod(0o644)
    print(f"wrote {path}; these commands start it, now and with the machine, and end it for good:")
    if macos:
        print(f"    sudo launchctl bootstrap system {path}\n    sudo launchctl bootout system {path}")
    else:
        unit = path.stem
        print(f"    systemctl daemon-reload && systemctl enable --now {unit}\n    systemctl disable --now {unit}")


def _owner() -> str:
    return pwd.getpwuid(PROJECT.stat().st_uid).pw_name


def _launch_daemon(service: str, arguments: Sequence[str], outputs: Path) -> tuple[Path, str]:
    label = f"keyformer.{service}"
    log = str(outputs.absolute() / "cluster" / f"{service}-service.log")
    content = {
        "Label": label,
        "ProgramArguments": [sys.executable, "-m", "pipeline.cluster", *arguments],
        "WorkingDirectory": str(PROJECT),
        "UserName": _owner(),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": 30,
        "ProcessType": "Interactive",  # otherwise macOS slows it down as background work
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "EnvironmentVariables": {"PATH": os.environ.get("PATH", os.defpath)},
    }
    return LAUNCH_DAEMONS / f"{label}.plist", plistlib.dumps(content, sort_keys=False).decode()


def _systemd_unit(service: str, arguments: Sequence[str], outputs: Path) -> tuple[Path, str]:
    command = " ".join(_quoted(part) for part in (sys.executable, "-m", "pipeline.cluster", *arguments))
    return (
        SYSTEMD_UNITS / f"keyformer-{service}.service",
        f"""[Unit]
Description=Keyformer cluster: {service}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
WorkingDirectory={str(PROJECT).replace("%", "%%")}
User={_owner()}
Restart=always
RestartSec={_RESTART_S}
KillMode=mixed
TimeoutStopSec=30

[Install]
WantedBy=multi-user.target
""",
    )


def _quoted(part: str) -> str:
    """One word of a command line, as systemd reads it: in quotes, % and $ doubled."""
    escaped = part.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(c in part for c in " \t\"'\\;") else escaped
