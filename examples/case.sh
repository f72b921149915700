#!/usr/bin/env bash
# What caseN_run.sh and caseN_extract.sh do: case.sh run|extract N [options]; each with --help. PYTHON names an interpreter
# that has all that is needed, so that nothing is set up.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
  # shellcheck source=../environment.sh
  . "$root/environment.sh"
  stronghold_environment
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m stronghold.evaluation.cases "$@"
