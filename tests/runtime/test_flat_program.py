"""Tests of jaxrl/runtime/flat_program.py."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.runtime.flat_program import FlatProgram, Flattened, flatten, unflatten

TREE = {"b": [jnp.ones(2), jnp.zeros(3)], "a": None}


def first(tree, x):
    return tree["b"][0] + x


def test_trees_and_flat_trees_run_one_program():
    program = FlatProgram(first)
    program.lower(TREE, np.float32(1)).compile()
    results = [program(tree, np.float32(1)) for tree in (TREE, flatten(TREE), TREE)]
    assert program.n_compiled == 1
    assert all((np.asarray(result) == 2).all() for result in results)


def test_another_structure_of_the_same_arrays_is_another_program():
    program = FlatProgram(lambda tree: jax.tree.leaves(tree)[0] + len(jax.tree.leaves(tree)))
    assert program([jnp.ones(2)])[0] == program((jnp.ones(2),))[0] == 2
    assert program.n_compiled == 2


def test_donated_trees_are_deleted_and_results_stay_flat():
    program = FlatProgram(lambda total, x: flatten([t + x for t in total]), donate_argnames="total")
    total = [jnp.zeros(4), jnp.ones(4)]
    new = program(total, np.float32(1))
    assert [t.is_deleted() for t in total] == [True, True]
    assert [float(t[0]) for t in program(new, np.float32(1)).leaves] == [2, 3]


def test_flat_trees_in_trees_become_trees():
    nested = flatten((flatten(TREE), 3))
    tree, three = unflatten(nested)
    assert tree["a"] is None and tree["b"] == TREE["b"] and three == 3


def test_programs_and_their_arguments_keep_the_names_of_the_trees():
    text = FlatProgram(first).lower(TREE, np.float32(1)).as_text(debug_info=True)
    assert "jit_first" in text and "\"tree.['b'][0]\"" in text.replace("\\", "")


def test_a_missing_argument_is_an_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        FlatProgram(first)(TREE)


def test_a_tree_is_flattened_once_and_not_kept_alive():
    class Model(dict):
        """A tree that weak references can refer to, as modules are."""

    jax.tree_util.register_pytree_node(
        Model, lambda model: (list(model.values()), tuple(model)), lambda keys, values: Model()
    )
    flat, model = Flattened(), Model(a=np.ones(3))
    array = weakref.ref(model["a"])
    assert flat(model) is flat(model)
    other = Model(a=np.zeros(2))
    assert flat(other).leaves[0] is other["a"] and flat(model).leaves[0] is model["a"]
    del model
    assert array() is None
