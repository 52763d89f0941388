#!/bin/sh
# Records assets/traces/demo.mdtrace anew: the demo model on the CPU, with room for a quarter of its
# experts, so that rows come from RAM and from disk. The computer must have nothing else to do, for
# the speeds of the recording are those of that minute.
#
#   bench/demo_trace.sh [FILE]
set -eu
cd "$(dirname "$0")/.."
out=${1:-assets/traces/demo.mdtrace}
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
cat >"$data/config.toml" <<'END'
[engine]
device = "cpu"
[memory]
pool_slots = 70
fine_slots = 16
arena_rows = 150
END
python3 -m moet_desk --data-dir "$data" run -i --temperature 0.6 --seed 11 --max-tokens 260 \
    --record-trace "$out" <<'END'
Write a four-line poem about the harbor.
Write a very short story for young children about a tall horse and a door. Use simple words.
Tell me about the moon.
Give me three tips for growing tomatoes.
Tell me a story about a lighthouse keeper.
END
