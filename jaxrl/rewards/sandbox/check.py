"""Runs programs in the jail once, to learn before a run whether this machine can judge any."""

from jaxrl.rewards.sandbox.runner import SandboxLimits, run

_PROGRAM = "import random, threading\nprint(6 * int(input()))\ndef f(x): return [6 * x]"


def failure(*, unsafe: bool) -> str:
    """Why a right program would not get its score on this machine; "" if it would."""
    limits = SandboxLimits(wall_s=20.0)
    try:
        printed = run(_PROGRAM, stdin="7\n", limits=limits, unsafe=unsafe)
        program = _PROGRAM.replace("print(6 * int(input()))\n", "")
        called = run(program, call=("f", 7), imports=True, limits=limits, unsafe=unsafe)
        tested = run(program, test="assert f(7) == [42]", limits=limits, unsafe=unsafe)
    except OSError as error:
        return str(error)
    outcomes = {"it prints": printed, "a call": called, "a test": tested}
    outputs = [outcome.output.strip() for outcome in outcomes.values()]
    if outputs[:2] == ["42", "[42]"] and tested.end == "ok":
        return ""
    return f"a right program failed in the jail ({outcomes})"
