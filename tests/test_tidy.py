"""The style guide as a test: imports, sizes, names, containment of generated code, banned calls."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"

# What each package may import of ours. Imports only go down; services never meet.
MAY_IMPORT: dict[str, set[str]] = {
    "serving": set(),
    "engine": {"serving"},
    "scorer_service": {"serving", "engine"},
    "target_service": {"serving", "engine"},
    "gateway": {"serving"},
    "client": {"serving"},
    "demo": {"serving", "engine", "client"},
    "bench": {
        "serving", "engine", "client", "demo", "scorer_service", "target_service", "gateway",
    },
}  # fmt: skip
TORCH_FREE = {"serving", "gateway", "client"}
LOADS_TORCH = {"torch", "transformers", "triton", "safetensors.torch", "accelerate"}
PB2_FILES = {"servicer.py", "upstream.py"}
JUNK_NAMES = {"utils", "helpers", "misc", "common", "util", "helper"}
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def _sources(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_imports_only_go_down() -> None:
    wrong = [
        f"{_where(path, line)} imports {name}"
        for package, allowed in MAY_IMPORT.items()
        for path in _sources(package)
        for name, line in _imports(_tree(path))
        if name.split(".")[0] in MAY_IMPORT
        and name.split(".")[0] != package
        and name.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_without_torch_never_import_it() -> None:
    wrong = [
        f"{_where(path, line)} imports {name}"
        for path in _sources(*TORCH_FREE)
        for name, line in _imports(_tree(path))
        if any(name == banned or name.startswith(banned + ".") for banned in LOADS_TORCH)
    ]
    assert not wrong, "\n".join(wrong)


def test_generated_classes_stay_at_the_edge() -> None:
    wrong = [
        _where(path, line)
        for package in MAY_IMPORT
        if package not in {"client", "bench"}
        for path in _sources(package)
        if path.name not in PB2_FILES
        for name, line in _imports(_tree(path))
        if "_pb2" in name and name.startswith("specprefill.")
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_fit_a_screen() -> None:
    wrong = []
    for path in _sources(*MAY_IMPORT, "tests"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES_MAX:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    wrong.append(f"{_where(path, node.lineno)} {node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_a_junk_drawer() -> None:
    wrong = [str(p.relative_to(ROOT)) for p in _sources(*MAY_IMPORT) if p.stem in JUNK_NAMES]
    assert not wrong


def test_exceptions_are_named_and_cancellation_passes() -> None:
    wrong = []
    for path in _sources(*MAY_IMPORT):
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            if node.type is None:
                wrong.append(f"{_where(path, node.lineno)} bare except")
            elif "CancelledError" in ast.unparse(node.type) and not _raises(node):
                wrong.append(f"{_where(path, node.lineno)} swallows CancelledError")
    assert not wrong, "\n".join(wrong)


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def test_nothing_unpickles_and_nothing_loads_code_from_a_model() -> None:
    wrong = []
    for path in _sources(*MAY_IMPORT):
        tree = _tree(path)
        wrong += [
            f"{_where(path, line)} imports {name}"
            for name, line in _imports(tree)
            if name.split(".")[0] in UNSAFE_MODULES
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "torch.load", "torch.save", "eval", "exec", "json_format.Parse",
            }:  # fmt: skip
                wrong.append(f"{_where(path, node.lineno)} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant)
                if node.value.value is not False:
                    wrong.append(f"{_where(path, node.lineno)} trusts remote code")
    assert not wrong, "\n".join(wrong)


def test_services_print_nothing() -> None:
    wrong = [
        _where(path, node.lineno)
        for path in _sources("serving", "engine", "scorer_service", "target_service", "gateway")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"print", "breakpoint"}
    ]
    assert not wrong


def test_tests_never_sleep_and_never_patch_our_code() -> None:
    wrong = []
    for path in _sources("tests"):
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            polls = called == "asyncio.sleep" and ast.unparse(node.args[0]) == "0"
            if called in {"time.sleep", "asyncio.sleep"} and not polls:
                wrong.append(f"{_where(path, node.lineno)} sleeps")
            if called in {"mock.patch", "patch", "monkeypatch.setattr"}:
                wrong.append(f"{_where(path, node.lineno)} patches")
    assert not wrong, "\n".join(wrong)


def _tracked_text() -> Iterator[tuple[Path, str]]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix not in {".png", ".bin"}:
            yield path, path.read_text(encoding="utf-8")


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home)/\w")
    wrong = [str(path.relative_to(ROOT)) for path, text in _tracked_text() if pattern.search(text)]
    assert not wrong


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources],
        cwd=PROTOS,
        check=True,
    )
    fresh = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*_pb2*.py*"))
    assert fresh, "protoc wrote nothing"
    stale = [
        str(name)
        for name in fresh
        if not (PROTOS / name).exists()
        or (PROTOS / name).read_bytes() != (tmp_path / name).read_bytes()
    ]
    assert not stale, f"run `make proto`: {stale}"


def test_protos_pass_buf_lint() -> None:
    buf = Path(sys.executable).with_name("buf")
    assert buf.exists(), "buf-bin is in the dev extra"
    result = subprocess.run([buf, "lint"], cwd=PROTOS, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_every_package_of_the_map_exists(package: str) -> None:
    assert (ROOT / package / "__init__.py").exists()
