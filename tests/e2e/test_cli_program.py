"""The installed program, as a user runs it: in a pipe, in a terminal, and interrupted."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus import LLM, SamplingParams
from isthmus.checkpoints.directory import DirectoryCheckpoint
from isthmus.cli.main import main
from isthmus.cli.offline_bench import measure
from isthmus.cli.workload import Span, random_workload
from isthmus.errors import CheckpointError
from isthmus.testing.tiny_models import tiny_model

PROGRAM = [sys.executable, "-c", "import sys; from isthmus.cli.main import main; sys.exit(main())"]
TORCH_FREE = "import sys; from isthmus.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
ENGINE_FLAGS = ["--device", "cpu", "--num-blocks", "300", "--temperature", "0"]
ENDLESS = ["--ignore-eos", "--max-tokens", "4000"]
DEADLINE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can write long enough to be interrupted."""
    return tiny_model("llama", tmp_path_factory.mktemp("cli") / "llama", max_len=8192)


def environment() -> dict[str, str]:
    unwanted = ("ISTHMUS_TRACEBACK", "TRANSFORMERS_VERBOSITY")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb", "PYTHONUNBUFFERED": "1"}


def isthmus(*arguments: str, stdin: str = "", program: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*(program or PROGRAM), *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment(), timeout=DEADLINE_S, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["chat", "--help"], ["platforms"], ["platforms", "--json"], ["pull", "--list"]],
)
def test_no_torch(arguments: list[str]) -> None:
    done = isthmus(*arguments, program=[sys.executable, "-c", TORCH_FREE])
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert done.stderr == ""


def test_installed_script_is_this_program() -> None:
    script = Path(sys.executable).parent / "isthmus"
    done = isthmus("--help", program=[str(script)])
    assert done.returncode == 0
    assert done.stdout == isthmus("--help").stdout.replace("-c", "isthmus")
    for command in ("generate", "chat", "platforms", "config", "pull", "bench"):
        assert re.search(rf"^    {command}\b", done.stdout, re.MULTILINE)


def test_platforms_lists_all_with_reasons() -> None:
    data = json.loads(isthmus("platforms", "--json").stdout)
    reasons = {platform["name"]: platform["reason"] for platform in data["platforms"]}
    assert {"cpu", "cuda", "rocm", "xpu", "tpu", "null"} <= set(reasons)
    assert all(reasons.values())
    assert data["failed_plugins"] == []


def test_config_show(model: Path) -> None:
    done = isthmus("config", "show", str(model), "--device", "cpu", "--block-size", "8", "--dtype", "float32")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=3)[1:] for line in done.stdout.splitlines() if line}
    assert rows["cache.block_size"] == ["8", "user", "given explicitly"]
    assert rows["model.max_model_len"] == ["8192", "model", "LlamaForCausalLM has 8192 positions"]
    assert rows["device.index"] == ["0", "default", "built-in default"]
    assert rows["scheduler.max_num_seqs"][1:] == ["platform", "proposed by platform cpu"]
    assert len(rows["digest"][0]) == 64


def test_config_show_loads_no_weights(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(checkpoint: DirectoryCheckpoint, dtype: object) -> None:
        raise CheckpointError("weights were asked for")

    monkeypatch.setattr(DirectoryCheckpoint, "tensors", refuse)
    assert main(["config", "show", str(model), "--device", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["digest"]) == 64
    assert {"path": "model.model", "value": str(model), "source": "user", "reason": "given explicitly"} in data[
        "settings"
    ]
    assert main(["chat", str(model), "--device", "cpu", "--message", "a"]) == 2
    assert capsys.readouterr().err == "isthmus: error: weights were asked for\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "./no/such/model", "--prompt", "a"],
            "isthmus: error: model './no/such/model' looks like a path, but there is no such file or directory; "
            "check it\n",
        ),
        (
            ["generate", "m", "--prompt", "a", "--max-tokens", "0"],
            "isthmus: error: SamplingParams.max_tokens=0: must be >= 1; use None for as much as fits in the context\n",
        ),
        (
            ["chat", "m", "--message", "a", "--block-size", "0"],
            "isthmus: error: invalid configuration\n  cache.block_size=0: is below 1; give an integer >= 1, or auto\n",
        ),
        (["generate", "m", "--logprobs", "1", "--prompt", "a"], "isthmus: error: --logprobs=1: plain text has no "),
    ],
)
def test_errors_are_tidy(arguments: list[str], message: str) -> None:
    done = isthmus(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


def test_generate_streams_what_the_library_gives(model: Path) -> None:
    done = isthmus("generate", str(model), "--prompt", "The river", *ENGINE_FLAGS, "--max-tokens", "9")
    with LLM(str(model), device="cpu", num_blocks=300) as llm:
        expected = llm.generate("The river", SamplingParams(temperature=0, max_tokens=9), progress=False)[0]
    assert done.returncode == 0
    assert done.stdout == expected.outputs[0].text + "\n"
    rate = r"time to first token \d+\.\d\d s, \d+\.\d tokens/s \(cpu, float32\)"
    assert re.fullmatch(rf"-- {len(expected.outputs[0].token_ids)} tokens, {rate}\n", done.stderr)


def test_generate_json_from_stdin(model: Path) -> None:
    done = isthmus("generate", str(model), "--json", "--max-tokens", "4", *ENGINE_FLAGS, stdin="Snow fell\n")
    data = json.loads(done.stdout)
    assert (data["prompt"], data["num_output_tokens"], done.stderr) == ("Snow fell", 4, "")
    assert data["total_s"] >= data["time_to_first_token_s"] > 0


def test_chat_through_a_pipe(model: Path) -> None:
    flags = [*ENGINE_FLAGS, "--max-tokens", "6"]
    once = isthmus("chat", str(model), "--message", "hello", *flags)
    assert once.returncode == 0
    piped = isthmus("chat", str(model), *flags, stdin="hello\n/reset\n/set max_tokens 1\nhello\n")
    assert piped.returncode == 0
    assert piped.stdout.startswith(once.stdout)
    second = piped.stdout.removeprefix(once.stdout)
    assert once.stdout.startswith(second.removesuffix("\n"))
    assert [line.split(",")[0] for line in piped.stderr.splitlines() if line.startswith("--")] == [
        "-- 6 tokens",
        "-- 1 token",
    ]


def test_bench_offline_is_one_json_line(model: Path) -> None:
    flags = ["--num-requests", "5", "--input-len", "3:9", "--output-len", "4", "--device", "cpu", "--num-blocks", "300"]
    done = isthmus("bench", "offline", str(model), *flags)
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert (result["num_requests"], result["num_output_tokens"], result["num_threads"]) == (5, 20, 1)
    assert (result["platform"], result["dtype"], result["model"]) == ("cpu", "float32", str(model))
    assert 15 <= result["num_prompt_tokens"] <= 45
    assert result["ttft_ms"]["p99"] >= result["ttft_ms"]["p50"] > 0
    assert result["tpot_ms"]["mean"] > 0
    assert result["output_tokens_per_s"] == pytest.approx(20 / result["wall_s"], rel=0.01)
    assert result["peak_rss_bytes"] > 50e6


def test_warm_up_leaves_no_prefix_behind(model: Path) -> None:
    items = random_workload(2, Span(64, 64), Span(2, 2), vocab_size=300, seed=0)
    with LLM(str(model), device="null", block_size=16) as llm:
        measured: list[int] = []
        original = llm.generate

        def generate(*arguments: object, **keywords: object) -> object:
            outputs = original(*arguments, **keywords)  # type: ignore[arg-type]
            measured.extend(output.num_cached_tokens for output in outputs)
            return outputs

        llm.generate = generate  # type: ignore[method-assign, assignment]
        result = measure(llm, items, detokenize=False)
    assert measured == [0, 0, 0, 0]  # two of the warm-up, two of the run
    assert (result.num_prompt_tokens, result.num_output_tokens, result.detokenize) == (128, 4, False)


def test_interrupted_generate_is_quiet(model: Path) -> None:
    command = [*PROGRAM, "generate", str(model), "--prompt", "The river", *ENGINE_FLAGS, *ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        stderr = process.stderr.read().decode()
        assert process.wait(DEADLINE_S) == 130
    assert re.fullmatch(r"-- \d+ tokens?.*\(cpu, float32\)\n", stderr)


def test_reader_that_leaves_early_gets_no_traceback(model: Path) -> None:
    command = shlex.join([*PROGRAM, "generate", str(model), "--prompt", "The river", *ENGINE_FLAGS, *ENDLESS])
    done = subprocess.run(
        ["sh", "-c", f"{command} | head -c 1"],
        capture_output=True,
        env=environment(),
        timeout=DEADLINE_S,
        check=False,
    )
    assert (len(done.stdout), done.stderr) == (1, b"")


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        # The slave stays open here: a terminal that no process has open reads as an error.
        self._master, self._slave = pty.openpty()
        name = os.ttyname(self._slave)
        # The leader of a new session gets the first terminal that it opens as its controlling one, hence Ctrl-C.
        script = f'exec "$@" <{name} >{name} 2>&1'
        self.process = subprocess.Popen(
            ["sh", "-c", script, "sh", *PROGRAM, *arguments], env=environment(), start_new_session=True
        )
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, *, pressing: str = "") -> str:
        """Read until `pattern` is found in what was not yet taken, and take all up to its end.

        pressing: what is typed every second until then.
        """
        deadline = time.monotonic() + DEADLINE_S
        while (found := re.search(pattern, self.text)) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"no {pattern!r} in {self.text!r}")
            self.type(pressing)
            while select.select([self._master], [], [], 1)[0] and re.search(pattern, self.text) is None:
                self.text += os.read(self._master, 4096).decode(errors="replace")
        taken, self.text = self.text[: found.end()], self.text[found.end() :]
        return taken

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal(model: Path) -> Iterator[Terminal]:
    running = Terminal("chat", str(model), *ENGINE_FLAGS, *ENDLESS)
    yield running
    running.close()


def test_chat_in_a_terminal(terminal: Terminal) -> None:
    terminal.wait_for(r"> $")
    terminal.type("tell me a story\r")
    terminal.wait_for(r"tell me a story\r\n.")
    terminal.type("\x03")
    stopped = terminal.wait_for(r"-- (\d+) tokens?,[^\r\n]*\(cpu, float32\)")
    assert int(re.findall(r"-- (\d+) token", stopped)[-1]) < 4000
    terminal.wait_for(r"> $")
    terminal.type("/set max_tokens 3\r")
    terminal.wait_for(r"sampling: temperature=0\.0 max_tokens=3 ignore_eos=true")
    terminal.wait_for(r"> $")
    terminal.type("half a line")
    terminal.wait_for(r"half a line")
    # Python misses a signal that comes while readline takes in a key, hence more than one.
    terminal.wait_for(r"Ctrl-D or /quit leaves", pressing="\x03")
    terminal.wait_for(r"> $")
    terminal.type("hi\r")
    terminal.wait_for(r"-- 3 tokens")
    terminal.wait_for(r"> $")
    terminal.type("\x04")
    assert terminal.process.wait(DEADLINE_S) == 0
