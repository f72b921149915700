# shellcheck shell=bash
# Sourced by first.sh, compare.sh and large.sh: their options, their clock, and what each needs before it measures.
#
# Options: --minutes N (9.5), --out DIR ($OUT, else results/gpu), --wheels DIR, --device NAME, --commit NAME, --small,
# --pack. A part runs in what is left of the minutes, and is ended then; its records so far are there, and the same
# command goes on with the rest. What DIR lacks comes from results/gpu, where an earlier call's output was put. With --pack
# all but the records ends up in beside.tar, and traces in traces.tar: a machine that is lent may give back few files, and
# none above some size.

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$HERE/../.." && pwd)"
PYTHON="${PYTHON:-python3}"
MARGIN=8 # seconds for a part to draw its table
PACKED_BYTES=$((15 * 2 ** 20)) # of traces.tar, at most: the traces beyond that stay beside it

minutes=9.5 out="${OUT:-$ROOT/results/gpu}" wheels="" commit="" device="" small="" packs="" given=()
while (($#)); do
  case "$1" in
    --minutes) minutes="$2" && shift 2 ;;
    --out) out="$2" && shift 2 ;;
    --wheels) wheels="$(cd "$2" && pwd)" && shift 2 ;;
    --commit) commit="$2" && shift 2 ;;
    --device) device="$2" && given+=(--device "$2") && shift 2 ;;
    --pack) packs=yes && shift ;;
    --small) small=yes && given+=(--small) && shift ;;
    *) printf 'error: an option is one of --minutes, --out, --wheels, --commit, --device, --pack, --small (got %s)\n' "$1" >&2 && exit 2 ;;
  esac
done
END=$("$PYTHON" -c 'import sys; print(int(60 * float(sys.argv[1])))' "$minutes")
SECONDS=0
mkdir -p "$out"
if [[ -d "$ROOT/results/gpu" && ! "$out" -ef "$ROOT/results/gpu" ]]; then
  find "$ROOT/results/gpu" -maxdepth 1 -type f \( -name '*.jsonl' -o -name '*.tar' \) -exec cp -n {} "$out" \;
fi
for packed in "$out"/beside.tar "$out"/traces.tar; do
  if [[ -e "$packed" ]]; then tar -xf "$packed" -C "$out" && rm "$packed"; fi
done
exec > >(tee -a "$out/$(basename "$0" .sh).txt") 2>&1
TEE=$!
not_done=() failed=()

left() { echo $((END - SECONDS)); }
share() { echo $((END * $1 / 100)); } # of the minutes, in seconds, so many percent
in_minutes() { printf '%d.%02d' $(($1 / 60)) $(($1 % 60 * 100 / 60)); }

# part NAME MOST COMMAND...: runs COMMAND, for MOST seconds and for what is left at most, and says how it ended.
part() {
  local name="$1" most="$2" begin=$SECONDS code=0
  shift 2
  if (($(left) <= MARGIN)); then
    not_done+=("$name")
    return 0
  fi
  most=$((most < $(left) ? most : $(left)))
  printf '\n== %s (%d s left)\n' "$name" "$(left)"
  timeout --kill-after=10 "$most" "$@" </dev/null || code=$?
  local how="ended with $code" # 3 is a script's own word that some is left, the others are those of timeout
  case "$code" in
    0) how="done" ;;
    3) how="some of it left" && not_done+=("some of $name") ;;
    124 | 137) how="ended by the clock" && not_done+=("some of $name") ;;
    *) failed+=("$name") ;;
  esac
  printf '== %s: %s after %d s\n' "$name" "$how" $((SECONDS - begin))
}

# measure NAME MOST SCRIPT...: a part that is a script of this folder, which gets a little less than its time.
measure() {
  local name="$1" most="$2" script="$3"
  shift 3
  local s=$((most < $(left) ? most : $(left)))
  s=$((s > MARGIN ? s - MARGIN : 0))
  part "$name" "$most" "$PYTHON" "$HERE/$script" --out "$out" --commit "$commit" "${given[@]}" \
    --minutes "$(in_minutes "$s")" "$@"
}

# prepare: modules from the wheels, the extension, and, once for each start of the machine, its memory.
prepare() {
  mkdir -p "$ROOT/build"
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}" # OpenMP's idle threads sleep: other threads want their cores
  export KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-99}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
  if (($(left) <= MARGIN)); then return 0; fi
  part "modules" 120 bash -c 'install_missing "$@"' bash psutil numpy safetensors rich accelerate tokenizers tensorboard matplotlib
  if ! is_built; then
    part "building the extension" 240 bash -c build
    if ! is_built; then finish; fi # nothing of what follows could run, or would be of this code
  fi
  local known="" there=""
  read -r known there < <("$PYTHON" "$HERE/half_hour.py") || true # it says why not, and so will each part
  commit="${commit:-$known}" device="${device:-$there}"
  local touched
  touched="$ROOT/build/touched-$(cat /proc/sys/kernel/random/boot_id)"
  if [[ ! -e "$touched" ]]; then
    measure "touching the memory" "$(share 17)" touch.py
    touch "$touched"
  fi
}

# is_built: whether the extension is there for this interpreter, and no source is newer.
is_built() {
  local extension
  extension="$ROOT/stronghold/_C$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
  [[ -e "$extension" && -z "$(find "$ROOT/csrc" "$ROOT/setup.py" -newer "$extension" -print -quit)" ]]
}

# build: builds the extension into the tree, with tools of its own from the wheels where the interpreter's do not do.
# The stamp is what environment.sh looks for: without it test.sh would build once more.
build() {
  cd "$ROOT" || return
  export PYTHONPATH="$ROOT/build/tools:$PYTHONPATH"
  if ! "$PYTHON" -c 'import pybind11, setuptools; assert int(setuptools.__version__.split(".")[0]) >= 77' 2>/dev/null; then
    if [[ -z "$wheels" ]]; then
      echo "pybind11 and setuptools from 77 on build the extension; pass --wheels DIR with them"
      return 1
    fi
    from_wheels --target "$ROOT/build/tools" --upgrade --no-warn-conflicts pybind11 'setuptools>=77' || return
  fi
  "$PYTHON" setup.py --quiet build_ext --inplace || return
  # shellcheck source=environment.sh
  . "$ROOT/environment.sh"
  local suffix
  suffix="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
  touch "$ROOT/stronghold/_C$suffix" # also where setuptools found nothing to do, that is_built sees it
  _stronghold_hashes "$ROOT/stronghold/_C$suffix" >"$ROOT/build/extension$suffix.sha256"
}

from_wheels() {
  "$PYTHON" -m pip --disable-pip-version-check install --quiet --no-index --find-links "$wheels" "$@"
}

# install_missing MODULE...: installs from --wheels those that are not there: all at once, else one by one, and one whose
# own needs are not all there without them, for it may do: what is missing of one is not to keep away another.
install_missing() {
  local missing
  mapfile -t missing < <("$PYTHON" -c '
import sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    if find_spec(name) is None:
        print(name)' "$@")
  if ((${#missing[@]} == 0)); then return 0; fi
  if [[ -z "$wheels" ]]; then
    printf 'missing: %s; pass --wheels DIR with their wheels\n' "${missing[*]}"
    return 1
  fi
  if from_wheels "${missing[@]}" 2>/dev/null; then return 0; fi
  local name said lacking=()
  for name in "${missing[@]}"; do
    if ! said=$(from_wheels "$name" 2>&1); then
      printf '%s\n' "$said"
      from_wheels --no-deps "$name" 2>/dev/null || lacking+=("$name")
    fi
  done
  if ((${#lacking[@]} == 0)); then return 0; fi
  printf 'missing, and without a wheel in %s: %s\n' "$wheels" "${lacking[*]}"
  return 1
}

export -f build from_wheels install_missing
export PYTHON ROOT wheels

# finish: says what is left, and ends with 1 where a part failed.
finish() {
  printf '\n%s after %d s of %d; records are in %s\n' "$(basename "$0")" "$SECONDS" "$END" "$out"
  if ((${#not_done[@]})); then printf 'no time for: %s; the same command goes on there\n' "$(join "${not_done[@]}")"; fi
  if ((${#failed[@]})); then printf 'failed or wrong: %s\n' "$(join "${failed[@]}")"; fi
  exec >&- 2>&-
  wait "$TEE" || true # the file's last lines, before whoever called takes it away
  if [[ -n "$packs" ]]; then pack_beside; fi
  exit $((${#failed[@]} > 0))
}

# pack_beside: everything but the records into two files, which the next call with the same DIR unpacks.
pack_beside() {
  local beside=() traces=() name bytes=0
  while read -r name; do
    if [[ "$name" != trace_* ]]; then
      beside+=("$name")
    elif (((bytes += $(stat -c %s "$out/$name")) <= PACKED_BYTES)); then
      traces+=("$name")
    fi
  done < <(find "$out" -maxdepth 1 -type f ! -name '*.jsonl' -printf '%f\n' | sort)
  tar -cf "$out/beside.tar" -C "$out" --remove-files "${beside[@]}"
  if ((${#traces[@]})); then tar -cf "$out/traces.tar" -C "$out" --remove-files "${traces[@]}"; fi
}

join() { local IFS=";" && sed 's/;/; /g' <<<"$*"; }
