"""Names of the code: a class or type alias has one name that no other one has."""

import ast
import collections
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("jaxrl/**/*.py"), *ROOT.glob("sharding/**/*.py")])


def type_names(tree: ast.Module) -> list[str]:
    """Classes and type aliases that a module defines at its top."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.TypeAlias):
            names.append(node.name.id)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [target.id for target in targets if isinstance(target, ast.Name)]
            names += [name for name in found if name[0].isupper() and not name.isupper()]
    return names


def test_no_class_or_alias_is_defined_twice():
    files = collections.defaultdict(list)
    for path in FILES:
        for name in type_names(ast.parse(path.read_text())):
            files[name].append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert not twice, "give one of them a name that says more"


def test_classes_and_aliases_are_found():
    text = "type Aa = int\nBb = dict[str, int]\nCc: type = int\nLIMIT = 3\nx = 1\nclass Dd: ...\n"
    assert type_names(ast.parse(text)) == ["Aa", "Bb", "Cc", "Dd"]
