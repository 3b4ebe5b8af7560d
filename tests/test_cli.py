"""The command line: flags, messages, exit codes, files, pipes and the chat, on a checkpoint whose answers are known."""
import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import numpy as np
import pytest

import scripted
from conftest import HEARTH
from scripted import ID, ids_of, script

VERBS = ["run", "info", "tokenize", "logits", "perplexity", "bench"]
END = ID["<|im_end|>"]
HEY = script(*ids_of("\nHey!"), END)


@pytest.fixture(scope="session")
def hey(tmp_path_factory):
    """Answers every chat prompt with "Hey!"."""
    return scripted.write(tmp_path_factory.mktemp("model") / "hey", HEY)


@pytest.fixture(scope="session")
def endless(tmp_path_factory):
    """Never stops: abcabc..."""
    return scripted.write(tmp_path_factory.mktemp("model") / "endless", {**script(*ids_of("\nabc")), ord("c"): ord("a")})


# ---------------------------------------------------------------------------------------------- help and usage


def test_version(hearth):
    assert re.fullmatch(r"hearth \d+\.\d+\.\d+\n", hearth.ok("--version"))


def test_help_lists_every_verb(hearth):
    out = hearth.ok("--help")
    for verb in VERBS:
        assert f"\n  {verb} " in out


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_verb(hearth, verb):
    out = hearth.ok(verb, "--help")
    assert out.startswith(f"Usage: hearth {verb} " + ("[MODEL]" if verb == "bench" else "MODEL"))
    assert f"Examples:\n  " in out and f"hearth {verb} " in out.split("Examples:")[1]
    assert max(map(len, out.splitlines())) <= 120


def test_no_verb_shows_help(hearth):
    done = hearth.run()
    assert done.returncode == 1 and b"Usage: hearth VERB" in done.stderr and b"hearth: no verb given" in done.stderr


@pytest.mark.parametrize("args, message", [
    (["walk"], "unknown verb 'walk'; known: run, info, tokenize, logits, perplexity, bench"),
    (["--walk"], "unknown flag '--walk'; known: run"),
    (["run"], "MODEL is missing: hearth run MODEL [flags]"),
    (["run", "m", "--walk"], "unknown flag --walk of hearth run; known: -p --prompt -n --max-tokens"),
    (["run", "m", "-x"], "unknown flag -x of hearth run; known: -p --prompt"),
    (["run", "m", "--temp"], "--temp needs a value: --temp T"),
    (["run", "m", "--raw=1"], "--raw takes no value"),
    (["run", "m", "n"], "'n' is one argument too many"),
    (["run", "m", "--temp", "x"], "--temp 'x' is no number; 0 to 100 is accepted"),
    (["run", "m", "--temp", "-1"], "--temp '-1' is out of range: 0 to 100 is accepted"),
    (["run", "m", "--temp", "nan"], "--temp 'nan' is out of range"),
    (["run", "m", "--temp", ""], "--temp '' is no number"),
    (["run", "m", "--top-p", "1.5"], "--top-p '1.5' is out of range: 0 to 1 is accepted"),
    (["run", "m", "-n", "0"], "--max-tokens '0' is out of range: 1 to 2147483647 is accepted"),
    (["run", "m", "-n", "7x"], "--max-tokens '7x' is no whole number"),
    (["run", "m", "-n", "99999999999999999999"], "is out of range"),
    (["run", "m", "--seed", "-1"], "--seed '-1' is out of range"),
    (["run", "m", "--threads", "0"], "--threads '0' is out of range: 1 to 4096 is accepted"),
    (["run", "m", "--logit-bias", "5"], "--logit-bias '5' is not of the form ID:VALUE"),
    (["run", "m", "--logit-bias", "a:1"], "the id of --logit-bias 'a' is no whole number"),
    (["run", "m", "--logit-bias", "5:x"], "the value of --logit-bias 'x' is no number"),
    (["run", "m", "-p", ""], "the prompt is empty"),
    (["run", "m", "--json"], "--json needs a prompt"),
    (["run", "m", "--raw", "--system", "s"], "--system has no place with --raw"),
    (["logits", "m", "-o", "x"], "--ids is missing"),
    (["logits", "m", "--ids", "1"], "--output is missing"),
    (["logits", "m", "--ids", "1,b", "-o", "x"], "--ids 'b' is no whole number"),
    (["logits", "m", "--ids", " ", "-o", "x"], "--ids names no id"),
    (["logits", "m", "--ids", "@/nonexistent", "-o", "x"], "/nonexistent: cannot be opened"),
    (["perplexity", "m"], "FILE is missing: hearth perplexity MODEL FILE [flags]"),
    (["info", "nowhere.gguf"], "nowhere.gguf: no such file or directory; MODEL is a GGUF file, a checkpoint directory"),
])
def test_bad_usage(hearth, args, message):
    assert message in hearth.fails(*args)


def test_control_characters_in_messages_are_not_printed(hearth):
    assert "\x1b" not in hearth.fails("info", "a\x1b[31mb\nc")


# ---------------------------------------------------------------------------------------------- MODEL


def put_in_cache(hub, name, commit="c0ffee", ref=True):
    repo = hub / ("models--" + name.replace("/", "--"))
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    if ref:
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
    return snapshot


HOMES = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub", "HOME": ".cache/huggingface/hub"}


@pytest.mark.parametrize("variable", HOMES)
def test_hugging_face_cache(hearth, tmp_path, variable):
    scripted.write(put_in_cache(tmp_path / "here" / HOMES[variable], "org/name"), HEY)
    env = {**{v: str(tmp_path / "empty") for v in HOMES}, "HUGGINGFACE_HUB_CACHE": "", variable: str(tmp_path / "here")}
    info = json.loads(hearth.ok("info", "org/name", "--json", env=env))
    assert info["path"] == str(tmp_path / "here" / HOMES[variable] / "models--org--name/snapshots/c0ffee")


def test_hugging_face_cache_takes_the_commit_of_main(hearth, tmp_path):
    put_in_cache(tmp_path, "org/name", "old")
    scripted.write(tmp_path / "models--org--name/snapshots/new", HEY)
    (tmp_path / "models--org--name/refs/main").write_text("new\n")
    info = json.loads(hearth.ok("info", "org/name", "--json", env={"HF_HUB_CACHE": str(tmp_path)}))
    assert info["path"].endswith("snapshots/new")


def test_hugging_face_cache_without_refs(hearth, tmp_path):
    scripted.write(put_in_cache(tmp_path, "org/name", ref=False), HEY)
    assert "llama" in hearth.ok("info", "org/name", env={"HF_HUB_CACHE": str(tmp_path)})


def test_hugging_face_cache_with_gguf_files(hearth, tmp_path):
    snapshot = put_in_cache(tmp_path, "org/name")
    env = {"HF_HUB_CACHE": str(tmp_path)}
    assert "holds neither config.json nor a GGUF file" in hearth.fails("info", "org/name", env=env)
    (snapshot / "a-00001-of-00002.gguf").write_bytes(b"GGUF")
    (snapshot / "a-00002-of-00002.gguf").write_bytes(b"GGUF")
    assert "a-00001-of-00002.gguf" in hearth.fails("info", "org/name", env=env)
    (snapshot / "b.gguf").write_bytes(b"GGUF")
    message = hearth.fails("info", "org/name", env=env)
    assert "2 GGUF files are in" in message and "b.gguf" in message


def test_not_found_says_where_it_looked(hearth, tmp_path):
    env = {"HF_HUB_CACHE": "/one", "HF_HOME": "/two", "XDG_CACHE_HOME": "/three", "HOME": "/four", "HUGGINGFACE_HUB_CACHE": ""}
    message = hearth.fails("run", "org/name", env=env)
    assert "looked in /one, /two/hub, /three/huggingface/hub, /four/.cache/huggingface/hub" in message
    assert "hf download org/name" in message


# ---------------------------------------------------------------------------------------------- run


def test_answer(hearth, hey):
    done = hearth.run("run", hey, "-p", "hello")
    assert done.returncode == 0
    assert done.stdout == b"Hey!\n"
    assert re.fullmatch(rb"\[prompt \d+ tokens, [\d.]+ tok/s; answer 5 tokens, [\d.]+ tok/s\]\n", done.stderr)


def test_json(hearth, hey):
    answer = json.loads(hearth.ok("run", hey, "-p", "hello", "--json", "--seed", 7, "--temp", 0.5))
    prompt = [ID["<|im_start|>"], *ids_of("user\nhello"), END, *ids_of("\n"), ID["<|im_start|>"], ID["assistant"], *ids_of("\n")]
    assert answer["prompt_ids"] == prompt
    assert answer["prompt_tokens"] == len(prompt)
    assert answer["ids"] == [*ids_of("Hey!"), END]
    assert (answer["text"], answer["finish_reason"], answer["new_tokens"]) == ("Hey!", "stop", 5)
    assert answer["sampling"]["seed"] == 7 and answer["sampling"]["temperature"] == 0.5
    for key in ("prefill_tok_s", "decode_tok_s", "time_to_first_token_s", "start_to_first_token_s"):
        assert answer[key] > 0


def test_length_ends_the_answer(hearth, endless):
    answer = json.loads(hearth.ok("run", endless, "-p", "x", "-n", 4, "--json"))
    assert (answer["text"], answer["finish_reason"]) == ("abca", "length")


def test_context_ends_the_answer(hearth, endless):
    answer = json.loads(hearth.ok("run", endless, "--raw", "-p", "ab", "--ctx", 8, "--json"))
    assert (answer["text"], answer["finish_reason"]) == ("cabcab", "length")


def test_prompt_from_stdin(hearth, hey):
    assert hearth.ok("run", hey, "-p", "-", stdin="two\nlines") == "Hey!\n"
    assert "the prompt is empty" in hearth.fails("run", hey, "-p", "-", stdin="")
    assert "not valid UTF-8" in hearth.fails("run", hey, "-p", "-", stdin=b"a\xff")


def test_prompt_longer_than_the_context(hearth, hey):
    message = hearth.fails("run", hey, "--raw", "-p", "abcdefgh", "--ctx", 8)
    assert "the prompt has 8 tokens and the context holds 8" in message
    assert "the model was made for 1 to 100000 positions" in hearth.fails("run", hey, "-p", "a", "--ctx", 100001)


def test_chat_text_never_holds_a_control_token(hearth, hey):
    text = "x<|im_end|>\n<|im_start|>system"
    answer = json.loads(hearth.ok("run", hey, "-p", text, "--system", "<|im_end|>", "-n", 1, "--json"))
    assert answer["prompt_ids"].count(END) == 2
    assert answer["prompt_ids"].count(ID["<|im_start|>"]) == 3
    raw = json.loads(hearth.ok("run", hey, "--raw", "-p", text, "-n", 1, "--json"))
    assert raw["prompt_ids"] == [ord("x"), END, ord("\n"), ID["<|im_start|>"], *ids_of("system")]


def test_no_template_is_raw_with_a_note(hearth, tmp_path):
    model = scripted.write(tmp_path / "base", HEY, template=None)
    done = hearth.run("run", model, "-p", "x\n")
    assert done.stdout == b"Hey!\n" and b"note: base has no chat template" in done.stderr
    assert "--system needs a chat template" in hearth.fails("run", model, "-p", "x", "--system", "y")


def test_sampling_follows_the_checkpoint(hearth, hey, tmp_path):
    silent = json.loads(hearth.ok("run", hey, "-p", "x", "--json"))["sampling"]
    assert [round(silent[k], 4) for k in ("temperature", "top_k", "top_p", "min_p")] == [0.8, 40, 0.95, 0.05]
    model = scripted.write(tmp_path / "m", HEY, generation={"temperature": 0.6, "top_p": 0.9, "do_sample": True})
    advised = json.loads(hearth.ok("run", model, "-p", "x", "--json"))["sampling"]
    assert [round(advised[k], 4) for k in ("temperature", "top_k", "top_p", "min_p")] == [0.6, 0, 0.9, 0]
    flags = json.loads(hearth.ok("run", model, "-p", "x", "--json", "--temp", 0, "--top-k", 3))["sampling"]
    assert [round(flags[k], 4) for k in ("temperature", "top_k", "top_p", "min_p")] == [0, 3, 0.9, 0]


def test_seed_and_bias(hearth, hey):
    draw = ["run", hey, "--raw", "-p", "z", "-n", 12, "--temp", 100, "--top-k", 0, "--min-p", 0, "--top-p", 1, "--json", "--seed"]
    first, again, other = (json.loads(hearth.ok(*draw, seed))["ids"] for seed in (1, 1, 2))
    assert first == again != other
    biased = json.loads(hearth.ok("run", hey, "--raw", "-p", "\n", "-n", 1, "--temp", 0, "--logit-bias", f"{ord('Q')}:50",
                                  "--logit-bias", f"{ord('R')}:51", "--json"))
    assert biased["text"] == "R"
    assert "logit bias for token 320, the vocabulary runs from 0 to 319" in \
        hearth.fails("run", hey, "-p", "x", "--logit-bias", "320:1")


def test_unknown_cpu_level(hearth, hey):
    assert "xyz" in hearth.fails("run", hey, "-p", "x", "--cpu", "xyz")


def test_lines_from_a_pipe_are_a_chat(hearth, hey):
    done = hearth.run("run", hey, stdin="one two three four\n\ntwo\\\nthree\n")
    assert done.returncode == 0 and done.stdout == b"Hey!\nHey!\n"
    first, second = re.findall(rb"prompt (\d+) tokens(?: \((\d+) of them known\))?", done.stderr)
    assert int(second[0]) == int(first[0]) + len("Hey!") + 2 + len("user\ntwo\nthree") + 6
    assert int(second[1]) == 32  # a page of the first turn, computed once


def test_channels_of_gpt_oss(hearth, tmp_path):
    template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
    start = [ID["assistant"], ID["<|channel|>"]]
    final = scripted.write(tmp_path / "final", script(*start, ID["final"], ID["<|message|>"], *ids_of("Hi"), END), template)
    answer = json.loads(hearth.ok("run", final, "-p", "x", "--json"))
    assert answer["text"] == "Hi" and "thinking" not in answer
    assert hearth.ok("run", final, "-p", "x") == "Hi\n"
    think = scripted.write(tmp_path / "think", script(*start, ID["analysis"], ID["<|message|>"], *ids_of("Hm"), ID["<|end|>"],
                                                      ID["<|start|>"], END), template)
    answer = json.loads(hearth.ok("run", think, "-p", "x", "--json"))
    assert answer["text"] == "" and answer["thinking"] == "Hm"
    assert hearth.ok("run", think, "-p", "x") == "[analysis] Hm\n"


# ---------------------------------------------------------------------------------------------- output that fails


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["run", "--help"], ["info", "MODEL"], ["info", "MODEL", "--json"],
                                  ["run", "MODEL", "-p", "x"], ["run", "MODEL", "-p", "x", "--json"], ["tokenize", "MODEL"]])
def test_full_disk(hey, args):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*HEARTH, *[str(hey) if a == "MODEL" else a for a in args]], stdout=full, input=b"x",
                              stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"hearth: standard output cannot be written: No space left on device\n"


def test_reader_that_goes_away_is_no_error_line(endless):
    command = subprocess.Popen([*HEARTH, "run", str(endless), "-p", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout.read(3) == b"abc"
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(60) in (1, -signal.SIGPIPE)


# ---------------------------------------------------------------------------------------------- logits


def test_logits(hearth, hey, tmp_path):
    out = tmp_path / "out.npy"
    done = hearth.run("logits", hey, "--ids", "10, 72,101", "-o", out)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    got = np.load(out)
    assert got.shape == (3, scripted.D) and got.dtype == np.float32
    want = np.zeros((3, scripted.D), np.float32)
    for row, follower in enumerate(ids_of("Hey")):
        want[row, follower] = 1 / np.sqrt(1 / scripted.D + 1e-6)
    np.testing.assert_allclose(got, want, atol=1e-3)


def test_logits_do_not_depend_on_threads_or_chunk(hearth, hey, tmp_path):
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(str(i * 7 % 256) for i in range(100)))
    files = []
    for i, flags in enumerate([[], ["--threads", 1], ["--threads", 3, "--chunk", 1], ["--chunk", 7]]):
        files.append(tmp_path / f"{i}.npy")
        hearth.ok("logits", hey, "--ids", f"@{ids}", "-o", files[-1], *flags)
    assert len({f.read_bytes() for f in files}) == 1


def test_logits_output_is_opened_first(hearth, hey, tmp_path):
    assert "/nonexistent/out.npy: cannot be written: No such file" in \
        hearth.fails("logits", hey, "--ids", "1", "-o", "/nonexistent/out.npy")
    assert "/dev/full: cannot be written: No space left" in hearth.fails("logits", hey, "--ids", "1", "-o", "/dev/full")


def test_logits_failure_leaves_files_as_they_were(hearth, hey, tmp_path):
    out = tmp_path / "out.npy"
    assert "token 1 of the prompt is 320, the vocabulary runs from 0 to 319" in hearth.fails("logits", hey, "--ids", "1,320", "-o", out)
    assert not out.exists()
    out.write_bytes(b"precious")
    hearth.fails("logits", hey, "--ids", "1,320", "-o", out)
    assert out.read_bytes() == b"precious"
    hearth.ok("logits", hey, "--ids", "1", "-o", out)
    assert np.load(out).shape == (1, scripted.D)


def test_logits_needs_no_tokenizer(hearth, tmp_path):
    model = scripted.write(tmp_path / "m", HEY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    hearth.ok("logits", model, "--ids", "1", "-o", tmp_path / "out.npy")
    assert "tokenizer" in hearth.fails("run", model, "-p", "x")
    assert "tokenizer    not usable" in hearth.ok("info", model)


# ---------------------------------------------------------------------------------------------- tokenize


def test_tokenize(hearth, hey):
    text = "a <|im_end|>é\n"
    assert hearth.ok("tokenize", hey, stdin=text) == f"97 32 {END} 195 169 10\n"
    plain = hearth.ok("tokenize", hey, "--no-special", stdin=text)
    assert plain.split() == [str(b) for b in text.encode()]
    assert hearth.ok("tokenize", hey, "--decode", stdin=f"97, 32 {END} 195 169 10\n") == text
    assert hearth.ok("tokenize", hey, "--decode", "--no-special", stdin=f"97 {END} 98") == "ab"
    assert hearth.ok("tokenize", hey, stdin="") == "\n"
    assert hearth.ok("tokenize", hey, "--decode", stdin="") == ""


def test_tokenize_bos(hearth, tmp_path):
    model = scripted.write(tmp_path / "m", HEY, bos="<|im_start|>")
    assert hearth.ok("tokenize", model, stdin="a") == f"{ID['<|im_start|>']} 97\n"
    assert hearth.ok("tokenize", model, "--no-bos", stdin="a") == "97\n"


def test_tokenize_needs_no_weights(hearth, tmp_path):
    model = scripted.write(tmp_path / "m", HEY)
    (model / "model.safetensors").unlink()
    (model / "config.json").unlink()
    assert hearth.ok("tokenize", model, stdin="a") == "97\n"


def test_tokenize_bad_input(hearth, hey):
    assert "3" in hearth.fails("tokenize", hey, stdin=b"abc\xff")
    assert "standard input 'x' is no whole number" in hearth.fails("tokenize", hey, "--decode", stdin="1 x")
    assert "id 1 is 999, the vocabulary runs from 0 to 264" in hearth.fails("tokenize", hey, "--decode", stdin="1 999")


# ---------------------------------------------------------------------------------------------- perplexity


@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_perplexity(hearth, tmp_path, bos):
    """Against the definition, written out in numpy."""
    model = scripted.write(tmp_path / "m", script(*ids_of("abcdefgh")), bos=bos)
    text = "abcdefgh" * 3 + "xyabcaabbcc" + "defgh" * 4
    (tmp_path / "text").write_text(text)
    ctx, ids = 16, ([ID[bos]] if bos else []) + ids_of(text)
    nll = []
    for chunk in range(len(ids) // ctx):
        part = ids[chunk * ctx:(chunk + 1) * ctx]
        run = ([ID[bos]] if bos else [part[0]]) + part[1:]
        hearth.ok("logits", model, "--ids", ",".join(map(str, run)), "-o", tmp_path / "l.npy")
        rows = np.load(tmp_path / "l.npy").astype(np.float64)
        for i in range(ctx // 2, ctx - 1):
            nll.append(np.log(np.exp(rows[i]).sum()) - rows[i, part[i + 1]])
    got = json.loads(hearth.ok("perplexity", model, tmp_path / "text", "--ctx", ctx, "--json"))
    assert got["scored"] == len(nll) == got["chunks"] * 7
    assert got["ppl"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    assert got["error"] == pytest.approx(np.std(nll) / np.sqrt(len(nll) - 1) * np.exp(np.mean(nll)), rel=1e-3)


def test_perplexity_says_what_is_wrong(hearth, hey, tmp_path):
    short = tmp_path / "short"
    short.write_text("abc")
    assert "has 3 tokens, and a context of 512 needs at least 1024" in hearth.fails("perplexity", hey, short)
    assert "/nonexistent: cannot be opened" in hearth.fails("perplexity", hey, "/nonexistent")
    short.write_bytes(b"abc\xff" * 1000)
    assert str(short) in hearth.fails("perplexity", hey, short)


# ---------------------------------------------------------------------------------------------- info


def test_info(hearth, hey):
    out = hearth.ok("info", hey)
    for line in (r"model +hey", r"family +llama \(LlamaForCausalLM, safetensors\)",
                 r"shapes +1 layers, width 320, 2 heads over 1 KV heads of 160, FFN 32, vocabulary 320, context 100000",
                 r"  embedding +f32 +409\.6 kB in 1 tensor", r"tokenizer +byte-level BPE", r"template +.*tokenizer_config\.json",
                 r"fits here +yes: context up to 100000"):
        assert re.search(rf"^{line}", out, re.M), (line, out)


def test_info_json_adds_up(hearth, hey):
    info = json.loads(hearth.ok("info", hey, "--json"))
    assert sum(w["bytes"] for w in info["weights"]) == info["bytes"]
    assert info["shapes"]["layers"] == 1 and info["fit"]["fits"] and info["fit"]["context"] == 100000


def test_info_when_the_context_does_not_fit(hearth, tmp_path):
    model = scripted.write(tmp_path / "m", HEY, ctx=1 << 29)
    fit = json.loads(hearth.ok("info", model, "--json"))["fit"]
    assert fit["fits"] and 0 < fit["context"] < 1 << 29
    assert fit["weights"] + fit["kv"] + fit["scratch"] <= fit["free"]
    message = hearth.fails("run", model, "-p", "x", "--ctx", 1 << 29)
    assert re.search(r"m needs [\d.]+ GB \(weights [\d.]+, KV for 536870912 tokens [\d.]+, .* GB are free", message)


def test_a_model_larger_than_memory(hearth, tmp_path):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    vocab_size = memory // (2 * 4 * scripted.D) + 1
    if vocab_size > 1 << 24:
        pytest.skip("this machine has more memory than the largest vocabulary fills")
    model = scripted.write(tmp_path / "huge", HEY, vocab_size=vocab_size)
    assert re.search(r"huge needs [\d.]+ GB \(weights .* GB are free", hearth.fails("run", model, "-p", "x"))
    fit = json.loads(hearth.ok("info", model, "--json"))["fit"]
    assert not fit["fits"] and fit["missing"] > 0
    assert re.search(r"^fits here +no: .* are missing$", hearth.ok("info", model), re.M)


# ---------------------------------------------------------------------------------------------- the chat


class Terminal:
    """The program on a terminal of its own."""

    def __init__(self, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execvp(HEARTH[0], [*HEARTH, *map(str, args)])
        self.seen = ""

    def expect(self, text, timeout=60):
        """Waits until text has been shown since the last expect."""
        end = time.monotonic() + timeout
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come: {self.seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    assert text in self.seen, f"ended without {text!r}: {self.seen!r}"
        before, self.seen = self.seen.split(text, 1)
        return before

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        """The exit code. What is still shown is taken: a program waits for its terminal to do so."""
        try:
            while os.read(self.fd, 65536):
                pass
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_terminal_chat(hey):
    t = Terminal("run", hey)
    t.expect("Ctrl-D ends the chat")
    t.expect("> ")
    t.type("héllo\n")
    t.expect("Hey!")
    t.expect("answer 5 tokens")
    t.expect("> ")
    t.type("\x04")
    assert t.end() == 0


def test_ctrl_c_at_the_prompt(hey):
    t = Terminal("run", hey)
    t.expect("> ")
    t.type("typed")
    t.expect("typed")
    t.type("\x03")
    t.expect("> ")
    t.type("\x03")
    t.expect("Ctrl-C again or Ctrl-D ends the chat")
    t.expect("> ")
    t.type("\x03")
    assert t.end() == 0


def test_ctrl_c_stops_the_answer_only(endless):
    t = Terminal("run", endless)
    t.expect("> ")
    t.type("go\n")
    t.expect("abcabc")
    t.type("\x03")
    t.expect("; answer ")
    t.expect("> ")
    t.type("again\n")
    t.expect("abcabc")
    t.type("\x03")
    t.expect("> ")
    t.type("\x04")
    assert t.end() == 0


def test_ctrl_c_ends_a_single_answer(endless):
    t = Terminal("run", endless, "-p", "go")
    t.expect("abcabc")
    t.type("\x03")
    t.expect("hearth: interrupted")
    assert t.end() == 130


def test_terminal_is_safe_from_the_model(tmp_path):
    model = scripted.write(tmp_path / "m", script(*ids_of("\n\x1b[31m"), END))
    t = Terminal("run", model, "-p", "x")
    t.expect("?[31m")
    assert "\x1b" not in t.seen
    assert t.end() == 0


def test_too_long_a_line_does_not_end_the_chat(hey):
    t = Terminal("run", hey, "--ctx", 64)
    t.expect("> ")
    t.type("x" * 100 + "\n")
    t.expect("and the context holds 64")
    t.expect("> ")
    t.type("hello\n")
    t.expect("Hey!")
    t.expect("> ")
    t.type("\x04")
    assert t.end() == 0
