#!/usr/bin/env bash
# Tracked text files: no trailing blanks, no tabs outside Makefiles, a newline at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
bad=0
while IFS= read -r -d '' file; do
  [ -f "$file" ] && [ ! -L "$file" ] || continue
  case "$file" in LICENSE | *_pb2*) continue ;; esac
  if grep -nIE '[[:blank:]]+$' "$file" /dev/null; then bad=1; fi
  case "$file" in Makefile) ;; *) if grep -nIP '\t' "$file" /dev/null; then bad=1; fi ;; esac
  if [ -s "$file" ] && [ -n "$(tail -c1 "$file")" ]; then echo "$file: no newline at the end"; bad=1; fi
done < <(git ls-files -z --cached --others --exclude-standard)
exit $bad
