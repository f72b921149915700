#!/usr/bin/env bash
# Ten minutes of models larger than the cap: a Llama of 8 B parameters in full, then the GPT of 5.1 B.
# README.md beside this file has the options, and what each number should be.
set -euo pipefail
# shellcheck source=benchmarks/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare
measure "matrix products, to take shares of" "$(share 10)" probe.py --only product
measure "models larger than the cap" 600 large.py
finish
