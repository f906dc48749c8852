"""Where the tests of IPEX's own kernels run."""

from __future__ import annotations

import pytest

from isthmus_xpu.packages import Installed, ipex_problem

PROBLEM = ipex_problem(Installed(), on_gpu=False)

needs_ipex = pytest.mark.skipif(PROBLEM is not None, reason=f"{PROBLEM}; `nox -s xpu-tests` runs this with IPEX")
