"""Models of other packages take the data as it is and give logits with the classes on axis 1."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from calibrant.training.models import create_model
from calibrant.training.models.external import TransformerOutput

from .shapes import weights_without_numbers

TINY_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


@pytest.fixture
def timm():
    return pytest.importorskip("timm")


@pytest.fixture
def smp():
    return pytest.importorskip("segmentation_models_pytorch")


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


def train_step(model, inputs, target):
    logits = model(inputs)
    F.cross_entropy(logits, target).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    return logits


# -------------------------------------------------------------------------------------------------- timm


@pytest.mark.usefixtures("timm")
def test_timm_takes_the_channels_of_the_data():
    model = create_model("timm:resnet18", 5, {"channels": 1, "image_size": 32}, block_args=None)
    assert train_step(model, torch.randn(2, 1, 32, 32), torch.tensor([0, 4])).shape == (2, 5)
    with weights_without_numbers():
        assert create_model("timm:resnet18", 5, {"channels": 1}, in_chans=4).conv1.in_channels == 4


@pytest.mark.usefixtures("timm")
def test_timm_takes_the_size_of_the_data_where_it_matters():
    with torch.device("meta"):
        model = create_model("timm:swinv2_tiny_window8_256", 1000, {"channels": 3, "image_size": 256})
        small = create_model("timm:swinv2_tiny_window8_256", 5, {"channels": 3, "image_size": 64})
        other = create_model(
            "timm:swinv2_tiny_window8_256", 5, {"channels": 3, "image_size": 64}, img_size=128
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(28.35e6, abs=0.05e6)
    assert small.patch_embed.img_size == (64, 64)
    assert other.patch_embed.img_size == (128, 128)


@pytest.mark.usefixtures("timm")
def test_swin_trains():
    options = {"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)}
    model = create_model("timm:swinv2_tiny_window8_256", 5, {"channels": 3, "image_size": 64}, **options)
    assert train_step(model, torch.randn(2, 3, 64, 64), torch.tensor([0, 4])).shape == (2, 5)


@pytest.mark.usefixtures("timm")
def test_what_timm_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"unknown model 'timm:resnt18'.*did you mean 'resnet18'"):
        create_model("timm:resnt18", 5)
    with pytest.raises(TypeError, match=r"timm:resnet18 cannot be built with depht=3: .*unexpected.*'depht'"):
        create_model("timm:resnet18", 5, depht=3)


@pytest.mark.usefixtures("timm")
def test_weights_of_a_file_for_timm(tmp_path):
    model = create_model("timm:resnet10t", 5)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.warns(UserWarning, match=r"starts from random weights \(fc.weight, fc.bias"):
        other = create_model("timm:resnet10t", 7, weights=tmp_path / "weights.pt", replace_head=True)
    assert torch.equal(other.layer1[0].conv1.weight, model.layer1[0].conv1.weight)
    assert other.fc.out_features == 7


# --------------------------------------------------------------------------------------------------- smp


@pytest.mark.usefixtures("smp")
def test_deeplab_segments():
    model = create_model("smp:DeepLabV3", 5, {"channels": 3, "image_size": 64}, encoder_name="resnet18")
    logits = train_step(model, torch.randn(2, 3, 64, 64), torch.randint(5, (2, 64, 64)))
    assert logits.shape == (2, 5, 64, 64)


@pytest.mark.usefixtures("smp")
def test_smp_takes_other_encoders_and_channels():
    with torch.device("meta"):
        options = {"decoder_channels": (32, 16, 8)}
        model = create_model(
            "smp:unet", 5, {"channels": 1}, encoder_name="resnet18", encoder_depth=3, **options
        )
        assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 5, 32, 32)


@pytest.mark.usefixtures("smp")
def test_smp_reads_the_weights_of_an_encoder_from_a_file(tmp_path: Path):
    options = {"encoder_name": "resnet18", "encoder_depth": 3, "decoder_channels": (8, 8, 8)}
    first = create_model("smp:Unet", 5, **options)
    torch.save(first.encoder.state_dict(), tmp_path / "encoder.pt")
    second = create_model("smp:Unet", 5, encoder_weights=str(tmp_path / "encoder.pt"), **options)
    for name, tensor in first.encoder.state_dict().items():
        assert torch.equal(second.encoder.state_dict()[name], tensor)
    assert not torch.equal(second.segmentation_head[0].weight, first.segmentation_head[0].weight)
    with pytest.raises(ValueError, match=r"encoder\.pt has weights of another model: .* missing"):
        create_model(
            "smp:Unet",
            5,
            **{**options, "encoder_name": "resnet34"},
            encoder_weights=str(tmp_path / "encoder.pt"),
        )
    with pytest.raises(FileNotFoundError, match="no file of weights"):
        create_model("smp:Unet", 5, encoder_weights=str(tmp_path / "none.pt"), **options)


@pytest.mark.usefixtures("smp")
def test_what_smp_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"unknown model 'smp:deeplab3'.*did you mean 'DeepLabV3'"):
        create_model("smp:deeplab3", 5)
    with pytest.raises(ValueError, match=r"unknown encoder_name 'resnet3' [(]did you mean 'resnet34'"):
        create_model("smp:Unet", 5, encoder_name="resnet3")
    with pytest.raises(
        TypeError, match=r"smp:Unet has no option 'encoder_deph' [(]did you mean 'encoder_depth'"
    ):
        create_model("smp:Unet", 5, encoder_deph=3)


# -------------------------------------------------------------------------------------------- transformers


@pytest.fixture
def tiny_bert(transformers, tmp_path):
    """A folder with the configuration of a tiny BERT, and nothing else."""
    transformers.BertConfig(vocab_size=50, **TINY_BERT).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def tokens(count=3, length=9):
    return {
        "input_ids": torch.randint(50, (count, length)),
        "attention_mask": torch.ones(count, length, dtype=torch.long),
    }


def test_bert_of_a_folder_classifies_texts(tiny_bert):
    model = create_model(f"hf:{tiny_bert}", 5, {"length": 9})
    assert isinstance(model, TransformerOutput)
    assert train_step(model, tokens(), torch.tensor([0, 1, 4])).shape == (3, 5)
    model.eval()
    ids = tokens()["input_ids"]
    torch.testing.assert_close(model(ids), model({"input_ids": ids, "attention_mask": torch.ones_like(ids)}))


def test_bert_of_a_folder_classifies_tokens(tiny_bert):
    model = create_model(f"hf:{tiny_bert}", 5, task="token").eval()
    inputs = tokens()
    logits = train_step(model, inputs, torch.randint(5, (3, 9)))
    assert logits.shape == (3, 5, 9)
    torch.testing.assert_close(logits.movedim(1, -1), model.network(**inputs).logits)


def test_values_of_the_configuration_can_be_replaced(tiny_bert):
    model = create_model(f"hf:{tiny_bert}", 5, {"vocabulary_size": 70}, config={"num_hidden_layers": 2})
    assert model.network.config.vocab_size == 70
    assert len(model.network.bert.encoder.layer) == 2
    kept = create_model(f"hf:{tiny_bert}", 5, {"vocabulary_size": 70}, config={"vocab_size": 80})
    assert kept.network.config.vocab_size == 80


@pytest.mark.usefixtures("transformers")
def test_a_type_of_model_needs_no_folder():
    model = create_model("hf:bert", 5, {"vocabulary_size": 50}, config=TINY_BERT)
    assert train_step(model, tokens(), torch.tensor([0, 1, 4])).shape == (3, 5)


@pytest.mark.usefixtures("transformers")
def test_bert_is_of_the_size_that_the_paper_names():
    with torch.device("meta"):
        model = create_model("hf:bert", 20)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(109.5e6, abs=0.1e6)


def test_weights_of_a_folder_are_taken_but_for_the_last_layer(tiny_bert, transformers):
    trained = create_model(f"hf:{tiny_bert}", 3)
    trained.network.save_pretrained(tiny_bert)
    same = create_model(f"hf:{tiny_bert}", 3, pretrained=True)
    other = create_model(f"hf:{tiny_bert}", 5, pretrained=True)
    random = create_model(f"hf:{tiny_bert}", 3)
    words = trained.network.bert.embeddings.word_embeddings.weight
    assert torch.equal(same.network.classifier.weight, trained.network.classifier.weight)
    assert torch.equal(same.network.bert.embeddings.word_embeddings.weight, words)
    assert torch.equal(other.network.bert.embeddings.word_embeddings.weight, words)
    assert other.network.classifier.out_features == 5
    assert not torch.equal(random.network.bert.embeddings.word_embeddings.weight, words)
    with pytest.raises(ValueError, match="do not fit its configuration"):
        create_model(f"hf:{tiny_bert}", 3, pretrained=True, config={"intermediate_size": 12})


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("vit", {key: TINY_BERT[key] for key in list(TINY_BERT)[:4]}),
        ("swinv2", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}),
    ],
)
def test_transformers_classify_images(name, config):
    model = create_model(f"hf:{name}", 5, {"channels": 1, "image_size": 32}, config=config)
    assert train_step(model, torch.randn(2, 1, 32, 32), torch.tensor([0, 4])).shape == (2, 5)


@pytest.mark.usefixtures("transformers")
def test_logits_of_segmentation_have_the_size_of_the_images():
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
    config = {**sizes, "decoder_hidden_size": 8}
    model = create_model("hf:segformer", 5, {"channels": 3}, task="segmentation", config=config)
    logits = train_step(model, torch.randn(2, 3, 32, 48), torch.randint(5, (2, 32, 48)))
    assert logits.shape == (2, 5, 32, 48)


@pytest.mark.usefixtures("transformers")
def test_what_transformers_does_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError, match="task must be one of 'sequence', 'token'"):
        create_model("hf:bert", 5, task="tokens")
    with pytest.raises(TypeError, match=r"has no 'hiden_size' [(]did you mean 'hidden_size'"):
        create_model("hf:bert", 5, config={"hiden_size": 3})
    with pytest.raises(TypeError, match=r"has no option 'pretraned' [(]did you mean 'pretrained'"):
        create_model("hf:bert", 5, pretraned=True)
    with pytest.raises(OSError, match=r"neither a folder with a config.json nor a model"):
        create_model(f"hf:{tmp_path}", 5)
