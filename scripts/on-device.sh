#!/usr/bin/env bash
# For somebody with a card: look for it, run the suites, make five pairs of B2 and B1, and keep raw records.
#
#   scripts/on-device.sh DEVICE FOLDER [--without-hardware]
#
# DEVICE is cuda:N, atom:N, rngd:N or cpu. With --without-hardware the vendor's software takes the place of a card:
# ATOM over the stand-in, RNGD by the vendor's evaluator; the records say so. SUITE_SECONDS bounds the suites.
#
# ROWLOCK_PYTHON names an interpreter that has all packages, where none can be fetched; nothing is installed then:
#   python3 -m venv --system-site-packages env    # the machine's own torch
#   env/bin/pip install --no-index --find-links WHEELS --requirement requirements-base.txt
#   ROWLOCK_PYTHON=env/bin/python scripts/on-device.sh cuda:0 records
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:?usage: scripts/on-device.sh DEVICE FOLDER [--without-hardware]}
mkdir -p "${2:?usage: scripts/on-device.sh DEVICE FOLDER [--without-hardware]}"
out=$(realpath "$2")
without=${3:-}
kind=${device%%:*}
number=${device#*:}
if [ -n "${ROWLOCK_PYTHON:-}" ]; then
  python=$ROWLOCK_PYTHON
  export PYTHONPATH=$PWD/src
else
  case "$kind" in
    atom | rngd) make "env-$kind"; python=.venv-$kind/bin/python ;;
    *) make .venv/.ready; python=.venv/bin/python ;;
  esac
fi
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
suite=$kind
if [ "$kind" = atom ]; then
  if [ -n "$without" ]; then
    # as a module: the directory of the file has names of the standard library in it; and apart from eval, which hides a failure
    variables=$(PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" "$python" -m support.standin)
    eval "$variables"
  else
    suite=atom-card
  fi
fi
if [ "$kind" = rngd ]; then
  if [ -z "$without" ]; then suite=rngd-card; fi
  # programs are built once, by the suites
  export XDG_CACHE_HOME=$PWD/.cache/rngd
fi
if [ "$number" != "$device" ]; then export ROWLOCK_TEST_NUMBER=$number; fi

{
  date -u +%FT%TZ
  # a copy without its history is told by its files
  git rev-parse HEAD && git status --short || find . -name '*.py' -not -path './.*' | sort | xargs cat | sha256sum
  uname -a
  "$python" --version
  "$python" -m pip list --format freeze
} > "$out/versions.txt"
case "$kind" in
  cuda) nvidia-smi -q > "$out/vendor-tool.txt" 2>&1 || true ;;
  atom) rbln-smi > "$out/vendor-tool.txt" 2>&1 || true ;;
  rngd) furiosa-smi info > "$out/vendor-tool.txt" 2>&1 || true ;;
esac

status=0
"$python" -m rowlock.cli doctor --device "$device" --state "$out/state" $without --json > "$out/doctor.json" || status=$?
if [ "$status" -ne 0 ]; then
  cat "$out/doctor.json"
  echo "The device cannot be used; $out/doctor.json says why." >&2
  exit "$status"
fi
timeout "${SUITE_SECONDS:-1800}" "$python" -m pytest --device "$suite" --junitxml "$out/suites.xml" \
  tests/conformance tests/system/test_transition.py > "$out/suites.txt" 2>&1 || status=$?
tail -n 3 "$out/suites.txt"
"$python" scripts/device_pairs.py --device "$device" --out "$out" $without || status=$?
(cd "$out" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum > SHA256SUMS)
echo "Records: $out"
exit "$status"
