#!/usr/bin/env bash
# test_more.sh [asan|ubsan|tsan|fuzz|aarch64]...: what is too slow for each `make test`; without arguments all but ubsan,
# which asan includes. Each part has its own build under build/.
set -uo pipefail
cd "$(dirname "$0")/.."
say() { echo "test-more: $*" >&2; }
FUZZ_SECONDS=${FUZZ_SECONDS:-60}
mkdir -p build
logs=()
failed=0

# step NAME COMMAND...: runs it with its output kept for the count.
step() {
    local log=build/more-$1.log
    say "$1"
    shift
    "$@" 2>&1 | tee "$log" || failed=1
    logs+=("$log")
}
configure() { cmake -S . -B "$1" -G Ninja "${@:2}" >/dev/null; }
c_tests() { ctest --test-dir "$1" --output-on-failure --timeout 600 "${@:2}"; }
# The Python tests that drive the program itself; "slow" ones would take too long here.
python_tests() { HEARTH_BIN=$1 build/venv/bin/python -m pytest -q -rs -m "not slow" --timeout 600 "${@:2}"; }

sanitized() { # NAME SANITIZERS
    configure "build/$1" -DHEARTH_SANITIZE="$2" && ninja -C "build/$1" || { failed=1; return; }
    step "$1-ctest" c_tests "build/$1"
    step "$1-pytest" python_tests "build/$1/hearth" tests/test_cli.py tests/test_golden.py
}

export UBSAN_OPTIONS=print_stacktrace=1

# One target for FUZZ_SECONDS, from the small files of its kind that the tests have anyway.
fuzz_one() {
    local name=$1 seeds=build/corpus/$1
    mkdir -p "$seeds" "build/crashes"
    case $name in
    *gguf*) find tests -name '*.gguf' -size -64k -exec cp {} "$seeds" \; ;;
    *safetensors*) find tests -name '*.safetensors' -size -64k -exec cp {} "$seeds" \; ;;
    *config*) find tests -name '*config.json' -size -64k | while read -r f; do cp "$f" "$seeds/$(echo "$f" | tr / _)"; done ;;
    *tokenizer* | *tekken*) find tests -name 'tokenizer.json' -size -64k | while read -r f; do cp "$f" "$seeds/$(echo "$f" | tr / _)"; done ;;
    *jinja*) find tests src -name '*.jinja' -size -64k -exec cp {} "$seeds" \; ;;
    esac
    [ ! -d "tests/fuzz/seeds/$name" ] || cp tests/fuzz/seeds/"$name"/* "$seeds"
    if "build/fuzz/$name" -max_total_time="$FUZZ_SECONDS" -max_len=65536 -timeout=20 -rss_limit_mb=3000 -print_final_stats=1 \
        -artifact_prefix="build/crashes/$name-" "$seeds" >"build/$name.log" 2>&1; then
        echo "$name: $(grep -o 'number_of_executed_units: [0-9]*' "build/$name.log" | tail -1 | cut -d' ' -f2) inputs, no fault"
    else
        tail -40 "build/$name.log"
        echo "$name: FAILED, the input is under build/crashes/"
        return 1
    fi
}
fuzz() {
    local targets
    targets=$(cd tests/fuzz && ls fuzz_*.c | sed 's/\.c$//')
    configure build/fuzz -DCMAKE_C_COMPILER=clang -DHEARTH_SANITIZE=address,undefined -DHEARTH_FUZZ=ON &&
        ninja -C build/fuzz $targets || return 1
    export -f fuzz_one
    export FUZZ_SECONDS
    xargs -P "$(nproc)" -I{} bash -c 'fuzz_one {}' <<<"$targets"
}

aarch64() {
    if ! tools/setup.sh aarch64; then
        if [ "${CI:-}" = true ]; then failed=1; fi
        say "aarch64: SKIPPED: its libraries could not be installed (Ubuntu keeps them on ports.ubuntu.com: add that for arm64)"
        return
    fi
    configure build/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake && ninja -C build/aarch64 || { failed=1; return; }
    step aarch64-ctest c_tests build/aarch64
    step aarch64-pytest python_tests "qemu-aarch64-static build/aarch64/hearth" tests/test_golden.py
}

parts=("$@")
[ $# -gt 0 ] || parts=(asan fuzz tsan aarch64)
tools/setup.sh build test more || exit 1
tools/venv.sh || exit 1
for part in "${parts[@]}"; do
    case $part in
    asan) sanitized asan address,undefined ;;
    ubsan) sanitized ubsan undefined ;;
    tsan)
        if configure build/tsan -DHEARTH_SANITIZE=thread && ninja -C build/tsan; then step tsan-ctest c_tests build/tsan -R 'test_(engine|ops|products)'
        else failed=1; fi ;;
    fuzz) step fuzz fuzz ;;
    aarch64) aarch64 ;;
    *) say "unknown part $part; known: asan ubsan tsan fuzz aarch64"; exit 1 ;;
    esac
done
if [ "${parts[*]}" != fuzz ] && [ ${#logs[@]} -gt 0 ]; then tools/count.sh "${logs[@]}" || failed=1; fi
exit $failed
