"""The teachers of a run: algorithm.teacher, and algorithm.more_teachers by data source."""

import dataclasses
import functools

from jaxrl.config.keys import AlgorithmConfig
from jaxrl.config.plugins import read_options
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class TeacherSettings:
    source: str = key("", "The rows with this data_source, whose responses the teacher reads")
    model: str = key("", "At an endpoint: name of the model; '' = the only one that it serves")


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model that scores the policy's responses: a folder or hub id, or the URL of a server."""

    key: str  # of the config that names it
    path: str
    options: TeacherSettings = TeacherSettings()

    @property
    def is_endpoint(self) -> bool:
        """Whether a server scores, and not a model on the devices of the run."""
        return self.path.startswith(("http://", "https://"))


def read_teacher(name: str, spec: str) -> tuple[Teacher, list[str]]:
    """(the teacher of "PATH?OPTION=VALUE&..." in config.`name`, one line per wrong option)."""
    options, errors = read_options(TeacherSettings, spec)
    teacher = Teacher(name, spec.partition("?")[0], options)
    if not errors and options.model and not teacher.is_endpoint:
        errors.append(f"{spec!r} names a model of a server, but no URL; leave out model")
    if not errors and name == "algorithm.teacher" and options.source:
        errors.append(
            f"{spec!r} reads all rows that no other teacher names; leave out source, or move it to "
            "algorithm.more_teachers"
        )
    if not errors and name == "algorithm.more_teachers" and not (options.source and teacher.path):
        errors.append(f"{spec!r} reads no rows; write it as 'PATH?source=DATA_SOURCE'")
    return teacher, errors


def teachers(cfg: AlgorithmConfig) -> tuple[Teacher, ...]:
    """algorithm.teacher first; () without one. Raises ValueError for a wrong option."""
    return _teachers(cfg.teacher, cfg.more_teachers)


@functools.cache
def _teachers(first: str, more: tuple[str, ...]) -> tuple[Teacher, ...]:
    named = [("algorithm.teacher", first)] if first else []
    read = [read_teacher(*one) for one in (*named, *(("algorithm.more_teachers", m) for m in more))]
    if errors := [line for _, lines in read for line in lines]:
        raise ValueError("; ".join(errors))
    return tuple(teacher for teacher, _ in read)


def model_teachers(cfg: AlgorithmConfig) -> dict[str, Teacher]:
    """The teachers on the devices of the run by role: "teacher", "teacher_2", ..."""
    found = [teacher for teacher in teachers(cfg) if not teacher.is_endpoint]
    return {f"teacher_{i + 1}" if i else "teacher": one for i, one in enumerate(found)}


def teacher_of(found: tuple[Teacher, ...], source: str) -> int:
    """Index of the teacher that reads responses to rows of a data source."""
    by_source = {teacher.options.source: i for i, teacher in enumerate(found)}
    return by_source.get(source, 0)
