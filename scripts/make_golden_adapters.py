"""Writes adapters of PEFT for the tiny checkpoints of the model tests, or checks jaxrl's in PEFT.

tests/models/golden_adapters/<name>/ has an adapter for every checkpoint in tests/models/golden/
whose linear layers are not those of others, saved by PEFT, and the logits of PEFT's torch model;
<name>_dora/ has one of DoRA. Those of image-and-text checkpoints are of the language model, in the
class of transformers with the tower. <name>_experts/ has one of the experts and of q_proj, with a
tensor per expert: PEFT reads this format and does not write it, because transformers 5 fuses the
experts. <name>_tables/ has one of the embedding table, the output head and q_proj. <name>_scores/
has one of a classifier in tests/models/golden_scores/, with its trained score head, and the score
of each token. <name>_tower/ has one of q_proj and of the tower and projector of a checkpoint in
tests/models/vision/golden/, and the features of images as scripts/make_golden_towers.py writes
them. Folders that exist are kept. With --check=FOLDER, it loads the adapters in
FOLDER/<name> into the checkpoints and compares the logits, scores or features with those in their
golden files.

torch and peft are not dependencies of the project; run this in a separate environment:
    python -m venv /tmp/peft && /tmp/peft/bin/pip install torch peft transformers safetensors numpy
    /tmp/peft/bin/python scripts/make_golden_adapters.py tests/models
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import transformers
from make_golden_towers import WRITERS, packed_images
from peft import LoraConfig, PeftModel, get_peft_model  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file, save_file

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LINEAR_ATTENTION = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
# The names of its MLPs are those of experts for PEFT, which reads no others.
QWEN3_NEXT = [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"]
LATENT = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
TARGETS = {  # of checkpoints with other layers
    "qwen3_5": [*ATTENTION, *MLP, *LINEAR_ATTENTION],
    "qwen3_5_moe": [*ATTENTION, *MLP, *LINEAR_ATTENTION, "shared_expert_gate"],  # not experts
    "qwen3_next": QWEN3_NEXT,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "glm4": [*ATTENTION, "gate_up_proj", "down_proj"],
    "gpt_oss": ATTENTION,  # its experts are in one tensor
    "starcoder2": [*ATTENTION, "c_fc", "c_proj"],
    "deepseek_v3": ["q_proj", *LATENT],
    "glm4_moe_lite": ["q_a_proj", "q_b_proj", *LATENT],
    "gemma4_moe": [*ATTENTION, *MLP],  # the MLP next to the experts
    "gemma4_shared": [*ATTENTION, *MLP, "per_layer_input_gate", "per_layer_projection"],
    "lfm2": [*ATTENTION[:3], "in_proj", "out_proj", "w1", "w2", "w3"],
}
# Checkpoints without an adapter: their linear layers are those of others.
WITHOUT = ("cohere2", "exaone4", "gemma", "granite", "ministral3", "olmo2", "olmo3")
WITHOUT += ("gemma4_unified", "mistral3", "muse_glimmer", "qwen2_moe", "seed_oss", "smollm3")
IMAGE_AND_TEXT = ("qwen2_5_vl", "qwen3_vl")
DORA = ("gemma2", "mixtral", "qwen2", "qwen3_5")  # checkpoints with a DoRA adapter
EXPERTS = ("mixtral", "qwen3_moe")  # checkpoints with adapters of experts
TABLES = ("llama", "qwen2")  # checkpoints with adapters of the embedding table and the output head
SCORES = ("llama", "qwen2")  # classifiers with an adapter
TOWERS = {  # checkpoints of tests/models/vision/golden with adapters of the tower
    "qwen3_vl": r"visual\.(blocks|merger|deepstack_merger_list)\..*(qkv|proj|fc\d)",
    "gemma4_limits": r"vision_tower\.encoder\..*\.linear|model\.embed_vision\..*_projection",
}
GOLDEN_TOWER = "golden_tower.npz"
SHOWN = slice(None, None, 5)  # positions whose logits are kept


def base_folder(models: Path, case: str, name: str) -> Path:
    if case.endswith("_tower"):
        return models / "vision" / "golden" / name
    return models / ("golden_scores" if case.endswith("_scores") else "golden") / name


def base_model(folder: Path) -> torch.nn.Module:
    is_classifier = folder.parent.name == "golden_scores"
    kind = "SequenceClassification" if is_classifier else "CausalLM"
    with_images = folder.name in IMAGE_AND_TEXT or folder.parents[1].name == "vision"
    kind = "ImageTextToText" if with_images else kind
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def outputs(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The logits of the shown positions, or a classifier's scores of all, without its pooling."""
    inputs = torch.from_numpy(tokens).long()
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    with torch.no_grad():
        if hasattr(model, "score"):
            return {"scores": model.score(model.model(inputs)[0])[..., 0].numpy()}
        return {"logits": model(inputs).logits.numpy()[:, SHOWN]}


def images(model: PeftModel) -> dict[str, np.ndarray]:
    """The patches of images and their features."""
    base = model.get_base_model()
    kind = base.config.vision_config.model_type
    with torch.no_grad():
        return WRITERS.get(kind, packed_images)(base, np.random.default_rng(0))


def write(models: Path, seed: int, case: str, name: str, **settings) -> None:
    """Dense models have adapters on all linear layers; most mixtures of experts on attention."""
    dense = "mixtral" not in name and "moe" not in name
    targets = TARGETS.get(name, ATTENTION + MLP * dense)
    if name in IMAGE_AND_TEXT:  # towers have layers of the same names
        targets = rf"model\.language_model\..*\.({'|'.join(targets)})"
    source = base_folder(models, case, name)
    settings = dict(target_modules=targets, task_type="CAUSAL_LM") | settings
    model = get_peft_model(base_model(source), LoraConfig(r=4, lora_alpha=6, **settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter, weight in model.named_parameters():
        if "lora_B" in parameter or "lora_embedding_A" in parameter:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
        if "lora_magnitude_vector" in parameter:
            weight.data *= 1 + 0.3 * torch.randn(weight.shape, generator=generator)
        if "modules_to_save" in parameter:  # the score head
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    target = models / "golden_adapters" / case
    model.save_pretrained(target)
    (target / "README.md").unlink(missing_ok=True)
    if case.endswith("_tower"):
        np.savez_compressed(target / GOLDEN_TOWER, allow_pickle=False, **images(model))
        return
    np.savez(
        target / "golden.npz",
        allow_pickle=False,
        **outputs(model, np.load(source / "golden.npz")["tokens"]),
    )


def write_experts(models: Path, seed: int, case: str, name: str) -> None:
    """An adapter of rank 4 and scale 3/2 of every expert and of q_proj."""
    rng, source = np.random.default_rng(seed), models / "golden" / name
    base = load_file(source / "model.safetensors")
    chosen = [key for key in base if ".experts." in key or key.endswith("q_proj.weight")]
    tensors = {}
    for key in chosen:
        out, into = base[key].shape
        a, b = rng.uniform(-1, 1, (4, into)) * into**-0.5, 0.3 * rng.normal(size=(out, 4))
        for part, values in (("A", a), ("B", b)):
            lora = f"base_model.model.{key.removesuffix('weight')}lora_{part}.weight"
            tensors[lora] = values.astype(np.float32)
    target = models / "golden_adapters" / case
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 6,
        "target_modules": sorted({key.split(".")[-2] for key in chosen}),
    }
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2))
    tokens = np.load(source / "golden.npz")["tokens"]
    model = PeftModel.from_pretrained(base_model(source), str(target)).eval()
    np.savez(target / "golden.npz", allow_pickle=False, **outputs(model, tokens))


def check(models: Path, case: str, name: str, folder: Path) -> None:
    source = base_folder(models, case, name)
    if case.endswith("_tower"):
        expected = np.load(models / "golden_adapters" / case / GOLDEN_TOWER)["features"]
        model = PeftModel.from_pretrained(base_model(source), str(folder / case)).eval()
        worst = np.abs(images(model)["features"] - expected).max()
        print(f"{case}: features differ by {worst:.1e}")
        assert worst < 2e-4
        return
    saved = np.load(folder / case / "golden.npz")
    base, tokens = base_model(source), np.load(source / "golden.npz")["tokens"]
    [(kind, before)] = outputs(base, tokens).items()
    found = outputs(PeftModel.from_pretrained(base, str(folder / case)).eval(), tokens)[kind]
    worst, change = np.abs(found - saved[kind]).max(), np.abs(found - before).max()
    print(f"{case}: {kind} differ by {worst:.1e}, the adapter changes them by {change:.1e}")
    assert worst < 2e-4


def main() -> None:
    models, *options = sys.argv[1:]
    names = sorted({path.name for path in (Path(models) / "golden").iterdir()} - {*WITHOUT})
    cases = {name: (name, {"use_rslora": i % 2 == 1}) for i, name in enumerate(names)}
    cases |= {f"{name}_dora": (name, {"use_dora": True}) for name in DORA}
    cases |= {f"{name}_experts": (name, {}) for name in EXPERTS}
    targets = ["embed_tokens", "lm_head", "q_proj"]
    cases |= {f"{name}_tables": (name, {"target_modules": targets}) for name in TABLES}
    cases |= {f"{name}_scores": (name, {"task_type": "SEQ_CLS"}) for name in SCORES}
    text = r"model\.language_model\..*\.q_proj"
    cases |= {
        f"{name}_tower": (name, {"target_modules": f"{text}|model\\.{tower}"})
        for name, tower in TOWERS.items()
    }
    checked = Path(options[0].removeprefix("--check=")) if options else None
    for seed, (case, (name, settings)) in enumerate(cases.items()):
        if checked is not None:
            if (checked / case).is_dir():
                check(Path(models), case, name, checked)
        elif not (Path(models) / "golden_adapters" / case).is_dir():
            make = write_experts if case.endswith("_experts") else write
            make(Path(models), seed, case, name, **settings)


if __name__ == "__main__":
    main()
