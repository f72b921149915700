#!/usr/bin/env bash
# What caseN_run.sh and caseN_extract.sh do: case.sh run|extract N [options]; each with --help. PYTHON names an interpreter
# that has all that is needed, so that nothing is set up.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=../environment.sh
. "$root/environment.sh"
if [[ -z "${PYTHON:-}" ]]; then
  stronghold_environment
  # Cases 1 to 3 compare methods; one that cannot be installed is said and left out when its turn comes.
  if [[ "${1:-} ${2:-}" == run\ [123] && " $* " != *" tiny "* && " $* " != *" --help "* ]]; then stronghold_baselines deepspeed ninja || true; fi
else
  stronghold_exports
fi
exec "$PYTHON" -m stronghold.evaluation.cases "$@"
