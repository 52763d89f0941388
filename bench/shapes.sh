#!/bin/sh
# `bench --shape` for every catalogue model that runs, made-up weights, one after another on one GPU.
#
#   bench/shapes.sh FOLDER [NAME...]     one JSON record per model, and table.md of all
#
# VRAM (default 32GiB), CONTEXT (8192) and PREFILL (8192) may be set, and RAM (64GiB: rows beyond are
# read from a drive; set PREFILL=0 then, or each prompt reads all of them). Exits with 1 if one failed.
set -u
cd "$(dirname "$0")/.."
out=${1:?give a folder for the records}
shift
mkdir -p "$out"
[ $# -gt 0 ] || set -- qwen3-30b-a3b gpt-oss-20b gpt-oss-120b glm-4.5-air glm-4.7 glm-4.7-flash \
    minimax-m2.7 olmoe-1b-7b mixtral-8x7b qwen3-235b-a22b qwen3-coder-480b deepseek-v3.1 \
    kimi-k2-0905 kimi-k2.5 deepseek-v3.2 glm-5.2 glm-5.2-fp8 longcat-flash longcat-flash-lite \
    qwen3-next-80b qwen3.6-35b-a3b qwen3.5-122b-a10b
failed=0
for name; do
    began=$(date +%s)
    python3 -m moet_desk bench --shape "$name" --vram-limit "${VRAM:-32GiB}" \
        --context "${CONTEXT:-8192}" --prefill "${PREFILL:-8192}" --json ${RAM:+--ram-limit "$RAM"} \
        >"$out/$name.json" 2>"$out/$name.txt"
    code=$?
    if [ $code -ne 0 ]; then
        failed=1
        rm -f "$out/$name.json"
        tail -n 3 "$out/$name.txt"
    fi
    echo "$name: exit status $code, $(($(date +%s) - began)) s"
done
python3 -m bench.shape_table "$out"/*.json >"$out/table.md" && cat "$out/table.md"
exit $failed
