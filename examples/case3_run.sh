#!/usr/bin/env bash
exec "$(dirname "${BASH_SOURCE[0]}")/case.sh" run 3 "$@"
