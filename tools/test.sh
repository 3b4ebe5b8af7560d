#!/usr/bin/env bash
# test.sh: sets up what the tests need, builds, and runs all of them: the C tests by ctest, the Python tests by pytest.
# What could not be fetched (a vocabulary, the default model) lets the tests that need it be skipped by name. With
# everything there it needs no network.
set -uo pipefail
cd "$(dirname "$0")/.."
say() { echo "test: $*" >&2; }

tools/setup.sh build test || exit 1
mkdir -p build
tools/venv.sh || exit 1
python=build/venv/bin/python
cmake -S . -B build -G Ninja >/dev/null || exit 1
ninja -C build || exit 1

for fetch in tests/fetch_vocab.py tests/fetch_templates.py; do
    [ ! -f $fetch ] || $python $fetch || say "$fetch did not get everything: the tests that need it are skipped"
done
python3 tools/get_model.py >/dev/null || say "no default model: the tests that need it are skipped"

failed=0
ctest --test-dir build --output-on-failure 2>&1 | tee build/ctest.log || failed=1
$python -m pytest -q -rs tests 2>&1 | tee build/pytest.log || failed=1
tools/count.sh build/ctest.log build/pytest.log || failed=1
exit $failed
