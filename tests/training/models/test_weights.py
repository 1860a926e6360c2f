"""Weights of a file are taken whole, but for a last layer of another size if that is asked for."""

import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from calibrant.training.models import create_model, load_weights
from calibrant.training.models.external import TransformerOutput

HIDDEN = (6,)


def small(num_classes, **options):
    return create_model("mlp", num_classes, {"features": 5}, hidden=HIDDEN, **options)


def same(first, second):
    return all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".safetensors"])
def test_weights_are_those_of_the_file(ending, tmp_path):
    trained, path = small(3), tmp_path / f"weights{ending}"
    (save_file if ending == ".safetensors" else torch.save)(trained.state_dict(), path)
    assert same(trained, small(3, weights=path))
    assert same(trained, small(3, weights=str(path), replace_head=True))


@pytest.mark.parametrize("name", ["state_dict", "model"])
def test_a_state_dict_may_have_a_name(name, tmp_path):
    trained = small(3)
    torch.save({name: trained.state_dict(), "epoch": 3}, tmp_path / "weights.pt")
    assert same(trained, small(3, weights=tmp_path / "weights.pt"))


def test_a_last_layer_of_another_size_is_refused_unless_asked_for(tmp_path):
    trained, path = small(3), tmp_path / "weights.pt"
    torch.save(trained.state_dict(), path)
    with pytest.raises(
        ValueError, match=r"is for 3 classes and the data has 4 \(3.weight, 3.bias\): replace_head"
    ):
        small(4, weights=path)
    with pytest.warns(UserWarning, match="starts from random weights \\(3.weight, 3.bias"):
        model = small(4, weights=path, replace_head=True)
    assert torch.equal(model[1].weight, trained[1].weight)
    assert model[3].weight.shape == (4, 6)
    with pytest.warns(UserWarning, match="starts from random weights"):
        assert load_weights(small(4), path, 4, replace_head=True) == ("3.weight", "3.bias")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("1.bias"), r"another model: 1 missing \(1.bias\)"),
        (lambda state: state.update(more=torch.zeros(1)), r"another model: 1 unknown \(more\)"),
        (
            lambda state: state.update({"1.weight": torch.zeros(6, 2)}),
            r"1 of another shape \(1.weight \(6, 2\) and not",
        ),
        (lambda state: state.update({"3.weight": torch.zeros(3, 2)}), r"3.weight \(3, 2\) and not \(3, 6\)"),
        (lambda state: state.update({"3.bias": torch.tensor(1.0)}), r"3.bias \(\) and not \(3,\)"),
    ],
)
def test_weights_of_another_model_are_refused(change, message, tmp_path):
    state = small(3).state_dict()
    change(state)
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=message):
        small(3, weights=tmp_path / "weights.pt", replace_head=True)


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("weights.pt", b"not a file of torch", "is damaged"),
        ("weights.pt", b"", "is damaged"),
        ("weights.pt", pickle.dumps({"weight": Harmful()}, protocol=2), "is damaged, or has more in it"),
        ("weights.safetensors", b"not a file of safetensors", "is damaged"),
        ("weights.zip", b"", "the ending of a file of weights must be one of '.safetensors', '.pt'"),
    ],
    ids=["text", "empty", "code", "text-safetensors", "ending"],
)
def test_files_of_something_else_are_refused(name, content, message, tmp_path, capsys):
    with pytest.raises(ValueError, match=message) as info:
        small(3, weights=write(tmp_path / name, content))
    assert "\n" not in str(info.value)
    assert "executed" not in capsys.readouterr().out


def test_files_without_tensors_by_name_are_refused(tmp_path):
    torch.save({"a": 1}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="has no state dict"):
        small(3, weights=tmp_path / "weights.pt")
    with pytest.raises(FileNotFoundError, match="there is no file of weights"):
        small(3, weights=tmp_path / "none.pt")


def test_names_are_right_with_and_without_the_adapter(tmp_path):
    adapter = TransformerOutput(nn.Linear(2, 3), "sequence")
    torch.save(adapter.state_dict(), tmp_path / "with.pt")
    torch.save(adapter.network.state_dict(), tmp_path / "without.pt")
    for name in ("with.pt", "without.pt"):
        other = TransformerOutput(nn.Linear(2, 3), "sequence")
        load_weights(other, tmp_path / name, 3)
        assert same(adapter, other)
