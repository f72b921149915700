#!/usr/bin/env bash
# Sets up what the tests need and runs them in three processes: all but the long ones, or with --all, alone, these too;
# then those of a GPU, on an accelerator in software where there is none.
# Other arguments go to pytest instead, in one process (./test.sh -k native). Those of a GPU alone, ./test.sh -m gpu, need
# of PyTorch, numpy, psutil, safetensors and pytest no more, and no network.
# With --baselines it runs those that need DeepSpeed instead, which it installs if need be.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=environment.sh
. "$root/environment.sh"
if [[ "$*" == "-m gpu"* ]]; then STRONGHOLD_MODULES=() STRONGHOLD_TEST_MODULES=("${STRONGHOLD_GPU_TEST_MODULES[@]}"); fi
stronghold_environment "${STRONGHOLD_TEST_MODULES[@]}"
if [[ " $* " == *" --baselines "* ]]; then stronghold_baselines deepspeed ninja || exit 1; fi

# The models of the tests are small: more threads than two only get into one another's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
unset PYTHONDONTWRITEBYTECODE # many tests start processes, and each would compile what it imports
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" # no test may need the network
cd "$root"
several=(-n 3 --no-loadscope-reorder) # many wait for a disk, a process or a delay: others run meanwhile
mapfile -t of_gpu < <(grep -rl --include="test_*.py" "pytest\.mark\.gpu" tests) # others import what may not be there
case "$*" in
  "") chosen="not long" ;;
  --all) chosen="long or not long" ;;
  "-m gpu"*) # of the files that are named, if any are
    if [[ "$*" != *tests/* ]]; then set -- "$@" "${of_gpu[@]}"; fi
    exec "$PYTHON" -m pytest "$@" </dev/null
    ;;
  *) exec "$PYTHON" -m pytest "$@" </dev/null ;;
esac
failed=0
"$PYTHON" -m pytest "${several[@]}" --dist loadfile -m "not gpu and ($chosen)" </dev/null || failed=1
# In processes of their own, without a GPU on software.
"$PYTHON" -m pytest "${several[@]}" -m "gpu and ($chosen)" "${of_gpu[@]}" </dev/null || failed=1
exit "$failed"
