"""Everything that the documentation names exists: commands, files, keys."""

import json
import pathlib
import re
from importlib.util import find_spec

import numpy as np
import pytest

from jaxrl.algorithms.table import lookup
from jaxrl.algorithms.user_rows import TABLES, check_user_rows
from jaxrl.config.choices import REWARDS
from jaxrl.config.command_line import override
from jaxrl.config.config_file import load_config
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import check_devices, default_config, resolve
from jaxrl.config.schema import find_key, keys
from jaxrl.data.sources.files import read_rows
from jaxrl.planner.chips import split_name
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.options import read as read_plan_arguments
from jaxrl.rewards.functions import load_reward
from scripts import config_gallery, draw_step
from scripts.pages import combinations, presets
from scripts.pages import config as config_page
from scripts.pages import models as models_page

ROOT = pathlib.Path(__file__).parents[1]
KEYS = keys(RunConfig)
GENERATED = ROOT / "docs" / "reference" / "api"  # a build of the site writes it
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != GENERATED),
]
MODEL_PAGES = "run: python -m scripts.pages.models"
MADE_BY_A_RUN = ("runs/", "data/", "checkpoints/")


def names(pattern: str, page: pathlib.Path) -> list[str]:
    return re.findall(pattern, page.read_text())


def test_config_page_is_up_to_date():
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    assert page == config_page.markdown(), (
        "run: python -m scripts.pages.config > docs/reference/config.md"
    )


def test_every_page_is_in_a_table_of_contents():
    docs = ROOT / "docs"
    pages = {page: page.read_text() for page in PAGES if docs in page.parents}
    listed = {docs / "index.md"}
    for page, text in pages.items():
        for block in re.findall(r"```{toctree}\n(.*?)```", text, re.DOTALL):
            names = [line for line in block.splitlines() if line[:1] not in ("", ":")]
            listed |= {page.parent / f"{name}.md" for name in names}
    assert not set(pages) - listed


def test_the_gallery_of_configs_is_up_to_date():
    page = (ROOT / "docs" / "reference" / "configs.md").read_text()
    assert page == config_gallery.page(), (
        "run: scripts/config_gallery.py > docs/reference/configs.md"
    )
    files = [*(ROOT / "configs").glob("*.py"), *(ROOT / "configs" / "bench").glob("*.py")]
    assert page.count("### `configs/") == len(files)


def test_the_pages_of_models_have_every_family_and_its_settings():
    folder = models_page.FOLDER
    assert (folder / "README.md").read_text() == models_page.index(), MODEL_PAGES
    pages = {path.stem for path in folder.glob("*.md")} - {"README"}
    assert pages == set(models_page.FAMILIES), MODEL_PAGES
    for name, family in models_page.FAMILIES.items():
        page = (folder / f"{name}.md").read_text()
        assert page.startswith(models_page.introduction(family)), MODEL_PAGES
        assert re.findall("^## (.*)", page, re.MULTILINE) == list(family.models), MODEL_PAGES
    model = "google/gemma-3-1b-it"
    keys, shown = models_page.WEIGHTS["LoRA"], "1 H100 (80 GB) | LoRA"
    row = models_page.row(model, model_shape(model), "h100:1", shown, keys)
    assert row in (folder / "gemma3.md").read_text(), MODEL_PAGES


def test_every_row_of_a_model_is_a_command_for_its_devices():
    rows = set()  # (options, devices); models differ in the mesh and memory only
    for name in models_page.FAMILIES:
        tables = (models_page.FOLDER / f"{name}.md").read_text()
        rows |= set(re.findall(r"^\| (\S.*?) \| (?:.*?\| ){3}`(--.*)` \|$", tables, re.MULTILINE))
    assert len(rows) > 100
    topologies = {shown: name for name, shown in (models_page.DEVICES | models_page.LARGE).items()}
    for shown, options in rows:
        topology = topologies[shown]
        command = ["--config=configs/grpo.py", *options.split(), f"--topology={topology}"]
        check_devices(read_plan_arguments(command).cfg, split_name(topology)[1])


def test_the_page_of_a_model_is_up_to_date():
    page = (models_page.FOLDER / "smollm2.md").read_text()
    assert page == models_page.page(models_page.FAMILIES["smollm2"]), MODEL_PAGES


@pytest.mark.parametrize("name", ["training_step", "data_flow"])
def test_pictures_are_up_to_date(name):
    drawn = getattr(draw_step, name)()
    assert (ROOT / "docs" / f"{name}.svg").read_text() == drawn, "run: scripts/draw_step.py docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_named_exists(page):
    for module in names(r"python -m ([a-z_]+(?:\.[a-z_]+)+)", page):
        assert find_spec(module), f"{page.name} names the module {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_named_exists(page):
    rooms = "jaxrl|sharding|configs|scripts|tests|docs"
    found = names(rf"(?<![\w/.])((?:{rooms})/[\w./-]*\w/?)", page)
    found += [link for link in names(r"\]\(([^)#:]+)\)", page) if not link.startswith("http")]
    for name in found:
        places = [ROOT / name, page.parent / name]
        assert any(place.exists() for place in places), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_override_and_config_named_exists(page):
    for name in names(r"--config\.([a-z_.0-9]+)", page):
        known = name == "help" or find_key(name.rstrip("."), KEYS)
        assert known, f"{page.name} names --config.{name}"
    for file in names(r"--config=(configs/\w+\.py)", page):
        assert (ROOT / file).is_file(), f"{page.name} names {file}"


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub and the site give to the page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_anchor_linked_exists(page):
    for name, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        target = page.parent / name if name else page
        assert anchor in anchors(target), f"{page.name} links to {name}#{anchor}"


SECTIONS = "|".join(sorted({name.split(".")[0] for name in KEYS if "." in name}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_named_in_backticks_exists(page):
    if page.name in ("keys.md", "algorithms.md", "LOG.md"):  # other projects' and earlier keys
        return
    for name in names(rf"`((?:{SECTIONS})\.[a-z_0-9.]+)(?:=[^`]*)?`", page):
        if name == "score.weight":  # a tensor
            continue
        if name.endswith((".py", ".md", ".jsonl", ".html", ".json", ".jinja")):
            continue
        sections = {".".join(key.split(".")[:2]) for key in KEYS}
        assert find_key(name, KEYS) or name in sections, f"{page.name} names {name}"


ALGORITHMS = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
CHOICES = {key: names for key, names in combinations.NAMES.items() if key != "old_logp"}


@pytest.mark.parametrize("key", CHOICES)
def test_the_page_of_algorithms_has_a_row_for_every_name(key):
    table = [line for line in ALGORITHMS.splitlines() if line.startswith("| ")]
    for name in CHOICES[key]:
        choice = f"`algorithm.{key}={name}`"
        assert any(choice in line.split("|")[2] for line in table), f"add a row for {choice}"


@pytest.mark.parametrize("section", [combinations, presets], ids=["combinations", "presets"])
def test_the_printed_tables_of_the_page_of_algorithms_are_up_to_date(section):
    assert section.markdown() in ALGORITHMS, f"insert the output of: python -m {section.__name__}"


def test_the_page_of_algorithms_sets_keys_that_exist_to_values_they_take():
    config = default_config()
    for name, value in re.findall(
        r"`((?:algorithm|critic|data|reward|rollout)(?:\.\w+)+)=([^`]*)`", ALGORITHMS
    ):
        override(config, name, value)
        spec = KEYS[name]
        assert not spec.choices or value in spec.choices, f"{name}={value}"


def test_every_key_of_the_algorithm_is_on_the_page_of_algorithms():
    missing = [n for n in KEYS if n.startswith("algorithm.") and f"`{n}" not in ALGORITHMS]
    assert not missing, f"say in docs/reference/algorithms.md what {missing} are for"


def write_files(page: str, folder: pathlib.Path) -> None:
    """Writes the Python blocks of a page that begin with the name of their file."""
    for text in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        if name := re.match(r"# (\w+\.py)\n", text):
            (folder / name[1]).write_text(text)


@pytest.mark.parametrize(
    "page, name", [("README.md", "my_run"), ("docs/how_to/migrating.md", "my_grpo")]
)
def test_the_config_of_a_page_resolves(page, name, tmp_path):
    write_files(page, tmp_path)
    assert resolve(load_config(str(tmp_path / f"{name}.py"))).name == name


def test_the_four_pieces_of_an_experiment_in_the_readme_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files("README.md", tmp_path)
    row = json.loads(names(r"```json\n(.*?)\n```", ROOT / "README.md")[0])
    pathlib.Path("train.jsonl").write_text(json.dumps(row))
    run = resolve(load_config("my_run.py"))
    assert [found for _, found in read_rows(run.data.train[0])] == [row]
    score = load_reward(run.reward.functions[0])
    assert (score("", " 312", "312"), score("", "95", "312")) == (1.0, 0.0)
    check_user_rows(run)
    loss = lookup(TABLES["policy_loss"], run.algorithm.policy_loss, "algorithm.policy_loss")
    # ratios 3 and 1, the first truncated to 2: -2 * 1 * -1.5 and -1 * -1 * -0.5
    inputs = np.log([[3.0, 1.0]]), np.array([[-1.5, -0.5]]), np.array([[1.0, -1.0]])
    np.testing.assert_allclose(loss.function(*inputs), [[3.0, -0.5]], rtol=1e-6)


METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()
METRIC_GROUPS = (
    "buffer|critic|data|env|loss|mismatch|optim|perf|preference|reward|rollout|router|staleness|"
    "time|val"
)


def metric_names() -> set[str]:
    """Every metric name that is a string in jaxrl, and time/<phase>_s of every timed phase."""
    found = set()
    for file in (ROOT / "jaxrl").rglob("*.py"):
        text = file.read_text()
        found |= set(re.findall(rf'(?<!f)"((?:{METRIC_GROUPS})/[a-z][a-z_0-9]*)"', text))
        found |= {f"time/{phase}_s" for phase in re.findall(r'\.timed\(\s*"(\w+)"', text)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_named_exists(page):
    """Metrics of the tables are checked below; those of earlier releases are in the log."""
    if page.name in ("LOG.md", "metrics.md"):
        return
    found = names(rf"`((?:{METRIC_GROUPS})/[a-z][a-z_0-9]*)`", page)
    of_functions = {f"reward/{name}" for name in (*REWARDS, "reward_model")}
    unknown = {name for name in found if f"`{name}`" not in METRICS} - of_functions
    assert not unknown, f"{page.name} names {unknown}"


def test_every_logged_metric_is_on_the_page_of_metrics():
    names = metric_names()
    assert len(names) > 70
    missing = [name for name in sorted(names) if f"`{name}`" not in METRICS]
    assert not missing, f"add {missing} to docs/reference/metrics.md"


def test_the_page_of_metrics_names_no_other_metric():
    code = "\n".join(file.read_text() for file in (ROOT / "jaxrl").rglob("*.py"))
    for name in re.findall(r"^\| `([a-z]+/[a-z_0-9]+)`", METRICS, re.MULTILINE):
        short = name.split("/")[1].removesuffix("_s")
        assert f'"{name}"' in code or f'"{short}"' in code, f"{name} is not logged"
