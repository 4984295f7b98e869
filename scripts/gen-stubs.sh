#!/usr/bin/env bash
# Regenerates the committed protobuf stubs. With --check: fails if they are not current.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -Iproto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  proto/rowlock/v1/*.proto
# identity.proto has no service: its grpc stub is empty.
rm -f "$out"/rowlock/v1/identity_pb2_grpc.py*
if [ "${1:-}" = --check ]; then
  for file in "$out"/rowlock/v1/*; do
    diff -q "$file" "proto/rowlock/v1/$(basename "$file")" >/dev/null ||
      { echo "proto/rowlock/v1/$(basename "$file") is not current: run scripts/gen-stubs.sh" >&2; exit 1; }
  done
else
  cp "$out"/rowlock/v1/* proto/rowlock/v1/
fi
