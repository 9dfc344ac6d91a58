#!/usr/bin/env bash
# Calls SCRIPT [ARGS], or says plainly that it is not there: make's own message would be "Error 127".
set -euo pipefail
cd "$(dirname "$0")/../.."

script=$1
shift
if [[ ! -f $script ]]; then
  echo "$script is not there: this part of railfs is not built yet" >&2
  exit 1
fi
exec bash "$script" "$@"
