"""tools/check.sh: each rule of the house, seen to fail once."""
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLEAN = {
    "src/base/base.h": "",
    "src/model/model.h": '#include "base.h"\n',
    "src/model/model_priv.h": "",
    "src/model/model.c": '#include "model.h"\n#include "model_priv.h"\n',
    "src/backend/backend.c": "#ifdef WITH_CUDA\n#endif\n",
    "src/cli/main.c": '#include "model.h"\nchar *home = getenv("HOME");\n',
    "tests/test_model.c": '#include "model.h"\n',
}


def check(tmp_path, extra):
    for name, text in {**CLEAN, **extra}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = subprocess.run([ROOT / "tools" / "check.sh", tmp_path], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_clean_house_passes(tmp_path):
    code, out = check(tmp_path, {})
    assert code == 0, out


@pytest.mark.parametrize("name, text, message", [
    ("src/base/span.c", '#include "model.h"\n', "src/base/span.c:1: base may not include model"),
    ("src/cli/cmd_x.c", '#include "model_priv.h"\n', "cmd_x.c:1: model_priv.h is private to model"),
    ("src/model/gguf.c", '#include "nowhere.h"\n', "gguf.c:1: includes nowhere.h, which no room has"),
    ("src/attic/old.c", "", "src/attic/old.c:1: no room is called attic"),
    ("src/model/long.c", "\n" * 1201, "src/model/long.c:1201: 1201 lines, at most 1200"),
    ("tests/long.py", "\n" * 1201, "tests/long.py:1201: 1201 lines, at most 1200"),
    ("src/cli/model.c", "", "model.c:1: the name is taken by"),
    ("src/model/gguf.c", "\n#ifdef WITH_CUDA\n#endif\n", "src/model/gguf.c:2: WITH_ switches"),
    ("src/model/gguf.c", "#if defined(WITH_MPI)\n#endif\n", "src/model/gguf.c:1: WITH_ switches"),
    ("src/model/gguf.c", 'char *s = getenv("X");\n', "src/model/gguf.c:1: the environment"),
    ("tests/test_gguf.c", '#include "../src/model/model.c"\n', "tests/test_gguf.c:1: tests never include a .c"),
    ("src/model/gguf.c", "/* TO" "DO: later */\n", "src/model/gguf.c:1: an open end"),
    ("tools/x.sh", "# FIX" "ME\n", "tools/x.sh:1: an open end"),
])
def test_breach_is_named(tmp_path, name, text, message):
    code, out = check(tmp_path, {name: text})
    assert code == 1
    assert message in out
    assert "1 breach(es)" in out


def test_this_house_passes():
    done = subprocess.run([ROOT / "tools" / "check.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
