#!/bin/sh
# venv.sh: the Python environment of the tests in build/venv, from tests/requirements.txt. Does nothing, and needs no
# network, while that list is as it was.
set -eu
cd "$(dirname "$0")/.."
venv=build/venv
if [ -f $venv/requirements.txt ] && cmp -s tests/requirements.txt $venv/requirements.txt; then exit 0; fi
echo "venv: installing the Python packages of tests/requirements.txt into $venv" >&2
[ -x $venv/bin/python ] || python3 -m venv $venv
if ! $venv/bin/python -m pip install -q --disable-pip-version-check -r tests/requirements.txt; then
    echo "venv: pip could not install tests/requirements.txt; without a network the Python tests cannot be set up" >&2
    exit 1
fi
cp tests/requirements.txt $venv/requirements.txt
