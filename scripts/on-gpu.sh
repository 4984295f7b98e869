#!/usr/bin/env bash
# On a GPU, in under ten minutes: scripts/on-gpu.sh [FOLDER]. See scripts/on-device.sh,
# also for a machine without network.
set -euo pipefail
SUITE_SECONDS=420 exec timeout 590 "$(dirname "$0")/on-device.sh" cuda:0 "${1:-gpu-records}"
