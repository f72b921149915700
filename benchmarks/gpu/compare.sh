#!/usr/bin/env bash
# Ten minutes of every method under caps of device memory, DeepSpeed's among them.
# README.md beside this file has the options, and what each number should be.
#
# DeepSpeed comes from --wheels. What it compiles goes to deepspeed_extensions.tar beside the records, and a later call
# on another machine begins with it: its sources are made older than that, so that ninja finds nothing to build.
set -euo pipefail
# shellcheck source=benchmarks/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

EXTENSIONS="$ROOT/build/torch_extensions"
PACKED="deepspeed_extensions.tar"

unpack() {
  local sources
  sources="$("$PYTHON" -c 'from importlib.util import find_spec
print(find_spec("deepspeed").submodule_search_locations[0])')/ops/csrc"
  if [[ -d "$sources" ]]; then find "$sources" -type f -exec touch -d 2000-01-01 {} +; fi
  if [[ -e "$out/$PACKED" && ! -d "$EXTENSIONS" ]]; then tar -xf "$out/$PACKED" -C "$ROOT/build"; fi
}

pack() {
  if compgen -G "$EXTENSIONS/*/*.so" >/dev/null; then tar -cf "$out/$PACKED" -C "$ROOT/build" torch_extensions; fi
}

prepare
if [[ -n "$wheels" ]]; then install_missing hjson pydantic einops msgpack ninja torchao deepspeed || true; fi # its methods say what is missing
if "$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("deepspeed") is None)'; then
  unpack
fi
sizes=()
if [[ "$device" == cpu ]]; then # without a memory of its own that could be capped
  sizes=(--small --only stronghold --caps 1MiB --batches 2 --rounds 1 --updates deferred)
elif [[ -n "$small" ]]; then # every method once
  sizes=(--small --caps 6MiB --reserve 3MiB --batches 2 --rounds 1)
fi
if ((END > 0)); then
  commit_options=(--out "$out/methods.jsonl" --commit "$commit" ${device:+--device "$device"} "${sizes[@]}")
  seconds=$(($(left) > 2 * MARGIN ? $(left) - 2 * MARGIN : 0))
  part "methods under caps" 600 "$PYTHON" "$HERE/compare.py" --part methods "${commit_options[@]}" \
    --minutes "$(in_minutes "$seconds")"
  pack
else
  not_done+=("methods under caps")
fi
finish
