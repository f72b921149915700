#!/usr/bin/env bash
# Builds the documentation into build/docs, to open there without a server: build/docs/index.html.
# Arguments go to mkdocs, for instance --strict.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=environment.sh
. "$root/environment.sh"
stronghold_environment mkdocs material mkdocstrings
cd "$root"
export NO_MKDOCS_2_WARNING=1 # Material announces its successor at each build
exec "$PYTHON" -m mkdocs build --clean "$@"
