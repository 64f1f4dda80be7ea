"""The function that a test without a name calls."""

import ast


def only_function(program: str, n_arguments: int) -> str:
    """The only function of a program, or method of its class Solution, with so many arguments.

    "" if there is none. Raises ValueError if there are several: the row must name one.
    """
    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    solution = [n for n in body if isinstance(n, ast.ClassDef) and n.name == "Solution"]
    nodes = solution[-1].body if solution else body
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    fitting = [f for f in functions if _takes(f, n_arguments, is_method=bool(solution))]
    names = sorted({f.name for f in fitting or functions})
    if len(names) > 1:
        raise ValueError(
            f"the tests of a code task name no function and the program has {', '.join(names)}; "
            'give the tests the metadata {"func_name": ...}, or the row a column starter_code'
        )
    return names[0] if names else ""


def _takes(function: ast.FunctionDef, n: int, *, is_method: bool) -> bool:
    """Whether a function can be called with `n` arguments."""
    arguments = function.args
    is_static = any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list
    )
    most = len(arguments.posonlyargs) + len(arguments.args) - (is_method and not is_static)
    return most - len(arguments.defaults) <= n and (n <= most or arguments.vararg is not None)
