#!/usr/bin/env bash
# Runs one of the paper's five cases, or extracts its table: case.sh run|extract N [options]; each with --help. The
# caseN_run.sh and caseN_extract.sh are links to this file. PYTHON names an interpreter that has all that is needed, so
# that nothing is set up.
set -euo pipefail

if [[ "$(basename "$0")" =~ ^case([0-9])_(run|extract)\.sh$ ]]; then
  set -- "${BASH_REMATCH[2]}" "${BASH_REMATCH[1]}" "$@"
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=../environment.sh
. "$root/environment.sh"
if [[ -z "${PYTHON:-}" ]]; then
  stronghold_environment
  # Some cases compare methods; one that cannot be installed is said and left out when its turn comes.
  needed="$("$PYTHON" -m stronghold.lab.cases needs "$@")"
  if [[ "$needed" == deepspeed* ]]; then
    read -ra modules <<<"$needed"
    stronghold_baselines "${modules[@]}" || true
  fi
else
  stronghold_exports
fi
exec "$PYTHON" -m stronghold.lab.cases "$@"
