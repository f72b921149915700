# shellcheck shell=bash
# Sourced by examples/run.sh, test.sh, .ci/run and docker/Dockerfile, never run by itself.
#
# stronghold_environment [MODULE...] sets PYTHON to an interpreter that has what stronghold needs, the MODULEs, and
# the extension built from the csrc/ of this tree, and puts this tree on PYTHONPATH. It takes, in this order, the
# active virtual environment, the project's .venv and the python3 on the PATH, as they are, if they have everything;
# otherwise it fills the project's .venv. It leaves the caller's working directory alone.

# What the library and its command line import, by the name under which Python has it; then what the tests do besides.
STRONGHOLD_MODULES=(accelerate matplotlib numpy psutil rich safetensors tensorboard tokenizers transformers)
STRONGHOLD_TEST_MODULES=(pytest pytest_timeout xdist hypothesis nbclient ipykernel sklearn peft trl lightning bitsandbytes
  torchao datasets diffusers sybil mkdocs material mkdocstrings)
case "$(uname -sm)" in "Linux x86_64" | "Linux aarch64") STRONGHOLD_TEST_MODULES+=(triton) ;; esac # none for others
# All that the files with tests of a GPU import: a machine that has one may have no network to bring the rest.
STRONGHOLD_GPU_TEST_MODULES=(numpy psutil pytest safetensors)

STRONGHOLD_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

stronghold_environment() {
  local root="$STRONGHOLD_ROOT" lock=""
  mkdir -p "$root/build"
  if command -v flock >/dev/null; then # two runs at once: one sets up, the other waits and finds it done
    exec {lock}>"$root/build/environment.lock"
    flock -n "$lock" || { _stronghold_say "waiting for another set-up of this tree"; flock "$lock"; }
  fi
  stronghold_dependencies "$@"
  _stronghold_build
  if [[ -n "$lock" ]]; then exec {lock}>&-; fi
  stronghold_exports
}

# stronghold_dependencies [MODULE...], the half of it that needs requirements.txt alone: the interpreter, no extension.
stronghold_dependencies() {
  _stronghold_choose "$@" || { _stronghold_create && _stronghold_choose "$@"; } ||
    _stronghold_fail "the environment in $STRONGHOLD_ROOT/.venv is not complete; remove that folder and run this again"
}

# Sets what a process of the project needs besides an interpreter.
stronghold_exports() {
  export PYTHONPATH="$STRONGHOLD_ROOT${PYTHONPATH:+:$PYTHONPATH}" # the tree in place is what runs
  # OpenMP's idle threads spin for up to ten milliseconds before they sleep, on cores that PyTorch's threads and
  # the optimizer's want in turn: let them sleep after microseconds.
  if [[ -z "${OMP_WAIT_POLICY:-}" ]]; then export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"; fi
}

# stronghold_baselines MODULE..., after one of those two: installs what methods to compare with are made of into the
# same environment if one of the MODULEs is missing, and keeps what DeepSpeed compiles, once, in build/torch_extensions.
# Fails, with everything else as it was, where they cannot be installed.
stronghold_baselines() {
  local root="$STRONGHOLD_ROOT" lock="" prefix
  mkdir -p "$root/build"
  prefix="$("$PYTHON" -c 'import sys; print(sys.prefix)' </dev/null)"
  export PATH="$prefix/bin:$PATH" # DeepSpeed looks for ninja there
  if [[ -z "${TORCH_EXTENSIONS_DIR:-}" ]]; then
    export TORCH_EXTENSIONS_DIR="$root/build/torch_extensions"
    # A build that was killed leaves a lock behind, for which the next would wait for ever. Who has the descriptor, this
    # process and the program that it becomes, is building; where nobody is, what locks there are mean nothing.
    if command -v flock >/dev/null; then
      exec {lock}>"$root/build/baselines.lock"
      if flock -n "$lock"; then rm -f "$TORCH_EXTENSIONS_DIR"/*/lock; fi
    fi
  fi
  if ! _stronghold_suits "$PYTHON" -c '
import sys
from importlib.util import find_spec
assert all(map(find_spec, sys.argv[1:]))' "$@"; then
    _stronghold_say "installing DeepSpeed, ninja and torchao (requirements-baselines.txt) into $prefix"
    (_stronghold_pip install -r <(_stronghold_requirements "$root/requirements-baselines.txt"))
  fi
}

_stronghold_say() { printf 'environment: %s\n' "$*" >&2; }

_stronghold_fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints nothing and succeeds if the interpreter $1 has the right version, torch, the dependencies and the modules
# that follow. Only torch is imported: the others take long, and being there is what can be missing.
_stronghold_suits() {
  command -v "$1" >/dev/null && "$@" </dev/null >/dev/null 2>&1
}

_stronghold_choose() {
  local candidate check='
import sys
from importlib.util import find_spec
assert (3, 10) <= sys.version_info < (3, 14)
assert all(map(find_spec, sys.argv[1:]))
import torch
assert tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)
'
  for candidate in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} "$STRONGHOLD_ROOT/.venv/bin/python" python3; do
    if _stronghold_suits "$candidate" -c "$check" "${STRONGHOLD_MODULES[@]}" "$@"; then
      PYTHON="$(command -v "$candidate")"
      export PYTHON
      return 0
    fi
  done
  return 1
}

# Sets PYTHON to an interpreter that a virtual environment can be made from.
_stronghold_base_python() {
  local candidate found=""
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if _stronghold_suits "$candidate" -c 'import sys; assert (3, 10) <= sys.version_info < (3, 14)'; then
      PYTHON="$candidate"
      return 0
    fi
    found="${found:-$("$candidate" --version 2>/dev/null </dev/null || true)}"
  done
  _stronghold_fail "needs Python 3.10 to 3.13 (found ${found:-none}); on Debian: apt-get install python3 python3-venv python3-dev"
}

# Names at once everything that only the system's package manager can bring, before anything is downloaded.
_stronghold_check_system() {
  local missing=()
  if [[ "${1:-}" == venv ]]; then
    _stronghold_suits "$PYTHON" -c 'import venv, ensurepip' || missing+=(python3-venv)
  fi
  _stronghold_suits "$PYTHON" -c '
import os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' || missing+=(python3-dev)
  command -v "${CXX:-g++}" >/dev/null || missing+=(g++)
  if ((${#missing[@]})); then
    _stronghold_fail "the system lacks ${missing[*]}; on Debian: apt-get install ${missing[*]}"
  fi
}

_stronghold_create() {
  local root="$STRONGHOLD_ROOT"
  if [[ -x "$root/.venv/bin/python" ]]; then
    PYTHON="$root/.venv/bin/python"
    _stronghold_suits "$PYTHON" -c 'import sys; assert (3, 10) <= sys.version_info < (3, 14)' ||
      _stronghold_fail "$root/.venv has $("$PYTHON" --version 2>&1), not Python 3.10 to 3.13; remove it and run this again"
    _stronghold_check_system
  else
    _stronghold_base_python
    _stronghold_check_system venv
  fi
  if ! _stronghold_suits "$root/.venv/bin/python" -m pip --version; then
    _stronghold_say "creating .venv with $("$PYTHON" --version 2>&1)"
    "$PYTHON" -m venv --clear "$root/.venv" </dev/null ||
      _stronghold_fail "could not create $root/.venv with $PYTHON (see above)"
  fi
  PYTHON="$root/.venv/bin/python"
  rm -f "$root"/build/extension*.sha256 # the build is what registers the project in the new environment
  local torch
  # STRONGHOLD_TORCH names another build, such as the last one for an older GPU, with PIP_EXTRA_INDEX_URL where it is.
  torch="${STRONGHOLD_TORCH:-$(grep -m 1 '^torch==' "$root/requirements.txt")}"
  _stronghold_say "installing $torch (a large download)"
  _stronghold_pip install "$torch"
  _stronghold_say "installing the other dependencies of requirements.txt"
  _stronghold_pip install -r <(_stronghold_requirements "$root/requirements.txt" | grep -v '^torch==') "$torch"
}

# Prints the requirements in $1. torchao 0.18 imports what PyTorch has from 2.10 on and does not tell pip so, and
# transformers imports torchao where it is: before 2.10 the last torchao that works takes its place.
_stronghold_requirements() {
  local check='
import torch
assert tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)'
  if _stronghold_suits "$PYTHON" -c "$check"; then cat "$1"; else sed 's/^torchao==.*/torchao==0.17.0/' "$1"; fi
}

_stronghold_pip() {
  "$PYTHON" -m pip --disable-pip-version-check --quiet "$@" </dev/null >&2 ||
    _stronghold_fail "pip could not finish (see above); check the network and the space on disk, and run this again"
}

# Builds the extension into the tree if it is absent or older than its sources. The stamp holds the hashes of the
# sources and of what was built from them, so that neither a changed source nor a foreign build goes unnoticed.
_stronghold_build() {
  local root="$STRONGHOLD_ROOT" suffix extension stamp prefix
  suffix="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))' </dev/null)"
  extension="$root/stronghold/_C$suffix"
  stamp="$root/build/extension$suffix.sha256"
  if [[ -e "$extension" && -e "$stamp" && "$(_stronghold_hashes "$extension")" == "$(<"$stamp")" ]]; then
    return 0
  fi
  _stronghold_check_system
  _stronghold_say "building the extension"
  rm -f "$extension" "$stamp"
  local how=(install --no-deps -e "$root")
  if [[ "$PYTHON" != "$root/.venv/bin/python" ]]; then
    # Not our environment: what the build would register in it goes to a folder that is thrown away.
    prefix="$(mktemp -d)"
    how+=(--prefix "$prefix" --ignore-installed --no-warn-script-location)
  fi
  # Build isolation downloads setuptools and pybind11; where both are at hand nothing needs to be downloaded. PyTorch
  # has pybind11's headers, which setup.py takes where there are no others.
  if _stronghold_suits "$PYTHON" -c '
import setuptools
assert int(setuptools.__version__.split(".")[0]) >= 77'; then
    how+=(--no-build-isolation)
  fi
  _stronghold_pip "${how[@]}"
  if [[ -n "${prefix:-}" ]]; then rm -rf "$prefix"; fi
  [[ -e "$extension" ]] || _stronghold_fail "the build left no $extension"
  _stronghold_hashes "$extension" >"$stamp"
}

_stronghold_hashes() (
  cd "$STRONGHOLD_ROOT" && LC_ALL=C sha256sum csrc/* setup.py pyproject.toml "$1"
)
