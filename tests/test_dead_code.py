"""The package or its scripts use every function, class, constant and public method."""

import ast
import collections
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("jaxrl", "sharding")
USERS = (*PACKAGES, "scripts", "configs")  # not tests
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NAMED = re.compile(r"^(?:[\w./]+[:.])?([A-Za-z_]\w*)$")
REFERENCE = "the reference implementation, with which tests compare the kernels"
ALLOWED = {  # file -> (names, who uses them); "*" stands for all names
    "jaxrl/checkpoint/state_handler.py": ("async_save", "Orbax calls it"),
    "jaxrl/data/streaming.py": ("flat_map", "Grain calls it"),
    "jaxrl/engine/jetstream.py": ("*", "JetStream's verbs, which an orchestrator calls"),
    "jaxrl/http/connection.py": (
        "connection_made on_response_complete send_400_response next_event",
        "uvicorn and h11 call them",
    ),
    "jaxrl/kernels/logprob/reference.py": ("logprob_reference", REFERENCE),
    "jaxrl/kernels/quantized_matmul.py": ("quantized_matmul_reference", REFERENCE),
    "jaxrl/models/vision/adapters.py": (
        "tower_adapters add_tower_adapters",
        "runs with images will call them; training is not connected yet",
    ),
    "jaxrl/report/watch.py": (
        "do_GET log_message process_request process_request_thread handle_error",
        "http.server and socketserver call them",
    ),
    "jaxrl/runtime/backend.py": ("emit", "logging calls it"),
    "jaxrl/runtime/compilation.py": ("emit", "logging calls it"),
    "jaxrl/runtime/flat_program.py": (
        "tree_flatten tree_flatten_with_keys tree_unflatten",
        "JAX calls them",
    ),
}


class Source(NamedTuple):
    """The names that one file defines and reads."""

    tree: ast.Module
    imported: set[str]
    loaded: collections.Counter[str]
    attributes: set[str]  # and strings that name one, such as "module:function"


def read_source(text: str) -> Source:
    source = Source(ast.parse(text), set(), collections.Counter(), set())
    nodes: list[ast.AST] = [source.tree]
    for node in nodes:  # faster than ast.walk
        match node:
            case ast.alias():
                source.imported.add(node.name)
            case ast.Name(ctx=ast.Load()):
                source.loaded[node.id] += 1
                continue
            case ast.Attribute():
                source.attributes.add(node.attr)
            case ast.Constant():
                if isinstance(node.value, str) and (found := NAMED.search(node.value)):
                    source.attributes.add(found[1])
                continue
        for field in node._fields:
            value = getattr(node, field)
            if isinstance(value, list):
                nodes += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return source


def used_names(sources: dict[pathlib.Path, Source]) -> tuple[set[str], set[str]]:
    """(names that a file imports and reads, all attributes)."""
    names, attributes = set(), set()
    for path, source in sources.items():
        # An __init__ may only pass a name on.
        only = source.loaded.keys() if path.name == "__init__.py" else source.imported
        names |= source.imported & only
        attributes |= source.attributes
    return names, attributes


def unused(source: Source, imported: set[str], attributes: set[str]) -> list[str]:
    """Names of module-level definitions and public methods that no other definition reads."""
    found = []
    for node in source.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                inside = 0
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                one = (isinstance(x, ast.Name) and x.id == name for x in ast.walk(node))
                inside = sum(one) if source.loaded[name] else 0
            case _:
                continue
        if isinstance(node, ast.ClassDef):
            methods = [one.name for one in node.body if isinstance(one, FUNCTIONS)]
            found += [one for one in methods if not (one.startswith("_") or one in attributes)]
        elsewhere = name in imported or name in attributes or name.startswith("__")
        if not elsewhere and source.loaded[name] <= inside:
            found.append(name)
    return found


def test_everything_is_used():
    files = [path for folder in USERS for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]
    sources = {path.relative_to(ROOT): read_source(path.read_text()) for path in files}
    used, dead = used_names(sources), []
    for path, source in sources.items():
        if path.parts[0] in PACKAGES:
            allowed = ALLOWED.get(path.as_posix(), ("", ""))[0].split()
            names = [name for name in unused(source, *used) if name not in allowed]
            dead += [f"{path}: {name}" for name in names if "*" not in allowed]
    assert not dead, "only tests use these, or nothing does; delete them: " + ", ".join(dead)


def test_a_function_that_only_itself_or_a_package_names_is_dead():
    text = "def f():\n    f()\ndef g(): ...\nclass C:\n    def m(self): ..."
    defined, package = pathlib.Path("a.py"), pathlib.Path("__init__.py")
    sources = {defined: read_source(text), package: read_source("from a import f")}
    assert unused(sources[defined], *used_names(sources)) == ["f", "g", "m", "C"]
    sources[pathlib.Path("b.py")] = read_source("from a import C, g\nC().m()")
    assert unused(sources[defined], *used_names(sources)) == ["f"]
