#!/usr/bin/env bash
# Sets up what the tests need and runs them in three processes: all but the long ones, or with --all, alone, these too.
# Other arguments go to pytest instead, in one process (./test.sh -k native, ./test.sh -m gpu).
# With --baselines it runs those that need DeepSpeed instead, which it installs if need be.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=environment.sh
. "$root/environment.sh"
stronghold_environment "${STRONGHOLD_TEST_MODULES[@]}"
if [[ " $* " == *" --baselines "* ]]; then stronghold_baselines deepspeed ninja || exit 1; fi

# The models of the tests are small: more threads than two only get into one another's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" # no test may need the network
cd "$root"
several=(-n 3 --dist loadfile --no-loadscope-reorder) # many wait for a disk, a process or a delay: others run meanwhile
case "$*" in
  "") set -- "${several[@]}" -m "not long" ;;
  --all) set -- "${several[@]}" ;;
esac
exec "$PYTHON" -m pytest "$@" </dev/null
