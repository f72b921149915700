#!/usr/bin/env bash
# Says what fits this machine, how fast, and with which settings: `stronghold plan`, with what it needs set up first.
# All arguments go to the command; --help lists them.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=../environment.sh
. "$root/environment.sh"
stronghold_environment
exec "$PYTHON" -m stronghold plan "$@"
