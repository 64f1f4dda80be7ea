"""Tests of jaxrl/rewards/sandbox/seccomp.py: the filter's decisions, on both machines."""

import fcntl
import os

import pytest

from jaxrl.rewards.sandbox import seccomp

PERMIT, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
MACHINES = list(seccomp.ARCHITECTURES)
PROGRAMS = {machine: seccomp.filter_program(machine) for machine in MACHINES}


def decision(machine, number, *arguments, architecture=None):
    """The filter's result for a call: an interpreter of the instructions that it uses."""
    words = {0: number, 4: architecture or seccomp.ARCHITECTURES[machine]}
    for i, argument in enumerate((*arguments, *(0,) * (6 - len(arguments)))):
        words |= {16 + 8 * i: argument & 0xFFFFFFFF, 20 + 8 * i: argument >> 32}
    program, at, value = PROGRAMS[machine], 0, 0
    while True:
        operation, if_true, if_false, constant = program[at]
        at += 1
        match operation:
            case 0x20:
                value = words[constant]
            case 0x54:
                value &= constant
            case 0x05:
                at += constant
            case 0x15:
                at += if_true if value == constant else if_false
            case 0x35:
                at += if_true if value >= constant else if_false
            case 0x06:
                return constant


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_the_table_are_permitted_and_all_others_denied(machine):
    numbers = seccomp.call_numbers(machine)
    ruled = {numbers[name] for name in seccomp._RULES}
    for number in {*range(600), 0x40000000, 0x40000027, 0xFFFFFFFF} - ruled - {435}:
        permitted = number in numbers.values()
        assert decision(machine, number) == (PERMIT if permitted else EPERM), number
    assert decision(machine, 435) == ENOSYS  # clone3
    assert decision(machine, numbers["read"], architecture=0x40000003) == KILL  # 32-bit calls


HIGH = 1 << 32  # the kernel ignores it
CASES = {
    "clone": [((0x3D0F00,), True), ((17,), False), ((0x3C0F00,), False)],
    "prctl": [((15,), True), ((1,), False), ((4,), False), ((22,), False)],
    "prlimit64": [((0, 9), True), ((1, 9), False), ((HIGH, 9), True)],
    "ioctl": [((0, 0x5401), True), ((0, 0x5412), False), ((0, 0x5452 | HIGH), False)],
    "socketpair": [
        ((1, 1, 0), True),
        ((1, 1 | 0o2004000, 0), True),
        ((1, 2, 0), False),
        ((1, 5, 0), False),
        ((16, 3, 0), False),
    ],
    "fcntl": [
        ((0, fcntl.F_DUPFD_CLOEXEC), True),
        ((0, fcntl.F_SETLKW, 1 << 63 | 0x2000), True),
        ((0, fcntl.F_SETFL, os.O_NONBLOCK), True),
        ((0, fcntl.F_SETFL, os.O_ASYNC), False),
        ((0, fcntl.F_SETFL | HIGH, os.O_ASYNC | HIGH), False),
        *(((0, command), False) for command in (8, 9, 10, 11, 15, 1024, 1026, 8 | HIGH)),
    ],
}
RULES = [(name, *case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name, arguments, permitted", RULES)
def test_arguments_decide(machine, name, arguments, permitted):
    number = seccomp.call_numbers(machine)[name]
    assert decision(machine, number, *arguments) == (PERMIT if permitted else EPERM)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_number_is_in_the_table_twice(machine):
    numbers = seccomp.call_numbers(machine)
    assert len(set(numbers.values())) == len(numbers)
