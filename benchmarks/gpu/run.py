"""All phases one after the other, each in a process of its own under a deadline; `run.sh` starts this.

The kit comes last and gets the time that is left. What a phase has written stays if it dies or is stopped.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from sizes import FULL, TINY
from table import to_markdown

from isthmus import conformance
from isthmus.cli.offline_bench import commit

HERE = Path(__file__).resolve().parent
KIT = conformance.__name__
KIT_SETTINGS = Path(conformance.__file__).with_name("pytest.ini")
SHARES = {"attention": 0.28, "graph": 0.2, "eager": 0.14, "kit": 1.0}
"""Of the whole time, at most; the kit takes what is left."""
STOP_S = 8
"""A process that is told to stop may take so long to write its file."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of this program. deadline: by `time.monotonic`."""

    device: str
    out: Path
    tiny: bool
    limit_s: float
    deadline: float

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def call(self, name: str, command: Sequence[str], seconds: float) -> dict[str, Any]:
        """Run a phase; how it ended. What it prints goes to the console."""
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        begin = time.monotonic()
        process = subprocess.Popen([sys.executable, *command])
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            status = "stopped at its deadline"
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return {"status": status, "seconds": round(time.monotonic() - begin, 1)}


def measured(run: Run, name: str, script: str, *options: str) -> dict[str, Any]:
    """A phase that writes JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        seconds = min(SHARES[name] * run.limit_s, run.left_s)
        command = [str(HERE / script), "--device", run.device, "--out", str(out), "--seconds", str(seconds - STOP_S)]
        ended = run.call(name, [*command, *options, *(["--tiny"] if run.tiny else [])], seconds)
        return {**(json.loads(out.read_text()) if out.exists() else {}), **ended}


def kit(run: Run) -> dict[str, Any]:
    """The conformance kit as `isthmus platforms certify` runs it; stopped, it still writes its report."""
    report = run.out / f"conformance-{run.device}.json"
    report.unlink(missing_ok=True)
    command = ["-m", "pytest", "-c", str(KIT_SETTINGS), "-p", "no:terminal", "-p", "no:cacheprovider"]
    command += ["-p", "no:warnings", "-p", f"{KIT}.plugin", "--pyargs", KIT, "--isthmus-platform", run.device]
    command += ["--isthmus-report", str(report), "--isthmus-table", *(TINY if run.tiny else FULL).kit]
    ended = run.call("kit", command, run.left_s - STOP_S)
    if not report.exists():
        return ended
    found = json.loads(report.read_text())
    failures = [failure["id"] for failure in found["failures"]]
    return {**ended, "level": found["level"], "areas": found["areas"], "failures": failures}


def facts(run: Run) -> dict[str, Any]:
    """Of this machine and this checkout."""
    names = ("isthmus", "torch", "triton", "transformers", "numpy")
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    command = [sys.executable, "-c", "import sys; from isthmus.cli.main import main; sys.exit(main())"]
    probes = subprocess.run([*command, "platforms", "--json"], capture_output=True, text=True, check=False)
    rows = json.loads(probes.stdout)["platforms"] if probes.returncode == 0 else []
    return {
        "date": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "commit": commit(Path(conformance.__file__)),
        "device": run.device,
        "found": next((row["reason"] for row in rows if row["name"] == run.device), "no such platform"),
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: installed[name] for name in names if name in installed},
        "tiny": run.tiny,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=530, help="the whole run ends in this time (default: 530)")
    parser.add_argument("--phases", default=",".join(SHARES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="see on any machine that it runs")
    args = parser.parse_args()
    phases = args.phases.split(",")
    if unknown := set(phases) - SHARES.keys():
        parser.error(f"no such phase: {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.device, args.out, args.tiny, args.limit_s, time.monotonic() + args.limit_s)
    result: dict[str, Any] = facts(run)
    for name in phases:
        if run.left_s < 3 * STOP_S:
            result[name] = {"status": "no time left"}
        elif name == "attention":
            result[name] = measured(run, name, "attention.py")
        elif name == "kit":
            result[name] = kit(run)
        else:
            has_one = any("throughput" in result.get(other, {}) for other in phases)
            options = ["--mode", name, *([] if has_one else ["--throughput"])]
            result[name] = measured(run, name, "engine.py", *options)
        (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / "results.md").write_text(to_markdown(result))
    print((args.out / "results.md").read_text())
    return 0 if all(result[name].get("status") == 0 for name in phases) else 1


if __name__ == "__main__":
    sys.exit(main())
