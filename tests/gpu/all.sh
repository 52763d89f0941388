#!/bin/sh
# Every GPU test on one commit: tests side by side, then those that measure the device's memory
# alone, then the kernels under compute-sanitizer. Needs a GPU to itself, about 8 minutes.
#
#   tests/gpu/all.sh FOLDER     logs go there, whole; the summary goes to the screen
#
# Exits with 1 if anything failed or no test ran.
set -u
cd "$(dirname "$0")/../.."
out=${1:?give a folder for the logs}
mkdir -p "$out"
failed=0

run() { # NAME COMMAND...
    log=$out/$1.txt
    shift
    began=$(date +%s)
    "$@" >"$log" 2>&1
    code=$?
    [ $code -eq 0 ] || failed=1
    echo "$log: exit status $code, $(($(date +%s) - began)) s"
    grep -E "^(FAILED|ERROR)|[0-9]+ (passed|failed)|SUMMARY" "$log"
}
tests() { # NAME ARGUMENTS...
    name=$1
    shift
    run "$name" python3 -m pytest -o addopts= -v -m gpu -p no:cacheprovider "$@"
}

tests tests tests/gpu --ignore tests/gpu/test_engine_faults.py --ignore tests/gpu/test_arbiter.py \
    -n 4 --dist loadfile
tests faults tests/gpu/test_engine_faults.py
tests arbiter tests/gpu/test_arbiter.py
run memcheck sh tests/gpu/sanitize.sh memcheck
run racecheck sh tests/gpu/sanitize.sh racecheck
exit $failed
