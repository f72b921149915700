#!/usr/bin/env bash
# Runs the main job: trains the reference GPT on the source of the Python standard library, and times it.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
  cat <<'EOF'
usage: examples/run.sh [-m METHOD] [-l LAYERS] [-h HIDDEN] [-b BATCH] [-w WINDOW] [-p STAGES] [-r REPLICAS] [options]

Trains the reference GPT (16 heads, a vocabulary of 51200, AdamW) on the source of the Python standard
library, byte by byte, sets up what it needs first, and prints speed, memory and loss. The log goes to
results/log_METHOD_l-LAYERS_h-HIDDEN_bs-BATCH_ws-WINDOW_TIME.txt, the summary as a JSON line to
results/runs.jsonl, every step's record and TensorBoard events to a folder of their own in results/runs/.

  -m METHOD       what trains (default: stronghold), all from the same weights on the same batches:
                    stronghold          a window of layers on the device, the rest in RAM, or by --store on disk
                    megatron-lm         everything on the device
                    megatron-lm-exact   the same in other rounding, to compare with
                    l2l                 one layer on the device at a time (Pudipeddi et al. 2020)
                    zero-offload        DeepSpeed's ZeRO 2 with its AdamW on the host
                    zero-infinity       DeepSpeed's ZeRO 3 with everything on the host, zero-infinity-nvme on disk
                    fsdp-offload        PyTorch's FSDP2 with everything on the host
                    torchao-offload     torchao's AdamW on the host, on CUDA alone
                    all                 each of them in turn, and a table of all; DeepSpeed is installed if need be
  -l LAYERS       layers (default: 16)
  -h HIDDEN       width of a layer, a multiple of 32 (default: 2048)
  -b BATCH        samples in a step (default: 4)
  -w WINDOW       layers on the device at a time, or auto (default: 4)
  -p STAGES       parts of the model, each in a process of its own with a window, a store and an optimizer of its own
                  (default: 1; stronghold alone, one GPU for each where there are GPUs)
  -r REPLICAS     of the whole model, each with a part of the batch, in processes of their own that have the weights and
                  states on the host in common (default: 1; stronghold alone)
  --micro-batches N
                  parts of the batch that go through the stages one behind the other (default: as many as divide it)
  --micro-batch N samples that a layer computes at a time (default: the batch; stronghold and l2l)
  --seq N         tokens in a sample (default: 1024, as the paper's runs have; on a CPU 256)
  --steps N       steps (default: 50)
  --lr X          highest learning rate (default: 6e-4), after a tenth of the steps
  --dtype TYPE    fp32 or bf16, the compute type (default: fp32)
  --store STORE   where layers outside the window are: ram (default), disk (beside the run's records), or a folder,
                  which keeps the run when it ends
  --clip X        largest norm of all gradients, 0 for any (default: 1; with --store on disk 0)
  --states TYPE   AdamW's moments: fp32 (default) or 8bit
  --device NAME   cpu, cuda or cuda:N (default: cuda where there is one, else cpu)
  --results DIR   where all that goes (default: results)
  --help          this text

examples:
  ./examples/run.sh -m stronghold -l 8 -h 256 -b 4 -w 2      under three minutes on two cores
  ./examples/run.sh -m stronghold -l 32 -h 2048 -b 4 -w 4 --seq 1024 --device cuda
  ./examples/run.sh -m stronghold -l 8 -h 256 -b 8 -w 2 -p 2
  ./examples/run.sh -m stronghold -l 8 -h 256 -b 8 -w 2 -r 2
  ./examples/run.sh -m all -l 4 -h 256 -b 2 -w 2 --seq 64 --steps 20
  ./examples/run.sh -m stronghold -l 32 -h 2048 -b 1 -w 2 --seq 64 --steps 5 --lr 3e-5 --dtype bf16 --store disk
EOF
}

fail() {
  printf 'run.sh: error: %s\n' "$*" >&2
  exit 2
}

method=stronghold layers=16 hidden=2048 batch=4 window=4 stages=1 replicas=1 micro_batches="" micro_batch=""
seq="" steps=50 lr=6e-4 dtype=fp32 store=ram states=fp32 clip="" device="" results=results
while (($#)); do
  case "$1" in
    --help) usage; exit 0 ;;
    -m | -l | -h | -b | -w | -p | -r | --micro-batches | --micro-batch | --seq | --steps | --lr | --dtype | --store | --clip | --states | --device | --results)
      (($# > 1)) && [[ -n "$2" ]] || fail "$1 needs a value; see --help"
      case "$1" in
        -m) method="$2" ;;
        -l) layers="$2" ;;
        -h) hidden="$2" ;;
        -b) batch="$2" ;;
        -w) window="$2" ;;
        -p) stages="$2" ;;
        -r) replicas="$2" ;;
        --micro-batches) micro_batches="$2" ;;
        --micro-batch) micro_batch="$2" ;;
        --results) results="$(realpath -m -- "$2")" ;;
        --store) [[ "$2" == ram || "$2" == disk ]] && store="$2" || store="$(realpath -m -- "$2")" ;;
        *) printf -v "${1#--}" '%s' "$2" ;;
      esac
      shift 2
      ;;
    *) fail "unknown option '$1'; see --help" ;;
  esac
done

# What can be known before anything is set up; the program itself checks the rest.
methods="$(cd "$root/stronghold/lab/methods" && printf '%s ' [a-z]*.py | sed 's/\.py//g; s/_/-/g')all"
[[ " $methods " == *" $method "* ]] || fail "-m must be one of: $methods (got '$method')"
whole() { [[ "$2" =~ ^[1-9][0-9]{0,8}$ ]] || fail "$1 must be a whole number of at least 1 and at most 999999999 (got '$2')"; }
whole -l "$layers"
whole -h "$hidden"
whole -b "$batch"
whole -p "$stages"
whole -r "$replicas"
[[ -z "$micro_batches" ]] || whole --micro-batches "$micro_batches"
[[ -z "$micro_batch" ]] || whole --micro-batch "$micro_batch"
[[ -z "$seq" ]] || whole --seq "$seq"
whole --steps "$steps"
if [[ "$window" != auto ]]; then
  whole -w "$window"
  ((window <= layers)) || fail "-w must not be more than the layers (got -w $window, -l $layers)"
fi
processes=$((stages * replicas))
((processes == 1)) || [[ "$method" == stronghold ]] ||
  fail "-p and -r are for stronghold (got -m $method -p $stages -r $replicas)"
there="$results"
[[ "$there" == /* ]] || there="$root/$there"
until [[ -e "$there" ]]; do there="$(dirname -- "$there")"; done # what is missing is made
[[ -d "$there" && -w "$there" ]] || fail "--results must be a folder that can be made and written to (got '$results')"
[[ "$dtype" == fp32 || "$dtype" == bf16 ]] || fail "--dtype must be fp32 or bf16 (got '$dtype')"

# shellcheck source=../environment.sh
. "$root/environment.sh"
stronghold_environment
case "$method" in
  zero-*) stronghold_baselines deepspeed ninja || exit 1 ;;
  torchao-*) stronghold_baselines torchao || exit 1 ;;
  all) stronghold_baselines deepspeed ninja torchao || true ;; # without them its table says what is missing
esac

if [[ -z "$seq" ]]; then
  if [[ "$device" == cuda* ]] || { [[ -z "$device" ]] && "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }; then
    seq=1024
  else
    seq=256
    printf 'sequence   256 tokens, for this is a CPU; on a GPU, as in the paper, 1024 (--seq)\n'
  fi
fi

start=("$PYTHON" -m stronghold)
if ((processes > 1)); then
  # Each process gets its share of the cores; left to itself torchrun gives it one.
  cores="$("$PYTHON" -c 'from stronghold.native import usable_cores; print(usable_cores())')"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
  start=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$processes" -m -- stronghold)
fi

name="${method}_l-${layers}_h-${hidden}_bs-${batch}_ws-${window}_$(date +%Y-%m-%d_%H-%M-%S)"
log="$results/log_$name.txt"
printf 'run        %s: %s steps of %s x %s tokens, window %s, %s, lr %s\nlog        %s\n' \
  "$method" "$steps" "$batch" "$seq" "$window" "$dtype" "$lr" "$log"
cd "$root" # so that the paths in logs are those of the project, not of this machine
# exec: a signal sent to this script reaches the program, which then saves what was learned
exec "${start[@]}" train --method "$method" --layers "$layers" --hidden "$hidden" --batch "$batch" \
  --window "$window" --seq "$seq" --steps "$steps" --lr "$lr" --dtype "$dtype" --store "$store" --states "$states" \
  --stages "$stages" --replicas "$replicas" ${micro_batches:+--micro-batches "$micro_batches"} \
  ${micro_batch:+--micro-batch "$micro_batch"} \
  ${clip:+--clip "$clip"} ${device:+--device "$device"} --log "$log" --record "$results/runs.jsonl" --out "$results/runs/$name"
