"""Tests of jaxrl/migrate/shell.py: what a script runs, without running it."""

import pytest

from jaxrl.migrate.shell import EvaluatedScript, evaluate
from jaxrl.migrate.shell_expansion import causes, shown

HOME = {"HOME": "/home/me"}


def run(script: str, **options) -> EvaluatedScript:
    return evaluate(script, environment=options.pop("environment", HOME), **options)


def words(script: str, **options) -> list[str]:
    """The words of the last command, with marks as a shell writes them."""
    return [shown(word) for word in run(script, **options).runs[-1].words]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("X=a; run $X ${X} \"$X\" '$X'", ["run", "a", "a", "a", "$X"]),
        ("export X=a\nrun x=${X}b", ["run", "x=ab"]),
        ("run ${X:-d} ${X-d} ${X:+d}", ["run", "d", "d"]),
        ("X=; run ${X:-d} ${X-d}", ["run", "d"]),
        (": ${X:=d}; run $X", ["run", "d"]),
        ("run ${X:-$HOME/data}", ["run", "/home/me/data"]),
        ("run ~/data a=~", ["run", "/home/me/data", "a=~"]),
        ("X='a  b'; run $X \"$X\"", ["run", "a", "b", "a  b"]),
        ("run a\\\n  b \\\n  c", ["run", "a", "b", "c"]),
        ("run a # b\nrun c", ["run", "c"]),
        ("A=(a 'b c')\nA+=(d)\nrun \"${A[@]}\" ${#A[@]} \"${A[1]}\"",
         ["run", "a", "b c", "d", "3", "b c"]),
        ("A=(\n  a # it's \"a\" comment\n  b\n)\nrun \"${A[@]}\"", ["run", "a", "b"]),
        ("A=()\nrun \"${A[@]}\" x", ["run", "x"]),
        ("N=3; run $((N * (2 + 1))) $(( (1024 * 2) / N % 5 ))", ["run", "9", "2"]),
        ("N=$((1024 * 4)); M=$((N > 4000 ? 1 : 0))\nrun $N", ["run", "4096"]),
        ("F=a/b.tar.gz; run ${F%.*} ${F%%.*} ${F##*/} ${F#*/}",
         ["run", "a/b.tar", "a/b", "b.tar.gz", "b.tar.gz"]),
        ("F=Qwen-A; run ${F/-/_} ${F,,} ${F^^} ${F:0:4}",
         ["run", "Qwen_A", "qwen-a", "QWEN-A", "Qwen"]),
        ("X=Y; Y=z; run ${!X}", ["run", "z"]),
        ("L=\"['$HOME/a', 'b']\"; run files=\"$L\"", ["run", "files=['/home/me/a', 'b']"]),
        ("run x='[\"console\",\"wandb\"]'", ["run", 'x=["console","wandb"]']),
        ("A=1 B=2 run c 2>&1 | tee log", ["tee", "log"]),
        ("cat > f <<EOF\nrun it's here\nEOF\nrun b >out 2>&1 <in", ["run", "b"]),
        ("read -r -d '' X <<EOF\na $HOME\n b\nEOF\nrun $X", ["run", "a", "/home/me", "b"]),
        ("srun bash -c \"run a b\"", ["run", "a", "b"]),
        ("cd x && pip install y && run a", ["run", "a"]),
        ("make || exit 1\nrun a", ["run", "a"]),
        ("X=1; f() { X=2; }\nfunction g { X=3; }\nrun $X", ["run", "1"]),
        ("for x in a b; do run $x; done", ["run", "b"]),
    ],
)  # fmt: skip
def test_a_command_has_the_words_that_the_shell_would_give_it(script, expected):
    assert words(script) == expected


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[ "$X" = a ]', True),
        ('[ "$X" != a ]', False),
        ("[[ $X == a* && -n $X ]]", True),
        ('[ -z "$UNSET" ]', True),
        ("[ $N -gt 1 ] && [ $N -le 2 ]", True),
        ("[[ ! $N -eq 2 ]]", False),
        ("(( N % 2 == 0 ))", True),
        ('[ "$X" = b ] || [ "$N" = 2 ]', True),
        ('[ "$X" = b ] && { [ "$N" = 2 ] || [ "$N" = 3 ]; }', False),
    ],
)
def test_conditions_of_known_values_select_a_branch(condition, holds):
    script = (
        f"X=a; N=2\nif {condition}; then Y=yes; elif [ 1 = 2 ]; then Y=2; else Y=no; fi\nrun $Y"
    )
    assert words(script) == ["run", "yes" if holds else "no"]


def test_case_takes_the_first_pattern_that_matches():
    script = 'case "$1" in\n a|b) X=1 ;;\n 8b-*) X=2 ;;\n *) X=3 ;;\nesac\nrun $X'
    assert [words(script, arguments=[a])[1] for a in ("b", "8b-chat", "z")] == ["1", "2", "3"]


def test_arguments_are_those_given_and_shift_drops_them():
    script = 'if [ "$#" -lt 2 ]; then echo usage; exit 1; fi\nN=$1\nshift 2\nrun n=$N "$@"'
    assert words(script, arguments=["8", "out", "a.b=1"]) == ["run", "n=8", "a.b=1"]
    found = run(script)  # the branch that ends the script is not taken
    assert [causes(word) for word in found.runs[-1].words] == [(), ("1",)]
    assert found.reasons["1"] == "an argument of the script, which is not given"


def test_what_only_a_run_knows_is_named_with_its_reason():
    script = "N=$(nproc)\nrun n=$N p=$PORT d=$(date) q=$((N * 2))"
    found = run(script)
    assert [causes(word) for word in found.runs[-1].words[1:]] == [
        ("N",), ("PORT",), ("$(date)",), ("N",),
    ]  # fmt: skip
    assert (
        found.reasons["N"].startswith("line 1: $(nproc)") and found.reasons["PORT"] == "is not set"
    )
    assert (
        words(script, given={"N": "4"})[1] == "n=4" and words(script, given={"N": "4"})[4] == "q=8"
    )
    assert words(script, environment={"PORT": "1"})[2] == "p=1"


def test_what_differs_between_branches_that_may_be_taken_is_marked():
    script = (
        "D=${D:-$(probe)}\nA=(same)\nX=1; Y=1\n"
        'case "$D" in\n gpu) A+=(k=1); X=2 ;;\n npu) A+=(k=2) ;;\nesac\n'
        'run "${A[@]}" x=$X y=$Y'
    )
    found = run(script).runs[-1].words
    assert found[:2] == ("run", "same") and found[-1] == "y=1"
    assert all(causes(word) == ("D",) for word in found[2:-1]) and len(found) == 6
    assert words(script, environment={"D": "gpu"}) == ["run", "same", "k=1", "x=2", "y=1"]


def test_a_command_in_a_branch_says_what_decides_it():
    runs = run("if [ $(probe) = 1 ]; then run a; else run b; fi").runs
    assert [r.words for r in runs] == [("run", "a"), ("run", "b")]
    assert all(r.depends_on == ("$(probe)",) for r in runs)


@pytest.mark.parametrize("script", ["run 'a", "A=(a", "if true; then run a", "run ${X"])
def test_an_incomplete_script_is_an_error(script):
    with pytest.raises(ValueError, match=r"never closed|ends before"):
        run(script)
