#!/usr/bin/env python3
"""Gets the chat templates that llama.cpp's sources hold (in the PyPI source package of llama-cpp-python, MIT) into the
user's cache directory (~/.cache/hearth/templates) for test_templates.py. With them there it needs no network. Where they
cannot be had that is said, and the tests that need them are skipped: ends with 1 then, else with 0."""
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
FOLDER = "/vendor/llama.cpp/models/templates/"
COUNT = 60  # at least


def cache_dir():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "hearth" / "templates"


def say(text):
    print("fetch_templates: " + text, file=sys.stderr)


def download(scratch):
    """The source package's path, or None. pip asks even a source package for its metadata, so its build back end
    (scikit-build-core, in requirements.txt) has to be there; nothing is built."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation",
               "--no-binary", PACKAGE, "--retries", "1", "--timeout", "20", "--dest", scratch, f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, stdout=sys.stderr)
    found = list(pathlib.Path(scratch).glob("*.tar.gz"))
    return found[0] if done.returncode == 0 and found else None


def main():
    target = cache_dir()
    if len(list(target.glob("*.jinja"))) >= COUNT:
        return 0
    say(f"getting the templates of {PACKAGE} {VERSION} (77 MB) into {target}")
    with tempfile.TemporaryDirectory() as scratch:
        package = download(scratch)
        if not package:
            say("they could not be fetched")
            return 1
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(package) as tar:
            for member in tar:
                if member.isfile() and FOLDER in member.name and member.name.endswith(".jinja"):
                    part = target / (pathlib.PurePosixPath(member.name).name + ".part")
                    part.write_bytes(tar.extractfile(member).read())
                    part.rename(part.with_suffix(""))
    n = len(list(target.glob("*.jinja")))
    say(f"{n} templates")
    return 0 if n >= COUNT else 1


if __name__ == "__main__":
    sys.exit(main())
