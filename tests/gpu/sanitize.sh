#!/bin/sh
# Kernels on a GPU under compute-sanitizer: accesses outside of tensors, races in shared memory.
#
#   tests/gpu/sanitize.sh [memcheck|racecheck]     both without an argument
#
# Small cases of the kernel tests, some minutes in all. Prints each tool's summary; exits with 1 if a
# tool found something or a test failed.
set -u
cd "$(dirname "$0")/../.."

sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
command -v "$sanitizer" >/dev/null || sanitizer=/usr/local/cuda/bin/compute-sanitizer
command -v "$sanitizer" >/dev/null || { echo "there is no compute-sanitizer here"; exit 1; }

experts="(shapes and 160-2080) or without_ptx or nan_in_one_token or quantize_rows"
tables="(route and 128-4) or (lookup and 1-6-40) or claim__then_lookup"
dense="500-520 or embed__ids or write__entries or swiglu_split or gqa_prepare or e4m3__converted"
attention="(mla_decode and F32) or (gqa_decode and FP8 and 64-8-64) or (gqa_prefill and FP8)"
sampling="(random_rows and 4096) or sample__nan"
small="$experts or $tables or $dense or $attention or $sampling"

failed=0
run() { # TOOL SELECTION
    log=$(mktemp)
    "$sanitizer" --tool "$1" --target-processes all --error-exitcode 1 \
        python3 -m pytest -o addopts= -q -p no:cacheprovider -m gpu \
        tests/gpu/test_moe.py tests/gpu/test_dense.py tests/gpu/test_attention.py \
        tests/gpu/test_sampling.py -k "$2" >"$log" 2>&1
    code=$?
    echo "$1: exit status $code"
    grep -E "ERROR SUMMARY|RACECHECK SUMMARY|[0-9]+ (passed|failed)" "$log"
    if [ $code -ne 0 ]; then
        failed=1
        grep -E "=========|FAILED|^E  " "$log" | head -60
    fi
    rm -f "$log"
}

[ "${1:-memcheck}" = memcheck ] && {
    # Without the pool each tensor is an allocation of its own, whose end the tool knows. A tool may
    # make launches wait for each other: tests in which the host answers a running kernel would hang
    # in it, so of those only the one without an answer runs.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1
    export PYTORCH_NO_CUDA_MEMORY_CACHING
    run memcheck "$small or wait__no_answer"
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
}
[ "${1:-racecheck}" = racecheck ] && run racecheck "$small or wait__no_answer or chain__captured"
exit $failed
