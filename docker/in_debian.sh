#!/usr/bin/env bash
# Runs the image's steps in a Debian made by debootstrap, so that only the base image is taken on trust.
#
#   sudo docker/in_debian.sh [--suite bookworm] [--mirror URL] [--bind FOLDER] [--keep] DIR
#
# It makes DIR, which must be new or empty (5 GB), takes there each instruction of docker/Dockerfile in order, and then
# runs the command that the image starts with, three steps long. It needs root, debootstrap and a network. pip's and
# apt's settings are this machine's; FOLDER, such as one of wheels, is seen there under the same name. Without --keep DIR
# is removed when all went well.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
fail() {
  printf 'in_debian.sh: error: %s\n' "$*" >&2
  exit 2
}

suite=bookworm mirror="" bind="" keep="" directory=""
while (($#)); do
  case "$1" in
    --help) usage; exit 0 ;;
    --suite | --mirror | --bind)
      (($# > 1)) || fail "$1 needs a value; see --help"
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    --keep) keep=1; shift ;;
    -*) fail "unknown option '$1'; see --help" ;;
    *) directory="$1"; shift ;;
  esac
done
[[ -n "$directory" ]] || fail "it needs a directory; see --help"
[[ ! -e "$directory" || -z "$(ls -A "$directory")" ]] || fail "$directory is not empty"
((EUID == 0)) || fail "debootstrap and chroot need root"
command -v debootstrap >/dev/null || fail "no debootstrap here; on Debian: apt-get install debootstrap"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
directory="$(realpath -m -- "$directory")"
say() { printf 'in_debian: %s\n' "$*" >&2; }

say "making a Debian ($suite) in $directory"
debootstrap --variant=minbase "$suite" "$directory" ${mirror:+"$mirror"} >"$directory.log" 2>&1 ||
  fail "debootstrap could not finish; see $directory.log"
for file in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/resolv.conf /etc/hosts /etc/pip.conf; do
  if [[ -e "$file" ]]; then cp -rL "$file" "$directory$(dirname "$file")/"; fi
done
certificates=/etc/ssl/certs/ca-certificates.crt # again before each step: one may install Debian's own
for place in proc dev ${bind:+"${bind#/}"}; do
  mkdir -p "$directory/$place"
  mount --rbind "/$place" "$directory/$place"
  mount --make-rslave "$directory/$place"
done
leave() { umount -lR "$directory/proc" "$directory/dev" ${bind:+"$directory$bind"} 2>/dev/null || true; }
trap leave EXIT

# What the Dockerfile says, one instruction a line, with the values that a build without arguments has.
user=0:0 workdir=/
declare -A settings=([USER_ID]=1000 [GROUP_ID]=1000)
while IFS= read -r line; do
  name="${line%% *}" rest="${line#* }"
  case "$name" in
    FROM | CMD) ;;
    ARG | ENV) if [[ "$rest" == *=* && "$rest" != BASE=* ]]; then settings["${rest%%=*}"]="${rest#*=}"; fi ;;
    USER) user=1000:1000 ;;
    WORKDIR) workdir="$rest" ;;
    COPY)
      read -ra words <<<"$rest"
      say "COPY ${words[*]:1}"
      if [[ "${words[1]}" == . ]]; then
        (cd "$root" && git ls-files -z | grep -zvE '^results/.*\.(jsonl|txt|csv)$' | xargs -0 cp -P --parents -t "$directory$workdir")
      else
        (cd "$root" && cp "${words[@]:1:${#words[@]}-2}" "$directory$workdir/")
      fi
      chown -R 1000:1000 "$directory$workdir"
      ;;
    RUN)
      say "RUN ${rest:0:100}"
      if [[ -e "$certificates" ]]; then
        mkdir -p "$directory/etc/ssl/certs"
        cp -L "$certificates" "$directory$certificates"
      fi
      environment=(HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin)
      for key in "${!settings[@]}"; do environment+=("$key=${settings[$key]}"); done
      while IFS= read -r key; do environment+=("$key=${!key}"); done < <(compgen -e | grep -E '^PIP_|^(SSL|REQUESTS)_|_proxy$' || true)
      if [[ "$user" != 0:0 ]]; then environment+=(HOME=/home/stronghold); fi
      chroot --userspec="$user" "$directory" /usr/bin/env -i "${environment[@]}" sh -c "cd '$workdir' && $rest" </dev/null ||
        fail "this step failed: $rest"
      ;;
    *) fail "docker/Dockerfile has an instruction that this script does not know: $name" ;;
  esac
done < <(sed -e '/^#/d' -e '/^$/d' "$root/docker/Dockerfile" | sed -e ':a' -e '/\\$/N; s/\\\n//; ta')

say "the image's command, three steps long"
chroot --userspec=1000:1000 "$directory" /usr/bin/env -i HOME=/home/stronghold PATH=/stronghold/.venv/bin:/usr/bin:/bin \
  sh -c 'cd /stronghold && ./examples/run.sh -m stronghold -l 8 -h 256 -b 4 -w 2 --steps 3' </dev/null
if [[ -z "$keep" ]]; then
  leave
  trap - EXIT
  # A bound folder may be on the same file system: nothing is removed while one is still there.
  ! grep -qF " $directory/" /proc/mounts || fail "something is still mounted in $directory; unmount it, then remove that"
  rm -rf --one-file-system "$directory" "$directory.log"
fi
say "every step went well"
