#!/usr/bin/env bash
# Makes .venv: picks a working Python 3.11, 3.12 or 3.13 and hands over to install.py. `make` calls it; PYTHON=... names another.
set -u
cd "$(dirname "$0")/.." || exit 2

# A Python serves when it starts (a pyenv shim may not), has the right version, and can make virtual environments.
serves() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    candidates=$PYTHON
else
    candidates=$(type -aP python3.13 python3.12 python3.11 python3 python)
fi
tried=
while IFS= read -r candidate; do
    [ -n "$candidate" ] || continue
    if serves "$candidate"; then
        exec "$candidate" environment/install.py
    fi
    version=$("$candidate" --version 2>/dev/null | head -n 1)
    tried="$tried $candidate (${version:-does not start})"
done <<<"$candidates"

echo "set-up: expected Python 3.11, 3.12 or 3.13 with its venv module, got:${tried:- no python at all}." >&2
echo "        Install one (macOS: brew install python@3.13; Debian, Ubuntu: apt-get install python3 python3-venv)," >&2
echo "        or name one: make setup PYTHON=/path/to/python3.13" >&2
exit 2
