from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

PROGRAM = """
import importlib, json, pkgutil, sys
for package in ("serving", "gateway", "client"):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
import gateway.__main__
heavy = {"torch", "transformers", "triton", "accelerate"}
print(json.dumps(sorted(heavy.intersection(sys.modules))))
"""


def test_gateway_serving_and_client_never_load_torch_where_it_is_installed() -> None:
    assert importlib.util.find_spec("torch"), "the test proves nothing without torch"
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=50
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == []
