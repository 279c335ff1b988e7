"""The shape of the code: imports go one way, heavy libraries only where they are allowed, commands start fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "krafla_cli"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Layers from the bottom up; a module imports from its own part and from parts in lower layers only.
LAYERS = [
    {"errors"},
    {"progress"},
    {"formats", "pool"},
    {"cluster"},
    {"kernels"},
    {"rope", "quant", "parts", "torch_file", "globs"},
    {"tokenizer"},
    {"convert", "export", "runtime", "embed", "report"},
    {"cli", "__init__"},
    {"__main__"},
]
LAYER_OF = {part: i for i, parts in enumerate(LAYERS) for part in parts}
# kernels and formats know nothing of each other; neither is above the other.
INDEPENDENT = {("kernels", "formats"), ("rope", "kernels")}

# Library -> the parts that may import it.
ALLOWED = {
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "gguf": {"quant", "export"},
    "click": {"cli"},
    "tqdm": {"cli"},
    "torch": {"torch_file", "convert", "runtime", "embed", "export", "report"},
    "tokenizers": {"tokenizer", "embed", "convert", "runtime", "__init__"},
    "jinja2": {"tokenizer"},
    "safetensors": {"convert", "embed", "export", "runtime"},
    "transformers": set(),
    "ray": {"cluster"},
    "pyarrow": {"embed"},
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, top_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those under ``if TYPE_CHECKING`` left out."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    if top_level_only:
        skipped |= {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for child in ast.walk(node)
        }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    for line, name in imports(path):
        pieces = name.split(".")
        if pieces[0] != "krafla_cli" or len(pieces) == 1:
            continue
        other = pieces[1]
        if other not in LAYER_OF or other == part:
            continue
        assert LAYER_OF[other] < LAYER_OF[part], f"{path}:{line}: {part} imports {name}"
        assert (part, other) not in INDEPENDENT, f"{path}:{line}: {part} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_are_used_where_they_are_allowed(path: Path) -> None:
    for line, name in imports(path):
        allowed = ALLOWED.get(name.split(".")[0])
        assert allowed is None or part_of(path) in allowed, f"{path}:{line}: {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "cli").glob("*.py")), ids=lambda p: p.stem)
def test_commands_import_lazily(path: Path) -> None:
    for line, name in imports(path, top_level_only=True):
        heavy = name.split(".")[0] in ("numpy", "torch", "numba", "tokenizers", "safetensors", "tqdm", "jinja2")
        library = name.startswith("krafla_cli.") and not name.startswith(
            ("krafla_cli.cli", "krafla_cli.errors", "krafla_cli.progress")
        )
        assert not heavy, f"{path}:{line}: {name}"
        assert not library, f"{path}:{line}: {name}"


def test_files_stay_readable() -> None:
    long = {str(p.relative_to(PACKAGE)): n for p in MODULES if (n := len(p.read_text().splitlines())) > 500}
    assert long == {}


def modules_after(*args: str) -> set[str]:
    """Names of all modules that a command imported."""
    code = "import sys; from krafla_cli.cli import invoke; invoke(sys.argv[1:]); print('\\n' + ' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


def test_help_imports_no_numpy() -> None:
    assert not modules_after("--help") & {"numpy", "torch", "numba", "tokenizers", "jinja2"}


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_looking_at_files_imports_neither_torch_nor_numba(command: str, tmp_path: Path) -> None:
    from tests.formats.test_mlb import MINIMAL, write

    path = tmp_path / "m.mlb"
    path.write_bytes(write(MINIMAL))
    assert not modules_after(command, str(path)) & {"torch", "numba", "tokenizers", "transformers", "tqdm"}
