"""Writes tests/migrate/keys/*.tsv: the settings of other frameworks, as their packages define them.

    pip download --no-deps --dest=WHEELS verl==0.9.1 openrlhf==0.11.2 trl==1.16.0 \\
        transformers==5.17.0 google-tunix==0.1.7
    python scripts/make_framework_keys.py WHEELS PRIME-RL.git

The wheels are read, not installed; the second argument is a git directory of prime-rl. A file's
first line has the package and its version, the others a key, its default (Python source, as
written there) and the programs that have the key with this default.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "tests" / "migrate" / "keys"
Rows = Iterator[tuple[str, str, str]]  # key, default, program

VERL = {  # program: its YAML files, each overriding those before it
    "ppo": ("_generated_ppo_trainer",),
    "ppo_megatron": ("_generated_ppo_megatron_trainer",),
    "ppo_veomni": ("_generated_ppo_veomni_trainer",),
    "ppo_torchtitan": ("_generated_ppo_torchtitan_trainer",),
    "fully_async": ("fully_async_ppo_trainer",),
    "one_step_off": ("one_step_off_ppo_trainer",),
    "sft": ("sft_trainer_engine",),
}
VERL_SECTIONS = {  # of the SFT config: files by section
    "model": ("model/hf_model",),
    "engine": tuple(
        f"engine/{n}" for n in ("fsdp", "megatron", "veomni", "torchtitan", "automodel")
    ),
    "optim": tuple(f"optim/{n}" for n in ("fsdp", "megatron", "veomni", "torchtitan", "automodel")),
    "profiler": ("profiler/profiler",),
}
OPENRLHF = {"ppo": "train_ppo_ray", "sft": "train_sft", "dpo": "train_dpo", "rm": "train_rm"}
TRL = {
    "grpo": ("GRPOConfig", "GRPOScriptArguments"),
    "rloo": ("RLOOConfig", "RLOOScriptArguments"),
    "sft": ("SFTConfig",),
    "dpo": ("DPOConfig",),
    "kto": ("KTOConfig",),
    "reward": ("RewardConfig",),
    "all": ("ModelConfig", "ScriptArguments", "DatasetMixtureConfig"),
}
TUNIX_BASES = (  # files of the classes' bases
    "rl/algorithm_config.py",
    "rl/agentic/agentic_rl_learner.py",
    "rl/grpo/grpo_learner.py",
    "sft/peft_trainer.py",
)
TUNIX = {  # program: file and class
    "grpo": ("rl/grpo/grpo_learner.py", "GRPOConfig"),
    "agentic_grpo": ("rl/agentic/agentic_grpo_learner.py", "GRPOConfig"),
    "dapo": ("rl/grpo/dapo_learner.py", "DAPOConfig"),
    "dr_grpo": ("rl/grpo/drgrpo_learner.py", "DrGRPOConfig"),
    "ppo": ("rl/ppo/ppo_learner.py", "PPOConfig"),
    "training": ("rl/rl_cluster.py", "RLTrainingConfig"),
    "cluster": ("rl/rl_cluster.py", "ClusterConfig"),
    "rollout": ("rl/rollout/base_rollout.py", "RolloutConfig"),
    "dpo": ("sft/dpo/dpo_trainer.py", "DPOTrainingConfig"),
}
PRIME_RL = {"rl": ("rl", "RLConfig"), "sft": ("sft", "SFTConfig")}
PRIME_RL_CONFIGS = "packages/prime-rl-configs/src/prime_rl/configs/"


def wheel(folder: Path, name: str) -> tuple[str, dict[str, str]]:
    """Version and texts by path of a downloaded wheel."""
    (path,) = folder.glob(f"{name}-*.whl")
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.endswith((".py", ".yaml"))]
        return path.name.split("-")[1], {n: archive.read(n).decode() for n in names}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif name != "_target_":  # the class that Hydra makes of a section
            yield f"{prefix}{name}", repr(value)


def verl(files: Mapping[str, str]) -> Rows:
    yamls = {n: text for n, text in files.items() if n.endswith(".yaml")}
    by_name = {n.split("/config/")[-1].removesuffix(".yaml"): t for n, t in yamls.items()}
    for program, names in VERL.items():
        for name in names:
            tree = yaml.safe_load(by_name[name])
            for dropped in ("defaults", "hydra"):
                tree.pop(dropped, None)
            yield from ((key, value, program) for key, value in flat(tree))
    for section, names in VERL_SECTIONS.items():
        for name in names:
            tree = yaml.safe_load(by_name[name])
            tree.pop("defaults", None)
            yield from ((key, value, "sft") for key, value in flat(tree, f"{section}."))


def openrlhf(files: Mapping[str, str]) -> Rows:
    for program, name in OPENRLHF.items():
        text = next(t for n, t in files.items() if n.endswith(f"/cli/{name}.py"))
        yield from ((k, v, program) for k, v in flags(ast.parse(text), {}))


def flags(node: ast.AST, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Flags and defaults of the add_argument calls in a tree; f-strings of a loop's values too."""
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
        assert isinstance(node.target, ast.Name)
        for value in ast.literal_eval(node.iter):
            for statement in node.body:
                yield from flags(statement, {**known, node.target.id: value})
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
        name = eval(ast.unparse(node.args[0]), {}, dict(known))
        options = {k.arg: k.value for k in node.keywords}
        default = options.get("default")
        absent = "False" if "action" in options else "None"
        yield name.lstrip("-"), absent if default is None else ast.unparse(default)
    for child in ast.iter_child_nodes(node):
        yield from flags(child, known)


def classes(*texts: str) -> dict[str, ast.ClassDef]:
    found: dict[str, ast.ClassDef] = {}
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, node)
    return found


def fields(name: str, known: Mapping[str, ast.ClassDef]) -> dict[str, ast.AnnAssign]:
    """Annotated fields of a class and of its bases, where these are known."""
    found: dict[str, ast.AnnAssign] = {}
    node = known[name]
    for base in node.bases:
        inherited = ast.unparse(base).rsplit(".", 1)[-1]
        if inherited in known and inherited != name:
            found |= fields(inherited, known)
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation):
            found[ast.unparse(one.target)] = one
    return found


def default(node: ast.AnnAssign) -> str:
    """Python source of a field's default: of field(default=X) and Field(X) that is X."""
    value = node.value
    if (
        isinstance(value, ast.Call)
        and ast.unparse(value.func).rsplit(".", 1)[-1].lower() == "field"
    ):
        given = {k.arg: k.value for k in value.keywords}
        value = given.get("default", given.get("default_factory", (value.args or [None])[0]))
    return "" if value is None else " ".join(ast.unparse(value).split())


def trl(files: Mapping[str, str], transformers: Mapping[str, str]) -> Rows:
    modules = re.compile(r"trl/(trainer/\w+_config|scripts/(utils|grpo|rloo))\.py")
    texts = [text for name, text in files.items() if modules.fullmatch(name)]
    known = classes(transformers["transformers/training_args.py"], *sorted(texts))
    for program, names in TRL.items():
        for name in names:
            yield from ((k, default(v), program) for k, v in fields(name, known).items())


def tunix(files: Mapping[str, str]) -> Rows:
    for program, (path, name) in TUNIX.items():
        known = classes(*(files[f"tunix/{n}"] for n in (path, *TUNIX_BASES)))
        yield from ((k, default(v), program) for k, v in fields(name, known).items())


class Module:
    """Names of a module of prime-rl's configs: its classes, its aliases, what it imports."""

    def __init__(self, text: str):
        self.classes = classes(text)
        self.aliases: dict[str, ast.expr] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in ast.parse(text).body:
            if (
                isinstance(node, ast.AnnAssign)
                and node.value
                and ast.unparse(node.annotation) == "TypeAlias"
            ):
                self.aliases[ast.unparse(node.target)] = node.value
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "prime_rl.configs."
            ):
                origin = str(node.module).rsplit(".", 1)[-1]
                self.imports |= {one.asname or one.name: (origin, one.name) for one in node.names}


Modules = Mapping[str, Module]
Field = tuple[str, ast.AnnAssign]  # with the module that has it


def prime_rl(modules: Modules) -> Rows:
    for program, (module, name) in PRIME_RL.items():
        yield from ((k, v, program) for k, v in settings(module, name, modules, ""))


def settings(module: str, name: str, modules: Modules, prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted keys of a model; those of every model that a field's annotation names."""
    for key, (home, node) in model_fields(module, name, modules).items():
        inner = list(dict.fromkeys(model_names(node.annotation, home, modules)))
        annotation = ast.unparse(node.annotation)
        ending = "[]" if re.search(r"list\[", annotation) and inner else ""
        ending = ".NAME" if re.search(r"dict\[", annotation) and inner else ending
        for where, one in inner:
            yield from settings(where, one, modules, f"{prefix}{key}{ending}.")
        if not inner or default(node) == "None":
            yield f"{prefix}{key}{ending}", default(node)


def model_fields(module: str, name: str, modules: Modules) -> dict[str, Field]:
    found: dict[str, Field] = {}
    node = modules[module].classes[name]
    for base in node.bases:
        for where, one in model_names(base, module, modules):
            found |= model_fields(where, one, modules)
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation):
            found[ast.unparse(one.target)] = (module, one)
    return found


def model_names(node: ast.expr, module: str, modules: Modules) -> Iterator[tuple[str, str]]:
    """The models that an annotation names, through aliases and imports."""
    for one in ast.walk(node):
        name = one.id if isinstance(one, ast.Name) else ""
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            name = one.value.partition(" ")[0]  # a forward reference
        where = modules[module]
        if name in where.classes:
            yield module, name
        elif name in where.aliases:
            yield from model_names(where.aliases[name], module, modules)
        elif name in where.imports:
            origin, original = where.imports[name]
            yield from model_names(ast.Name(original), origin, modules)


def clone(folder: str) -> tuple[str, dict[str, Module]]:
    """Version and config modules of prime-rl."""

    def git(*arguments: str) -> bytes:
        command = ["git", "--git-dir", folder, *arguments]
        return subprocess.run(command, check=True, capture_output=True).stdout

    project = git("show", "HEAD:pyproject.toml").decode()
    version = re.findall(r'^version = "(.*)"', project, re.MULTILINE)[0]
    commit = git("rev-parse", "--short=12", "HEAD").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD", PRIME_RL_CONFIGS))) as archive:
        texts = {m.name: archive.extractfile(m) for m in archive if m.name.endswith(".py")}
        found = {Path(n).stem: Module(t.read().decode()) for n, t in texts.items() if t}
    return f"{version} ({commit})", found


def write(name: str, package: str, rows: Rows) -> None:
    programs: dict[tuple[str, str], dict[str, None]] = {}
    for key, value, program in rows:
        programs.setdefault((key, value), {})[program] = None
    lines = [f"{k}\t{v}\t{' '.join(p)}" for (k, v), p in sorted(programs.items())]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.tsv").write_text("\n".join([package, *lines, ""]))


def main(folder: str, repository: str) -> None:
    readers = {"verl": verl, "openrlhf": openrlhf, "tunix": tunix}
    packages = {"verl": "verl", "openrlhf": "openrlhf", "tunix": "google_tunix"}
    for name, reader in readers.items():
        version, files = wheel(Path(folder), packages[name])
        write(name, f"{packages[name].replace('_', '-')} {version}", reader(files))
    version, files = wheel(Path(folder), "trl")
    base, transformers = wheel(Path(folder), "transformers")
    write("trl", f"trl {version}, transformers {base}", trl(files, transformers))
    version, modules = clone(repository)
    write("prime_rl", f"prime-rl {version}", prime_rl(modules))


if __name__ == "__main__":
    main(*sys.argv[1:])
