"""Foreign model files: what is not understood is named or refused, never read as something else."""

import json
import os
import shutil
import threading
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import jaxrl.models.files.gguf.conversion_cache as cache_module
from jaxrl import convert
from jaxrl.data import tokenizer_trial
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.data.tokenizer_trial import try_tokenizer
from jaxrl.models.files import peft_config
from jaxrl.models.files.adapter import (
    adapter_config,
    open_adapter,
    warn_of_other_base,
    warn_of_unused_head,
)
from jaxrl.models.files.atomic_folder import atomic_folder
from jaxrl.models.files.hf_load import load_model, model_config
from jaxrl.models.files.hf_save import save_model
from jaxrl.models.files.source import resolve_model
from jaxrl.models.files.weight_files import find_tensors
from sharding import TRAIN
from tests.models.files.tiny_gguf import write_gguf

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
LLAMA = load_file(GOLDEN / "llama" / "model.safetensors")
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxrl" / "models"


@pytest.fixture
def conversions(monkeypatch):
    """The files that were converted, in order."""
    done, convert_gguf = [], cache_module.convert_gguf

    def counted(path, folder, **options):
        done.append(path)
        convert_gguf(path, folder, **options)

    monkeypatch.setattr(cache_module, "convert_gguf", counted)
    return done


def changed_copy(source: Path, target: Path) -> Path:
    """A file of the same size with other weights: the last byte of the last tensor differs."""
    data = bytearray(source.read_bytes())
    data[-2] ^= 0x40
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(data)
    return target


def test_another_gguf_file_of_the_same_name_and_size_has_its_own_weights(
    gguf_file, cache, tmp_path
):
    other = changed_copy(gguf_file, tmp_path / "model.gguf")
    one, two = (load_file(resolve_model(f) / "model.safetensors") for f in (gguf_file, other))
    assert any(not np.array_equal(one[name], two[name], equal_nan=True) for name in one)


def test_a_gguf_file_that_changes_in_place_is_converted_again(gguf_file, cache, tmp_path):
    path = Path(shutil.copy2(gguf_file, tmp_path / "model.gguf"))
    first, stat = resolve_model(path), path.stat()
    changed_copy(gguf_file, path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as unpacking and rsync -t do
    assert resolve_model(path) != first


def test_a_gguf_file_that_must_be_refused_is_refused_after_a_good_one(gguf_file, cache, tmp_path):
    resolve_model(gguf_file)
    data = gguf_file.read_bytes().replace(b"llama", b"gemma", 1)  # general.architecture
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ValueError, match="architecture 'gemma', and only 'llama' is supported"):
        resolve_model(tmp_path / "model.gguf")


def test_the_same_content_at_another_path_is_converted_once(
    gguf_file, cache, tmp_path, conversions
):
    copy = Path(shutil.copy(gguf_file, tmp_path / "model.gguf"))
    assert resolve_model(copy) == resolve_model(gguf_file)
    assert len(conversions) == 1


def test_a_cache_of_the_former_naming_is_not_used(gguf_file, cache, conversions):
    old = cache / f"model-{gguf_file.stat().st_size:x}"
    shutil.copytree(GOLDEN / "llama", old)
    assert resolve_model(gguf_file) != old and len(conversions) == 1


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def change_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def name_another_file(folder: Path) -> None:
    record = json.loads((folder / "conversion.json").read_text())
    (folder / "conversion.json").write_text(json.dumps(record | {"sha256": "0" * 64}))


@pytest.mark.parametrize(
    "damage", [remove_weights, truncate_weights, change_tokenizer, name_another_file]
)
def test_a_damaged_conversion_is_made_again(damage, gguf_file, cache, conversions):
    folder = resolve_model(gguf_file)
    whole = (folder / "model.safetensors").read_bytes()
    damage(folder)
    assert resolve_model(gguf_file) == folder and len(conversions) == 2
    assert (folder / "model.safetensors").read_bytes() == whole


def test_an_interrupted_conversion_is_not_used(gguf_file, cache, conversions, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as after SIGKILL

    def stop(path, folder):
        shutil.copytree(GOLDEN / "llama", folder, dirs_exist_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(cache_module, "convert_gguf", stop)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(gguf_file)
    assert resolve_model(gguf_file).exists() and len(conversions) == 1


def test_conversions_at_the_same_time_are_one(gguf_file, cache, conversions):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model(gguf_file))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and len(conversions) == 1
    assert [path.name for path in cache.iterdir()] == [found[0].name]


def test_a_file_that_changes_while_it_is_converted_is_an_error(
    gguf_file, cache, tmp_path, monkeypatch
):
    path, convert_gguf = Path(shutil.copy(gguf_file, tmp_path / "model.gguf")), None
    convert_gguf = cache_module.convert_gguf

    def convert_and_change(source, folder):
        convert_gguf(source, folder)
        changed_copy(gguf_file, path)

    monkeypatch.setattr(cache_module, "convert_gguf", convert_and_change)
    with pytest.raises(ValueError, match=r"model\.gguf changed while it was read"):
        resolve_model(path)
    assert list(cache.iterdir()) == []


def write_model(folder: Path, tensors: dict, *, tied: bool, file: str = "model.safetensors"):
    """The golden Llama's config with these tensors."""
    folder.mkdir(exist_ok=True)
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    save_file(tensors, folder / file)
    return folder


def test_f1_a_head_that_differs_from_a_tied_embedding_is_loaded_and_exported(tmp_path, one_device):
    folder = write_model(tmp_path / "model", LLAMA, tied=True)
    with pytest.warns(UserWarning, match=r"tie_word_embeddings=true, but its lm_head\.weight"):
        cfg, model = load_model(folder, rules=TRAIN)
    assert not cfg.tied and model.lm_head is not None
    np.testing.assert_array_equal(np.asarray(model.lm_head), LLAMA[HEAD])
    with warnings.catch_warnings():  # named once
        warnings.simplefilter("error")
        assert model_config(folder) == cfg
        save_model(tmp_path / "export", model, source=folder)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["tie_word_embeddings"] is (
        False
    )
    np.testing.assert_array_equal(
        load_file(tmp_path / "export" / "model.safetensors")[HEAD], LLAMA[HEAD]
    )


def test_an_export_replaces_a_link_and_leaves_what_it_names(tmp_path):
    outside = write_model(tmp_path / "outside", LLAMA, tied=False)
    (tmp_path / "hf").symlink_to(outside)
    with atomic_folder(tmp_path / "hf") as folder:
        (folder / "config.json").write_text("{}")
    assert not (tmp_path / "hf").is_symlink() and (outside / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "outside"]


def test_f1_jaxrl_convert_keeps_the_head(tmp_path):
    folder = write_model(tmp_path / "model", LLAMA, tied=True)
    with pytest.warns(UserWarning, match="two separate tables"):
        convert.main(convert.read([str(folder), str(tmp_path / "out")]))
    assert not model_config(tmp_path / "out").tied
    np.testing.assert_array_equal(
        load_file(tmp_path / "out" / "model.safetensors")[HEAD], LLAMA[HEAD]
    )


def without_head() -> dict:
    return {name: w for name, w in LLAMA.items() if name != HEAD}


def test_f1_an_equal_head_stays_tied_and_no_head_stays_tied(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, extra in enumerate(({}, {HEAD: LLAMA[EMBEDDING]})):
            folder = write_model(tmp_path / str(i), without_head() | extra, tied=True)
            assert model_config(folder).tied


def test_f1_a_last_row_that_differs_is_enough(tmp_path):
    head = LLAMA[EMBEDDING].copy()
    head[-1, -1] += 1
    with pytest.warns(UserWarning, match="two separate tables"):
        assert not model_config(
            write_model(tmp_path / "m", without_head() | {HEAD: head}, tied=True)
        ).tied


def test_f1_a_head_of_another_shape_is_refused(tmp_path, one_device):
    tensors = without_head() | {HEAD: LLAMA[EMBEDDING][:-8].copy()}
    folder = write_model(tmp_path / "m", tensors, tied=True)
    with (
        pytest.warns(UserWarning, match="two separate tables"),
        pytest.raises(ValueError, match=r"lm_head\.weight is \[.*expected"),
    ):
        load_model(folder, rules=TRAIN)


def test_f1_an_untied_model_without_a_head_is_refused(tmp_path, one_device):
    folder = write_model(tmp_path / "m", without_head(), tied=False)
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        load_model(folder, rules=TRAIN)


@pytest.mark.parametrize(
    "other",
    [
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "training_args.safetensors",
        "model.fp16.safetensors",
    ],
)
def test_f4_weights_next_to_model_safetensors_are_not_read(other, tmp_path):
    folder = write_model(tmp_path / "m", LLAMA, tied=False)
    save_file({NORM: LLAMA[NORM] + 1, "step": np.zeros(1, np.int64)}, folder / other)
    found = find_tensors(folder)
    assert found.keys() == LLAMA.keys()
    assert {info.path.name for info in found.values()} == {"model.safetensors"}


def write_shards(folder: Path, n: int = 2, total: int | None = None, index: bool = True) -> Path:
    """The golden Llama in n shards of `total`, with an index."""
    folder.mkdir()
    shutil.copy(GOLDEN / "llama" / "config.json", folder)
    names = sorted(LLAMA)
    places = {
        name: f"model-{i % n + 1:05d}-of-{total or n:05d}.safetensors"
        for i, name in enumerate(names)
    }
    for file in set(places.values()):
        save_file({k: LLAMA[k] for k in names if places[k] == file}, folder / file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def edit_index(folder: Path, **changes) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": weight_map | changes}))


def add_to_shard(folder: Path, **tensors) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(path) | tensors, path)


def test_f4_shards_are_read_with_and_without_an_index(tmp_path):
    for index in (True, False):
        folder = write_shards(tmp_path / str(index), index=index)
        save_file({NORM: LLAMA[NORM]}, folder / "consolidated.safetensors")
        assert find_tensors(folder).keys() == LLAMA.keys()


def test_f4_computed_buffers_are_no_parameters_even_outside_of_the_index(tmp_path):
    folder = write_shards(tmp_path / "m")
    add_to_shard(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, "f4")})
    assert find_tensors(folder).keys() == LLAMA.keys()


def lose_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def add_a_shard(folder: Path) -> None:
    save_file({"x": LLAMA[NORM]}, folder / "model-00003-of-00003.safetensors")


def add_a_single_file(folder: Path) -> None:
    save_file(LLAMA, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_a_shard, r"lacks model-00002-of-00002\.safetensors, which its .*index\.json names"),
        (add_a_shard, r"has model-00003-of-00003\.safetensors, which its .* does not name"),
        (add_a_single_file, r"has model\.safetensors and also .*index\.json, which names 2 other"),
        (lambda f: edit_index(f, missing="model-00001-of-00002.safetensors"), r"differ in missing"),
        (lambda f: add_to_shard(f, extra=LLAMA[NORM]), r"differ in extra \(model-00002"),
        (
            lambda f: add_to_shard(f, **{EMBEDDING: LLAMA[EMBEDDING], NORM: LLAMA[NORM]}),
            r"differ in model\.(embed|norm)",
        ),
    ],
    ids=["lost", "not indexed", "single", "not in shard", "not in index", "duplicate"],
)
def test_f4_an_index_that_differs_from_its_files_is_one_message(damage, words, tmp_path):
    folder = write_shards(tmp_path / "m")
    damage(folder)
    with pytest.raises(ValueError, match=words):
        find_tensors(folder)


def test_f4_duplicates_and_incomplete_shards_without_an_index_are_refused(tmp_path):
    folder = write_shards(tmp_path / "twice", index=False)
    add_to_shard(folder, **LLAMA)
    with pytest.raises(ValueError, match=r"twice, in model-00001.* and in model-00002"):
        find_tensors(folder)
    folder = write_shards(tmp_path / "part", total=3, index=False)
    with pytest.raises(ValueError, match="not all of the shards of one model"):
        find_tensors(folder)


def test_f4_a_parameter_under_two_names_is_refused(tmp_path):
    tensors = LLAMA | {f"language_model.{NORM}": LLAMA[NORM]}
    with pytest.raises(ValueError, match=r"has model\.norm\.weight twice"):
        find_tensors(write_model(tmp_path / "m", tensors, tied=False))


@pytest.mark.parametrize(
    "file", ["consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin"]
)
def test_f4_other_weight_files_alone_are_named(file, tmp_path):
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"neither model\.safetensors nor .*{file} is not read"):
        find_tensors(tmp_path)


def test_f4_tensors_that_no_parameter_uses_are_named(tmp_path, one_device):
    tensors = LLAMA | {"model.layers.0.self_attn.q_norm.weight": np.ones(8, "f4")}
    with pytest.raises(ValueError, match=r"1 unexpected: model\.layers\.0\.self_attn\.q_norm"):
        load_model(write_model(tmp_path / "m", tensors, tied=False), rules=TRAIN)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int8", "float8_e4m3fn"])
def test_f4_quantized_tensors_are_refused_by_name(dtype, tmp_path):
    codes = np.zeros(LLAMA[NORM].shape, getattr(ml_dtypes, dtype, None) or dtype)
    folder = write_model(tmp_path / "m", LLAMA | {NORM: codes}, tied=False)
    with pytest.raises(ValueError, match=r"stores model\.norm\.weight as .* not quantized"):
        find_tensors(folder)


ADAPTERS = GOLDEN.parent / "golden_adapters"
PEFT_FIELDS = (  # of LoraConfig in PEFT 0.21.2, with a value that is on
    ("alora_invocation_tokens", [1, 2]),
    ("alpha_pattern", {"q_proj": 2}),
    ("arrow_config", {"top_k": 2}),
    ("ensure_weight_tying", True),
    ("fan_in_fan_out", True),
    ("kasa_config", {"beta": 0.1}),
    ("layer_replication", [[0, 1], [0, 2]]),
    ("layers_to_transform", [0]),
    ("layers_to_transform", 0),
    ("lora_bias", True),
    ("megatron_config", {"hidden_size": 8}),
    ("monteclora_config", {"num_samples": 2}),
    ("rank_pattern", {"q_proj": 2}),
    ("target_parameters", ["mlp.experts.gate_up_proj"]),
    ("trainable_token_indices", [3]),
    ("use_bdlora", {"nblocks": 2}),
    ("use_qalora", True),
    ("velora_config", {"num_groups": 2}),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("modules_to_save", ["lm_head"]),
    ("modules_to_save", ["score", "embed_tokens"]),
    ("modules_to_save", "lm_head"),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "lora_ga"),
    ("init_lora_weights", "a_new_start"),
    ("use_rslora", "false"),
    ("use_dora", 1),
    ("r", True),
    ("r", 0),
    ("r", 4.0),
    ("lora_alpha", "6"),
    ("target_modules", None),
    ("target_modules", []),
    ("target_modules", [1]),
    ("peft_type", "ADALORA"),
    ("a_field_of_tomorrow", 0.5),
    ("a_field_of_tomorrow", [0]),
)
HARMLESS = (
    ("lora_dropout", 0.1),
    ("inference_mode", False),
    ("peft_version", "0.99.0"),
    ("auto_mapping", {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}),
    ("revision", "main"),
    ("runtime_config", {"ephemeral_gpu_offload": True}),
    ("megatron_core", "megatron.core"),
    ("layers_pattern", "layers"),
    ("qalora_group_size", 32),
    ("eva_config", {"rho": 2.0}),
    ("loftq_config", {"loftq_bits": 4}),
    ("corda_config", {"corda_method": "ipm"}),
    ("lora_ga_config", {"direction": "ArB2r"}),
    ("init_lora_weights", "gaussian"),
    ("init_lora_weights", "eva"),
    ("init_lora_weights", "orthogonal"),
    ("init_lora_weights", "mica"),
    ("init_lora_weights", False),
    ("modules_to_save", ["classifier", "score"]),
    ("task_type", None),
    ("exclude_modules", ["lm_head"]),
    ("a_field_of_tomorrow", None),
    ("a_field_of_tomorrow", False),
    ("a_field_of_tomorrow", {}),
    ("enable_lora", None),
    ("merge_weights", False),
)


def copy_adapter(name: str, target: Path, **changes) -> Path:
    """A golden adapter with changes of its adapter_config.json."""
    shutil.copytree(ADAPTERS / name, target)
    path = target / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


@pytest.mark.parametrize(("field", "value"), PEFT_FIELDS)
def test_f2_a_field_that_changes_an_adapter_is_refused_by_name(field, value, tmp_path):
    with pytest.raises(ValueError, match=rf"adapter_config\.json has .*{field}"):
        adapter_config(copy_adapter("llama", tmp_path / "a", **{field: value}))


@pytest.mark.parametrize(("field", "value"), HARMLESS)
def test_f2_a_field_that_changes_nothing_is_accepted(field, value, tmp_path):
    found = adapter_config(copy_adapter("llama", tmp_path / "a", **{field: value}))
    assert found == adapter_config(ADAPTERS / "llama")


def test_f2_every_field_that_peft_writes_is_in_the_tables():
    written = json.loads((ADAPTERS / "llama" / "adapter_config.json").read_text()).keys()
    tables = {*peft_config.READ, *peft_config.NEUTRAL, *peft_config.REFUSED}
    assert len(written) == 41 and written <= tables


def test_f2_another_revision_of_the_base_is_named(tmp_path):
    folder = copy_adapter("llama", tmp_path / "a", revision="v2")
    with pytest.warns(UserWarning, match=r"trained on the revision 'v2' of .*golden/llama: check"):
        warn_of_other_base(folder, "tests/models/golden/llama")


EVERY_LAYER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"},
        {"target_modules": [f"self_attn.{name}" for name in EVERY_LAYER]},
        {"target_modules": [*EVERY_LAYER, "lm_head"], "exclude_modules": ["lm_head"]},
    ],
    ids=["all-linear", "regular expression", "longer names", "excluded"],
)
def test_f5_target_modules_in_every_form_are_read(changes, tmp_path):
    folder = copy_adapter("llama", tmp_path / "a", **changes)
    assert adapter_config(folder) == adapter_config(ADAPTERS / "llama")
    open_adapter(folder, model_config(GOLDEN / "llama"))


def keep_tensors(folder: Path, keep) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name: w for name, w in load_file(path).items() if keep(name)}, path)


def test_f5_an_expression_for_some_layers_is_refused_with_their_names(tmp_path):
    folder = copy_adapter("llama", tmp_path / "a", target_modules=r".*layers\.0\..*_proj")
    keep_tensors(folder, lambda name: ".layers.0." in name)
    with pytest.raises(
        ValueError, match=r"only some of its layers: 14 tensors are missing: .*rs\.1"
    ):
        open_adapter(folder, model_config(GOLDEN / "llama"))


def test_f5_an_expression_for_some_modules_gives_these(tmp_path):
    folder = copy_adapter("llama", tmp_path / "a", target_modules=r".*\.self_attn\.(q|v)_proj")
    keep_tensors(folder, lambda name: ".q_proj." in name or ".v_proj." in name)
    assert open_adapter(folder, model_config(GOLDEN / "llama")).lora.targets == ("q_proj", "v_proj")


def add_to_adapter(folder: Path, **tensors) -> Path:
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | tensors, path)
    return folder


def test_f5_a_trained_copy_that_the_config_does_not_name_is_refused(tmp_path):
    copy = {"base_model.model.lm_head.weight": LLAMA[HEAD]}
    folder = add_to_adapter(copy_adapter("llama", tmp_path / "a"), **copy)
    with pytest.raises(ValueError, match=r"1 tensors are unknown: lm_head\.weight"):
        open_adapter(folder, model_config(GOLDEN / "llama"))


def test_f5_a_head_of_several_labels_is_read_and_of_another_width_refused(tmp_path):
    decoder, name = model_config(GOLDEN / "llama"), "base_model.model.score.weight"
    head = {name: np.zeros((3, decoder.D), "f4")}
    folder = add_to_adapter(copy_adapter("llama", tmp_path / "a"), **head)
    assert open_adapter(folder, decoder).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    folder = add_to_adapter(folder, **{name: np.zeros((3, decoder.D + 1), "f4")})
    with pytest.raises(ValueError, match=r"of another shape: score\.weight"):
        open_adapter(folder, decoder)


def test_f5_codes_in_an_adapter_are_refused(tmp_path):
    decoder = model_config(GOLDEN / "llama")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    codes = {name: np.zeros((4, decoder.D), np.uint8)}
    folder = add_to_adapter(copy_adapter("llama", tmp_path / "a"), **codes)
    with pytest.raises(ValueError, match=r"not floating-point numbers: .*q_proj\.lora_A"):
        open_adapter(folder, decoder)


def test_f5_a_score_head_that_the_model_does_not_have_is_named(tmp_path):
    with pytest.warns(
        UserWarning, match=r"has a score head \(score\.weight\), which is not loaded"
    ):
        warn_of_unused_head(tmp_path, ["score.weight"], model_config(GOLDEN / "llama"))


def explode(data: dict) -> None:
    pattern = {"Regex": "(a+)+b"}
    data["pre_tokenizer"] = {"type": "Split", "pattern": pattern} | {
        "behavior": "Isolated",
        "invert": False,
    }


def normalize_nothing(data: dict) -> None:
    data["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "a"}


def pad_without_end(data: dict) -> None:
    data["padding"] = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }


def write_tokenizer(folder: Path, change=None) -> Path:
    """A byte-level tokenizer.json, with a change of its content."""
    vocab = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    data = json.loads(tokenizer.to_str())
    if change:
        change(data)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (explode, "retry-limit"),
        (normalize_nothing, "index out of bounds"),
        (pad_without_end, "memory allocation of"),
    ],
    ids=["regular expression", "normalizer", "padding"],
)
def test_a_tokenizer_that_panics_or_aborts_is_refused(change, words, cache, tmp_path):
    with pytest.raises(ValueError, match=rf"cannot be loaded \(it ends its process: .*{words}"):
        load_tokenizer(write_tokenizer(tmp_path / "model", change))
    assert not list(tokenizer_trial.cache_dir().glob("*"))  # tried again the next time


def test_a_tokenizer_that_hangs_is_refused(cache, tmp_path):
    file = write_tokenizer(tmp_path / "model") / "tokenizer.json"
    with pytest.raises(ValueError, match=r"did not finish a short text within 0\.001 s"):
        try_tokenizer(file, timeout_s=0.001)  # no process starts in a millisecond


def test_a_good_tokenizer_is_tried_once_per_content(cache, tmp_path, monkeypatch):
    folder = write_tokenizer(tmp_path / "model")
    assert load_tokenizer(folder).decode(load_tokenizer(folder)("a b")["input_ids"])
    monkeypatch.setattr("subprocess.run", None)  # calling it again would raise
    load_tokenizer(shutil.copytree(folder, tmp_path / "copy"))
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(write_tokenizer(tmp_path / "other", normalize_nothing))
