"""Tests of jaxrl/data: prompts.py, chat/row_messages.py and sources/files.py."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.config.keys import DataConfig
from jaxrl.data.items import load_items
from jaxrl.data.prompts import prompt_maker
from jaxrl.data.sources.files import find_files

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def qa(*questions):
    return [{"question": q, "answer": q.upper()} for q in questions]


def questions(prompts):
    return [p.messages[-1]["content"] for p in prompts]


@pytest.fixture
def load(renderer):
    def load(*sources, max_rows=0, answer_for="math", **data):
        maker = prompt_maker(renderer, DataConfig(**data), answer_for=answer_for)
        return load_items(sources, maker, max_rows=max_rows)

    return load


@pytest.mark.parametrize("write, name", [(write_parquet, "a.parquet"), (write_jsonl, "a.jsonl")])
def test_verl_schema_is_read_from_parquet_and_jsonl(load, renderer, tmp_path, write, name):
    [prompt] = load(write(tmp_path / name, [VERL_ROW]))
    assert prompt.messages == tuple(VERL_ROW["prompt"])
    assert (prompt.id, prompt.answer, prompt.source) == (0, "2", "openai/gsm8k")
    assert prompt.extra == {"split": "train", "index": 7, "ability": "math"}
    np.testing.assert_array_equal(prompt.tokens, renderer.render(VERL_ROW["prompt"]))


@pytest.mark.parametrize("column", ["prompt", "question", "problem"])
def test_a_plain_string_is_one_user_message(load, tmp_path, column):
    [prompt] = load(write_jsonl(tmp_path / "a.jsonl", [{column: "1 + 1?", "answer": 2}]))
    assert prompt.messages == ({"role": "user", "content": "1 + 1?"},)
    assert (prompt.answer, prompt.source, prompt.extra) == (2, "default", {})
    assert prompt.is_text


def test_only_a_newline_ends_a_row(load, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"question": "a\u2028b\x85c",\r"answer": "1"}\r\n'.encode())
    [prompt] = load(str(path))
    assert prompt.messages[0]["content"] == "a\u2028b\x85c"


def test_messages_and_structured_answers_are_read(load, tmp_path):
    messages = [{"role": "user", "content": "a"}]
    rows = [
        {"messages": messages, "answer": ["x", "y"]},
        {"prompt": messages, "reward_model": {"ground_truth": {"inputs": [1]}}},
    ]
    prompts = load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [p.messages for p in prompts] == [tuple(messages)] * 2
    assert [p.answer for p in prompts] == [["x", "y"], {"inputs": [1]}]
    assert [p.answer_text for p in prompts] == ['["x", "y"]', '{"inputs": [1]}']
    assert not any(p.is_text for p in prompts)


def test_other_columns_reach_the_reward(load, tmp_path):
    row = {"question": "a", "answer": "b", "level": 3, "ability": "math", "none": None}
    path = write_jsonl(tmp_path / "a.jsonl", [row, row | {"extra_info": {"level": 4}}])
    assert [p.extra for p in load(path)] == [
        {"level": 3, "ability": "math"},
        {"level": 4, "ability": "math"},
    ]


def test_an_answer_that_json_cannot_express_is_rejected(load, tmp_path):
    table = pa.table({"question": ["a"], "answer": [b"bytes"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet:1 has an answer that JSON cannot express"):
        load(str(tmp_path / "a.parquet"))


def test_a_json_list_is_read(load, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(qa("a", "b")))
    assert questions(load(str(tmp_path / "a.json"))) == ["a", "b"]


def test_ids_count_over_all_sources_and_survive_filtering(load, tmp_path, caplog):
    first = write_jsonl(tmp_path / "a.jsonl", qa("a", "b" * 300, "c"))
    second = write_jsonl(tmp_path / "b.jsonl", qa("d"))
    prompts = load(first, second, max_prompt_len=100)
    assert [(p.id, p.messages[0]["content"]) for p in prompts] == [(0, "a"), (2, "c"), (3, "d")]
    (message,) = caplog.messages  # a warning, so that the console shows it
    assert message.startswith("1 of 4 prompts are longer than data.max_prompt_len = 100 tokens")


def test_a_task_is_a_source_like_a_file(load):
    prompts = load("task:addition?digits=1,2&size=30&split=val")
    assert {p.source for p in prompts} == {"addition/1", "addition/2"}
    assert [p.id for p in prompts] == list(range(len(prompts)))


def test_a_limit_takes_evenly_spaced_rows_of_all_sources(load, tmp_path):
    sources = [write_jsonl(tmp_path / f"{n}.jsonl", qa(*(n * 4))) for n in "abc"]
    assert questions(load(*sources, max_rows=6)) == ["a", "a", "b", "b", "c", "c"]
    assert [p.id for p in load("task:addition?size=1500", max_rows=3)] == [0, 500, 1000]
    assert len(load(*sources, max_rows=100)) == 12


@pytest.mark.parametrize(
    "truncation, kept", [("left", slice(-10, None)), ("right", slice(None, 10)), ("middle", None)]
)
def test_truncation_drops_the_named_side(load, tmp_path, truncation, kept):
    path = write_jsonl(tmp_path / "a.jsonl", qa("What is longer than ten tokens, and why?"))
    [full] = load(path)
    [cut] = load(path, max_prompt_len=10, filter_overlong_prompts=False, truncation=truncation)
    expected = (
        np.concatenate([full.tokens[:5], full.tokens[-5:]]) if kept is None else full.tokens[kept]
    )
    np.testing.assert_array_equal(cut.tokens, expected)


def test_an_overlong_prompt_error_has_id_length_and_remedy(load, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", qa("a", "b" * 300))
    [_, long] = load(path)
    message = (
        rf"prompt 1 has {len(long.tokens)} tokens, data\.max_prompt_len is 50; raise it, set data"
    )
    with pytest.raises(ValueError, match=message):
        load(path, max_prompt_len=50, filter_overlong_prompts=False)


def test_a_missing_column_error_has_place_found_and_required_columns(load, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"text": "a", "label": 1}])
    with pytest.raises(
        ValueError, match=r"a\.parquet:1 has the columns text, label; required is a"
    ):
        load(path)
    path = write_jsonl(tmp_path / "b.jsonl", [*qa("a"), {"question": "b"}])
    with pytest.raises(
        ValueError, match=r"b\.jsonl:2 has the columns question; math needs an answer"
    ):
        load(path)


def test_image_prompts_are_rejected(load, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "x"}]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: prompt has .* type image, and the run"):
        load(write_jsonl(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize("column", ["images", "video"])
def test_a_row_with_media_is_rejected_and_empty_columns_are_not(load, tmp_path, column):
    rows = qa("a") + [row | {column: ["x.png"]} for row in qa("b")]
    with pytest.raises(ValueError, match=rf"a\.jsonl:2 has a value in the column {column}, and"):
        load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert len(load(write_jsonl(tmp_path / "b.jsonl", [qa("a")[0] | {column: []}]))) == 1


def test_text_parts_of_a_message_are_joined(load, tmp_path):
    parts = [{"type": "text", "text": text} for text in ("1 + ", "2?")]
    rows = [{"prompt": [{"role": "user", "content": parts}], "answer": "3"}]
    [prompt] = load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert prompt.messages == ({"role": "user", "content": "1 + 2?"},)


def test_empty_data_is_an_error(load, tmp_path):
    with pytest.raises(ValueError, match=r"no prompts in .*a\.jsonl; set data\.train"):
        load(write_jsonl(tmp_path / "a.jsonl", []))
    with pytest.raises(ValueError, match="no prompts in an empty list of sources"):
        load()


def test_an_error_about_filtering_everything_has_the_shortest_length(load, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", qa("a" * 80, "b" * 90))
    with pytest.raises(ValueError, match=r"all 2 prompts .* = 20 tokens \(the shortest has \d+\)"):
        load(path, max_prompt_len=20)


def test_missing_and_unreadable_files_are_clear_errors(load, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nowhere\.jsonl is not a file, a folder or a pattern"
    ):
        load(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"broken\.parquet cannot be read as \.parquet"):
        load(str(tmp_path / "broken.parquet"))
    (tmp_path / "broken.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question"\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl:2 is not JSON"):
        load(str(tmp_path / "broken.jsonl"))
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ValueError, match="convert it to parquet or JSONL"):
        load(str(tmp_path / "a.csv"))


def test_a_glob_reads_the_files_in_order(load, tmp_path):
    for name in "ba":
        write_jsonl(tmp_path / f"{name}.jsonl", qa(name))
    assert questions(load(str(tmp_path / "*.jsonl"))) == ["a", "b"]


def test_a_hub_folder_is_read_by_split(load, tmp_path):
    for shard, question in [("train-00001-of-00002", "b"), ("train-00000-of-00002", "a")]:
        write_parquet(tmp_path / "data" / f"{shard}.parquet", qa(question))
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", qa("c"))
    assert questions(load(f"{tmp_path}?split=train")) == ["a", "b"]
    assert questions(load(f"{tmp_path}?split=test")) == ["c"]
    with pytest.raises(ValueError, match="has the splits test, train, requested is none;"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match="requested is 'dev'"):
        load(f"{tmp_path}?split=dev")


def test_a_folder_without_splits_is_read_completely(load, tmp_path):
    for name in ("part-0", "part-1", "rest"):
        write_parquet(tmp_path / f"{name}.parquet", qa(name))
    assert questions(load(str(tmp_path))) == ["part-0", "part-1", "rest"]


def save_to_disk(folder, rows, n_shards=2):
    """The files of Dataset.save_to_disk: arrow streams and their order in state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{n_shards:05d}.arrow" for i in range(n_shards)]
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(rows[i::n_shards])
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )


def test_a_saved_hf_dataset_is_read_without_the_datasets_package(load, tmp_path):
    save_to_disk(tmp_path / "one", qa("a", "b", "c"))
    assert questions(load(str(tmp_path / "one"))) == ["a", "c", "b"]
    save_to_disk(tmp_path / "dict" / "train", qa("t"), n_shards=1)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert questions(load(str(tmp_path / "dict"))) == ["t"]
    with pytest.raises(ValueError, match="has the splits train, requested is 'test'"):
        load(f"{tmp_path / 'dict'}?split=test")


def test_the_arrow_file_format_is_read_too(load, tmp_path):
    table = pa.Table.from_pylist(qa("a"))
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    assert questions(load(str(tmp_path / "a.arrow"))) == ["a"]


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no \.parquet"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    "row",
    [
        {"input": "1 + 1?", "label": "2"},  # OpenRLHF
        {"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": "2"},  # TRL
        {"problem": "1 + 1?", "solution": "1 + 1 is 2.", "answer": "2"},  # an answer comes first
    ],
)
def test_usual_column_names_are_read(load, tmp_path, row):
    [prompt] = load(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert (questions([prompt]), prompt.answer) == (["1 + 1?"], "2")


def test_columns_are_read_under_the_names_of_the_mapping(load, tmp_path):
    row = {"prompt": "wrong", "answer": "wrong", "q": "1 + 1?", "meta": {"truth": 2}}
    path = write_jsonl(tmp_path / "a.jsonl", [row, row | {"p": "2 + 2?"}])
    columns = ("question:p", "question:q", "label:meta.truth")
    prompts = load(path, columns=columns)
    assert questions(prompts) == ["1 + 1?", "2 + 2?"]
    assert [p.answer for p in prompts] == [2, 2]


def test_a_mapped_column_that_is_missing_is_an_error_with_the_columns(load, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "a", "gold": "b"}])
    message = r"a\.jsonl:1 has no column gt to read as answer, .* has the columns question, gold"
    with pytest.raises(ValueError, match=message):
        load(path, columns=("answer:gt",))


def test_rows_without_an_answer_are_read_if_no_reward_needs_one(load, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    [prompt] = load(path, answer_for="")
    assert prompt.answer == ""
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1 has the columns prompt; math needs an answer"
    ):
        load(path, answer_for="math")
