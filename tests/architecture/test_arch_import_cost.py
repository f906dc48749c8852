"""What importing costs: `import isthmus` is cheap, and finding the platforms needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

MAX_IMPORT_CPU_S = 0.3

IMPORT = """
import json, sys, time
start = time.process_time()
import isthmus
print(json.dumps({"cpu_s": time.process_time() - start, "torch": "torch" in sys.modules}))
"""

PROBE = """
import json, sys
from isthmus.plugins.manager import PluginManager
manager = PluginManager.load()
reports = manager.probe_all()
print(json.dumps({
    "platforms": [report.name for report in reports],
    "failures": [failure.reason for failure in manager.failures],
    "heavy": sorted({"torch", "torch_xla", "transformers", "numpy"} & sys.modules.keys()),
}))
"""


def run(program: str) -> dict[str, object]:
    environ = {name: value for name, value in os.environ.items() if name != "ISTHMUS_DISABLE_PLUGINS"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60, env=environ
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_import_is_cheap_and_brings_no_torch() -> None:
    """CPU time of the process, best of three: a busy machine does not fail it."""
    results = [run(IMPORT) for _ in range(3)]
    assert not any(result["torch"] for result in results)
    assert min(float(str(result["cpu_s"])) for result in results) < MAX_IMPORT_CPU_S


def test_loading_and_probing_every_plugin_brings_no_torch() -> None:
    result = run(PROBE)
    assert {"cpu", "cuda", "null", "rocm", "tpu", "xpu"} <= set(result["platforms"])  # type: ignore[call-overload]
    assert result["failures"] == []
    assert result["heavy"] == []
