"""Schemathesis against the server's own description of itself: no 5xx, no undocumented status, form or type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from clients.program import serving

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
)
CASES = 40
"""Of each route, beside those that cover every field."""
MAX_LEN = 48
"""So that an answer of as many tokens as fit takes no time."""


def test_the_server_does_what_it_says(tmp_path: Path) -> None:
    """What is wrong is sent as well as what is right; then the server answers as before."""
    options = ["--checks", ",".join(CHECKS), "--max-examples", str(CASES), "--continue-on-failure", "--no-color"]
    options += ["--phases", "coverage,fuzzing", "--generation-deterministic", "--request-timeout", "90"]
    with serving(tmp_path, max_len=MAX_LEN) as url:
        program = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json", *options]
        done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
