"""What the Python tests share: the program under test, and the default model where it is.

HEARTH_BIN names another program to test, with a runner before it if need be ("qemu-aarch64-static build/aarch64/hearth")."""
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEARTH = shlex.split(os.environ.get("HEARTH_BIN", "build/hearth"))
HEARTH[-1] = str(ROOT / HEARTH[-1])


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long under a sanitizer or an emulator")


class Hearth:
    """Runs the program. `ok` expects success and returns standard output; `fails` expects one line on stderr, exit code 1,
    and returns the line."""

    command = HEARTH

    def run(self, *args, stdin="", env=None, timeout=300):
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        return subprocess.run([*HEARTH, *map(str, args)], input=data, capture_output=True, timeout=timeout,
                              env={**os.environ, **(env or {})})

    def ok(self, *args, **how):
        done = self.run(*args, **how)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout.decode()

    def fails(self, *args, **how):
        done = self.run(*args, **how)
        err = done.stderr.decode(errors="replace")
        assert done.returncode == 1, f"exit code {done.returncode}\n{err}"
        assert done.stdout == b""
        lines = [line for line in err.splitlines() if not line.startswith("hearth: note: ")]
        assert len(lines) == 1 and lines[0].startswith("hearth: "), err
        return lines[0]


@pytest.fixture(scope="session")
def hearth():
    if not pathlib.Path(HEARTH[-1]).exists():
        pytest.fail(f"{HEARTH[-1]} is not built: make build")
    return Hearth()


@pytest.fixture(scope="session")
def smollm2():
    """The default model's path; tests that need it are skipped where it could not be fetched."""
    found = subprocess.run([sys.executable, ROOT / "tools" / "get_model.py", "--if-present"], capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip("the default model SmolLM2-135M-Instruct is not in the cache: make demo fetches it")
    return found.stdout.strip()
