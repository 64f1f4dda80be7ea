import pytest

from jaxrl.api.options import read


def test_full_training_has_one_model_whose_weights_are_not_quantized(capsys):
    options, _ = read(["--model=m", "--full"])
    assert (options.slots, options.max_models) == (1, 1)
    for argument, message in (
        ("--config.lora.base_dtype=int8", "'int8' and --config.rollout.dtype='auto': --full"),
        ("--config.rollout.dtype=int8", "--config.rollout.dtype='int8': --full trains all weights"),
        ("--max-models=9", "--max-models=9: --full trains one model"),
    ):
        with pytest.raises(SystemExit) as stopped:
            read(["--model=m", "--full", argument])
        assert message in f"{stopped.value} {capsys.readouterr().err}"


@pytest.mark.parametrize("more", [[], ["--config.data.images=True", "--full"]], ids=str)
def test_towers_are_trained_on_images_through_adapters(more, capsys):
    with pytest.raises(SystemExit) as stopped:
        read(["--model=m", "--train-vision", *more])
    assert "leave out --full, and set --config.data.images=True" in str(stopped.value)
