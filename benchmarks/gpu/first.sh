#!/usr/bin/env bash
# The first minutes, ten by default: does it build, does each mode work, what does the machine give, where does a step go.
# README.md beside this file has the options, and what each number should be.
set -euo pipefail
# shellcheck source=benchmarks/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# about: what no record has, into machine.txt.
about() {
  {
    date -u
    lscpu
    free -m
    ulimit -a
    df -h "$out" /tmp
    nvidia-smi -q # at rest: what it says while the device computes is in probe.jsonl and trace.jsonl
    nvidia-smi topo -m
    command -v nvcc g++ ninja
    "$PYTHON" -m pip --disable-pip-version-check list
  } >"$out/machine.txt" 2>&1 || true # what is not there says so in it
}
export -f about
export out

part "the machine, into machine.txt" 30 bash -c about
prepare
measure "every mode beside plain PyTorch" "$(share 42)" smoke.py
measure "what the machine gives" "$(share 19)" probe.py
measure "where a step goes" 600 trace_steps.py
finish
