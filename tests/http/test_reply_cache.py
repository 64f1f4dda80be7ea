import pytest

from jaxrl.http.reply_cache import ReplyCache, content_key


def test_a_request_finds_its_reply_and_another_one_does_not(tmp_path):
    cache = ReplyCache(tmp_path / "new", ".json")
    key = content_key("http://a", {"x": 1, "y": [2]})
    assert cache.get(key) is None
    cache.put(key, b"first")
    cache.put(key, b"second")
    assert ReplyCache(tmp_path / "new", ".json").get(key) == b"second"
    assert [path.name for path in tmp_path.rglob("*.*")] == [f"{key}.json"]
    assert key == content_key("http://a", {"y": [2], "x": 1})  # not the order of fields
    others = [
        content_key("http://b", {"x": 1, "y": [2]}),
        content_key("http://a", {"x": 1, "y": [2]}, 3),
        content_key("http://a", {"x": 1, "y": [3]}),
    ]
    assert len({key, *others}) == 4


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        ReplyCache(tmp_path / "file", ".json").put("ab", b"")
